"""Each setting of storage: sound gradients of attentions, and linear functions are transposed."""

import itertools

import jax
import jax.numpy as jnp
import measure
import pytest
from support import normal, thorough_but

import mpjax

STORAGES = ("fast", "lean", "0", "0.5", "0.9", "8bit")
HEADS, T, WIDTH = 2, 32, 16
KEEP = jax.random.bernoulli(jax.random.key(0), 0.9, (2, HEADS, T, T))
X, W = normal(0, 2, T, HEADS * WIDTH), normal(1, HEADS * WIDTH, HEADS * WIDTH, scale=0.25)


def attention(w, x, weights):
    q, k, v = ((h @ w).reshape(2, T, HEADS, WIDTH) for h in (x, jnp.sin(x), x**2))
    p = weights(jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)))
    return jnp.mean(jnp.sin(jnp.einsum("bhqk,bkhd->bqhd", p, v)))


def dropped(w, x):
    return attention(w, x, lambda p: p * (KEEP / jnp.float32(0.9)))


def gated(w, x):
    return attention(w, x, lambda p: p * jax.nn.sigmoid(w[:HEADS, 0])[:, None, None] * KEEP)


PAIRS = [*itertools.product((dropped, gated), STORAGES)]


@pytest.mark.parametrize(("fun", "storage"), thorough_but(PAIRS, *range(0, 12, 3)))
def test_gradients_pass_what_runs_on_the_weights_of_an_attention(fun, storage):
    half = ("bfloat16", "float16")[STORAGES.index(storage) % 2]
    parts = "result" if storage == "8bit" else "result gradient"  # codes are less accurate
    rows = measure.check(fun, (W, X), half, storage=storage, parts=parts, seeds=(0,), eager=True)
    assert all(row.autocast < 0.05 for row in rows)


def product(x):
    return jnp.sin(W) * (x @ W)


def loop(x):
    return jax.lax.scan(lambda x, s: ((x @ W) * s, None), x, jnp.cos(normal(2, 3, 32, 32)))[0]


@pytest.mark.parametrize("storage", thorough_but(STORAGES, "fast", "0.5", "8bit"))
@pytest.mark.parametrize("fun", [product, loop])
def test_linear_functions_are_transposed(fun, storage):
    x = normal(3, 32, 32)
    auto = mpjax.autocast(fun, f"mixed_bfloat16,storage={storage}")
    (got,), (want,) = jax.linear_transpose(auto, x)(x), jax.linear_transpose(fun, x)(x)
    assert measure.norm(got - want) < 0.02 * measure.norm(want)


def test_the_matvec_of_a_solver_is_transposed():
    spd = jnp.eye(32) + W @ W.T / 64
    auto = mpjax.autocast(
        lambda x: spd @ x + jnp.sin(W[0]) * (W @ x), "mixed_bfloat16,storage=lean"
    )

    def solved(b):
        transposed = lambda matvec, b: jnp.linalg.solve(spd, b)  # noqa: E731
        return jax.lax.custom_linear_solve(auto, b, transposed, transposed).sum()

    assert jnp.all(jnp.isfinite(jax.grad(solved)(X[0, 0])))
