"""The rule of each operation: by its row, by a list, by an override, by a region."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from planned import VECTOR, H, V, W, is_raw, is_small, know, op, ruling, said
from support import cast, equations

import mpjax
from mpjax._src.autocast.plan import analyze, outline

POLICY = mpjax.get_policy("mixed_bfloat16")
I8 = jnp.ones((16, 16), jnp.int8)
B16 = jnp.ones((16, 16), jnp.bfloat16)
F16 = jnp.ones((16, 16), jnp.float16)


def planned(fun, *args, policy=POLICY, paths=()):
    closed = jax.make_jaxpr(fun)(*args)
    dtypes = [v.aval.dtype for v in closed.jaxpr.invars]
    plan = outline(closed.jaxpr, closed.consts, policy, paths)
    know(analyze(plan, dtypes))
    return plan


def rule(name, fun, *args, **options):
    found = op(planned(fun, *args, **options).block, name)
    return ruling(found).in_force


def ruled(fun):
    """Gives a function a derivative rule of its own."""
    function = jax.custom_jvp(fun)
    function.defjvp(lambda primals, tangents: (fun(*primals), tangents[0]))
    return function


RULES = {
    "matmul": ("dot_general", lambda h: h @ W, "half"),
    "matmul, default precision": (
        "dot_general",
        lambda h: jnp.matmul(h, W, precision="default"),
        "half",
    ),
    "matmul, explicit precision": (
        "dot_general",
        lambda h: jnp.matmul(h, W, precision="highest"),
        "written",
    ),
    "matmul, one explicit": (
        "dot_general",
        lambda h: jnp.matmul(h, W, precision=("default", "highest")),
        "written",
    ),
    "matmul of integers": ("dot_general", lambda h: (I8 @ I8) * h[0], "leave"),
    "matmul of half": ("dot_general", lambda h: (B16 @ B16) * h[0], "leave"),
    "matmul of half, float32 result": (
        "dot_general",
        lambda h: lax.dot(B16, B16, preferred_element_type=jnp.float32) * h[0],
        "half",
    ),
    "matmul of both": (
        "dot_general",
        lambda h: lax.dot(W, W, preferred_element_type=jnp.bfloat16) * 2,
        "half",
    ),
    "convolution of half, float32 result": (
        "conv_general_dilated",
        lambda h: lax.conv_general_dilated(
            *(B16[None, None], B16[None, None], (1, 1), "SAME"),
            preferred_element_type=jnp.float32,
        ),
        "leave",
    ),
    "exponential": ("exp", lambda h: jnp.exp(h), "full"),
    "sum": ("reduce_sum", lambda h: jnp.sum(h), "full"),
    "addition": ("add", lambda h: h + 1, "follow"),
    "addition of integers": ("add", lambda h: jnp.arange(16) + 1, "leave"),
    "reshape": ("reshape", lambda h: h.reshape(-1), "layout"),
    "comparison": ("gt", lambda h: h > 0, "neutral"),
    "cast": ("convert_element_type", lambda h: h.astype(jnp.bfloat16), "cast"),
    "scan": ("scan", lambda h: lax.scan(lambda c, _: (c * 2, None), h, None, length=3), "program"),
    "bits": ("bitcast_convert_type", lambda h: lax.bitcast_convert_type(h, jnp.int32), "leave"),
    "an activation": ("custom_jvp_call", jax.nn.relu, "follow"),
    "a function with a rule, and a matmul": (
        "custom_jvp_call",
        lambda h: ruled(lambda x: x @ W)(h),
        "program",
    ),
    "a function with a rule, and an exponential": (
        "custom_jvp_call",
        lambda h: ruled(lambda x: jnp.exp(x) + 1)(h),
        "full",
    ),
    "a function with a rule, and a loop": (
        "custom_jvp_call",
        lambda h: ruled(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x))(h),
        "program",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_classify_gives_each_operation_its_rule(name):
    primitive, fun, expected = RULES[name]
    assert rule(primitive, fun, H) == expected


LISTED = {
    # (list, primitive): the rule of each operation of a small program.
    ("half", "exp"): {"exp": "half", "tanh": "follow", "dot_general": "half"},
    ("full", "tanh"): {"exp": "full", "tanh": "full", "dot_general": "half"},
    ("full", "dot_general"): {"exp": "full", "tanh": "follow", "dot_general": "full"},
    ("follow", "exp"): {"exp": "follow", "tanh": "follow", "dot_general": "half"},
    ("follow", "dot_general"): {"dot_general": "follow"},
    ("full", "reshape"): {"reshape": "full"},
    ("half", "reduce_sum"): {"reduce_sum": "half"},
}


def small(h):
    h = jnp.exp(jnp.tanh(h @ W)).reshape(-1)
    return jnp.sum(h), h.astype(jnp.bfloat16)


@pytest.mark.parametrize("case", LISTED, ids=" ".join)
def test_op_lists_change_the_rule_of_named_primitives(case):
    kind, primitive = case
    block = planned(small, H, policy=POLICY.with_ops(**{kind: primitive})).block
    for name, expected in LISTED[case].items():
        found = op(block, name)
        assert (ruling(found).forced or ruling(found).rule) == expected, name
    if kind != "follow":  # whose reason is then what it follows
        assert said(op(block, primitive)) == f"{kind}_ops of the policy"


def test_matmul_on_the_half_list_keeps_its_rule():
    """The rest of the plan asks whether it is one: for the short sums, for what it may return."""
    block = planned(small, H, policy=POLICY.with_ops(half=("dot_general", "exp"))).block
    assert ruling(op(block, "dot_general")).rule == "half"
    assert ruling(op(block, "exp")).rule == "follow"


def test_op_lists_do_not_apply_to_integers():
    fun = lambda h: (jnp.arange(16) + 1, h)  # noqa: E731
    found = op(planned(fun, H, policy=POLICY.with_ops(half="add")).block, "add")
    assert (ruling(found).rule, ruling(found).forced, said(found)) == (
        "leave",
        "",
        "no float32 operands or results",
    )


def overridden(fun, *args, paths, patterns, name="dot_general"):
    plan = planned(fun, *args, policy=POLICY.override(patterns), paths=paths)
    found = op(plan.block, name)
    return ruling(found).forced, ruling(found).half, plan.used_patterns


@pytest.mark.parametrize(
    "part",
    [
        lambda w, i: w,
        lambda w, i: w.T,
        lambda w, i: lax.dynamic_slice(w, (i, 0), (16, 4)),
        lambda w, i: w[:, :4],
        lambda w, i: w.reshape(32, 8).reshape(16, 16),
    ],
    ids=["itself", "transposed", "a part", "a slice", "reshaped"],
)
def test_override_by_path_applies_through_views_of_a_parameter(part):
    fun = lambda w, h, i: h @ part(w, i)  # noqa: E731
    forced, _, used = overridden(
        fun, W, H, 0, paths=("net/kernel", "", ""), patterns={"*kernel*": "float32"}
    )
    assert forced == "full" and used == {"*kernel*"}


def test_override_by_path_skips_values_computed_from_a_parameter():
    forced, _, used = overridden(
        lambda w, h: h @ jnp.tanh(w), W, H, paths=("kernel", ""), patterns={"kernel": "float32"}
    )
    assert forced == "" and used == {"kernel"}


def test_an_override_of_a_parameter_that_no_operation_reads_matches_it():
    plan = planned(lambda w: w, W, policy=POLICY.override({"ker*": "float32"}), paths=("kernel",))
    assert plan.used_patterns == {"ker*"}


def test_the_first_override_that_matches_wins():
    fun = lambda w, h: h @ w  # noqa: E731
    both = {"ker*": "float16", "*nel": "float32"}
    forced, half, used = overridden(fun, W, H, paths=("kernel", ""), patterns=both)
    assert (forced, half, used) == ("", jnp.float16, set(both))
    forced, half, used = overridden(
        fun, W, H, paths=("kernel", ""), patterns={"*nel": "float32", "ker*": "float16"}
    )
    assert (forced, half, used) == ("full", jnp.bfloat16, set(both))


def test_override_applies_to_a_scope_or_an_operation_in_it():
    def fun(h):
        with jax.named_scope("head"):
            return jnp.tanh(h @ W) > 0

    for pattern, full in (
        ("head", {"dot_general", "tanh"}),
        ("head/tanh", {"tanh"}),
        ("*tanh", {"tanh"}),
        ("heads", set()),
    ):
        block = planned(fun, H, policy=POLICY.override({pattern: "float32"})).block
        assert {o.name for o in block.ops if ruling(o).forced == "full"} == full
        assert ruling(op(block, "gt")).rule == "neutral" and not ruling(op(block, "gt")).forced


def test_override_by_path_reaches_scan_constants_but_not_carries():
    def fun(w, h):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, None, length=3)[0]

    for paths, full in ((("kernel", ""), True), (("", "kernel"), False)):
        forced, *_ = overridden(fun, W, H, paths=paths, patterns={"kernel": "float32"})
        assert (forced == "full") == full


REGIONS = {
    # dtype: the rule of each operation in a region of that dtype.
    "float32": {
        "dot_general": "full",
        "tanh": "full",
        "exp": "full",
        "reshape": "layout",
        "gt": "neutral",
    },
    "bfloat16": {
        "dot_general": "half",
        "tanh": "half",
        "exp": "half",
        "reshape": "layout",
        "gt": "neutral",
    },
    "float16": {
        "dot_general": "half",
        "tanh": "half",
        "exp": "half",
        "reshape": "layout",
        "gt": "neutral",
    },
}


@pytest.mark.parametrize("dtype", REGIONS)
def test_precision_region_sets_rule_and_dtype_of_its_operations(dtype):
    def fun(h):
        with mpjax.precision(dtype):
            h = jnp.exp(jnp.tanh(h @ W)).reshape(-1)
            return h > 0

    block = planned(fun, H).block
    for name, expected in REGIONS[dtype].items():
        found = op(block, name)
        assert (ruling(found).forced or ruling(found).rule) == expected, name
        assert ruling(found).half == (jnp.float16 if dtype == "float16" else jnp.bfloat16)
        assert said(found) == f"region {dtype}"


def test_the_innermost_region_wins():
    def fun(h):
        with mpjax.precision("float32"), mpjax.precision("bfloat16"):
            return jnp.tanh(h @ W)

    assert ruling(op(planned(fun, H).block, "tanh")).forced == "half"


def test_scatter_add_has_no_half_form_in_a_region():
    def fun(h, n):
        with mpjax.precision("bfloat16"):
            return h.at[n].add(1.0)

    assert ruling(op(planned(fun, H, 3).block, "scatter-add")).forced == ""


def test_region_leaves_explicit_precision_and_integers_alone():
    def fun(h):
        with mpjax.precision("bfloat16"):
            return jnp.matmul(h, W, precision="highest"), jnp.arange(3) + 1

    block = planned(fun, H).block
    assert ruling(op(block, "dot_general")).rule == "written"
    assert said(op(block, "add")) == "no float32 operands or results"


def test_operations_planned_by_an_inner_autocast_are_left_alone():
    def fun(h):
        return jnp.tanh(mpjax.autocast(lambda h: jnp.tanh(h @ W), "mixed_float16")(h))

    block = planned(fun, H).block
    inner = [o for o in block.walk() if o.name == "tanh"]
    assert [ruling(o).forced or ruling(o).rule for o in inner] == ["leave", "follow"]
    assert said(inner[0]) == "planned by an inner autocast"


SMALL = {
    "a sum": (lambda h: jnp.sum(h, -1), True),
    "an index of the largest": (lambda h: jnp.argmax(h, -1), True),
    "what is made of a sum": (lambda h: jnp.sqrt(jnp.sum(h, -1) * 2), True),
    "two sums": (lambda h: jnp.sum(h, -1) + jnp.max(h, -1), True),
    "a sum beside the whole": (lambda h: h + jnp.sum(h), False),
    "an argument": (lambda h: jnp.tanh(h), False),
    "a constant": (lambda h: jnp.broadcast_to(jnp.float32(2), (3,)) + 1, False),
    "a sum inside of a branch": (
        lambda h: lax.cond(h[0, 0] > 0, lambda s: s * 2, lambda s: s, jnp.sum(h, -1)),
        True,
    ),
    "a matmul of sums": (lambda h: jnp.sum(h, 0)[None] @ W, False),
}


@pytest.mark.parametrize("name", SMALL)
def test_is_small_tells_small_values(name):
    fun, expected = SMALL[name]
    assert is_small(planned(fun, H).block.outvars[0]) == expected


def test_constants_and_views_of_them_are_raw():
    for view, raw in (
        (lambda v: v, True),
        (lambda v: v.reshape(4, 4), True),
        (lambda v: v[:4], True),
        (lambda v: v[jnp.arange(4)], False),  # a new array
        (lambda v: v + 1, False),
    ):
        assert (
            is_raw(op(planned(lambda h, view=view: jnp.sin(view(VECTOR)), H).block, "sin").ins[0])
            == raw
        )
    part = planned(lambda h: jnp.sin(lax.dynamic_slice(h @ W, (0, 0), (2, 2))), H).block
    assert not is_raw(op(part, "sin").ins[0])
    inside = op(planned(lambda h: jax.checkpoint(jnp.sin)(VECTOR.reshape(4, 4)), H).block, "sin")
    assert is_raw(inside.ins[0])


def test_constants_are_known_inside_of_control_flow_and_carries_are_not():
    def branch(h):
        return lax.cond(h[0, 0] > 0, lambda h, c: h * c, lambda h, c: h, h, jnp.float32(0.5))

    assert float(op(planned(branch, H).block, "mul").ins[1].const) == 0.5

    def loop(h):
        return lax.scan(lambda c, _: (c * 0.9, None), jnp.float32(1.0), None, length=3)[0] * h

    (sub,) = op(planned(loop, H).block, "scan").subs
    assert sub.program.invars[0].const is None and not is_raw(sub.program.invars[0])


def test_a_policy_of_float32_forces_all():
    block = planned(lambda h: jnp.tanh(h @ W) @ V, H, policy=mpjax.get_policy("float32")).block
    assert {(ruling(o).forced, said(o)) for o in block.ops} == {
        ("full", "the policy computes in float32")
    }
    half = mpjax.get_policy("float32").override({"head": "bfloat16"})

    def fun(h):
        with jax.named_scope("head"):
            h = h @ W
        return h @ V

    first, second = planned(fun, H, policy=half).block.ops
    assert (ruling(first).forced, ruling(second).forced) == ("", "full")


@pytest.mark.parametrize("default", ["highest", "tensorfloat32", "BF16_BF16_F32_X3"])
def test_default_matmul_precision_applies_only_to_matmuls_in_float32(default):
    """JAX writes it into each of them; half ones, in derivatives too, must not carry it on."""

    def fun(h, k):
        image = jax.lax.conv(jnp.tanh(h @ W)[None, None], k, (1, 1), "SAME")
        with mpjax.precision("float32"):
            image = image @ W.T
        return jnp.sum(jnp.matmul(image[0, 0], W, precision="high" + "est" * (default[0] != "h")))

    args = H, jnp.ones((1, 1, 3, 3))
    with jax.default_matmul_precision(default):
        eqns = [
            eqn
            for eqn in equations(jax.make_jaxpr(jax.grad(cast(fun), (0, 1)))(*args))
            if eqn.primitive.name in ("dot_general", "conv_general_dilated")
        ]
        default = jax.make_jaxpr(jnp.matmul)(W, W).eqns[0].params["precision"]
    precisions = {"bfloat16": set(), "float32": set()}
    for eqn in eqns:
        precisions[eqn.invars[0].aval.dtype.name].add(str(eqn.params["precision"]))
    plain = jax.lax.Precision.DEFAULT
    assert precisions["bfloat16"] == {str((plain, plain))}
    assert str(default) in precisions["float32"] and len(precisions["float32"]) == 2
