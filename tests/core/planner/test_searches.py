"""Routers: a matmul whose few columns are ranked runs in float32, as people write it by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from support import matmul_dtypes, normal

import mpjax

BF16, FULL = {"bfloat16"}, {"float32"}
POLICY = mpjax.get_policy("mixed_bfloat16")


ROUTED = {
    "top_k": (lambda y: lax.top_k(jax.nn.softmax(y), 2), FULL),
    "argmax": (lambda y: jnp.argmax(y + 1, -1), FULL),
    "sort": (lambda y: jnp.sort(jax.nn.sigmoid(y) * 2, -1), FULL),
    "in a jit": (jax.jit(lambda y: lax.approx_max_k(jnp.tanh(y), 2)), FULL),
    "no order": (lambda y: jax.nn.softmax(y), BF16),
    "another matmul": (lambda y: jnp.argmax(y @ normal(2, 4, 64), -1), BF16),
}


@pytest.mark.parametrize("name", ROUTED)
@pytest.mark.parametrize("loop", [False, True])
def test_a_router_is_float32(name, loop):
    read, expected = ROUTED[name]
    w, x = normal(3, 64, 4), normal(4, 8, 64)

    def fun(w, x):
        return lax.map(lambda r: read(r[None] @ w), x) if loop else read(x @ w)

    found = matmul_dtypes(mpjax.autocast(fun, POLICY), w, x)
    assert {*found[0]} == expected


def test_the_best_of_many_words_is_no_router():
    fun = lambda w, x: jnp.argmax(x @ w, -1)  # noqa: E731
    found = matmul_dtypes(mpjax.autocast(fun, POLICY), normal(3, 64, 256), normal(4, 8, 64))
    assert {*found[0]} == BF16
