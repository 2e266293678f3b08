"""Roundings that are written into a program: once, unseen by derivatives, calls as they were."""

import jax
import jax.numpy as jnp
import nests
import numpy as np
import planners
import pytest
from jax import lax
from joint import planned
from support import assert_near, equations, normal, thorough_but

from mpjax._src.core.base import _jax
from mpjax._src.core.planner import narrowed, rounding, streams

B, T, D = 4, 8, 32
HALF = np.dtype(jnp.bfloat16)
X, BIAS = normal(0, B, T, D), normal(9, D)
WS = jnp.stack([normal(i + 1, D, D, scale=D**-0.5) for i in range(4)])
ARGS = (WS, X, BIAS)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def norm(h):
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


def block(h, w, b):
    return h + jax.nn.gelu(norm(h) @ w) @ w.T + b


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda primals, tangents: (doubled(*primals), 3 * tangents[0]))


def wrapped(wrap):
    def fun(ws, x, b):
        h = x @ ws[3]
        for w in ws[:3]:
            h = wrap(block)(h, w, b)
        return jnp.mean((norm(h) @ ws[2]) ** 2)

    return fun


def twice(block):
    return lambda h, w, b: block(block(h, w, b), w.T, b)


def scanned(ws, x, b):
    return jnp.mean((lax.scan(lambda h, w: (twice(block)(x @ w, w, b), None), x, ws)[0]) ** 2)


@jax.custom_vjp
def straight(x, y):
    return x, x, y, 1.0


straight.defvjp(lambda x, y: (straight(x, y), None), lambda _, cts: (3 * cts[0], 5 * cts[2]))


def identities(ws, x, b):
    h = block(x @ ws[3], ws[0], b)
    first, second, b, one = straight(h, b)
    return jnp.mean((norm(block(first * one, ws[1], b)) @ ws[2] + second) ** 2)


def ruled(ws, x, b):
    h = doubled(block(x @ ws[3], ws[0], 0.0))
    return jnp.mean((norm(block(h, ws[1], b)) @ ws[2]) ** 2)


FUNS = {
    "plain": wrapped(lambda f: f),
    "jit": wrapped(jax.jit),
    "checkpoint": wrapped(jax.checkpoint),
    "checkpoints": wrapped(lambda f: jax.checkpoint(twice(jax.checkpoint(f)))),
    "checkpointed jits": wrapped(lambda f: jax.checkpoint(twice(jax.jit(f)))),
    "scan": scanned,
    "rule": ruled,
    "identities with a rule": identities,
}


def names(jaxpr):
    return [e.primitive.name for e in equations(jaxpr)]


def rewritten(fun, *args):
    return narrowed.narrowed(jax.make_jaxpr(fun)(*args), HALF)


@pytest.fixture
def exact(monkeypatch):
    """Writes roundings that round nothing, also where they would do harm."""

    class Nothing:
        bind = staticmethod(lambda x, half: x)

    monkeypatch.setattr(narrowed, "rounded_p", Nothing)
    monkeypatch.setattr(streams.Walks, "refused", lambda *_: None)
    monkeypatch.setattr("joint.narrowed", lambda program, _: narrowed.narrowed(program, HALF))


@pytest.mark.parametrize("name", FUNS)
def test_streams_of_calls_are_rounded_and_calls_stay(name):
    before, after = jax.make_jaxpr(FUNS[name])(*ARGS), rewritten(FUNS[name], *ARGS)
    assert "rounded" in names(after)
    for kept in ("remat2", "custom_jvp_call", "custom_vjp_call", "scan"):
        assert names(after).count(kept) == names(before).count(kept)


@pytest.mark.parametrize(
    "name", thorough_but(FUNS, "checkpointed jits", "rule", "identities with a rule")
)
def test_without_rounding_it_is_the_program(name, exact):
    assert not planners.exact(FUNS[name], ARGS, (0, 1, 2))


@pytest.mark.parametrize("seed", thorough_but([*range(300, 360)], 3))
def test_without_rounding_nests_are_the_program(seed, exact):
    fun, _ = nests.drawn(seed)
    args = nests.arguments(seed)
    if not nests.is_refused(fun, args):
        assert not planners.exact(fun, args, (0, 1))


@pytest.mark.parametrize("name", thorough_but(["plain", "checkpoint"], "checkpoint"))
def test_derivatives_read_the_rounded_numbers(name):
    """The result is the same with a derivative and without, in forward mode and batched."""
    auto = planned(FUNS[name])
    value = auto(*ARGS)
    assert_near(jax.value_and_grad(auto)(*ARGS)[0], value, rtol=1e-6)
    assert_near(jax.jvp(auto, ARGS, ARGS)[0], value, rtol=1e-6)
    both = jax.vmap(auto, (None, 0, None))(WS, jnp.stack([X, 2 * X]), BIAS)
    assert_near(both[0], value, rtol=1e-6)
    assert value != planned(FUNS[name], "float32")(*ARGS)


def test_derivatives_do_not_see_roundings():
    program = rewritten(lambda x, w: block(x @ w, w, BIAS) @ w, X[0], WS[0])
    run = lambda x: _jax.eval_closed(program, x, WS[0])[0]  # noqa: E731
    plain = lambda x: block(x @ WS[0], WS[0], BIAS) @ WS[0]  # noqa: E731
    assert_near(jax.jvp(run, (X[0],), (X[0],))[1], jax.jvp(plain, (X[0],), (X[0],))[1], rtol=0.02)
    back = jax.make_jaxpr(lambda ct: jax.vjp(run, X[0])[1](ct))(X[0])
    once = jax.make_jaxpr(run)(X[0])
    assert names(back).count("rounded") == names(once).count("rounded")


def test_a_stream_is_handed_over_in_16_bits():
    fun = wrapped(lambda f: f)
    kept = jax.make_jaxpr(lambda *args: jax.vjp(planned(fun), *args)[1])(*ARGS)
    made = {v for v in kept.jaxpr.outvars if v.aval.shape == (B, T, D)} - {*kept.jaxpr.invars}
    dtypes = {str(v.aval.dtype) for v in made}
    assert dtypes == {"bfloat16"}


def test_exact_mode_and_programs_without_streams_stay_as_they_are():
    program = jax.make_jaxpr(FUNS["plain"])(*ARGS)
    assert narrowed.narrowed(program, np.dtype("float32")) is program
    alone = jax.make_jaxpr(lambda x, w: jnp.tanh(x @ w) @ w)(X, WS[0])
    assert narrowed.narrowed(alone, HALF) is alone


def test_scopes_stay():
    def fun(ws, x, b):
        with jax.named_scope("outer"):
            return FUNS["checkpointed jits"](ws, x, b)

    program = rewritten(fun, *ARGS)
    found = [e for e in equations(program) if e.primitive.name in ("rounded", "dot_general")]
    assert len(found) > 8
    assert all("outer" in str(e.source_info.name_stack) for e in found)


def test_the_level_is_small():
    """Biases, positions and the mean of rows, along whose axes it has one entry."""

    def fun(ws, x, b):
        return jnp.mean(norm(block(x + b, ws[0], b)) @ ws[2])

    program = rewritten(fun, *ARGS)
    (rounded,) = [e for e in equations(program) if e.primitive.name == "rounded"]
    (less,) = [e for e in equations(program) if rounded.invars[0] in e.outvars]
    shapes = [v.aval.shape for v in less.invars]
    assert shapes[0] == (B, T, D)
    stops = [
        e.invars[0].aval.shape for e in equations(program) if e.primitive.name == "stop_gradient"
    ]
    assert sorted(stops) == [(1, 1, D), (B, T, 1)]
