"""Max pools keep in a byte where each maximum was; masks of ReLUs are read from what is kept."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint import EXACT, planned
from planners import kept
from support import equations, normal, thorough_but

from mpjax._src.core.base.devices import traced_for

X = normal(1, 2, 9, 8, 3)
W = normal(2, 3, 32, scale=0.3)


def window(select, start, size, strides, padding, x):
    return jax.lax.reduce_window(x, start, select, size, strides, padding)


largest = functools.partial(window, jax.lax.max, -jnp.inf)
smallest = functools.partial(window, jax.lax.min, jnp.inf)
MAXIMA = {
    "overlapping": lambda x: largest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", x),
    "tiles": lambda x: largest((1, 2, 2, 1), (1, 2, 2, 1), "VALID", x),
    "with gaps": lambda x: largest((1, 2, 2, 1), (1, 3, 3, 1), "VALID", x),
    "of channels": lambda x: largest((1, 1, 1, 3), (1, 1, 1, 1), "SAME", x),
    "smallest": lambda x: smallest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", x),
    "below zero": lambda x: largest(
        (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (2, 2), (2, 2), (0, 0)), -x * x
    ),
    "equal entries": lambda x: largest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", jnp.round(x)),
    "twice": lambda x: (
        2 * largest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", x)
        + largest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", x)
    ),
}


@pytest.mark.parametrize("name", thorough_but(MAXIMA, *range(0, len(MAXIMA), 2)))
def test_gradients_are_those_of_jax(name):
    def fun(x):
        y = MAXIMA[name](x)
        return jnp.sum(y * (1 + jnp.arange(y.size).reshape(y.shape) % 64))

    want = jax.value_and_grad(fun)(X)
    for half in (EXACT, "bfloat16"):  # no matmul: nothing is rounded
        found = jax.jit(jax.value_and_grad(planned(fun, half)))(X)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, want)


def layers(w, x):
    y = jax.nn.relu(jnp.einsum("bhwi,ij->bhwj", x, w))
    return jnp.sum(jnp.sin(MAXIMA["overlapping"](y)) ** 2)


def names(fun, *args):
    return {e.primitive.name for e in equations(jax.make_jaxpr(jax.grad(fun))(*args))}


def test_positions_are_kept_in_a_byte_and_not_what_is_pooled():
    x = normal(3, 2, 16, 16, 3)
    product, pooled = 2 * 16 * 16 * 32, 2 * 8 * 8 * 32
    assert kept(planned(layers), (W, x)) <= 2 * product + (1 + 4) * pooled
    assert "select_and_scatter_add" not in names(planned(layers), W, x)
    with traced_for("v5e"):  # it has a kernel for JAX's derivative
        assert "select_and_scatter_add" in names(planned(layers), W, x)


def test_positions_in_a_loop():
    def fun(w, x):
        return jax.lax.scan(lambda c, x: (c + layers(w, x[None]), None), 0.0, x)[0]

    found, want = (jax.jit(jax.grad(f))(W, X) for f in (planned(fun, EXACT), fun))
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    assert "select_and_scatter_add" not in names(planned(fun), W, X)


def test_a_mask_is_read_from_a_result_that_is_kept():
    """A ReLU of several arrays: its mask would be kept, or read all of them."""

    def block(x, w):
        return jax.nn.relu(x + jnp.tanh(x @ w) @ w)

    def fun(x, w):
        return jnp.sum(block(block(block(x, w), w), w) @ w)

    x, w = normal(0, 64, 32), normal(1, 32, 32, scale=0.3)
    found, want = (jax.jit(jax.grad(f, (0, 1)))(x, w) for f in (planned(fun, EXACT), fun))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, want)
    bools = [
        v.aval
        for e in equations(jax.make_jaxpr(lambda *args: jax.vjp(planned(fun), *args)[1])(x, w))
        if e.primitive.name == "planned"
        for v in e.outvars
        if v.aval.dtype == bool
    ]
    assert not bools
