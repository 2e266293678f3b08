"""Softmaxes in every spelling: their 16-bit weights alone are kept, and gradients stay accurate."""

import itertools

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import numpy as np
import pytest
from joint import EXACT, planned
from planners import kept, sound
from support import normal, thorough_but

N, D = 32, 8
HEADS = 2
Q, K, V = (normal(i, HEADS, N, D) for i in range(3))
SCORES = HEADS * N * N
OTHERS = 3 * 2 * HEADS * N * D  # what the matmuls read in 16 bits
ROWS = 4 * HEADS * N
MASK = np.tril(np.ones((N, N), bool))
KEEP = np.random.default_rng(0).random((HEADS, N, N)) < 0.8
SINK = normal(3, 1)
COTANGENT = normal(4, HEADS, N, D)
stop = jax.lax.stop_gradient


def total(e):
    return jnp.sum(e, -1, keepdims=True)


def top(s):
    return stop(jnp.max(s, -1, keepdims=True))


def of(weights):
    """Returns a softmax from what is done to the exponentials of the shifted scores."""
    return lambda s: weights(jnp.exp(s - top(s)))


def with_sink(s):
    m = jnp.maximum(top(s), SINK)
    e = jnp.exp(s - m)
    return e / (total(e) + jnp.exp(SINK - m))


def guarded(e):
    e = jnp.where(MASK, e, 0)
    return e / jnp.maximum(total(e), 1e-9)


def one_where_empty(e):
    e = jnp.where(MASK[::-1] & MASK, e, 0)
    z = total(e)
    return e / jnp.where(z == 0, 1, z)


def in_base_2(s):
    s = s * float(np.log2(np.e))
    return jnp.exp2(s - (top(s) + jnp.log2(total(jnp.exp2(s - top(s))))))


def of_tiles(s):
    tiles = jax.nn.softmax(s.reshape(HEADS, N, 4, N // 4), (-2, -1))
    return tiles.reshape(s.shape)


def of_columns(s):
    return jnp.swapaxes(jax.nn.softmax(jnp.swapaxes(s, 1, 2), 1), 1, 2)


SPELLINGS = {
    "jax.nn": jax.nn.softmax,
    "spelled out": of(lambda e: e / total(e)),
    "unshifted": lambda s: jnp.exp(s) / total(jnp.exp(s)),
    "by a reciprocal": of(lambda e: e * (1 / total(e))),
    "by roots": of(lambda e: e * jax.lax.rsqrt(total(e)) * jax.lax.rsqrt(total(e))),
    "with a small number": of(lambda e: e / (total(e) + 1e-3)),
    "scaled": of(lambda e: 0.5 * e / total(0.25 * e)),
    "of a log-softmax": lambda s: jnp.exp(jax.nn.log_softmax(s)),
    "of a log-sum-exp": lambda s: jnp.exp(s - jax.nn.logsumexp(s, axis=-1)[..., None]),
    "negated": lambda s: jnp.exp(-1.0 * (jax.nn.logsumexp(s, -1, keepdims=True) - s)),
    "two exponentials": lambda s: (lambda e: e / total(e))(jnp.exp(s) * jnp.exp(-top(s))),
    "in base 2": in_base_2,
    "masked": of(guarded),
    "one where empty": of(one_where_empty),
    "of masked scores": lambda s: jax.nn.softmax(jnp.where(MASK, s, -1e9)),
    "where=": lambda s: jax.nn.softmax(s, where=MASK),
    "times a mask": of(lambda e: (lambda e: e / total(e))(e * jnp.asarray(MASK).astype("f4"))),
    "with a sink": with_sink,
    "of a log-sum-exp with a sink": lambda s: jnp.exp(
        s - jnp.logaddexp(jax.nn.logsumexp(s, -1, keepdims=True), SINK)
    ),
    "of tiles": of_tiles,
    "of columns": of_columns,
    "over queries": lambda s: jax.nn.softmax(s, 1),
    "of all": lambda s: jax.nn.softmax(s, (0, 1, 2)),
    "named": lambda s: jax.ad_checkpoint.checkpoint_name(jax.nn.softmax(s), "weights"),
}
LOOKALIKES = {
    "rows for columns": of(lambda e: e / e.sum(-1)[:, None, :]),
    "columns summed": of(lambda e: e / e.sum(1)[..., None]),
    "mask above alone": of(lambda e: jnp.where(MASK, e, 0) / total(e)),
    "two masks": of(lambda e: jnp.where(MASK, e, 0) / total(jnp.where(KEEP, e, 0))),
    "squared": of(lambda e: e**2 / total(e)),
    "a bias to columns": lambda s: (
        jnp.exp(s + s.mean(1, keepdims=True) - top(s)) / total(jnp.exp(s - top(s)))
    ),
    "another scale": lambda s: jnp.exp(s - top(s)) / total(jnp.exp(s / 2 - top(s) / 2)),
    "a gate": of(lambda e: jnp.tanh(e[..., :1]) * e / total(e)),
    "read by others": of(lambda e: e / total(e) + 0.1 * jnp.sin(e)),
    "dropped": lambda s: jnp.where(KEEP, jax.nn.softmax(s) / 0.8, 0),
    "over the square": of(lambda e: e / total(e) ** 2),
    "over another sum": of(lambda e: e / (total(e) + jnp.sum(jnp.sqrt(e), -1, keepdims=True))),
    "summed twice": lambda s: of(lambda e: e / total(e) / total(jnp.where(KEEP, e, 0)))(s),
}


def attention(softmax, scale=1.0):
    return lambda q, k, v: jnp.sum(
        COTANGENT * jnp.tanh(softmax(scale * (q @ jnp.swapaxes(k, 1, 2))) @ v)
    )


@pytest.mark.parametrize("name", thorough_but(SPELLINGS, *range(0, len(SPELLINGS), 3)))
def test_weights_alone_are_kept(name):
    held = kept(planned(attention(SPELLINGS[name])), (Q, K, V), (0, 1, 2))
    assert held <= 2 * SCORES + OTHERS + 4 * HEADS * N * D + 4 * ROWS


QUICK = ["jax.nn", "of a log-sum-exp", "one where empty", "with a sink"]
PAIRS = [(half, name) for half in ("bfloat16", "float16") for name in SPELLINGS]


@pytest.mark.parametrize(
    ("half", "name"), thorough_but(PAIRS, *(("bfloat16", name) for name in QUICK))
)
def test_gradients_of_confident_rows_are_as_accurate(half, name):
    """A confident weight's cotangent is multiplied by its difference from one."""

    same = normal(5, HEADS, N, 64, scale=0.42)  # a token attends to itself, by all but 0.001

    def fun(q, k, v):
        return jnp.sum(40 * COTANGENT * (SPELLINGS[name](q @ jnp.swapaxes(k, 1, 2)) @ v))

    wrong = sound(fun, (same, same, V), half, (0, 1, 2), eager=True)
    assert not wrong, wrong


@pytest.mark.parametrize(
    "name", thorough_but(LOOKALIKES, "rows for columns", "mask above alone", "a gate", "two masks")
)
def test_lookalikes_are_as_accurate(name):
    fun = attention(LOOKALIKES[name], 0.5)
    wrong = sound(fun, (Q, K, V), "bfloat16", (0, 1, 2), eager=True)
    assert not wrong, wrong


def after_the_matmul(q, k, v):
    s = 3 * (q @ jnp.swapaxes(k, 1, 2))
    e = jnp.exp(s - top(s))
    return jnp.sum(40 * COTANGENT * ((e @ v) / total(e)))


def whose_sum_is_read(q, k, v):
    s = 3 * (q @ jnp.swapaxes(k, 1, 2))
    z = jax.nn.logsumexp(s, -1, keepdims=True)
    return jnp.sum(COTANGENT * (jnp.exp(s - z) @ v)) + 0.1 * jnp.sum(z**2)


USES = [*itertools.product((after_the_matmul, whose_sum_is_read), ("bfloat16", "float16"))]


@pytest.mark.parametrize(("fun", "half"), thorough_but(USES, 1, 2))
def test_sums_may_be_read_by_others(fun, half):
    assert kept(planned(fun), (Q, K, V), (0, 1, 2)) <= 2 * SCORES + OTHERS + 4 * ROWS + OTHERS
    assert not sound(fun, (Q, K, V), half, (0, 1, 2), eager=True)


def test_rows_without_any_weight_have_no_gradient():
    empty = np.zeros((HEADS, N, N), bool)

    def none(s):
        e = jnp.where(empty, jnp.exp(s - top(s)), 0)
        return e / (total(e) + 1e-6)

    for g in jax.grad(planned(attention(none)), (0, 1, 2))(Q, K, V):
        np.testing.assert_array_equal(g, 0)


@pytest.mark.parametrize("name", thorough_but(["of a log-softmax", "jax.nn", "masked"], 0))
def test_in_exact_mode_nothing_is_rounded(name):
    fun = attention(SPELLINGS[name])
    got, want = (jax.grad(f, (0, 1, 2))(Q, K, V) for f in (planned(fun, EXACT), fun))
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_second_derivatives():
    fun = attention(SPELLINGS["of a log-sum-exp"])
    second = lambda f: jax.grad(lambda q: jnp.sum(jax.grad(f)(q, K, V) ** 2))(Q)  # noqa: E731
    got, want = (np.asarray(second(f)) for f in (planned(fun, EXACT), fun))
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max())


# ---- what a program returns of a softmax besides -------------------------------------------------


def parts(s):
    e = jnp.exp(s - top(s))
    return {"scores": s, "exponentials": e, "sum": total(e), "weights": e / total(e)}


UNSHIFTED = {
    "sum, not shifted": lambda s: (jnp.exp(s) / total(jnp.exp(s)), total(jnp.exp(s))),
    "stopped sum": lambda s: (jnp.exp(s) / stop(total(jnp.exp(s))), s),
    "logarithm of the sum": lambda s: (jax.nn.softmax(s), jax.nn.logsumexp(s, -1)),
}
RETURNED = {
    **{name: lambda s, name=name: (parts(s)["weights"], parts(s)[name]) for name in parts(Q)},
    **UNSHIFTED,
}


WAYS = [*itertools.product(RETURNED, ("alone", "checkpoint"), ("bfloat16", "float16"))]


@pytest.mark.parametrize(("name", "around", "half"), thorough_but(WAYS, *range(0, len(WAYS), 6)))
def test_what_is_returned_too_has_its_own_cotangent(name, around, half):
    def fun(q, k, v):
        weights, other = RETURNED[name](q @ k.mT / 8)
        return jnp.cos(weights @ v), jnp.sin(other)

    fun = jax.checkpoint(fun) if around == "checkpoint" else fun
    assert not sound(fun, (Q, K, V), half, (0, 1, 2))


def without_rows(s):
    e = jnp.where(np.arange(N)[:, None] < 2, 0, jnp.exp(s - top(s)))
    return e / jnp.where(total(e) == 0, 1, total(e))


SECOND = {**{name: lambda s, name=name: RETURNED[name](s)[0] for name in RETURNED}}
SECOND["rows without weights"] = without_rows


@pytest.mark.parametrize("name", thorough_but(SECOND, *range(0, len(SECOND), 2)))
def test_second_derivatives_are_those_of_the_function(name):
    fun = SECOND[name]

    def of(wrap):
        loss = wrap(lambda q, k, v: jnp.sum(jnp.sin(jnp.cos(fun(q @ k.mT / 8) @ v))))
        return jax.jit(lambda *xs: jax.jvp(jax.grad(loss, (0, 1, 2)), xs, (V, Q, K))[1])(Q, K, V)

    for got, want in zip(of(planned), of(lambda f: f), strict=True):
        off = np.linalg.norm(got - want) / np.linalg.norm(want)
        assert off < 0.03, off
