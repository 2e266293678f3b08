"""What a program returns of matmuls: their float32 accumulators."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from joint import planned
from support import assert_near, equations, normal

import mpjax

W, X = normal(0, 32, 32, scale=0.3), normal(1, 32, 32)


def is_rounded(x):
    """Returns whether all numbers of an array are 16-bit numbers."""
    x = np.asarray(x)
    return bool((x.astype(jnp.bfloat16).astype(np.float32) == x).all())


def mapped(fun):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))


RETURNED = {
    "itself": lambda w, x: x @ w,
    "moved": lambda w, x: jnp.maximum((x @ w).T, 0)[::-1].reshape(-1),
    "read elsewhere": lambda w, x: (x @ w, jnp.tanh(x @ w)),
    "added": lambda w, x: x @ w + x @ w.T,
    "stacked by a loop": lambda w, x: lax.map(lambda r: r @ w, x),
    "of a branch": lambda w, x: lax.cond(x[0, 0] > 9, lambda: x, lambda: x @ w),
    "on each device": mapped(lambda w, x: x @ w),
    "summed over devices": mapped(lambda w, x: lax.psum(x @ w, "i") + x @ w),
}


@pytest.mark.parametrize("name", RETURNED)
def test_a_result_that_is_returned_is_the_accumulator(name):
    fun = RETURNED[name]
    out = jax.tree.leaves(jax.jit(planned(fun))(W, X))[0]
    assert not is_rounded(out)
    low, w = (np.asarray(a).astype(jnp.bfloat16).astype(np.float32) for a in (X, W))
    want = jax.tree.leaves(fun(w, low))[0]
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5 * np.abs(want).max())


def test_a_convolution_returns_16_bits():
    """Not all hardware has its accumulator."""
    fun = planned(lambda w, x: lax.conv(x[None, None], w[None, None], (1, 1), "SAME"))
    assert is_rounded(fun(W[:3, :3], X))


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_matmuls_are_marked_for_the_devices_that_want_another_form(half):
    def fun(w, x):
        y = jnp.sin(x @ w) @ w
        return y, jnp.sin(y), jnp.dot(x, w, precision="highest")

    eqns = equations(jax.make_jaxpr(planned(fun, half))(W, X))
    marks = [e.ctx.xla_metadata for e in eqns if e.primitive.name == "dot_general"]
    assert [bool(mark) for mark in marks] == [True, True, False]


def test_a_few_columns_are_not_rounded_whoever_reads_them():
    fun = planned(lambda w, x: jnp.sin(x @ w[:, :4]))
    low, w = (np.asarray(a).astype(jnp.bfloat16).astype(np.float32) for a in (X, W))
    np.testing.assert_allclose(fun(W, X), np.sin(low @ w[:, :4]), rtol=0, atol=1e-5)
    size = lambda y: jnp.sqrt(y * y)  # noqa: E731
    with_region = planned(lambda w, x: size(mpjax.precision("bfloat16")(jnp.dot)(x, w[:, :4])))
    assert is_rounded(with_region(W, X))


READ = {
    "by others": (lambda y: (y, jnp.sin(y)), lambda y: jnp.sin(y)),
    "in a sum": (lambda y: (y + 1, jnp.sin(y + 1)), lambda y: jnp.sin(y + 1)),
    "in a view": (lambda y: (y.T, jnp.sin(y.T)), lambda y: jnp.sin(y.T)),
    "after a sum": (lambda y: (y + X + 1, jnp.sin(y + X)), lambda y: jnp.sin(y + X)),
    "in a loop": (
        lambda y: (y, lax.map(jnp.sin, y)),
        lambda y: lax.map(jnp.sin, y),
    ),
    "of a loop": (
        lambda y: (r := lax.map(lambda r: r @ W, y), jnp.sin(r)),
        lambda y: jnp.sin(lax.map(lambda r: r @ W, y)),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_other_readers_get_the_same_bits_as_if_it_were_not_returned(name):
    both, alone = READ[name]
    options = {"xla_backend_optimization_level": 0}
    got, want = (
        jax.jit(planned(lambda w, x, f=f: f(x @ w)), compiler_options=options)(W, X)
        for f in (both, alone)
    )
    np.testing.assert_array_equal(got[1], want)


def dense(w, x):
    return jnp.sum(jnp.sin(x @ w))


def twice(w, x):
    return jnp.sum(jnp.sin(jnp.sin(x @ w) @ w))


def layers(w, x):
    stack = jnp.stack([w, w.T])
    return jnp.sum(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0])


def by_slices(w, x):
    return jnp.sum(jnp.sin(x @ w[:, :20])) + jnp.sum(jnp.cos(x @ w[:, 12:]))


# The shape of the products, in the derivative by the weights.
SHAPES = {dense: (32, 32), twice: (32, 32), layers: (32, 32), by_slices: (32, 20)}


@pytest.mark.parametrize("fun", SHAPES)
@pytest.mark.parametrize("wrap", [lambda f: f, jax.checkpoint], ids=["plain", "checkpoint"])
def test_gradients_are_accumulators(fun, wrap):
    traced = jax.make_jaxpr(jax.grad(wrap(planned(fun))))(W, normal(1, 48, 32))
    matmuls = [e.outvars[0].aval for e in equations(traced) if e.primitive.name == "dot_general"]
    by_weights = [aval for aval in matmuls if aval.shape in (SHAPES[fun], SHAPES[fun][::-1])]
    assert by_weights and {aval.dtype.name for aval in by_weights} == {"float32"}
    assert "bfloat16" in {aval.dtype.name for aval in matmuls}


def test_what_a_loop_adds_up_is_rounded():
    """The sum averages the roundings, and the products are written in every turn."""

    def fun(w, x):
        return jnp.sum(lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0])

    traced = jax.make_jaxpr(jax.grad(planned(fun)))(W, normal(1, 480, 32))
    matmuls = [e.outvars[0].aval for e in equations(traced) if e.primitive.name == "dot_general"]
    assert {aval.dtype.name for aval in matmuls} == {"bfloat16"}


def test_a_state_that_a_loop_reads_is_not_carried_unrounded():
    """What its turns read would be another number than in a loop whose end is not returned."""

    def fun(w, x):
        return lax.scan(lambda h, r: (h @ w, jnp.sin(h)), x, None, length=3)

    def inner(w, x):
        return jnp.sin(fun(w, x)[0]), fun(w, x)[1]

    (end, states), (_, others) = (jax.jit(planned(f))(W, X) for f in (fun, inner))
    np.testing.assert_array_equal(states, others)
    assert is_rounded(end)


def test_the_loss_is_the_same_with_and_without_a_derivative():
    def fun(w, x):
        y = x @ w
        return jnp.mean(jnp.sin(y) @ w), (y, y + x)

    options = {"xla_backend_optimization_level": 0}
    auto = planned(fun)
    value = jax.jit(auto, compiler_options=options)(W, X)
    with_gradient = jax.jit(jax.value_and_grad(auto, has_aux=True), compiler_options=options)
    jax.tree.map(np.testing.assert_array_equal, with_gradient(W, X)[0], value)


@pytest.mark.parametrize("loop", [False, True])
def test_what_another_matmul_reads_is_no_accumulator(loop):
    def fun(w, x):
        y = lax.map(lambda r: jnp.tanh(r), x) if loop else x @ w
        return y.T @ w

    dtypes = {
        v.aval.dtype.name
        for e in equations(jax.make_jaxpr(planned(fun))(W, X))
        if e.primitive.name == ("scan" if loop else "transpose")
        for v in e.outvars
    }
    assert dtypes == {"bfloat16"}


# ---- what devices send each other ---------------------------------------------------------------


def mesh_of(kind):
    return jax.make_mesh((8,), ("data",), axis_types=(kind,))


def spread(x, spec, kind=AxisType.Auto):
    return jax.device_put(x, NamedSharding(mesh_of(kind), spec))


def sent(fun, *args):
    """Returns the dtypes of what devices exchange, as compiled, by the collective."""
    text = jax.jit(fun).lower(*args).compile().as_text()
    return {*re.findall(r" = (\w+)\[[\d,]+\]\S* (all-reduce|all-gather)\(", text)}


def dtypes_of(fun, shape, *args):
    found = [e for e in equations(jax.make_jaxpr(fun)(*args)) if e.primitive.name == "dot_general"]
    return {e.outvars[0].aval.dtype.name for e in found if e.outvars[0].aval.shape == shape}


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [
        ("mixed_bfloat16", "float32"),
        ("O2:bfloat16", "float32"),
        ("mixed_bfloat16,reduce=half", "bfloat16"),
    ],
)
def test_gradients_of_parameters_are_summed_as_the_policy_says(policy, dtype):
    w = normal(0, 32, 48).astype(jnp.bfloat16 if policy.startswith("O2") else jnp.float32)
    x = normal(1, 64, 32)
    gradient = jax.grad(mpjax.autocast(lambda w, x: jnp.mean(jnp.sin(x @ w)), policy))
    assert dtypes_of(gradient, (32, 48), w, x) | dtypes_of(gradient, (48, 32), w, x) == {dtype}
    assert gradient(w, x).dtype == w.dtype


def test_devices_sum_the_gradient_of_a_kernel_in_float32():
    kernel, x = normal(0, 3, 3, 8, 8, scale=0.2), normal(1, 16, 7, 8, 8)

    def fun(kernel, x):
        dims = ("NHWC", "HWIO", "NHWC")
        return jnp.sum(
            jnp.sin(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, dims))
        )

    gradient = jax.grad(mpjax.autocast(fun, "mixed_float16"))  # XLA:CPU sends no bfloat16
    args = spread(kernel, P()), spread(x, P("data"))
    assert ("f32", "all-reduce") in sent(gradient, *args)
    assert ("f16", "all-reduce") not in sent(gradient, *args)
    assert_near(jax.jit(gradient)(*args), jax.grad(fun)(kernel, x), 0.02)


@pytest.mark.parametrize(
    ("policy", "dtype"), [("mixed_float16", "f16"), ("mixed_float16,gather=float32", "f32")]
)
def test_devices_gather_what_matmuls_read_as_the_policy_says(policy, dtype):
    def fun(w, x):
        w = lax.with_sharding_constraint(w, NamedSharding(mesh_of(AxisType.Auto), P()))
        return jnp.mean(jnp.sin(x @ w))

    args = spread(normal(0, 32, 48), P("data")), spread(X, P("data"))
    assert {d for d, how in sent(mpjax.autocast(fun, policy), *args) if how == "all-gather"} == {
        dtype
    }


@pytest.mark.parametrize(("read", "dtype"), [(jnp.tanh, "f16"), (lambda x: jnp.sin(9 * x), "f32")])
def test_devices_gather_rows_in_16_bits_where_these_may_be_rounded(read, dtype):
    def fun(table, rows):
        return jnp.mean(read(table[rows] @ W) if dtype == "f16" else read(table[rows]) @ W)

    table, rows = normal(0, 128, 32), np.arange(64).reshape(8, 8) % 7
    text = jax.jit(mpjax.autocast(fun, "mixed_float16")).trace(spread(table, P(None, "data")), rows)
    text = text.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'"stablehlo.gather".*tensor<128x\d+x(\w+)>, tensor', text) == [dtype]
    one = jax.jit(mpjax.autocast(fun, "mixed_float16")).trace(table, rows)
    one = one.lower(lowering_platforms=("cuda",)).as_text()
    assert re.findall(r'"stablehlo.gather".*tensor<128x\d+x(\w+)>, tensor', one) == ["f32"]
