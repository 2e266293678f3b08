"""Exceptions to the rule of matmuls: regions of the user, the policy and the program itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from joint import EXACT, planned
from support import assert_near, equations, matmul_dtypes, normal, thorough_but

import mpjax
from mpjax._src.core.autocast import transform
from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.planner import exceptions

W, X = normal(0, 16, 16, scale=0.3), normal(1, 8, 16)
BF16, FULL = {"bfloat16"}, {"float32"}
BOTH = BF16 | FULL
POLICY = mpjax.get_policy("mixed_bfloat16")


def dtypes(fun, *args):
    return {d for pair in matmul_dtypes(fun, *args) for d in pair}


def derivatives(fun):
    total = lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(*args)))  # noqa: E731
    gradient = jax.grad(total)
    return {
        "value": total,
        "gradient": gradient,
        "forward mode": lambda w, x: jax.jvp(lambda w: total(w, x), (w,), (w,)),
        "second": lambda w, x: jax.jvp(lambda w: gradient(w, x), (w,), (w,)),
    }


def check(fun, expected, policy=POLICY, args=(W, X)):
    """Asserts the dtypes of matmuls in a function and its derivatives."""
    for name, derived in derivatives(mpjax.autocast(fun, policy)).items():
        assert dtypes(derived, *args) == expected, name


# ---- regions ------------------------------------------------------------------------------------


@jax.custom_jvp
def by_jvp(x, w):
    return x @ w


@by_jvp.defjvp
def _(primals, tangents):
    return jax.jvp(lambda x, w: x @ w, primals, tangents)


@jax.custom_vjp
def by_vjp(x, w):
    return x @ w


by_vjp.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, ct: (ct @ kept[1].T, kept[0].T @ ct))


def mapped(x, w):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P("i"), P()), "out_specs": P("i")}
    return jax.shard_map(lambda x, w: jnp.tanh(x @ w), mesh=mesh, **specs)(x, w)


AROUND = {
    "plain": lambda x, w: x @ w,
    "jit": jax.jit(lambda x, w: x @ w),
    "scan": lambda x, w: lax.scan(lambda h, r: (jnp.tanh(h @ w + r), h @ w), x[0], x),
    "nested": lambda x, w: lax.scan(
        lambda h, r: lax.scan(lambda h, s: (jnp.tanh(h * s @ w), None), h, r), x[0], x[:, :, None]
    )[0],
    "cond": lambda x, w: lax.cond(x[0, 0] > 9, lambda x: x, lambda x: jnp.tanh(x @ w), x),
    "fori": lambda x, w: lax.fori_loop(0, 2, lambda i, h: jnp.tanh(h @ w), x),
    "remat": jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w),
    "custom_jvp": by_jvp,
    "vmap": jax.vmap(lambda x, w: x @ w, (0, None)),
    "shard_map": mapped,
}


@pytest.mark.parametrize("name", AROUND)
def test_a_float32_region_reaches_what_it_is_around(name):
    fun = AROUND[name]

    def around(w, x):
        with mpjax.precision("float32"):
            return fun(x, w)

    check(around, FULL)


def test_a_region_reaches_the_backward_rule_of_a_custom_vjp():
    def around(w, x):
        with mpjax.precision("float32"):
            return by_vjp(x, w)

    gradient = jax.grad(lambda w, x: jnp.sum(mpjax.autocast(around, POLICY)(w, x) ** 2))
    assert dtypes(gradient, W, X) == FULL


@pytest.mark.parametrize("name", ["scan", "cond", "shard_map"])
def test_an_outer_region_ends_where_it_ends(name):
    """What is written back into a loop's body is not in the region of the loop next to it."""
    fun = AROUND[name]

    def two(w, x):
        with mpjax.precision("float32"):
            y = fun(x, w)
        return y, fun(x, w)

    check(two, BOTH)


def test_equal_equations_in_different_regions_are_two():
    def two(w, x):
        with mpjax.precision("float32"):
            y = x @ w
        return jnp.sum(jnp.sin(y) + jnp.cos(x @ w))

    found = [pair[0] for pair in matmul_dtypes(jax.grad(mpjax.autocast(two, POLICY)), W, X)]
    assert sorted(found) == ["bfloat16"] * 2 + ["float32"] * 2


def test_the_innermost_region_wins_inside_of_a_loop():
    def body(h, r, w):
        with mpjax.precision("bfloat16"):
            return jnp.tanh(h @ w + r)

    def fun(w, x):
        with mpjax.precision("float32"):
            return lax.scan(lambda h, r: (body(h, r, w), None), x[0], x)[0]

    gradient = jax.grad(lambda w, x: jnp.sum(mpjax.autocast(fun, POLICY)(w, x)))
    found = matmul_dtypes(gradient, W, X)
    assert [pair[0] for pair in found].count("bfloat16") == 3


def test_float32_policy_with_a_region_of_16_bits():
    def fun(w, x):
        with mpjax.precision("bfloat16"):
            y = jnp.tanh(x @ w)
        return y @ w

    policy = mpjax.get_policy("float32")
    assert matmul_dtypes(mpjax.autocast(fun, policy), W, X) == [("bfloat16",) * 2, ("float32",) * 2]
    check(fun, BOTH, policy)


# ---- regions of 16 bits -------------------------------------------------------------------------


def results(fun, *args, names=("exp", "dot_general")):
    """Returns the dtypes that equations of these primitives return, in order."""
    eqns = equations(jax.make_jaxpr(fun)(*args))
    return [e.outvars[0].aval.dtype.name for e in eqns if e.primitive.name in names]


@pytest.mark.parametrize(
    "policy", thorough_but(["mixed_bfloat16", "mixed_float16"], "mixed_bfloat16")
)
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("loop", [False, True])
def test_an_operation_in_a_region_of_16_bits_reads_and_returns_them(policy, half, loop):
    def step(x, w):
        with mpjax.precision(half):
            return jnp.exp(-x) @ w

    def fun(w, x):
        y = lax.scan(lambda c, r: (c, step(r, w)), 0, x[None])[1] if loop else step(x, w)
        return jnp.exp(y)

    auto = mpjax.autocast(fun, policy)
    assert results(auto, W, X) == [half, half, "float32"]
    got, want = (jax.jit(jax.grad(lambda *a: jnp.mean(f(*a))))(W, X) for f in (auto, fun))  # noqa: B023
    assert_near(got, want)


def test_a_region_of_16_bits_rounds_as_by_hand():
    def fun(x):
        with mpjax.precision("bfloat16"):
            return jnp.exp(jnp.sin(x) * x)

    low = jnp.asarray(X, jnp.bfloat16)
    options = {"xla_allow_excess_precision": False}
    by_hand = jax.jit(lambda x: jnp.exp(jnp.sin(x) * x), compiler_options=options)(low)
    assert_near(mpjax.autocast(fun, POLICY)(X), by_hand.astype(jnp.float32), rtol=0)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_a_region_of_16_bits_runs_again_in_16_bits_in_the_body_of_a_backward_pass(policy):
    """Otherwise the backward pass would go on with other numbers than the forward pass."""

    def body(c, r):
        with mpjax.precision("bfloat16"):
            y = jnp.exp(r)
        return c + jnp.sin(y).sum(), None

    gradient = jax.grad(lambda x: lax.scan(mpjax.autocast(body, policy), 0.0, x)[0])
    whole = jax.grad(lambda x: mpjax.autocast(lambda x: lax.scan(body, 0.0, x)[0], policy)(x))
    for derived in (gradient, whole):
        assert {*results(derived, X, names=("exp",))} == {"bfloat16"}


def test_moves_comparisons_and_what_has_no_16_bit_form_keep_their_dtypes():
    def fun(x, n):
        with mpjax.precision("bfloat16"):
            return x.T, x > 0, x.at[n].add(1.0), jnp.fft.rfft(x).real, jnp.arange(3) + 1

    names = ("transpose", "gt", "scatter-add", "fft")
    found = results(mpjax.autocast(fun, POLICY), X, 3, names=names)
    assert found == ["float32", "bool", "float32", "complex64"]


# ---- lists --------------------------------------------------------------------------------------


def small(w, x):
    return jnp.exp(jnp.tanh(x @ w)) + lax.conv(x[None, None], w[None, None], (1, 1), "SAME")[0, 0]


@pytest.mark.parametrize("name", ["exp", "tanh", "add"])
def test_a_half_op_reads_and_returns_16_bits_and_its_derivative_does_not(name):
    auto = mpjax.autocast(small, POLICY.with_ops(half=name))
    assert results(auto, W, X, names=("exp", "tanh", "add")) == [
        "bfloat16" if each == name else "float32" for each in ("tanh", "exp", "add")
    ]
    gradient = jax.grad(lambda w, x: jnp.sum(auto(w, x)))
    assert {*results(gradient, W, X, names=("mul",))} == {"float32"}


def test_an_op_that_follows_runs_in_16_bits_if_it_reads_them():
    wide = normal(2, 16, 32)
    policy = POLICY.with_ops(follow=("exp", "mul"))
    for fun, expected in (
        (lambda w, x: jnp.exp(-(x @ w)), ["bfloat16"]),
        (lambda w, x: jnp.exp(x @ w + x @ w), ["float32"]),
        (lambda w, x: jnp.exp(x), ["float32"]),
    ):
        auto = mpjax.autocast(lambda w, x, fun=fun: jnp.sin(fun(w, x)), policy)
        assert results(auto, wide, X, names=("exp",)) == expected
        gradient = jax.grad(lambda *args, auto=auto: jnp.sum(auto(*args)))
        assert {*results(gradient, wide, X, names=("mul",))} <= {"float32"}


def test_cotangents_are_summed_in_16_bits_if_a_list_says_so():
    loss = lambda w, x: jnp.sum(jnp.sin(x) @ w + jnp.cos(x) @ w)  # noqa: E731
    for half, expected in (((), "float32"), ("add_any", "bfloat16")):
        gradient = jax.grad(mpjax.autocast(loss, POLICY.with_ops(half=half)), (0, 1))
        assert expected in results(gradient, W, X, names=("add_any",))


def test_full_ops_name_matmuls_in_derivatives_too():
    check(small, BOTH, POLICY.with_ops(full="dot_general"))
    check(small, FULL, POLICY.with_ops(full=("dot_general", "conv_general_dilated")))

    @jax.custom_vjp
    def rule(w, x):
        return x @ w

    rule.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, ct: (kept[1].T @ ct, ct @ kept[0].T))
    gradient = jax.grad(
        lambda w: jnp.sum(mpjax.autocast(rule, POLICY.with_ops(full="dot_general"))(w, X))
    )
    assert dtypes(gradient, W) == FULL


# ---- overrides ----------------------------------------------------------------------------------


def two_layers(params, x):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ params["kernel"].T + params["bias"])
    with jax.named_scope("head"):
        return lax.scan(lambda h, _: (jnp.tanh(h @ params["head"]), None), x, length=2)[0]


PARAMS = {"kernel": W, "bias": W[0], "head": W + 1}


PATTERNS = {"*/kernel": 0, "first": 0, "first/dot_general": 0, "head": 1, "*/head": 1}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_an_override_to_float32_holds_for_derivatives(pattern):
    """By the path of a parameter, the name of a scope, or that of an operation in it."""
    auto = mpjax.autocast(two_layers, POLICY.override({pattern: "float32"}))
    found = matmul_dtypes(auto, PARAMS, X)
    assert [pair[0] == "float32" for pair in found] == [PATTERNS[pattern] == i for i in range(2)]
    gradient = jax.grad(lambda *args: jnp.sum(auto(*args)))
    derived = [pair[0] for pair in matmul_dtypes(gradient, PARAMS, X)]
    assert derived.count("bfloat16") == (2 if PATTERNS[pattern] else 3)


def test_an_override_to_the_other_half_and_one_by_path_in_a_loop():
    policy = POLICY.override({"first": "float16", "*/head": "float32"})
    auto = mpjax.autocast(two_layers, policy)
    assert [pair[0] for pair in matmul_dtypes(auto, PARAMS, X)] == ["float16", "float32"]
    gradient = jax.grad(lambda *args: jnp.mean(auto(*args)))
    assert dtypes(gradient, PARAMS, X) == {"float16", "float32"}
    assert_near(gradient(PARAMS, X), jax.grad(lambda *a: jnp.mean(two_layers(*a)))(PARAMS, X))


def test_a_float32_policy_with_an_override_to_16_bits():
    policy = mpjax.get_policy("float32").override({"head": "bfloat16"})
    auto = mpjax.autocast(two_layers, policy)
    assert [pair[0] for pair in matmul_dtypes(auto, PARAMS, X)] == ["float32", "bfloat16"]


# ---- what the program shows ---------------------------------------------------------------------


@pytest.mark.parametrize("default", [None, "highest", "tensorfloat32"])
def test_only_a_precision_of_its_author_keeps_a_matmul_in_float32(default):
    def fun(w, x):
        own = "high" if default == "highest" else "highest"
        return jnp.dot(x @ w, w, precision=own)

    with jax.default_matmul_precision(default or "default"):
        assert matmul_dtypes(mpjax.autocast(fun, POLICY), W, X) == [
            ("bfloat16",) * 2,
            ("float32",) * 2,
        ]
        check(fun, BOTH)
        lifted = POLICY.override({"*dot_general": "bfloat16"})
        check(fun, BF16, lifted)


SOLVED = {
    "cholesky": lambda a, x: jnp.linalg.cholesky(a @ a.T + 9 * jnp.eye(16)),
    "solve": lambda a, x: jnp.linalg.solve(a + 9 * jnp.eye(16), x.T),
    "inv": lambda a, x: jnp.linalg.inv(a + 9 * jnp.eye(16)),
    "eigh": lambda a, x: jnp.linalg.eigh(a + a.T)[0],
    "det": lambda a, x: jnp.linalg.det(a + 3 * jnp.eye(16)),
    "triangular": lambda a, x: jax.scipy.linalg.solve_triangular(a + 9 * jnp.eye(16), x.T),
    "lstsq": lambda a, x: jnp.linalg.lstsq(a + 9 * jnp.eye(16), x.T)[0],
    "fft": lambda a, x: jnp.fft.rfft(a).real,
}


@pytest.mark.filterwarnings("ignore:No matmul runs")  # those of lstsq ask for float32
@pytest.mark.parametrize("name", SOLVED)
def test_matmuls_in_derivatives_of_linear_algebra_stay_float32(name):
    fun = SOLVED[name]
    auto = mpjax.autocast(fun, POLICY)
    own = BF16 if name == "cholesky" else set()  # the product of the test
    gradient = jax.grad(lambda a, x: jnp.sum(jnp.sin(auto(a, x))))
    assert dtypes(gradient, W, X) <= own | FULL
    assert dtypes(lambda a: jax.jvp(lambda a: auto(a, X), (a,), (a,)), W) <= own | FULL


INTEGERS = {
    "counts": (lambda w, n: n.astype(jnp.float32) @ w, FULL),
    "their sums": (lambda w, n: (jnp.cumsum((n > 3) * 1.0, 1) + 1)[::-1] @ w, FULL),
    "positions": (
        lambda w, n: (jnp.arange(8 * 512.0).reshape(-1, 512) + 1) @ jnp.ones((512, 8)),
        FULL,
    ),
    "in a loop": (
        lambda w, n: lax.scan(lambda c, r: (c, r @ w), 0, n.astype(jnp.float32))[1],
        FULL,
    ),
    "masks": (lambda w, n: (n > 3).astype(jnp.float32) @ w, BF16),
    "one-hot": (lambda w, n: jax.nn.one_hot(n[:, 0], 16) @ w, BF16),
    "pixels": (lambda w, n: n.astype(jnp.uint8).astype(jnp.float32) @ w, BF16),
    "scaled": (lambda w, n: (n.astype(jnp.float32) / 255) @ w, BF16),
    "looked up": (lambda w, n: w[n[:, 0]] @ w, BF16),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_a_matmul_reads_stay_exact(name):
    fun, expected = INTEGERS[name]
    number = np.arange(8 * 16, dtype=np.int32).reshape(8, 16)
    assert dtypes(mpjax.autocast(fun, POLICY), W, number) == expected


def while_loop(end):
    def fun(w, x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w), c[1])  # noqa: E731
        return lax.while_loop(end, step, (0, x, x + 1))[1]

    return fun


ENDS = {
    "a count": (lambda c: c[0] < 3, BF16),
    "what it computes": (lambda c: c[1][0, 0] > 9, FULL),
    "what it computed before": (lambda c: c[2][0, 0] > 9, FULL),
    "a matmul of its own": (lambda c: jnp.sum(c[2].T @ c[2]) > 1e9, FULL),
}


@pytest.mark.parametrize("name", ENDS)
def test_matmuls_by_which_a_loop_ends_stay_float32(name):
    end, expected = ENDS[name]
    for fun in (while_loop(end), lambda w, x: lax.map(lambda x: while_loop(end)(w, x[None]), x)):
        assert dtypes(mpjax.autocast(fun, POLICY), W, X) == expected


def test_a_loop_that_turns_as_often_as_another_one_is_as_exact():
    end = ENDS["what it computes"][0]

    def fun(w, x):
        step = lambda c: (c[0] + 1, jnp.tanh(c[1] @ w), c[1])  # noqa: E731
        count = lax.while_loop(end, step, (0, x, x + 1))[0]
        return lax.fori_loop(0, count + 1, lambda i, h: jnp.tanh(h @ w), x)

    assert dtypes(mpjax.autocast(fun, POLICY), W, X) == FULL


def test_group_sizes_of_a_ragged_matmul_are_no_integers_to_keep():
    def fun(w, x):
        sizes = jnp.bincount(jnp.arange(8) % 2, length=2).astype(jnp.int32)
        return lax.ragged_dot(x, jnp.stack([w, w]), sizes)

    assert dtypes(mpjax.autocast(fun, POLICY), W, X) == BF16


def test_a_rule_whose_function_ends_by_a_matmul_repeats_its_decisions():
    loop = while_loop(ENDS["what it computes"][0])
    solve = jax.custom_vjp(lambda w, x: lax.map(lambda x: loop(w, x[None]), x) @ w)

    def back(kept, ct):
        return jax.vjp(lambda w, x: jnp.tanh(x @ w), *kept)[1](ct[:, 0])

    solve.defvjp(lambda w, x: (solve(w, x), (w, x)), back)
    auto = mpjax.autocast(solve, POLICY)
    assert dtypes(auto, W, X) == FULL
    assert dtypes(jax.grad(lambda w: jnp.sum(auto(w, X))), W) == FULL


def test_a_linear_call_and_a_jit_that_donates_are_written_inside():
    def linear(w, x):
        double = lambda w, x: x @ w * 2, lambda w, g: 3 * (g @ w.T)
        return jax.custom_derivatives.linear_call(*double, w, x)

    check_dtypes = jax.grad(lambda w, x: jnp.sum(mpjax.autocast(linear, POLICY)(w, x)), 1)
    assert dtypes(check_dtypes, W, X) == BF16
    donating = jax.jit(lambda x, w: jnp.sin(x @ w), donate_argnums=0)
    assert dtypes(mpjax.autocast(lambda w, x: donating(x, w), POLICY), W, X) == BF16


def test_a_kernel_in_a_rule_sees_the_policy():
    seen = []

    @mpjax.half_inputs
    def kernel(x, w):
        seen.append(x.dtype.name)
        return x @ w

    rule = jax.custom_vjp(kernel)
    rule.defvjp(lambda x, w: (kernel(x, w), (x, w)), lambda kept, ct: jax.vjp(kernel, *kept)[1](ct))
    jax.grad(mpjax.autocast(lambda w, x: jnp.sum(rule(x, w)), POLICY))(W, X)
    assert {*seen} == BF16 and len(seen) >= 3


# ---- what stays ---------------------------------------------------------------------------------


def classified(fun, policy):
    """Returns the program of which the planner derives, with what is asked of its equations."""
    closed = building.as_closed(_jax.hoisted(transform.trace(fun, policy, (W, X), {}).jaxpr)[0])
    return exceptions.Exceptions.of(policy, closed).marked(closed)


def test_calls_of_one_function_stay_calls_of_one_function():
    layer = jax.jit(lambda x, w: jnp.dot(jnp.tanh(x), w))

    def fun(w, x):
        return layer(layer(x, w), w)

    found = []
    for policy in (POLICY, POLICY.with_ops(full="dot_general")):
        calls = [e for e in classified(fun, policy).eqns if e.primitive.name in ("jit", "pjit")]
        found.append({id(e.params["jaxpr"]) for e in calls})
    assert [len(ids) for ids in found] == [1, 1]


@pytest.mark.parametrize("name", ["scan", "shard_map", "custom_jvp"])
def test_exact_mode_rounds_nothing_in_a_region_of_16_bits(name):
    def around(w, x):
        with mpjax.precision("bfloat16"):
            return jnp.exp(jax.tree.leaves(AROUND[name](x, w))[0]).sum()

    got, want = (jax.jit(jax.grad(f))(W, X) for f in (planned(around, EXACT), around))
    assert_near(got, want, rtol=1e-4)
