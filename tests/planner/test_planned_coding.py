"""storage=8bit: codes are handed over, and derivatives of any order see through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from joint import planned
from support import equations, normal

W, V = normal(0, 128, 256, scale=0.1), normal(1, 256, 128, scale=0.1)
X, DIRECTION = normal(2, 128, 128), normal(3, 128, 256)
QKV = normal(4, 1, 128, 2, 64)


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ V) ** 2)


def scanned(w, x):
    return jnp.mean(lax.scan(lambda c, _: (c + jnp.tanh(c @ w) @ V, None), x, length=2)[0] ** 2)


def chosen(w, x):
    return lax.cond(x[0, 0] < 9, loss, lambda *_: 0.0, w, x)


def coded(fun):
    return planned(fun, storage="8bit")


def arrays(fun, *args):
    return [v.aval for e in equations(jax.make_jaxpr(fun)(*args)) for v in e.outvars]


def codes(fun, *args):
    gradient = arrays(jax.grad(coded(fun)), *args)
    return {(a.dtype.name, a.shape) for a in gradient if a.dtype.name in ("int8", "uint8")}


def error(found, want):
    return np.linalg.norm(found - want) / np.linalg.norm(want)


@pytest.mark.parametrize("fun", [loss, scanned, chosen])
def test_the_loss_is_that_of_lean_and_gradients_are_close(fun):
    value, found = jax.jit(jax.value_and_grad(coded(fun)))(W, X)
    same, lean = jax.jit(jax.value_and_grad(planned(fun, storage="lean")))(W, X)
    np.testing.assert_allclose(value, same, rtol=1e-6)
    assert 0 < error(found, lean) < 0.02
    assert {name for name, _ in codes(fun, W, X)} == {"int8", "uint8"}


def gated(w, x):
    return jnp.mean((jax.nn.silu(x @ w) @ V) ** 2)


def test_what_an_activation_reads_has_codes():
    assert ("int8", (128, 256)) in codes(gated, W, X)


def directional(fun):
    return lambda w, x: jnp.vdot(jax.grad(fun)(w, x), DIRECTION)


SECOND = {
    "forward over reverse": lambda f: (
        lambda w: jax.jvp(lambda w: jax.grad(f)(w, X), (w,), (DIRECTION,))[1]
    ),
    "reverse over reverse": lambda f: lambda w: jax.grad(directional(f))(w, X),
    "reverse over forward": lambda f: jax.grad(
        lambda w: jax.jvp(lambda w: f(w, X), (w,), (DIRECTION,))[1]
    ),
    "checkpoint": lambda f: lambda w: jax.grad(jax.checkpoint(f))(w, X),
    "vmap": lambda f: lambda w: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), X),
}


@pytest.mark.parametrize("name", SECOND)
@pytest.mark.parametrize("fun", [loss, scanned])
def test_derivatives_of_any_order_see_through_codes(name, fun):
    found, want = (jax.jit(SECOND[name](f))(W) for f in (coded(fun), fun))
    assert error(found, want) < 0.04


def attention(q, x):
    return jnp.mean(jax.nn.dot_product_attention(q, jnp.sin(x), jnp.cos(x)) ** 2)


def test_weights_are_shares_and_values_are_kept_whole():
    found = codes(attention, QKV, QKV)
    assert {dtype for dtype, shape in found if shape[-2:] == (128, 128)} == {"uint8"}


@pytest.mark.parametrize("last", [jnp.exp, jnp.sin, lambda y: jax.nn.log_softmax(y)[:, 0]])
def test_what_is_enlarged_has_no_code(last):
    assert not codes(lambda w, x: jnp.sum(last(x @ w + 1)), W, X)


def test_the_derivative_of_an_erf_enlarges_nothing():
    fun = lambda w, x: jnp.sum(jax.nn.gelu(x @ w, approximate=False) @ V)  # noqa: E731
    assert codes(fun, W, X)


def test_small_arrays_and_integers_have_no_code():
    assert not codes(loss, W, X[:32])
    counted = lambda w, x: jnp.sum(jnp.sin((x > 0).astype(jnp.float32) @ w) * w.sum())  # noqa: E731
    assert ("int8", X.shape) not in codes(counted, W, X)


def test_a_relu_enlarges_nothing():
    def fun(w, x):
        y = x @ w
        y = jax.nn.relu((y - y.mean(0)) * lax.rsqrt(jnp.var(y, 0) + 1e-3))
        return jnp.sum((y @ V) ** 2)

    assert {name for name, _ in codes(fun, W, X)} == {"int8", "uint8"}
