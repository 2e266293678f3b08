"""Every spelling of a softmax keeps no more for the backward pass than the plainest does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import logsumexp
from measure import check, kept
from support import normal, thorough_but

N, D = 32, 8
Q, K, V = (normal(i, 2, N, D) for i in range(3))
MASK = jnp.tri(N) > 0
LOG2E = float(np.log2(np.e))


def shifted(s):
    return jnp.exp(s - jnp.max(s, -1, keepdims=True))


def total(e):
    return jnp.sum(e, -1, keepdims=True)


def masked(s):
    return jnp.where(MASK, s, -1e9)


def with_where(s):
    e = jnp.where(MASK, jnp.exp(s - jnp.max(masked(s), -1, keepdims=True)), 0.0)
    return e / total(e)


def online(s):
    top = jnp.max(s, -1, keepdims=True)
    e = jnp.exp(s - top)
    return jnp.exp(s - (top + jnp.log(total(e))))


def with_rows_first(s):
    return jnp.swapaxes(jax.nn.softmax(jnp.swapaxes(s, -1, -2), axis=-2), -1, -2)


# name: the spelling, and the plain one that it stands for
PLAIN = jax.nn.softmax
SPELLINGS = {
    "by hand": (lambda s: shifted(s) / total(shifted(s)), PLAIN),
    "one exp by hand": (lambda s: (lambda e: e / total(e))(shifted(s)), PLAIN),
    "no shift": (lambda s: jnp.exp(s) / total(jnp.exp(s)), PLAIN),
    "stopped shift": (
        lambda s: (lambda e: e / total(e))(
            jnp.exp(s - jax.lax.stop_gradient(jnp.max(s, -1, keepdims=True)))
        ),
        PLAIN,
    ),
    "plus eps": (lambda s: (lambda e: e / (total(e) + 1e-6))(shifted(s)), PLAIN),
    "off by one": (lambda s: (lambda e: e / (1 + total(e)))(shifted(s)), PLAIN),
    "largest of sum and eps": (
        lambda s: (lambda e: e / jnp.maximum(total(e), 1e-6))(shifted(s)),
        PLAIN,
    ),
    "times reciprocal": (lambda s: (lambda e: e * (1 / total(e)))(shifted(s)), PLAIN),
    "times power": (lambda s: (lambda e: e * total(e) ** -1)(shifted(s)), PLAIN),
    "exp of log_softmax": (lambda s: jnp.exp(jax.nn.log_softmax(s)), PLAIN),
    "minus logsumexp": (lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)), PLAIN),
    "minus scipy's": (lambda s: jnp.exp(s - logsumexp(s, -1, keepdims=True)), PLAIN),
    "online": (online, PLAIN),
    "exp2": (
        lambda s: (lambda e: e / total(e))(jnp.exp2(LOG2E * (s - jnp.max(s, -1)[..., None]))),
        PLAIN,
    ),
    "exp2 before the shift": (
        lambda s: (lambda t: (lambda e: e / total(e))(jnp.exp2(t - jnp.max(t, -1, keepdims=True))))(
            s * LOG2E
        ),
        PLAIN,
    ),
    "masked": (lambda s: jax.nn.softmax(masked(s)), PLAIN),
    "where=": (lambda s: jax.nn.softmax(s, where=MASK), PLAIN),
    "where by hand": (with_where, PLAIN),
    "mask that adds": (lambda s: jax.nn.softmax(s + jnp.where(MASK, 0.0, -1e9)), PLAIN),
    "softcapped by hand": (
        lambda s: (lambda e: e / total(e))(shifted(20 * jnp.tanh(s / 20))),
        lambda s: jax.nn.softmax(20 * jnp.tanh(s / 20)),
    ),
    "scaled after": (lambda s: 0.5 * (2 * jax.nn.softmax(s)), PLAIN),
    "other axis": (with_rows_first, PLAIN),
    "reshaped": (lambda s: jax.nn.softmax(s.reshape(2, 4, N // 4, N)).reshape(s.shape), PLAIN),
    "einsum's rows": (
        lambda s: (lambda e: e / jnp.einsum("bqk->bq", e)[..., None])(shifted(s)),
        PLAIN,
    ),
    "vmapped": (jax.vmap(jax.vmap(lambda r: (lambda e: e / e.sum())(jnp.exp(r - r.max())))), PLAIN),
    "jitted": (jax.jit(lambda s: (lambda e: e / total(e))(shifted(s))), PLAIN),
}


def attention(softmax):
    return lambda q, k, v: softmax(q @ jnp.swapaxes(k, -1, -2) / 3) @ v


def grouped(softmax):
    """Two heads of queries to each head of keys: a reshape stands between softmax and values."""

    def fun(q, k, v):
        s = jnp.einsum("bgnd,bmd->bgnm", q.reshape(2, 2, N // 2, D), k)
        p = softmax(s.reshape(2, N, N)).reshape(2, 2, N // 2, N)
        return jnp.einsum("bgnm,bmd->bgnd", p, v)

    return fun


def plain(softmax):
    return lambda q, k, v: softmax(jnp.einsum("bnd,bmd->bnm", q, k)) @ v


AROUND = {"attention": attention, "grouped": grouped, "plain": plain}


@functools.cache
def bytes_kept(softmax, around, half):
    """Returns the bytes of the floats kept: masks are another matter."""
    return sum(
        count * int(np.prod(shape)) * jnp.dtype(dtype).itemsize
        for (dtype, shape), count in kept(AROUND[around](softmax), (Q, K, V), half).items()
        if dtype != "bool"
    )


def compare(name, around, half):
    statistics = 3 * 2 * N * 4  # three float32 numbers to each row of scores
    got, want = (bytes_kept(softmax, around, half) for softmax in SPELLINGS[name])
    assert got <= want + statistics, f"{got} bytes kept, the plain softmax keeps {want}"


@pytest.mark.parametrize("name", thorough_but(SPELLINGS, *range(0, len(SPELLINGS), 4)))
def test_attention_of_each_softmax_spelling_keeps_no_more(name):
    compare(name, "attention", "bfloat16")


@pytest.mark.thorough
@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_of_each_softmax_spelling_keeps_no_more_in_float16(name):
    compare(name, "attention", "float16")


@pytest.mark.parametrize("name", thorough_but(SPELLINGS, *range(2, len(SPELLINGS), 4)))
def test_grouped_attention_of_each_softmax_spelling_keeps_no_more(name):
    compare(name, "grouped", "bfloat16")


def test_grouped_attention_keeps_what_attention_keeps():
    """And the queries in groups, which the matmul reads in 16 bits."""
    grouped, plain = (bytes_kept(jax.nn.softmax, f, "bfloat16") for f in ("grouped", "plain"))
    assert grouped <= plain + 2 * Q.size


@pytest.mark.thorough
@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", SPELLINGS)
def test_attention_of_each_softmax_spelling_is_sound(name, half):
    check(attention(SPELLINGS[name][0]), (Q, K, V), half, (0, 1, 2))
