"""What the backward part computes from less: the 16-bit weights of a softmax, normalized."""

import jax
import jax.numpy as jnp
from planners import PLANNERS, sound
from support import normal

N, D = 16, 8
Q, K, V = (normal(i, N, D) for i in range(3))


def attention(softmax):
    return lambda q, k, v: jnp.sum(jnp.tanh(softmax(q @ k.T) @ v) ** 2)


def test_exponentials_that_others_read_stay():
    def both(x):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) + 0.1 * jnp.sin(e)

    fun = attention(both)
    assert not sound(PLANNERS["derivative"], fun, (Q, K, V), "bfloat16", (0, 1, 2), eager=True)


def test_a_softmax_that_no_matmul_reads_stays():
    fun = lambda q, k: jnp.sum(jax.nn.softmax(q @ k.T) ** 2)  # noqa: E731
    assert not sound(PLANNERS["derivative"], fun, (Q, K), "bfloat16", (0, 1), eager=True)


def test_weights_that_others_read_stay():
    """In float16, small weights have a large relative error, which a quotient shows."""

    def fun(q, k, v):
        p = jax.nn.softmax(8 * (q @ k.T))
        return jnp.mean((0.1 - p) ** 2 / (p + 1e-6)) + jnp.mean(p @ v)

    assert not sound(PLANNERS["derivative"], fun, (Q, K, V), "float16", (0, 1, 2), eager=True)
