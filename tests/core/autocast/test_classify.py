"""What is asked of each operation: by its primitive, a list, an override or a region."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import cast, equations, normal

import mpjax
from mpjax._src.core.autocast import classify
from mpjax._src.core.autocast.classify import outline

H, W, V = normal(0, 8, 16), normal(1, 16, 16), normal(2, 16, 16)
POLICY = mpjax.get_policy("mixed_bfloat16")
I8 = jnp.ones((16, 16), jnp.int8)
B16 = jnp.ones((16, 16), jnp.bfloat16)


def outlined(fun, *args, policy=POLICY, paths=()):
    closed = jax.make_jaxpr(fun)(*args)
    return outline(closed.jaxpr, closed.consts, policy, paths or ("",) * len(closed.in_avals))


def of(found, name, place=-1):
    """Returns what is asked of the last operation of a name, or of that at an index among them."""
    return [found.rulings[op] for op in found.block.walk() if op.name == name][place]


def ruled(fun):
    """Gives a function a derivative rule of its own."""
    function = jax.custom_jvp(fun)
    function.defjvp(lambda primals, tangents: (fun(*primals), tangents[0]))
    return function


KINDS = {
    "matmul": ("dot_general", lambda h: h @ W, "MATMUL"),
    "matmul, default precision": (
        "dot_general",
        lambda h: jnp.matmul(h, W, precision="default"),
        "MATMUL",
    ),
    "matmul, explicit precision": (
        "dot_general",
        lambda h: jnp.matmul(h, W, precision="highest"),
        "WRITTEN",
    ),
    "matmul, one explicit": (
        "dot_general",
        lambda h: jnp.matmul(h, W, precision=("default", "highest")),
        "WRITTEN",
    ),
    "matmul of integers": ("dot_general", lambda h: (I8 @ I8) * h[0], "ELSEWHERE"),
    "matmul of 16 bits": ("dot_general", lambda h: (B16 @ B16) * h[0], "ELSEWHERE"),
    "matmul of 16 bits, float32 result": (
        "dot_general",
        lambda h: lax.dot(B16, B16, preferred_element_type=jnp.float32) * h[0],
        "MATMUL",
    ),
    "matmul of float32, 16-bit result": (
        "dot_general",
        lambda h: lax.dot(W, W, preferred_element_type=jnp.bfloat16) * 2,
        "MATMUL",
    ),
    "convolution of 16 bits, float32 result": (
        "conv_general_dilated",
        lambda h: lax.conv_general_dilated(
            *(B16[None, None], B16[None, None], (1, 1), "SAME"),
            preferred_element_type=jnp.float32,
        ),
        "ELSEWHERE",
    ),
    "exponential": ("exp", lambda h: jnp.exp(h), "COMPUTES"),
    "sum": ("reduce_sum", lambda h: jnp.sum(h), "COMPUTES"),
    "addition": ("add", lambda h: h + 1, "COMPUTES"),
    "addition of integers": ("add", lambda h: jnp.arange(16) + 1, "ELSEWHERE"),
    "reshape": ("reshape", lambda h: h.reshape(-1), "MOVES"),
    "comparison": ("gt", lambda h: h > 0, "MOVES"),
    "cast": ("convert_element_type", lambda h: h.astype(jnp.bfloat16), "CAST"),
    "scan": ("scan", lambda h: lax.scan(lambda c, _: (c * 2, None), h, None, length=3), "PROGRAM"),
    "bits": ("bitcast_convert_type", lambda h: lax.bitcast_convert_type(h, jnp.int32), "UNKNOWN"),
    "an activation": ("custom_jvp_call", jax.nn.relu, "COMPUTES"),
    "a function with a rule, and a matmul": (
        "custom_jvp_call",
        lambda h: ruled(lambda x: x @ W)(h),
        "PROGRAM",
    ),
    "a function with a rule, and an exponential": (
        "custom_jvp_call",
        lambda h: ruled(lambda x: jnp.exp(x) + 1)(h),
        "COMPUTES",
    ),
    "a function with a rule, and a loop": (
        "custom_jvp_call",
        lambda h: ruled(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 2, x))(h),
        "PROGRAM",
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_classify_gives_each_operation_its_kind(name):
    primitive, fun, kind = KINDS[name]
    ruling = of(outlined(fun, H), primitive)
    assert (ruling.kind, ruling.forced) == (getattr(classify, kind), "")


LISTED = {
    # (list, primitive): what is forced of operations of a small program.
    ("half", "exp"): {"exp": "half", "tanh": "", "dot_general": ""},
    ("full", "tanh"): {"exp": "", "tanh": "full", "dot_general": ""},
    ("full", "dot_general"): {"exp": "", "tanh": "", "dot_general": "full"},
    ("follow", "exp"): {"exp": "", "tanh": "", "dot_general": ""},
    ("full", "reshape"): {"reshape": "full"},
    ("half", "reduce_sum"): {"reduce_sum": "half"},
}


def small(h):
    h = jnp.exp(jnp.tanh(h @ W)).reshape(-1)
    return jnp.sum(h), h.astype(jnp.bfloat16)


@pytest.mark.parametrize("case", LISTED, ids=" ".join)
def test_op_lists_change_what_is_asked_of_named_primitives(case):
    kind, primitive = case
    found = outlined(small, H, policy=POLICY.with_ops(**{kind: primitive}))
    assert {name: of(found, name).forced for name in LISTED[case]} == LISTED[case]


def test_op_lists_do_not_apply_to_integers():
    fun = lambda h: (jnp.arange(16) + 1, h)  # noqa: E731
    ruling = of(outlined(fun, H, policy=POLICY.with_ops(half="add")), "add")
    assert (ruling.kind, ruling.forced) == (classify.ELSEWHERE, "")


def overridden(fun, *args, paths, patterns, name="dot_general"):
    found = outlined(fun, *args, policy=POLICY.override(patterns), paths=paths)
    return of(found, name).forced, of(found, name).half, found.used_patterns


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
    found = outlined(lambda w: w, W, policy=POLICY.override({"ker*": "float32"}), paths=("kernel",))
    assert found.used_patterns == {"ker*"}


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
        found = outlined(fun, H, policy=POLICY.override({pattern: "float32"}))
        assert {o.name for o in found.block.ops if found.rulings[o].forced == "full"} == full


def test_override_by_path_reaches_scan_constants_but_not_carries():
    def fun(w, h):
        return lax.scan(lambda c, _: (jnp.tanh(c @ w), None), h, None, length=3)[0]

    for paths, full in ((("kernel", ""), True), (("", "kernel"), False)):
        forced, *_ = overridden(fun, W, H, paths=paths, patterns={"kernel": "float32"})
        assert (forced == "full") == full


COMPUTING = ("dot_general", "tanh", "exp")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_precision_region_forces_its_dtype_on_what_computes(dtype):
    def fun(h):
        with mpjax.precision(dtype):
            h = jnp.exp(jnp.tanh(h @ W)).reshape(-1)
            return h > 0

    found = outlined(fun, H)
    forced = {name: of(found, name).forced for name in (*COMPUTING, "reshape", "gt")}
    asked = "full" if dtype == "float32" else "half"
    assert forced == {**dict.fromkeys(COMPUTING, asked), "reshape": "", "gt": ""}
    half = jnp.float16 if dtype == "float16" else jnp.bfloat16
    assert {of(found, name).half for name in forced} == {jnp.dtype(half)}


def test_the_innermost_region_wins():
    def fun(h):
        with mpjax.precision("float32"), mpjax.precision("bfloat16"):
            return jnp.tanh(h @ W)

    assert of(outlined(fun, H), "tanh").forced == "half"


def test_scatter_add_has_no_16_bit_form_in_a_region():
    def fun(h, n):
        with mpjax.precision("bfloat16"):
            return h.at[n].add(1.0)

    assert of(outlined(fun, H, 3), "scatter-add").forced == ""


def test_region_leaves_explicit_precision_and_integers_alone():
    def fun(h):
        with mpjax.precision("bfloat16"):
            return jnp.matmul(h, W, precision="highest"), jnp.arange(3) + 1

    found = outlined(fun, H)
    kinds = [(of(found, name).kind, of(found, name).forced) for name in ("dot_general", "add")]
    assert kinds == [(classify.WRITTEN, ""), (classify.ELSEWHERE, "")]


def test_operations_planned_by_an_inner_autocast_are_left_alone():
    def fun(h):
        return jnp.tanh(mpjax.autocast(lambda h: jnp.tanh(h @ W), "mixed_float16")(h))

    found = outlined(fun, H, policy=POLICY.with_ops(full="tanh"))
    inner, outer = (of(found, "tanh", place) for place in (0, 1))
    assert (inner.kind, inner.forced) == (classify.ELSEWHERE, "")
    assert (outer.kind, outer.forced) == (classify.COMPUTES, "full")


def test_a_policy_of_float32_forces_all():
    def fun(h):
        with jax.named_scope("head"):
            h = h @ W
        return jnp.tanh(h) @ V

    plain = mpjax.get_policy("float32")
    found = outlined(fun, H, policy=plain)
    assert found.as_written and {found.rulings[o].forced for o in found.block.ops} == {"full"}
    found = outlined(fun, H, policy=plain.override({"head": "bfloat16"}))
    assert not found.as_written
    assert [of(found, "dot_general", place).forced for place in (0, 1)] == ["", "full"]


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
