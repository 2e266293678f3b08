"""Loops that end when what matmuls compute meets a tolerance: in 16 bits they might never do."""

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pytest
from jax import lax
from jax.nn import logsumexp
from programs import W, X
from support import HALVES, cast, normal, thorough_but

import mpjax


def near(x):
    return jnp.max(jnp.abs(x)) < 1e-5


# name: what a turn hands on beside the state, by the last two states; when to stop; and whether
# that is because of a float32 comparison
VERDICTS = {
    "a flag": (lambda new, old, c: near(new - old), lambda c: c, True),
    "a number": (lambda new, old, c: jnp.where(near(new - old), 1, 0), lambda c: c == 1, True),
    "of several": (lambda new, old, c: c + near(new - old), lambda c: c >= 2, True),
    "a token": (lambda new, old, c: jnp.argmax(new), lambda c: c == 99, False),
    "of the best": (lambda new, old, c: jnp.argmax(new * (new > 0)), lambda c: c == 99, False),
    "of rows": (
        lambda new, old, c: lax.scan(lambda _, row: (jnp.argmax(row), None), 0, new)[0],
        lambda c: c == 99,
        False,
    ),
    "of a branch": (
        lambda new, old, c: lax.cond(near(new - old), lambda: 1, lambda: 0),
        lambda c: c == 1,
        True,
    ),
    "of a loop": (
        lambda new, old, c: lax.fori_loop(0, 2, lambda i, n: n + near(new - old), 0),
        lambda c: c == 2,
        True,
    ),
    "a count": (lambda new, old, c: c + 1, lambda c: c > 5, False),
}


PAIRS = [(late, name) for late in (False, True) for name in VERDICTS]


@pytest.mark.parametrize(("late", "name"), thorough_but(PAIRS, 0, 3, 4, 5, 6, 7, 10, 11, 17))
def test_loop_that_a_verdict_of_its_body_ends_is_left_alone(name, late):
    found, ends, alone = VERDICTS[name]

    def solve(w, x):
        def turn(c):
            old, n, now, _ = c
            new = jnp.tanh(x @ w + old @ w) / 4
            return new, n + 1, jnp.asarray(found(new, old, now), now.dtype), now

        nothing = False if name == "a flag" else 0
        go = lambda c: ~ends(c[3 if late else 2]) & (c[1] < 50)  # noqa: E731
        return lax.while_loop(go, turn, (x, 0, nothing, nothing))[:2]

    rows = mpjax.explain(solve, "mixed_bfloat16")(W, X).rows
    (loop,) = [row for row in rows if row.primitive == "while"]
    assert ("a matmul ends it" in loop.reason) == alone
    if alone:
        ours, theirs = jax.jit(lambda w, x: (cast(solve)(w, x)[1], solve(w, x)[1]))(W, X)
        assert ours == theirs


# ---- what meets a loop that was left alone ------------------------------------------------------

EPS = 0.1
POINTS, OTHERS = normal(0, 20, 3), normal(1, 15, 3) + 0.5


def costs(x, y):
    return jnp.sum(x**2, -1)[:, None] + jnp.sum(y**2, -1)[None] - 2 * x @ y.T


def transport(w, x, y):
    """Sinkhorn's iteration, in logarithms, until it meets a tolerance; the costs in every turn."""
    moved = x @ w
    fixed = lax.stop_gradient(moved)

    def turn(carry):
        f, g, n, _ = carry
        f = -EPS * logsumexp((g[None] - costs(fixed, y)) / EPS, 1) - EPS * jnp.log(20.0)
        new = -EPS * logsumexp((f[:, None] - costs(fixed, y)) / EPS, 0) - EPS * jnp.log(15.0)
        return f, new, n + 1, jnp.max(jnp.abs(new - g))

    start = jnp.zeros(20), jnp.zeros(15), 0, jnp.inf
    f, g, *_ = lax.while_loop(lambda c: (c[2] < 500) & (c[3] > 1e-4), turn, start)
    f, g = map(lax.stop_gradient, (f, g))
    return -EPS * jnp.sum(jnp.exp((f[:, None] + g[None] - costs(moved, y)) / EPS))


@pytest.mark.parametrize("half", thorough_but(HALVES, "bfloat16"))
def test_matmul_that_meets_the_solution_of_a_loop_is_sound(half):
    args = normal(2, 3, 3) * 0.6, POINTS, OTHERS
    assert [str(row) for row in measure.errors(transport, args, half) if not row.sound] == []


def adaptive(w, y, t, h):
    """One step of Heun's method, and whether it was accepted."""
    slope = jnp.tanh(w @ y)
    new = y + h / 2 * (slope + jnp.tanh(w @ (y + h * slope)))
    error = jnp.max(jnp.abs(new - y - h * slope)) / 1e-3
    accepted = error < 1
    factor = jnp.clip(0.9 / jnp.sqrt(jnp.maximum(error, 1e-6)), 0.2, 5.0)
    return jnp.where(accepted, new, y), jnp.where(accepted, t + h, t), h * factor


@pytest.mark.parametrize("half", thorough_but(HALVES, "float16"))
def test_loop_that_repeats_an_adaptive_solver_repeats_its_decisions(half):
    """A backward pass that goes as often through the steps of a solver as the forward pass did."""

    def replayed(w, y):
        def turn(c):
            return *adaptive(w, *c[:3]), c[3] + 1

        start = y, jnp.float32(0), jnp.float32(0.1), 0
        *_, count = lax.while_loop(lambda c: (c[1] < 1) & (c[3] < 200), turn, start)
        return lax.fori_loop(0, count, lambda i, c: adaptive(w, *c), start[:3])

    w, y = normal(5, 6, 6) * 1.5, normal(10, 6)
    want, got = jax.jit(lambda w, y: (replayed(w, y), cast(replayed, half)(w, y)))(w, y)
    assert all(np.allclose(x, z, rtol=1e-5) for x, z in zip(want, got, strict=True))
    rows = mpjax.explain(replayed, f"mixed_{half}")(w, y).rows
    reasons = [row.reason for row in rows if row.primitive == "while"]
    assert len(reasons) == 2 and all("left unchanged" in reason for reason in reasons)
