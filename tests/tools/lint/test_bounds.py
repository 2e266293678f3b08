"""Bounds hold what a program computes, on random inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import make_program

# Functions of a number of [-2.5, 3.5], one of [0.25, 4], and integers of [-7, 9] and [1, 5].
FUNCTIONS = {
    "sum": lambda x, p, n, k: x + p,
    "difference": lambda x, p, n, k: x - p,
    "product": lambda x, p, n, k: x * p,
    "quotient": lambda x, p, n, k: x / p,
    "quotient of integers": lambda x, p, n, k: lax.div(n, k),
    "quotient that is never one": lambda x, p, n, k: lax.div(k, 7 * k),
    "remainder": lambda x, p, n, k: lax.rem(x, p),
    "remainder by a whole number": lambda x, p, n, k: lax.rem(x, jnp.float32(2)),
    "remainder of integers": lambda x, p, n, k: lax.rem(n, k),
    "remainder of a whole number": lambda x, p, n, k: lax.rem(jnp.floor(x), jnp.float32(3)),
    "remainder by a larger number": lambda x, p, n, k: lax.rem(p, jnp.float32(9)),
    "power": lambda x, p, n, k: p**x,
    "square": lambda x, p, n, k: jnp.square(x),
    "cube": lambda x, p, n, k: x**3,
    "inverse": lambda x, p, n, k: lax.integer_pow(p, -2),
    "magnitude": lambda x, p, n, k: abs(x),
    "negative": lambda x, p, n, k: -p,
    "exponential": lambda x, p, n, k: jnp.exp(x),
    "power of two": lambda x, p, n, k: jnp.exp2(x),
    "root": lambda x, p, n, k: jnp.sqrt(p),
    "floor": lambda x, p, n, k: jnp.floor(x),
    "sine": lambda x, p, n, k: jnp.sin(x),
    "logistic": lambda x, p, n, k: jax.nn.sigmoid(x),
    "sign": lambda x, p, n, k: jnp.sign(x),
    "larger": lambda x, p, n, k: jnp.maximum(x, p),
    "smaller": lambda x, p, n, k: jnp.minimum(x, p),
    "clipped": lambda x, p, n, k: jnp.clip(jnp.log(p) * x, -1.5, 2),
    "clipped integer": lambda x, p, n, k: jnp.clip((jnp.log(p) * x).astype(jnp.int32), 1, 3),
    "place of the largest": lambda x, p, n, k: jnp.argmax(x),
    "order": lambda x, p, n, k: jnp.argsort(x),
    "sorted": lambda x, p, n, k: jnp.sort(x),
    "largest places": lambda x, p, n, k: lax.top_k(x, 3)[1],
    "random number": lambda x, p, n, k: jax.random.uniform(jax.random.key(0), (9,), minval=-3),
    "random integer": lambda x, p, n, k: jax.random.randint(jax.random.key(0), (9,), -3, 7),
    "outer product": lambda x, p, n, k: jnp.einsum("i,j->ij", x, p),
    "either": lambda x, p, n, k: jnp.where(n > 2, x, -p),
    "both": lambda x, p, n, k: jnp.concatenate([x, p]),
    "total": lambda x, p, n, k: jnp.sum(x),
    "running total": lambda x, p, n, k: jnp.cumsum(x),
    "largest": lambda x, p, n, k: jnp.max(x),
    "integer of a fraction": lambda x, p, n, k: p.astype(jnp.int32),
    "integer of a negative fraction": lambda x, p, n, k: (-p).astype(jnp.int32),
    "integer, and back": lambda x, p, n, k: x.astype(jnp.int32).astype(jnp.float32),
    "narrow integer": lambda x, p, n, k: n.astype(jnp.int8),
    "truth": lambda x, p, n, k: (x > 0).astype(jnp.float32),
    "fraction of an integer": lambda x, p, n, k: n.astype(jnp.float32) / 2,
    "counter": lambda x, p, n, k: jnp.arange(5) * k[:5],
}


def bounded(fun):
    """Returns the function of arrays that are first clamped to the ranges of its arguments."""
    return lambda x, p, n, k: fun(
        *(lax.clamp(-2.5, x, 3.5), lax.clamp(0.25, p, 4.0)),
        *(lax.clamp(-7, n, 9), lax.clamp(1, k, 5)),
    )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_result_is_within_its_bounds(name, rng):
    fun = bounded(FUNCTIONS[name])
    floats = np.float32(3 * rng.standard_normal((2, 64)))
    args = (*floats, *np.int32(rng.integers(-20, 20, (2, 64))))
    program = make_program(fun, args, {})
    bounds = bounds_of(program, program.block.outvars[0])
    found = np.asarray(fun(*args), np.float64)
    slack = 1e-6 * np.abs(found).max()
    assert bounds is not None
    assert bounds.low - slack <= found.min() and found.max() <= bounds.high + slack
    assert not bounds.whole or np.array_equal(found, np.rint(found))
