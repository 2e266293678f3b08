"""Functions with rules of their own: what their rules are given under autocast."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import W, X
from support import assert_near, cast, full_matmuls


def ruled(count, *given):
    """Returns ``tanh(x @ w)``, whose backward rule branches on residuals that are no arrays."""

    def run(w, x, *_):
        return jnp.tanh(x @ w)

    def fwd(w, x, *operands):
        y = run(w, x)
        kept = operands or (True, count, 0.5)
        return y, (w, x, y, kept)

    def bwd(res, ct):
        w, x, y, (flag, count, half, *steps) = res
        assert float(half) == 0.5
        assert all(array[-1] == 2 for array in steps)
        if flag:
            for _ in range(count):
                ct = ct / count
        d = ct * (1 - y**2)
        return x.T @ d, d @ w.T, *[None] * len(given)

    call = jax.custom_vjp(run)
    call.defvjp(fwd, bwd)
    return lambda w, x: call(w, x, *given)


def in_scan(fun):
    return lambda w, x: lax.scan(lambda c, _: (fun(w, c), None), x, None, length=2)[0]


WAYS = {
    "plain": lambda fun: jax.grad(fun, (0, 1)),
    "jit of grad": lambda fun: jax.jit(jax.grad(fun, (0, 1))),
    "grad of jit": lambda fun: jax.grad(jax.jit(fun), (0, 1)),
    "remat": lambda fun: jax.grad(jax.checkpoint(fun), (0, 1)),
    "vmap": lambda fun: jax.vmap(jax.grad(lambda w, x: fun(w, x[None]), (0, 1)), (None, 0)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("around", [lambda fun: fun, in_scan], ids=["alone", "scan"])
def test_residuals_that_are_python_values_come_back_as_they_were(way, around):
    fun = around(ruled(3))
    loss = lambda w, x: jnp.sum(fun(w, x) ** 2)  # noqa: E731
    auto = WAYS[way](cast(loss))
    assert_near(auto(W, X), WAYS[way](loss)(W, X), 0.03)
    assert not full_matmuls(auto, W, X)


def test_python_operands_come_back_as_they_were():
    fun = ruled(3, True, 3, 0.5, np.arange(3))
    loss = lambda w, x: jnp.sum(fun(w, x) ** 2)  # noqa: E731
    for way in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert_near(way(cast(loss))(W, X), way(loss)(W, X), 0.03)
