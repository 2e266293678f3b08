"""What the backward part computes from less: the 16-bit weights of a softmax, normalized."""

import jax
import jax.numpy as jnp
import pytest
from evaluation import is_var
from joint import planned
from planners import kept, sound
from support import equations, normal, thorough_but

N, D = 16, 8
Q, K, V = (normal(i, N, D) for i in range(3))


def attention(softmax):
    return lambda q, k, v: jnp.sum(jnp.tanh(softmax(q @ k.T) @ v) ** 2)


@pytest.mark.thorough
def test_exponentials_that_others_read_stay():
    def both(x):
        e = jnp.exp(x - x.max(-1, keepdims=True))
        return e / e.sum(-1, keepdims=True) + 0.1 * jnp.sin(e)

    fun = attention(both)
    assert not sound(fun, (Q, K, V), "bfloat16", (0, 1, 2), eager=True)


def test_a_softmax_that_no_matmul_reads_stays():
    fun = lambda q, k: jnp.sum(jax.nn.softmax(q @ k.T) ** 2)  # noqa: E731
    assert not sound(fun, (Q, K), "bfloat16", (0, 1), eager=True)


def test_weights_that_others_read_stay():
    """In float16, small weights have a large relative error, which a quotient shows."""

    def fun(q, k, v):
        p = jax.nn.softmax(8 * (q @ k.T))
        return jnp.mean((0.1 - p) ** 2 / (p + 1e-6)) + jnp.mean(p @ v)

    assert not sound(fun, (Q, K, V), "float16", (0, 1, 2), eager=True)


def test_a_matmul_keeps_its_copy_of_what_others_compute_again():
    """The sums of a residual network are read in float32 by norms, and in 16 bits by matmuls."""

    def block(x, w):
        y = (x @ w) @ w
        return jax.nn.relu(x + (y - y.mean(0)) * jax.lax.rsqrt(y.var(0) + 1e-3))

    def fun(x, w):
        for _ in range(4):
            x = block(x, w)
        return jnp.sum(x)

    x, w = normal(0, 64, 32), normal(1, 32, 32)
    of_a_block = 2 * 3 * x.size + x.size  # what matmuls and the norm read, and a mask
    assert kept(planned(fun), (x, w), (0, 1)) <= 4 * of_a_block


def layer(q, k):
    return q + jnp.sin(jax.nn.softmax(q @ k.T) @ k), None


AGAIN = {
    "alone": lambda q, k: jax.checkpoint(layer)(q, k)[0],
    "in turn": lambda q, k: jax.checkpoint(layer)(jax.checkpoint(layer)(q, k)[0], k)[0],
    "in a loop": lambda q, k: jax.lax.scan(jax.checkpoint(layer), q, jnp.stack([k, k]))[0],
}


@pytest.mark.parametrize("name", thorough_but(AGAIN, 0, 2))
def test_weights_that_a_checkpoint_computes_again_are_normalized_too(name):
    def fun(q, k):
        return jnp.sum(jnp.tanh(AGAIN[name](q, k)) ** 2)

    def readers_of_exponentials(fun):
        eqns = [*equations(jax.make_jaxpr(jax.grad(fun, (0, 1)))(Q, K))]
        made = {v for e in eqns if e.primitive.name == "exp" for v in e.outvars}
        return {e.primitive.name for e in eqns for v in e.invars if is_var(v) and v in made}

    assert "mul" in readers_of_exponentials(fun)
    assert readers_of_exponentials(planned(fun)) == {"reduce_sum", "div"}
    wrong = sound(fun, (Q, K), "bfloat16", (0, 1), eager=True)
    assert not wrong, wrong
