"""Every transformation of a planned function gives what JAX gives for the function itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.jet import jet
from joint import EXACT, planned
from support import normal

KEYS = jax.random.split(jax.random.key(0), 2)
W = np.asarray(jax.random.normal(KEYS[0], (8, 8)) / 3)
X = np.asarray(jax.random.normal(KEYS[1], (4, 8)))


def fun(w, x):
    def body(h, _):
        return jnp.tanh(h @ w) + h, jnp.sum(h)

    h, sums = lax.scan(jax.checkpoint(body), x, None, length=3)
    return jnp.mean(jax.nn.softmax(jax.nn.gelu(h @ w)) ** 2) + sums.sum() * 1e-3


# XLA fuses what it compiles differently, and a second derivative cancels most of its terms.
TOLERANCE = 1e-3

SMALL = W[:2, :2], X[:1, :2]


def scanned(f):
    return lambda w: lax.scan(lambda c, x: (c + f(w, x[None]), None), 0.0, jnp.asarray(X))[0]


def in_custom_jvp(f):
    @jax.custom_jvp
    def inner(w):
        return f(w, X)

    inner.defjvp(lambda p, t: jax.jvp(lambda w: f(w, X), p, t))
    return inner


def in_custom_vjp(f):
    @jax.custom_vjp
    def inner(w):
        return f(w, X)

    inner.defvjp(lambda w: jax.vjp(lambda w: f(w, X), w), lambda pull, ct: pull(ct))
    return inner


def looped(f):
    def run(w):
        return lax.while_loop(
            lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] + f(w, X)), (0, jnp.float32(0))
        )[1]

    return run


WAYS = {
    "value": lambda f: f(W, X),
    "grad": lambda f: jax.grad(f, (0, 1))(W, X),
    "jit of grad": lambda f: jax.jit(jax.grad(f))(W, X),
    "grad of jit": lambda f: jax.grad(jax.jit(f))(W, X),
    "jvp": lambda f: jax.jvp(f, (W, X), (W, X)),
    "jacfwd": lambda f: jax.jacfwd(f)(W, X),
    "jacrev": lambda f: jax.jacrev(f)(W, X),
    "vmap": lambda f: jax.vmap(f, (None, 0))(W, X[:, None]),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), (None, 0))(W, X[:, None]),
    "grad of vmap": lambda f: jax.grad(lambda w: jax.vmap(f, (None, 0))(w, X[:, None]).sum())(W),
    "jvp of grad": lambda f: jax.jvp(lambda w: jax.grad(f)(w, X), (W,), (W,)),
    "grad of jvp": lambda f: jax.grad(lambda w: jax.jvp(lambda w: f(w, X), (w,), (w,))[1])(W),
    "grad of grad": lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f)(w, X) ** 2))(W),
    "hessian": lambda f: jax.hessian(f, 1)(*SMALL),
    "third": lambda f: jax.jvp(lambda x: jax.hessian(f, 1)(SMALL[0], x), (SMALL[1],), (SMALL[1],))[
        1
    ],
    "grad of scan": lambda f: jax.grad(scanned(f))(W),
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f))(W, X),
    "grad of checkpoint that saves dots": lambda f: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    )(W, X),
    "grad of scan of checkpoint": lambda f: jax.grad(scanned(jax.checkpoint(f)))(W),
    "jvp of checkpoint": lambda f: jax.jvp(jax.checkpoint(f), (W, X), (W, X)),
    "hvp of checkpoint": lambda f: jax.jvp(lambda w: jax.grad(jax.checkpoint(f))(w, X), (W,), (W,)),
    "linearize": lambda f: jax.linearize(f, W, X)[1](W, X),
    "vmap of linearize": lambda f: jax.vmap(jax.linearize(f, W, X)[1])(
        np.stack([W, 2 * W]), np.stack([X, X])
    ),
    "transpose of linearize": lambda f: jax.linear_transpose(jax.linearize(f, W, X)[1], W, X)(
        jnp.float32(1)
    ),
    "cond": lambda f: jax.grad(
        lambda w: lax.cond(w[0, 0] > 0, lambda: f(w, X), lambda: f(w, 2 * X))
    )(W),
    "jvp of while": lambda f: jax.jvp(looped(f), (W,), (W,)),
    "grad around": lambda f: jax.grad(lambda w: jnp.log(f(w, X)) ** 2)(W),
    "custom_jvp": lambda f: jax.grad(in_custom_jvp(f))(W),
    "custom_vjp": lambda f: jax.grad(in_custom_vjp(f))(W),
}


# The others are compositions of these.
QUICK = ("vmap of grad", "jvp of grad", "grad of checkpoint", "linearize")


@pytest.mark.parametrize(
    "way", [w if w in QUICK else pytest.param(w, marks=pytest.mark.thorough) for w in WAYS]
)
def test_transformations_agree_with_jax(way):
    expected = jax.tree.leaves(WAYS[way](fun))
    found = jax.tree.leaves(WAYS[way](planned(fun, EXACT)))
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert np.linalg.norm(a - b) <= TOLERANCE * np.linalg.norm(b) + 1e-6


def test_closed_over_tracers():
    def closing(w):
        return planned(lambda x: fun(w, x), EXACT)(X)

    expected = jax.grad(fun)(W, X)
    for way in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        np.testing.assert_allclose(way(closing)(W), expected, rtol=1e-4, atol=1e-6)


def test_nested():
    def outer(w):
        return fun(w, X) + planned(lambda w: fun(w, X) * 2, EXACT)(w)

    found = jax.grad(planned(outer, EXACT))(W)
    np.testing.assert_allclose(found, 3 * jax.grad(fun)(W, X), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("half", [EXACT, "bfloat16", "float16"])
@pytest.mark.parametrize("derive", [lambda f: f, jax.grad], ids=["value", "grad"])
def test_taylor_series(half, derive):
    def flat(x):
        return jnp.sum(jnp.tanh(x @ W) @ W)

    def series(f):
        return jet(derive(f), (X,), ((np.ones_like(X), np.ones_like(X) / 2),))

    tolerance = TOLERANCE if half == EXACT else 0.05
    got, want = jax.jit(lambda: (series(planned(flat, half)), series(flat)))()
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.linalg.norm(g - w) <= tolerance * np.linalg.norm(w)


@pytest.mark.parametrize("half", ["bfloat16", EXACT])
def test_a_linear_function_is_transposed(half):
    w = normal(0, 16, 16)

    def linear(x, y):
        return lax.scan(lambda c, s: (c @ w * s, None), x, jnp.cos(w[:3, 0]))[0] + y, jnp.sum(y)

    x, cts = normal(1, 8, 16), (normal(2, 8, 16), jnp.float32(2))
    got = jax.jit(jax.linear_transpose(planned(linear, half), x, x))(cts)
    want = jax.linear_transpose(linear, x, x)(cts)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=0.03 * np.abs(b).max())
    alone = jax.linear_transpose(lambda x: planned(linear, half)(x, x)[0], x)(cts[0])[0]
    np.testing.assert_allclose(alone, want[0] + cts[0], rtol=0, atol=0.03 * np.abs(alone).max())
