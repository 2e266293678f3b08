"""Kernels that want half: half_inputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec
from support import HALVES, assert_near, cast, equations, normal, thorough_but

import mpjax

W, X = normal(0, 8, 8, scale=0.3), normal(1, 4, 8)
SEEN: list[tuple[str, ...]] = []


@pytest.fixture(autouse=True)
def seen():
    SEEN.clear()
    return SEEN


def plain(x, w):
    """Tells what it is given, wherever it is traced."""
    SEEN.append((x.dtype.name, w.dtype.name))
    return jnp.tanh(x @ w)


kernel = mpjax.half_inputs(plain)


@jax.custom_vjp
def ruled(x, w):
    return plain(x, w)


def _forward(x, w):
    y = plain(x, w)
    return y, (x, w, y)


def _backward(kept, ct):
    x, w, y = kept
    SEEN.append(("cotangent", ct.dtype.name))
    inner = ct * (1 - y * y)
    return inner @ w.T, x.T @ inner


ruled.defvjp(_forward, _backward)


def twice_in_a_loop(x, w):
    return lax.scan(lambda h, _: (kernel(h, w), None), x, None, length=2)[0]


def over_devices(x, w):
    mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = PartitionSpec("d"), PartitionSpec()
    return jax.shard_map(kernel, mesh=mesh, in_specs=(rows, whole), out_specs=rows)(x, w)


@jax.custom_vjp
def around(x, w):
    return kernel(x, w)


around.defvjp(lambda x, w: (around(x, w), (x, w)), lambda kept, ct: jax.vjp(kernel, *kept)[1](ct))

AROUND = {
    "plain": kernel,
    "jit": jax.jit(kernel),
    "scan": twice_in_a_loop,
    "remat": jax.checkpoint(kernel),
    "vmap": jax.vmap(kernel, (0, None)),
    "cond": lambda x, w: lax.cond(x[0, 0] > -9, kernel, lambda x, w: x, x, w),
    "shard_map": over_devices,
    "nested": lambda x, w: mpjax.autocast(kernel, "mixed_float16")(x, w),
    "a rule around": around,
    "a rule of its own": mpjax.half_inputs(ruled),
    "grad inside": lambda x, w: jax.grad(lambda x: jnp.sum(kernel(x, w) ** 2))(x),
}


QUICK = ["jit", "scan", "cond", "remat", "vmap", "nested", "a rule around", "a rule of its own"]


@pytest.mark.parametrize("name", thorough_but(AROUND, *QUICK))
def test_a_kernel_sees_half_wherever_it_is_traced(name, seen):
    total = lambda w: jnp.sum(AROUND[name](X, w) ** 2)  # noqa: E731
    want = jax.jit(jax.value_and_grad(total))(W)
    half = "float16" if name == "nested" else "bfloat16"
    plain = {"float16" if name == "nested" else "float32", "cotangent"}
    assert {one for pair in seen for one in pair} <= plain
    seen.clear()
    got = jax.jit(jax.value_and_grad(cast(total)))(W)
    assert seen and {one for pair in seen for one in pair} <= {half, "cotangent"}
    assert got[1].dtype == jnp.float32
    assert_near(got, want, 0.05)


@pytest.mark.parametrize("half", HALVES)
def test_half_inputs_kernel_gets_the_dtype_of_the_policy(half, seen):
    jax.eval_shape(cast(lambda w: jnp.sum(kernel(X, w)), half), W)
    assert seen == [(half, half)]


def test_half_inputs_outside_of_autocast_is_the_kernel_itself(seen):
    shared = jax.jit(lambda x, w: kernel(x, w))
    assert str(jax.make_jaxpr(kernel)(X, W)) == str(jax.make_jaxpr(plain)(X, W))
    jax.eval_shape(mpjax.autocast(shared, "mixed_bfloat16"), X, W)
    seen.clear()
    assert shared(X, W).dtype == jnp.float32
    assert seen == [("float32", "float32")]
    assert np.array_equal(shared(X, W), jax.jit(plain)(X, W))


def test_half_inputs_under_a_float32_policy_is_the_kernel_itself(seen):
    got = mpjax.autocast(lambda x, w: kernel(x, w), "float32")(X, W)
    assert seen == [("float32", "float32")] and np.array_equal(got, jax.jit(plain)(X, W))


def test_half_inputs_results_are_half_to_the_plan():
    """No cast stands between two kernels, nor between one and a matmul."""
    jaxpr = jax.make_jaxpr(cast(lambda x, w: kernel(kernel(x @ w, w), w) @ w))(X, W)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert casts and all(e.invars[0].aval.dtype == jnp.float32 for e in casts)  # of arguments


# ---- arguments and results ----------------------------------------------------------------------


def many(tree, index, *, scale, mode, bias=None):
    x = tree["x"][index]
    SEEN.append((x.dtype.name, tree["n"].dtype.name, index.dtype.name, scale.dtype.name))
    assert mode == "fast" and isinstance(tree["k"], float)
    total = jnp.sum(x.astype(jnp.float32))
    return {"y": x * scale.astype(x.dtype), "places": index}, total


TREE = {"x": X, "n": jnp.arange(3), "k": 2.0}
INDEX = jnp.asarray([0, 2])


def test_half_inputs_takes_trees_keywords_integers_and_several_results(seen):
    def fun(x):
        return mpjax.half_inputs(many)(TREE | {"x": x}, INDEX, scale=x[0], mode="fast")

    out, total = cast(fun)(X)
    assert seen == [("bfloat16", "int32", "int32", "bfloat16")]
    assert out["y"].dtype == total.dtype == jnp.float32 and out["places"].dtype == jnp.int32
    assert_near(out["y"], X[INDEX] * X[0], 0.02)


@pytest.mark.parametrize("chosen", ["scale", ["scale"], ("scale", 1)])
def test_half_inputs_keeps_chosen_arguments_in_float32(chosen, seen):
    wrapped = mpjax.half_inputs(float32=chosen)(many)
    fun = cast(lambda x: wrapped(TREE | {"x": x}, INDEX, scale=x[0], mode="fast")[1])
    jax.eval_shape(fun, X)
    assert seen == [("bfloat16", "int32", "int32", "float32")]


def test_half_inputs_argument_is_chosen_by_place_or_by_name(seen):
    for chosen in (1, "w"):
        wrapped = mpjax.half_inputs(plain, float32=chosen)
        jax.eval_shape(cast(lambda x, w, wrapped=wrapped: wrapped(x, w=w)), X, W)
        jax.eval_shape(cast(lambda x, w, wrapped=wrapped: wrapped(x, w)), X, W)
    assert seen == [("bfloat16", "float32")] * 4


def test_half_inputs_leaves_half_arguments_as_they_are(seen):
    jax.eval_shape(cast(lambda x, w: kernel(x.astype(jnp.float16), w)), X, W)
    assert seen == [("float16", "bfloat16")]


def test_cotangents_arrive_in_the_kernels_own_dtype(seen):
    jax.eval_shape(jax.grad(cast(lambda w: jnp.sum(mpjax.half_inputs(ruled)(X, w)))), W)
    assert ("cotangent", "bfloat16") in seen


def test_half_inputs_refuses_what_is_no_argument():
    with pytest.raises(ValueError, match=r"float32='z' is not an argument.*0 'x', 1 'w'"):
        mpjax.half_inputs(plain, float32="z")
    with pytest.raises(ValueError, match="float32=2 is not an argument"):
        mpjax.half_inputs(plain, float32=(0, 2))
    for wrong in (None, 1.5, True, ["x", 2.0]):
        with pytest.raises(ValueError, match=r"float32=.* must be the position or name"):
            mpjax.half_inputs(float32=wrong)
    with pytest.raises(TypeError, match="kernel=3 must be a function"):
        mpjax.half_inputs(3)


def test_arguments_that_a_kernel_takes_by_star_are_legal(seen):
    def stars(*args, **kwargs):
        SEEN.append(tuple(x.dtype.name for x in (*args, *kwargs.values())))
        return args[0]

    wrapped = mpjax.half_inputs(stars, float32=(1, "b"))
    jax.eval_shape(cast(lambda x: wrapped(x, x, a=x, b=x)), X)
    assert seen == [("bfloat16", "float32", "bfloat16", "float32")]


# ---- control ------------------------------------------------------------------------------------


def in_a_region(dtype):
    def fun(x, w):
        with mpjax.precision(dtype):
            return jnp.sum(jax.jit(lambda x, w: kernel(x, w))(x, w))

    return fun


def test_precision_region_decides_the_dtype_of_a_kernel(seen):
    for dtype in ("float32", "float16"):
        jax.eval_shape(cast(in_a_region(dtype)), X, W)
        jax.eval_shape(mpjax.autocast(in_a_region(dtype), "float32"), X, W)
        jax.eval_shape(in_a_region(dtype), X, W)
    half, whole = ("float16",) * 2, ("float32",) * 2
    assert seen == [whole] * 3 + [half, half, whole]


def layers(ws, x):
    for i, w in enumerate(ws):
        with jax.named_scope(f"layer_{i}"):
            x = jax.checkpoint(lambda x, w: kernel(x, w))(x, w)
    return jnp.sum(x)


def test_override_by_scope_decides_the_dtype_of_a_kernel(seen):
    for pattern in ("*layer_1*", "layer_1"):  # the kernel's own scope does not count
        policy = mpjax.get_policy("mixed_bfloat16").override({pattern: "float32"})
        jax.eval_shape(mpjax.autocast(layers, policy), [W] * 3, X)
        assert [x for x, _ in seen[-3:]] == ["bfloat16", "float32", "bfloat16"], pattern
        seen.clear()
    policy = mpjax.get_policy("mixed_bfloat16").override({"*layer_1*": "float16"})
    jax.eval_shape(mpjax.autocast(layers, policy), [W] * 3, X)
    assert [x for x, _ in seen[-3:]] == ["bfloat16", "float16", "bfloat16"]


def test_override_by_parameter_decides_the_dtype_of_a_kernel(seen):
    policy = mpjax.get_policy("mixed_bfloat16").override({"2": "float32"})
    jax.eval_shape(mpjax.autocast(layers, policy), [W, W, W], X)
    assert [x for x, _ in seen[-3:]] == ["bfloat16", "bfloat16", "float32"]


def test_a_jit_that_several_calls_share_is_float32_if_one_call_is(seen):
    shared = jax.jit(kernel)

    def fun(w, x):
        with jax.named_scope("first"):
            x = shared(x, w)
        return jnp.sum(shared(x, w))

    policy = mpjax.get_policy("mixed_bfloat16").override({"*first*": "float32"})
    jax.eval_shape(mpjax.autocast(fun, policy), W, X)
    assert seen[-1] == ("float32", "float32")


def test_an_override_of_something_else_traces_no_more_often(seen):
    policy = mpjax.get_policy("mixed_bfloat16").override({"*head*": "float32"})

    def fun(w, x):
        with jax.named_scope("head"):
            return jnp.sum(kernel(x, w) @ w) if False else jnp.sum(x @ w)

    jax.eval_shape(mpjax.autocast(lambda w, x: fun(w, kernel(x, w)), policy), W, X)
    assert seen == [("bfloat16", "bfloat16")]


# ---- kernels in earnest, and reports ------------------------------------------------------------


def doubled(x):
    def body(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(body, out_shape=shape, interpret=True)(x)


def rows_of(fun, *args, name):
    report = mpjax.explain(fun, "mixed_bfloat16")(*args)
    return report, [row for row in report.rows if row.primitive == name]


def test_explain_tells_of_kernels_left_in_float32():
    report, (row,) = rows_of(lambda x, w: doubled(x @ w), X, W, name="pallas_call")
    assert row.after == "f32->f32" and row.left_alone
    assert "half_inputs would run it" in str(report)


def test_explain_shows_kernels_in_half():
    wrapped = mpjax.half_inputs(doubled)
    report, (row,) = rows_of(lambda x, w: wrapped(x @ w), X, W, name="pallas_call")
    assert row.after == "bf16->bf16" and not row.left_alone
    assert row.reason.startswith("inside the kernel doubled (half_inputs)")
    assert "left unchanged:" not in str(report)


@pytest.mark.parametrize("storage", ["fast", "lean"])
def test_a_pallas_kernel_runs_in_half(storage):
    wrapped = mpjax.half_inputs(doubled)
    fun = lambda x, w: wrapped(jnp.tanh(x @ w)) @ w  # noqa: E731
    policy = mpjax.get_policy("mixed_bfloat16").replace(storage=storage)
    got = jax.jit(mpjax.autocast(fun, policy))(X, W)
    assert_near(got, np.float32(2) * np.tanh(np.asarray(X) @ W) @ W, 0.02)


@pytest.mark.thorough
def test_compare_and_find_nonfinite_run_kernels_in_half(seen):
    fun = lambda w, x: jnp.sum(kernel(x, w) ** 2)  # noqa: E731
    rows = mpjax.compare(fun, "mixed_bfloat16")(W, X).rows
    assert {"bfloat16"} == {one for pair in seen for one in pair} and rows
    report = mpjax.find_nonfinite(lambda w, x: jnp.log(fun(w, x) - 1e4), "mixed_bfloat16")(W, X)
    assert report.primitive == "log"


def test_half_inputs_takes_a_partial_whose_bound_arguments_stay(seen):
    wrapped = mpjax.half_inputs(functools.partial(plain, w=W))
    assert jax.eval_shape(cast(lambda x: wrapped(x)), X).dtype == jnp.float32
    assert seen == [("bfloat16", "float32")]  # what is bound is no argument


# ---- the policy that holds -----------------------------------------------------------------------


def test_current_policy_inside_a_jit_is_that_of_the_autocast_around():
    asked = []

    @jax.jit
    def inner(x):
        policy = mpjax.current_policy()
        asked.append(policy and policy.compute_dtype.name)
        return x @ x

    def fun(x):
        with mpjax.precision("float32"):
            x = inner(x)
        return jax.grad(lambda x: jnp.sum(inner(x)))(x)

    x = normal(0, 4, 4)
    jax.eval_shape(inner, x)
    assert mpjax.current_policy() is None and asked == [None]
    for half in HALVES:
        jax.eval_shape(mpjax.autocast(fun, f"mixed_{half}"), x)
    first, second = HALVES
    assert asked == [None, "float32", first, second]  # in the region both are one policy
    policies = []
    known = mpjax.autocast(lambda x: policies.append(mpjax.current_policy()), "mixed_bfloat16")
    jax.eval_shape(known, x)
    assert policies == [mpjax.get_policy("mixed_bfloat16")]
