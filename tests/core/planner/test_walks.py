"""Walks from a stream to the matmuls that read it: sums of entries that were moved."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import planners
import pytest
from support import normal, thorough_but

from mpjax._src.core.planner import streams
from mpjax._src.core.planner.recall import Opened

T, D = 12, 16
APART = np.arange(T)[:, None] - np.arange(T) + T
SUMS = {
    "added": lambda z: z + z.swapaxes(0, 1),
    "subtracted": lambda z: z - z.swapaxes(0, 1),
    "negated": lambda z: z + (-1.0 * z).swapaxes(0, 1),
    "squared": lambda z: z**2 + (z - 1).swapaxes(0, 1),
}


def norm(z):
    z = z - z.mean(-1, keepdims=True)
    return z * jax.lax.rsqrt(jnp.mean(z**2, -1, keepdims=True) + 1e-5)


def of_pairs(last, first="rows of a table"):
    """Blocks on pairs of tokens; the last matmul reads a sum of both directions."""

    def fun(ws, x, table):
        if first == "rows of a table":
            z = (x @ ws[0])[:, None] + x @ ws[1] + table[APART]
        else:  # what is the negative of its transpose
            z = 20 * (x[:, None] - x)
        for w in ws[2:]:
            z = z + 0.5 * jnp.tanh(norm(z) @ w) @ w.T
        return jnp.mean(jnp.sin(SUMS[last](z) @ ws[0]))

    return fun


def args(seed):
    ws = [normal(10 * seed + i, D, D, scale=D**-0.5) for i in range(4)]
    return ws, normal(10 * seed + 4, T, D), normal(10 * seed + 5, 2 * T, D)


def refused(fun):
    parts = Opened(jax.make_jaxpr(fun)(*args(0)))
    values = streams.candidates(parts.equations, parts.outs, np.dtype(jnp.bfloat16))
    walks = streams.Walks(parts.equations, parts.outs, streams.Facts(parts.equations))
    reasons = [walks.refused(v) for v in values]
    return [reason for reason in reasons if reason and "two values" in reason]


def test_sums_of_entries_of_one_sign_are_of_rounded_streams():
    assert not refused(of_pairs("added"))


@pytest.mark.parametrize("last", [*SUMS][1:])
def test_differences_of_entries_are_not(last):
    assert refused(of_pairs(last))


def test_what_no_table_tells_is_not():
    assert refused(of_pairs("added", "differences"))


USES = [*itertools.product(("rows of a table", "differences"), ("bfloat16", "float16"))]


@pytest.mark.parametrize(("first", "half"), thorough_but(USES, 1, 2))
def test_gradients_are_as_by_hand(first, half):
    fun = of_pairs("added", first)
    assert not planners.sound(fun, args, half, 0, eager=True)
