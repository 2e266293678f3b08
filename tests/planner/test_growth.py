"""Planning grows with the program, not faster, whatever the program is made of."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from joint import planned
from support import calls_to_trace, normal, thorough_but

from mpjax._src.planner import rounding

X, W = normal(0, 4, 8), normal(1, 8, 8, scale=0.3)


def relus(n):
    def fun(w, x):
        for _ in range(n):
            x = jax.nn.relu(x @ w)
        return jnp.sum(x)

    return fun


def skips(n):
    def fun(w, x):
        kept = []
        for _ in range(n):
            x = jnp.tanh(x @ w)
            kept.append(x)
        for y in reversed(kept):
            x = jnp.tanh((x + y) @ w)
        return jnp.sum(x)

    return fun


def loops(n):
    def fun(w, x):
        for _ in range(n):
            x, _ = lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=2)
        return jnp.sum(x)

    return fun


def branches(n):
    def fun(w, x):
        for _ in range(n):
            x = lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ w), lambda x: x, x)
        return jnp.sum(x)

    return fun


def nested(n):
    def fun(w, x):
        body = lambda x: jnp.tanh(x @ w)  # noqa: E731
        for _ in range(n):
            body = lambda x, inner=body: lax.scan(  # noqa: E731
                lambda c, _: (inner(c), None), x, None, length=2
            )[0]
        return jnp.sum(body(x))

    return fun


def streams_of(n):
    """A stream with a level that is rounded, and one that must not be: the first is compared."""

    def fun(w, x):
        h = first = x @ w
        for _ in range(n):
            x = x + jnp.tanh(x * lax.rsqrt(jnp.mean(x * x)) @ w) @ w + w[0]
            h = h + jnp.tanh(h @ w) @ w
        return jnp.sum((h - first) @ w + x @ w)

    return fun


KINDS = {"relus": (relus, 8), "skips": (skips, 6), "loops": (loops, 4), "branches": (branches, 3)}
KINDS["streams"] = (streams_of, 4)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


@pytest.mark.parametrize("kind", thorough_but(KINDS, "relus", "branches", "streams"))
def test_four_times_the_program_is_four_times_the_work(kind):
    make, n = KINDS[kind]

    def calls(n):
        return calls_to_trace(jax.grad(planned(make(n))), W, X)

    calls(1)
    assert calls(4 * n) <= 4**1.1 * calls(n)


@pytest.mark.thorough
def test_each_level_of_loops_adds_a_little_more():
    """Each program that encloses another looks through it: the work is quadratic in the depth."""
    counts = [calls_to_trace(jax.grad(planned(nested(n))), W, X) for n in (1, 2, 4)]
    assert counts[2] <= 6 * counts[1]


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_planning_takes_no_longer_than_differentiating_once_more(kind):
    make, n = KINDS[kind]
    fun = make(2 * n)
    plain = calls_to_trace(jax.grad(fun), W, X)
    assert calls_to_trace(jax.grad(planned(fun)), W, X) <= 3 * plain
