"""From 0.12 on, JAX has operations that are functions until they are compiled."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from joint import EXACT, planned
from support import assert_near, normal, thorough_but

W, X = normal(0, 4, 8) / 3, normal(1, 6, 4)


def operations(h):
    lower = h[:, :4][:, jnp.tril_indices(4, -1)[0]]
    chosen = h[1][jnp.nonzero(h[0] > 0, size=3)[0]]
    found = h[2][jnp.searchsorted(jnp.sort(h[0]), h[1]) % 8]
    mantissa, exponent = jnp.frexp(h)
    return sum((y**3).sum() for y in (lower, chosen, found, mantissa, jnp.ldexp(h, exponent)))


def alone(w, x):
    return jax.jit(operations)(jnp.tanh(x @ w))


def scanned(w, x):
    def body(c, y):
        return c + y.sum(), operations(jnp.sin(c * y) @ w)

    return lax.scan(jax.checkpoint(body), 1.0, jnp.stack([x, x + 1]))[1].sum()


@pytest.mark.parametrize("fun", thorough_but([alone, scanned], 0))
def test_derivatives_are_those_of_jax(fun):
    def derivatives(f):
        first = jax.grad(f)
        second = jax.grad(lambda w: (first(w, X) ** 2).sum())
        mapped = jax.vmap(first, (None, 0))
        return jax.jit(lambda w: (first(w, X), second(w), mapped(w, jnp.stack([X, X + 1]))))(W)

    assert_near(derivatives(planned(fun, EXACT)), derivatives(fun), 1e-3)
