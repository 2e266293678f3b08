"""Planning grows with the program, not faster, whatever the program is made of."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from joint import planned
from support import calls_to_trace, normal, thorough_but

from mpjax._src.core.planner import cotangents, rounding

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


def blocks(n):
    """Residual blocks with a norm and attention, and a table that is read at both ends."""

    def norm(x):
        x = x - jnp.mean(x, -1, keepdims=True)
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)

    def fun(w, x):
        x = x + w[:4]
        for _ in range(n):
            y = norm(x)
            x = x + jax.nn.softmax(y @ w @ y.T) @ y
            x = x + jax.nn.gelu(norm(x) @ w) @ w
        return jnp.sum(jax.nn.log_softmax(norm(x) @ w.T))

    return fun


def residual(n):
    """Residual layers with connections far ahead, and a table that is read at both ends."""

    def fun(w, x):
        kept = []
        for _ in range(n):
            x = x + jnp.tanh(x @ w)
            kept.append(x)
        for y in reversed(kept):
            x = x + y * 2
            x = x + jnp.tanh(x @ w)
        return jnp.sum(jax.nn.log_softmax(x @ w.T))

    return fun


def parameters(n):
    def fun(ws, x):
        for w in ws:
            x = x + jnp.tanh(x * w) * w + w
        return jnp.sum(x)

    return lambda w, x: fun([w[0] * i for i in range(n)], x)


def tree(depth):
    """A tree of branches."""
    if not depth:
        return lambda w, x: jnp.tanh(x @ w)
    one, other = tree(depth - 1), tree(depth - 1)
    return lambda w, x: lax.cond(x[0, depth] > 0, one, lambda w, x: other(w, jnp.sin(x)), w, x)


KINDS = {
    "relus": (relus, 8),
    "skips": (skips, 6),
    "loops": (loops, 4),
    "branches": (branches, 3),
    "streams": (streams_of, 4),
    "blocks": (blocks, 2),
    "residual": (residual, 6),
    "parameters": (parameters, 8),
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def visits(fun):
    """Counts the calls of and by the planner's functions while a gradient is traced."""
    return calls_to_trace(
        jax.grad(lambda w, x: jnp.sum(planned(fun)(w, x))), W, X, within="planner/"
    )


@pytest.mark.parametrize("kind", thorough_but(KINDS, "residual"))
def test_four_times_the_program_is_four_times_the_work(kind, monkeypatch):
    monkeypatch.setattr(cotangents, "LONGEST", 60)  # walks of small programs are not that long
    make, n = KINDS[kind]
    visits(make(1))
    assert visits(make(4 * n)) <= 4**1.1 * visits(make(n))


@pytest.mark.thorough
def test_a_tree_of_branches_is_as_much_work_as_it_has_branches():
    visits(tree(1))
    assert visits(tree(3)) <= (7 / 3) ** 1.1 * visits(tree(2))


@pytest.mark.thorough
def test_a_loop_in_a_loop_is_as_much_work_as_two():
    visits(nested(1))
    assert visits(nested(6)) <= 3**1.1 * visits(nested(2))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_planning_takes_no_longer_than_differentiating_once_more(kind):
    make, n = KINDS[kind]
    fun = make(2 * n)
    plain = calls_to_trace(jax.grad(fun), W, X)
    assert calls_to_trace(jax.grad(planned(fun)), W, X) <= 3 * plain
