"""Rule F: which streams are rounded, and a program that each of its conditions is there for."""

import jax
import jax.numpy as jnp
import numpy as np
import planners
import pytest
from jax import lax
from joint import planned
from support import normal, thorough_but

from mpjax._src.core.planner import levels, rounding, streams
from mpjax._src.core.planner.recall import Opened

B, T, D = 4, 8, 32
HALF = np.dtype(jnp.bfloat16)
X = normal(0, B, T, D)
WS = [normal(i + 1, D, D, scale=D**-0.5) for i in range(4)]
BIAS = normal(9, D)
ARGS = (WS, X, BIAS)
GELU = jax.nn.gelu


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def found(fun, *args, half=HALF):
    """Returns the streams of a function: the operation that makes each, and whether it has terms.

    Streams of its loops, branches and maps are not among them.
    """
    parts = Opened(jax.make_jaxpr(fun)(*args))
    values, facts = streams.streams(parts.equations, parts.outs, half, ruled=parts.ruled)
    return [(facts.maker[v].name, bool(facts.terms(v))) for v in values]


def why(fun, *args):
    """Returns why the candidates of a function are not rounded."""
    parts = Opened(jax.make_jaxpr(fun)(*args))
    values = streams.candidates(parts.equations, parts.outs, HALF)
    facts = streams.Facts(parts.equations)
    walks = streams.Walks(parts.equations, parts.outs, facts, parts.ruled)
    return [*filter(None, (walks.refused(v) for v in values))]


def norm(h, axis=-1):
    return (h - h.mean(axis, keepdims=True)) * lax.rsqrt(h.var(axis, keepdims=True) + 1e-5)


def group_norm(h):
    g = h.reshape(B, T, 4, D // 4)
    return norm(g, (1, 3)).reshape(h.shape)


def block(h, w, v):
    return h + GELU(norm(h) @ w) @ v


def read(h, ws):
    """Reads a stream by two kernels, and ends in a matmul."""
    return jnp.mean(norm(block(h, *ws[:2])) @ ws[2])


# ---- streams of ordinary models are rounded ------------------------------------------------------


def of_matmuls(ws, x, b):
    return read(x @ ws[3], ws)


def with_biases(ws, x, b):
    h = x @ ws[3] + b
    return jnp.mean(norm(h + (GELU(norm(h) @ ws[0]) @ ws[1] + b)) @ ws[2])


def biases_last(ws, x, b):
    h = block(x @ ws[3], *ws[:2]) + 30 * b
    return read(h, ws)


def positions(ws, x, b):
    return read(x @ ws[3] + jnp.sin(jnp.arange(T * D).reshape(T, D)), ws)


def conditioned(ws, x, b):
    shift = (jnp.tanh(b) @ ws[3])[None, None]
    return read((x @ ws[3]) * 2 + 9 * shift, ws)


def batch_norms(ws, x, b):
    h = x @ ws[3]
    for w in ws[:2]:
        h = jax.nn.relu(h + norm(h @ w, (0, 1)) * b + b)
    return jnp.mean(h @ ws[2])


def group_norms(ws, x, b):
    h = x @ ws[3] + 300 * jnp.repeat(b[:4], D // 4)
    return jnp.mean(group_norm(h + GELU(group_norm(h) @ ws[0]) @ ws[1]) @ ws[2])


def root_mean_squares(ws, x, b):
    def scaled(h):
        return h * lax.rsqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6) * b

    h = x @ ws[3]
    return jnp.mean(scaled(h + jax.nn.silu(scaled(h) @ ws[0]) @ ws[1]) @ ws[2])


def four_blocks(ws, x, b):
    h = x @ ws[3]
    for w in ws:
        h = block(h, w, w.T)
    return jnp.mean(norm(h) @ ws[2])


def checkpointed(ws, x, b):
    h = x @ ws[3] + b
    for w in ws:
        h = jax.checkpoint(lambda h, w, b: block(block(h, w, w.T) + b, w.T, w))(h, w, b)
    return jnp.mean(norm(h) @ ws[2])


# The streams: without terms, and with.
ROUNDED = {
    of_matmuls: (1, 0),
    with_biases: (0, 1),
    biases_last: (0, 2),
    positions: (0, 1),
    conditioned: (0, 1),
    batch_norms: (0, 1),
    group_norms: (0, 1),
    root_mean_squares: (1, 0),
    four_blocks: (4, 0),
    checkpointed: (0, 8),
}


@pytest.mark.parametrize("fun", ROUNDED, ids=lambda f: f.__name__)
def test_streams_of_models_are_rounded(fun):
    rows = found(fun, *ARGS)
    assert ROUNDED[fun] == (sum(not t for _, t in rows), sum(t for _, t in rows)), why(fun, *ARGS)


# ---- what refuses a rounding ---------------------------------------------------------------------

# What levels along time and along features have, of which the mean over the latter is zero.
SIGNS = np.sign(np.arange(D, dtype=np.float32) - D / 2 + 0.5)


def stream(ws, x):
    """An argument, to which a matmul adds a little: no matmul has rounded most of it."""
    return x + 0.01 * (x @ ws[3])


def two(h, other, ws):
    """Returns what two kernels make of a stream: a norm of it, and something else."""
    return other @ ws[0], norm(h) @ ws[1]


def displacement(ws, x, y):
    h = stream(ws, y)
    return two(h, 50 * (h[:, 1:] - h[:, :-1]), ws)


def four_small_blocks(ws, x, y):
    h = first = x @ ws[3]
    for w in ws:
        h = h + 0.001 * (jnp.tanh(norm(h) @ w) @ ws[0])
    return ((h - first) * 200) @ ws[1]


def increments(ws, x, y):
    h = stream(ws, x)
    new = h + 0.01 * (h @ ws[0])
    return two(new, 100 * (new - h), ws)


def own_functions(ws, x, y):
    h = stream(ws, y)
    return two(h, 50 * (h * h - jnp.abs(h)), ws)


def squares_less_one(ws, x, y):
    h = stream(ws, y)
    return two(h, 50 * (h * h - 1), ws)


def determinants(ws, x, y):
    h = stream(ws, y)
    m = jnp.abs(h).reshape(B, T, 8, 2, 2)
    det = m[..., 0, 0] * m[..., 1, 1] - m[..., 0, 1] * m[..., 1, 0]
    return two(h, jnp.tile(50 * det, 4), ws)


def to_a_target(ws, x, y):
    h = stream(ws, x)
    return two(h, 100 * (h - 1.01 * x), ws)


def to_another(ws, x, y):
    h = stream(ws, y)
    return two(h, 50 * (h - lax.rev(y, (1,))), ws)


def over_time(ws, x, y):
    h = stream(ws, y)
    return two(h, 50 * (h - h.mean(1, keepdims=True)), ws)


def of_groups(ws, x, y):
    h = stream(ws, y)
    return two(h, norm(h.reshape(B, T, 2, D // 2)).reshape(h.shape), ws)


def exponentials(ws, x, y):
    h = stream(ws, 20 * x)
    return two(h, jnp.exp(h), ws)


def phases(ws, x, y):
    h = stream(ws, 20 * x)
    return two(h, jnp.sin(20 * h), ws)


def thresholds(ws, x, y):
    h = stream(ws, y)
    return two(h, jnp.maximum(50 * h, 50), ws)


def comparisons(ws, x, y):
    h = stream(ws, y)
    return two(h, jnp.where(h > 1, x, 0.0), ws)


def orders(ws, x, y):
    h = stream(ws, y)
    return two(h, jnp.argsort(h, -1).astype(jnp.float32), ws)


def ties(ws, x, y):
    h = stream(ws, 1 + 0.1 * y)
    return two(h, jnp.where(h == h.max(-1, keepdims=True), 1.0, 0.0), ws)


def parts_of_it(ws, x, y):
    h = stream(ws, y)
    parts = jnp.stack([h[:, 1:], -h[:, :-1]])
    return two(h, 50 * parts.sum(0), ws)


def a_loop(ws, x, y):
    h = stream(ws, y)
    change = lambda c, row: (row, 50 * (row - c))  # noqa: E731
    return two(h, lax.scan(change, h[:, 0], h.swapaxes(0, 1)[1:])[1], ws)


@jax.custom_vjp
def steep(h):
    return h


steep.defvjp(lambda h: (h, h), lambda h, ct: (ct * jnp.exp(40 * h),))


def a_rule(ws, x, y):
    h = stream(ws, y)
    return two(h, steep(h), ws)


def returned(ws, x, y):
    h = stream(ws, x)
    return h, norm(h) @ ws[1]


def returned_mean(ws, x, y):
    h = stream(ws, x)
    return norm(h) @ ws[1], jnp.square(h).mean(-1)


def returned_transposed(ws, x, y):
    h = stream(ws, x)
    return h.T[::-1], norm(h) @ ws[1]


WITH_WHAT = "a sum with what it is made of"
EXACT = "a sum with what no matmul has rounded"
REFUSED = {
    displacement: "a sum of two values made of it",
    four_small_blocks: WITH_WHAT,
    increments: WITH_WHAT,
    own_functions: "a sum of two values made of it",
    squares_less_one: EXACT,
    determinants: "a sum of two values made of it",
    to_a_target: WITH_WHAT,
    to_another: WITH_WHAT,
    over_time: "its own mean",
    of_groups: "its own mean",
    exponentials: "read by exp",
    phases: "read by sin",
    thresholds: "a threshold",
    comparisons: "compared by gt",
    orders: "read by sort",
    ties: "read by reduce_max",
    parts_of_it: "a sum of parts",
    a_loop: "read by scan",
    a_rule: "read by a rule",
    returned: "returned",
    returned_mean: "returned",
    returned_transposed: "returned",
}


def drawn(seed):
    x = normal(10 * seed + 5, B, T, D)
    return [normal(10 * seed + i, D, D, scale=D**-0.5) for i in range(4)], x, SIGNS + 0.02 * x


@pytest.mark.parametrize("fun", REFUSED, ids=lambda f: f.__name__)
def test_what_refuses_a_rounding(fun):
    assert any(REFUSED[fun] in reason for reason in why(fun, *drawn(0)))


def errors(fun, half="bfloat16", draw=drawn):
    anew = lambda fun, policy: planned(fun, half)  # noqa: E731, as rules are now
    return planners.sound(fun, draw, half, 0, planned=anew, eager=True)


@pytest.mark.parametrize("half", thorough_but(["bfloat16", "float16"], "float16"))
@pytest.mark.parametrize("fun", thorough_but(REFUSED, increments), ids=lambda f: f.__name__)
def test_refused_streams_are_as_by_hand(fun, half):
    assert not errors(fun, half)


@pytest.mark.parametrize("fun", thorough_but(REFUSED, over_time), ids=lambda f: f.__name__)
def test_each_condition_is_needed(fun, monkeypatch):
    monkeypatch.setattr(streams.Walks, "refused", lambda *_: None)
    assert errors(fun)


# ---- levels --------------------------------------------------------------------------------------


def of_models(seed):
    ws = [normal(10 * seed + i, D, D, scale=D**-0.5) for i in range(4)]
    return ws, normal(10 * seed + 5, B, T, D), normal(10 * seed + 6, D)


@pytest.mark.parametrize("half", thorough_but(["bfloat16", "float16"], "bfloat16"))
@pytest.mark.parametrize("fun", thorough_but(ROUNDED, group_norms), ids=lambda f: f.__name__)
def test_rounded_streams_are_as_by_hand(fun, half):
    assert not errors(fun, half, of_models)


def of_a_table(ws, table, at):
    """Its rows have a level, which a norm takes off."""
    h = table[at]
    for w in ws[:2]:
        h = h + jnp.tanh(norm(h) @ w) @ ws[3]
    return norm(h) @ ws[2]


def rows(seed):
    at = np.random.default_rng(seed).integers(0, 20, (B, T))
    return of_models(seed)[0], 30 + normal(seed + 7, 20, D), at


@pytest.mark.parametrize(
    ("fun", "draw"), thorough_but([(of_a_table, rows), (group_norms, of_models)], 0)
)
def test_without_levels_streams_are_refused(fun, draw, monkeypatch):
    assert found(fun, *draw(0)) and not errors(fun, draw=draw)
    monkeypatch.setattr(levels, "SMALL_TERM", 10**9)
    assert not found(fun, *draw(0))
    monkeypatch.setattr(streams.Walks, "refused", lambda *_: None)
    assert errors(fun, draw=draw)


# ---- candidates ----------------------------------------------------------------------------------


def read_by_one(ws, x, b):
    return jnp.tanh(x @ ws[0] + x @ ws[1]) @ ws[2]


def of_one_matmul(ws, x, b):
    h = GELU(x @ ws[0] + b)
    return jnp.mean(norm(h) @ ws[1] + h @ ws[2])


def scaled(ws, x, b):
    """The factor has next to no gradient: the norm takes it off."""
    factor = 1 + 0.1 * jnp.tanh(x.mean(1, keepdims=True) @ ws[3])
    return norm((x @ ws[0] + x @ ws[1]) * factor, 1) @ ws[2]


def small(ws, x, b):
    return read(x @ ws[3], ws)


@pytest.mark.parametrize(
    "fun", [read_by_one, of_one_matmul, scaled, small], ids=lambda f: f.__name__
)
def test_what_gains_nothing_is_not_rounded(fun, monkeypatch):
    if fun is small:
        monkeypatch.setattr(rounding, "SMALL", X.size + 1)
    assert not found(fun, *ARGS)


def test_a_gradient_that_a_norm_takes_off(monkeypatch):
    assert not errors(scaled, draw=of_models)
    monkeypatch.setattr(streams, "_is_scaled", lambda *_: False)
    assert errors(scaled, draw=of_models)


def test_float16_holds_what_matmuls_make_and_read():
    def hot(ws, x, b):
        h = 3e5 * (x @ ws[3]) + x @ ws[2]
        return jnp.mean(norm(h) @ ws[0] + norm(jnp.abs(h)) @ ws[1])

    assert found(hot, *ARGS) and not found(hot, *ARGS, half=np.dtype(np.float16))
    assert found(of_matmuls, *ARGS, half=np.dtype(np.float16))
