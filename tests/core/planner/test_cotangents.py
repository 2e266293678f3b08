"""Rule C: a cotangent is rounded once for a matmul and all others where no common part cancels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from joint import planned
from planners import sound
from support import equations, normal, thorough_but

from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.cotangents import AVERAGED, EACH, EXACT, WHOLE, noise_of
from mpjax._src.core.planner.equations import parts

N, D = 8, 16
X, W, V = normal(0, N, D), normal(1, D, D, scale=0.25), normal(2, D, D, scale=0.25)
B = normal(3, D)
ROWS = normal(4, N, 1)


def rounded(fun, *args, **options):
    """Returns how many cotangents of a program are rounded for several readers."""
    program = planned(fun)
    eqns = equations(
        jax.make_jaxpr(lambda *args: jax.vjp(program, *args, **options)[1](1.0))(*args)
    )
    _, backward = [e.params["program"].closed for e in eqns if e.primitive.name == "planned"]
    return sum(e.primitive.name == rounding.ROUNDED for e in equations(backward))


def normed(x):
    x = x - x.mean(-1, keepdims=True)
    return x * lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-3)


def head(h):
    return jnp.mean(jnp.tanh(h @ V) ** 2)


def block(x, w):
    return x + jnp.tanh(x @ w) @ w


def layer(x, w, b):
    return head(jnp.tanh(x @ w + b))


# A program, and whether a cotangent is rounded for several readers; None if only the error counts.
PROGRAMS = {
    "a bias": (layer, (X, W, B), True),
    "what no matmul has made": (
        lambda x, w, b: jnp.mean(jnp.tanh(x @ w + b) ** 2),
        (X, W, B),
        False,
    ),
    "a residual stream": (lambda x, w: head(block(block(x, w), w)), (X, W), True),
    "less its mean": (lambda x, w, b: head(normed(x @ w + b)), (X, W, B), True),
    # No matmul reads the cotangent of the sum, but several sums over the rows do.
    "what several kernels read": (
        lambda x, w, b: head(normed(jnp.tanh(x @ w) * b + (x @ w.T))),
        (X, W, B),
        True,
    ),
    # Along the features, its mean has been subtracted: the sum is small, its roundings are not.
    "less its mean, along the features": (
        lambda x, w, r: head(normed(x @ w + r)),
        (X, W, ROWS),
        None,
    ),
    # The stream's cotangent meets its own copy, moved by one entry.
    "displaced": (lambda x, w: head(x @ w + 10 * (x - jnp.roll(x, 1, 0))), (X, W), None),
    "in a loop": (
        lambda x, w: head(lax.scan(lambda c, r: (c + jnp.tanh(c @ r), None), x, w)[0]),
        (X, jnp.stack([W, V])),
        None,
    ),
}


@pytest.mark.parametrize("name", thorough_but(PROGRAMS, *range(0, len(PROGRAMS), 2)))
def test_cotangents_that_several_read(name):
    fun, args, once = PROGRAMS[name]
    if once is not None:
        assert (rounded(fun, *args) > 0) == once
    wrong = sound(fun, args, "bfloat16", tuple(range(len(args))))
    assert not wrong, wrong


def test_a_multiple_of_a_cotangent_may_meet_another_one():
    """By entries, ``a v - b v`` is ``(a - b) v``, however close ``a`` and ``b`` are."""

    def fun(x, w):
        return head(jnp.tanh(x @ w + 3 * jnp.sinh(x) - 3 * jnp.sin(x)))

    assert rounded(fun, X, W)
    assert not sound(fun, (X, W), "bfloat16", (0, 1))


def test_a_result_without_a_cotangent_asks_for_nothing():
    """The exact cotangent of a running mean would meet that of the activations."""

    def fun(x, w, b):
        h = jnp.tanh(x @ w + b)
        return head(h), h.mean(0)

    assert rounded(fun, X, W, B, has_aux=True) == rounded(layer, X, W, B) == 1


def test_zeros_are_no_copy_of_a_cotangent():
    """The masks of several layers share one array of zeros."""

    def masked(h):
        return jnp.where(h > 0, h + jnp.where(h > 0, h, 0) @ W, 0)

    assert rounded(lambda x, w: head(masked(masked(masked(x @ w)))), X, W) == 3


def group_normed(x):
    y = x.reshape(N, 2, D // 2)
    y = y - y.mean((0, 2), keepdims=True)
    return (y * lax.rsqrt((y * y).mean((0, 2), keepdims=True) + 1e-3)).reshape(x.shape)


# How a bias is added, and whether its gradient is a sum over all axes of the mean.
BIASES = {
    "a channel": (B, False),
    "of all": (B[:1], True),
    "of all, in two steps": (B[:1], True),
    "an entry": (ROWS, False),
}


@pytest.mark.parametrize("name", thorough_but(BIASES, "a channel", "of all, in two steps"))
def test_sums_over_a_part_of_the_axes_of_a_mean(name):
    """What has a mean over rows and features taken off has sums of its rows that are not small."""
    b, whole = BIASES[name]

    def fun(x, w, b):
        b = jnp.broadcast_to(b, (D,)) if name.endswith("two steps") else b
        return head(group_normed(jnp.tanh(x @ w) * 2 + (x @ w.T) + b))

    wrong = sound(fun, (X, W, b), "bfloat16", (0, 1))
    assert not wrong, wrong
    if whole:
        assert rounded(fun, X, W, b) < rounded(lambda x, w: fun(x, w, b), X, W)
    else:
        assert rounded(fun, X, W, b) == rounded(lambda x, w: fun(x, w, b), X, W)


NOISE = {
    "a matmul": (lambda x, w: x @ w, EACH),
    "its entries times others": (lambda x, w: (x @ w) * x, EACH),
    "with another one": (lambda x, w: x @ w + (x @ w.T), EACH),
    "multiples of it": (lambda x, w: (y := x @ w) * x + jnp.where(x > 0, y, 0) / x, EACH),
    "a square of it beside": (lambda x, w: (y := x @ w) * y + y, WHOLE),
    "with something exact": (lambda x, w: x @ w + x, EXACT),
    "its sum": (lambda x, w: jnp.sum(x @ w, 0), AVERAGED),
    "its copies": (lambda x, w: jnp.broadcast_to(x @ w, (3, N, D)), WHOLE),
    "its differences": (lambda x, w: jnp.diff(x @ w), WHOLE),
    "a function": (lambda x, w: jnp.exp(x @ w), EXACT),
    "beside zeros": (lambda x, w: jnp.where(x > 0, x @ w, 0), EACH),
    "an argument": (lambda x, w: x * 2, EXACT),
    "a result in 16 bits, as of a kernel": (
        lambda x, w: (x.astype(jnp.bfloat16) * 2).astype(jnp.float32) * x,
        EACH,
    ),
    "of a loop": (lambda x, w: lax.scan(lambda c, r: (c + 1, r @ w), 0.0, x)[1], WHOLE),
    "carried by a loop": (
        lambda x, w: lax.fori_loop(0, 2, lambda i, c: c @ w + c, x @ w),
        WHOLE,
    ),
    "carried from something exact": (
        lambda x, w: lax.fori_loop(0, 2, lambda i, c: c + x @ w, x),
        EXACT,
    ),
}


@pytest.mark.parametrize("name", NOISE)
def test_noise(name):
    fun, level = NOISE[name]
    _, equations, (out,) = parts(jax.make_jaxpr(fun)(X, W))
    assert noise_of(equations).get(out, EXACT) == level


@pytest.mark.parametrize("half", thorough_but(["bfloat16", "float16"], "float16"))
def test_second_derivatives_do_not_round_twice(half):
    fun = lambda x, w: head(jnp.tanh(x + jnp.tanh(x @ w)))  # noqa: E731
    grad = lambda f: jax.grad(lambda w: jnp.sum(jax.grad(f, 1)(X, w) ** 2))  # noqa: E731
    got, want = (np.asarray(grad(f)(W)) for f in (planned(fun, half), fun))
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


SEGMENTS = jnp.arange(N) % 3
PARTS = {
    # The mean over all rows, and then the sums of three segments.
    "of segments": (lambda h: h - h.mean(0), lambda r: r[SEGMENTS], True),
    # The means of segments: their sums are zero.
    "of the same segments": (
        lambda h: h - (jax.ops.segment_sum(h, SEGMENTS, 3) / 3)[SEGMENTS],
        lambda r: r[SEGMENTS],
        False,
    ),
    "of all, after segments": (
        lambda h: h - (jax.ops.segment_sum(h, SEGMENTS, 3) / 3)[SEGMENTS],
        lambda r: r[:1],
        False,
    ),
}


@pytest.mark.parametrize("name", thorough_but(PARTS, 0, 2))
def test_sums_of_segments(name):
    centered, spread, once = PARTS[name]
    rows = normal(5, 3, D)

    def fun(x, w, r):
        return head(centered(jnp.tanh(x @ w) * 2 + (x @ w.T) + spread(r)))

    assert (rounded(fun, X, W, rows) == rounded(lambda x, w: fun(x, w, rows), X, W)) == once
    wrong = sound(fun, (X, W, rows), "bfloat16", (0, 1, 2))
    assert not wrong, wrong


def test_a_table_that_is_read_and_multiplied_by():
    """Its gradients share an operand, but not the axis that is summed: no terms are equal."""

    def fun(table, head, w):
        h = table[jnp.arange(N) % 5]
        h = h + jnp.tanh(h @ w)
        return jnp.sum(jax.nn.logsumexp((h + jnp.tanh(h @ w)) @ head.T, -1))

    table = normal(6, 24, D)
    tied = rounded(lambda table, w: fun(table, table, w), table, W)
    assert tied == rounded(fun, table, table, W)
