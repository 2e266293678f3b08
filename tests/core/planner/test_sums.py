"""Sums that differ by factors which are constant along the axes: one sum, and the same numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from joint import EXACT, planned
from support import assert_near, equations, normal, thorough_but

ROWS, WIDTH = 32, 16
X, W = normal(0, ROWS, WIDTH), normal(1, WIDTH, WIDTH)
SCALE, BIAS = 1 + normal(2, WIDTH) / 4, normal(3, WIDTH)


def normed(x, scale, bias, axis=0):
    deviation = jnp.sqrt(jnp.var(x, axis, keepdims=True) + 1e-5)
    return (x - jnp.mean(x, axis, keepdims=True)) * (scale / deviation) + bias


def batch_norm(w, scale, bias, x=X):
    return jnp.sum(jax.nn.silu(normed(x @ w, scale, bias)) ** 2)


def sums(fun, *args):
    """Returns how many sums of large arrays a gradient has."""
    eqns = equations(jax.make_jaxpr(jax.grad(fun, range(len(args))))(*args))
    summed = (e.invars[0].aval for e in eqns if e.primitive.name == "reduce_sum")
    return sum(aval.size == ROWS * WIDTH for aval in summed)


@pytest.mark.thorough
def test_the_derivative_of_a_batch_norm_has_fewer_sums():
    args = W, SCALE, BIAS
    assert sums(planned(batch_norm, EXACT), *args) < sums(batch_norm, *args)
    found = jax.grad(planned(batch_norm, EXACT), (0, 1, 2))(*args)
    assert_near(found, jax.grad(batch_norm, (0, 1, 2))(*args), rtol=1e-4)


# How a cotangent is multiplied beside being summed as it is.
TIMES = {
    "a factor that is spread": lambda x, c: x * c,
    "a factor of rows of one": lambda x, c: x * c[None],
    "a quotient": lambda x, c: x / c,
    "its negative": lambda x, c: -x * c,
    "two factors": lambda x, c: -(x * c) / (c + 9),
}


@pytest.mark.parametrize("name", thorough_but(TIMES, *range(0, len(TIMES), 2)))
def test_sums_of_multiples_are_multiples_of_a_sum(name):
    def fun(bias, mean, x=X):
        y = jnp.sin(x + bias + TIMES[name](jnp.broadcast_to(mean, x.shape), SCALE))
        return jnp.sum(y**2)

    args = BIAS, SCALE
    assert sums(fun, *args) == 3 and sums(planned(fun, EXACT), *args) == 2
    found = jax.grad(planned(fun, EXACT), (0, 1))(*args)
    assert_near(found, jax.grad(fun, (0, 1))(*args), rtol=1e-4)


@pytest.mark.parametrize(
    "factor", [lambda x: normal(4, ROWS, 1), lambda x: normal(4, ROWS, WIDTH), jnp.cos]
)
def test_factors_that_differ_along_the_axes_stay_in_the_sums(factor):
    def fun(bias, mean, x=X):
        return jnp.sum(jnp.sin(x + bias + factor(x) * jnp.broadcast_to(mean, x.shape)) ** 2)

    args = BIAS, SCALE
    assert sums(planned(fun, EXACT), *args) == sums(fun, *args) == 3
    found = jax.grad(planned(fun, EXACT), (0, 1))(*args)
    assert_near(found, jax.grad(fun, (0, 1))(*args), rtol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sums_on_several_devices(kind):
    mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(kind,) * 2)
    want = jax.grad(batch_norm, (0, 1, 2))(W, SCALE, BIAS)
    with jax.set_mesh(mesh):
        put = lambda x, *axes: jax.device_put(x, jax.NamedSharding(mesh, P(*axes)))  # noqa: E731
        args = W, put(SCALE, "columns"), put(BIAS, "columns"), put(X, "rows", None)
        args = (put(W, None, "columns"), *args[1:])
        found = jax.jit(jax.grad(planned(batch_norm, EXACT), (0, 1, 2)))(*args)
    assert_near(jax.tree.map(np.asarray, found), want, rtol=1e-4)


def test_sums_in_shard_map_and_scan():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(AxisType.Auto,))

    def mapped(w, scale, bias):
        def each(x, *args):
            return jax.lax.psum(batch_norm(*args, x=x), "rows")

        specs = P("rows"), P(), P(), P()
        return jax.shard_map(each, mesh=mesh, in_specs=specs, out_specs=P())(X, w, scale, bias)

    def scanned(w, scale, bias):
        def body(x, _):
            return jax.nn.silu(normed(x @ w, scale, bias)), None

        return jnp.sum(jax.lax.scan(body, X, None, length=3)[0] ** 2)

    for fun in (mapped, scanned):
        found = jax.jit(jax.grad(planned(fun, EXACT), (0, 1, 2)))(W, SCALE, BIAS)
        want = jax.jit(jax.grad(fun, (0, 1, 2)))(W, SCALE, BIAS)
        assert_near(found, want, rtol=1e-3)
