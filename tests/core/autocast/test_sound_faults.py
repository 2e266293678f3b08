"""Programs on which planners went wrong, by what they have in common: values, gradients, no crash.

autocast is judged by the float32 program whose matmuls round in the lowering (`planners`).
"""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import planners
import pytest
from jax import lax
from support import normal

from mpjax._src.core.planner import coding

lse, HALVES = jax.nn.logsumexp, ("bfloat16", "float16")


class Program(NamedTuple):
    """A program of a class, the settings of storage under which it is judged, and how."""

    fun: Callable[..., Any]
    args: tuple[Any, ...]
    storages: tuple[str, ...] = ("fast",)
    thorough: bool = False
    eager: bool = False


PROGRAMS: dict[str, Program] = {}


def programs(subject, args, table, **options):
    """Registers the programs of a table as ``subject: name``."""
    for name, fun in table.items():
        PROGRAMS[f"{subject}: {name}"] = Program(fun, args, **options)


# ---- recursions of log probabilities: a stacked carry is rounded --------------------------------

STATES, LONG = 24, 60
CHAIN = {"w": normal(1, 32, STATES, scale=0.2), "t": normal(2, STATES, STATES)}


def emissions(p, x):
    return jax.nn.log_softmax(x @ p["w"]) * 3


def hidden_markov(p, x):
    e, t = emissions(p, x), jax.nn.log_softmax(p["t"])
    step = lambda a, e: (lse(a[:, :, None] + t, 1) + e, None)  # noqa: E731
    return -jnp.mean(lse(lax.scan(step, e[0], e[1:])[0], -1))


def moves_of_each_step(p, x):
    """Backwards, and what is added comes from a matmul too."""
    e = emissions(p, x)
    moves = jax.nn.log_softmax((x.mean(1) @ p["w"])[:, :, None] + p["t"])
    step = lambda b, em: (lse(em[1] + (b + em[0])[:, None], -1), None)  # noqa: E731
    b = lax.scan(step, jnp.zeros(e.shape[1:]), (e, moves), reverse=True)[0]
    return -jnp.mean(lse(b, -1))


def coupled_chains(p, x):
    e, t = emissions(p, x), jax.nn.log_softmax(p["t"])

    def step(ab, e):
        a = lse(ab[0][:, :, None] + t, 1) + e
        b = lse(ab[1][:, :, None] + t.T, 1) + e + lse(a, -1, keepdims=True) / 2
        return (a, b), None

    a, b = lax.scan(step, (e[0], e[0]), e[1:])[0]
    return -jnp.mean(lse(a + b, -1)) / LONG


def one_by_one(p, x):
    def chain(e):
        t = jax.nn.log_softmax(p["t"])
        return lse(lax.scan(lambda a, e: (lse(a[:, None] + t, 0) + e, a), e[0], e[1:])[0])

    return -jnp.mean(jax.vmap(chain, 1)(emissions(p, x)))


programs(
    "log domain",
    (CHAIN, normal(3, LONG, 4, 32)),
    {
        "hidden Markov model": hidden_markov,
        "moves of each step": moves_of_each_step,
        "coupled chains": coupled_chains,
        "one chain by one": one_by_one,
    },
)


# ---- a carry stacked with views of itself: the fixpoint of facts does not end --------------------

ALIGNED = {"w": normal(1, 12, 6, scale=0.4)}


def aligned(step):
    def fun(p, x):
        e = emissions(p, x)
        a = lax.scan(lambda a, e: (step(a) + e, None), e[0], e[1:])[0]
        return -jnp.mean(lse(a, -1)) / len(x)

    return fun


def aligned_in_two_loops(p, x):
    e = emissions(p, x).reshape(5, 8, 4, 6)
    step = lambda a, e: (lse(jnp.stack([a, a[:, ::-1], a[::-1]]), 0) + e, None)  # noqa: E731
    a = lax.scan(lambda a, e: (lax.scan(step, a, e)[0], None), e[0, 0], e)[0]
    return -jnp.mean(lse(a, -1)) / len(x)


def aligned_by_fori(p, x):
    e = emissions(p, x)
    step = lambda i, a: lse(jnp.stack([a, a.T.reshape(a.shape)], -1), -1) + e[i]  # noqa: E731
    return -jnp.mean(lse(lax.fori_loop(1, len(x), step, e[0]), -1)) / len(x)


programs(
    "stacked views",
    (ALIGNED, normal(0, 40, 4, 12)),
    {
        "reversed": aligned(lambda a: lse(jnp.stack([a, a[:, ::-1]]), 0)),
        "rolled": aligned(lambda a: lse(jnp.stack([a, jnp.roll(a, 1, -1)]), 0)),
        "joined": aligned(lambda a: lse(jnp.concatenate([a[None], a[None, :, ::-1]]), 0)),
        "in two loops": aligned_in_two_loops,
        "by fori": aligned_by_fori,
    },
)


# ---- repeated angles: "read before it is computed" -----------------------------------------------

ROWS, TOKENS, HEADS, WIDTH = 2, 12, 4, 32
QKV = [normal(i, 16, WIDTH, scale=0.25) for i in range(3)]
ANGLES = np.outer(np.arange(TOKENS), 0.1 ** np.arange(4)).astype(np.float32)


def heads(x):
    return x.reshape(ROWS, TOKENS, HEADS, -1).swapaxes(1, 2)


def pairs(x):
    x = x.reshape(*x.shape[:-1], -1, 2)
    return jnp.stack([-x[..., 1], x[..., 0]], -1).reshape(*x.shape[:-2], -1)


def halves(x):
    return jnp.concatenate([-x[..., 4:], x[..., :4]], -1)


def rotary(angles, swap=pairs, changed=lambda k: k):
    def fun(p, x):
        q, k, v = (heads(x @ w) for w in p)
        cos, sin = jnp.cos(angles()), jnp.sin(angles())
        q, k = (y * cos + swap(y) * sin for y in (q, changed(k)))
        return jnp.mean((jax.nn.softmax(q @ k.swapaxes(-1, -2) / 3) @ changed(v)) ** 2)

    return fun


def axial():
    rows, columns = (jnp.repeat(jnp.asarray(a)[:, :2], 2, 1) for a in (ANGLES, ANGLES[::-1]))
    return jnp.concatenate([rows, columns], 1)


def repeated():
    return jnp.repeat(jnp.outer(jnp.arange(TOKENS), 0.1 ** jnp.arange(4.0)), 2, 1)


programs(
    "rotary",
    (QKV, normal(9, ROWS, TOKENS, 16)),
    {
        "repeated": rotary(repeated),
        "tiled": rotary(lambda: jnp.tile(ANGLES, (1, 2)), halves),
        "of rows and columns": rotary(axial),
        "of grouped heads": rotary(repeated, changed=lambda k: jnp.repeat(k[:, ::2], 2, 1)),
    },
    eager=True,
)


# ---- streams through views, the last compared with the first: "read before it is computed" -------

BLOCKS = [normal(i, 16, 16, scale=0.25) for i in range(7)]
PLAIN = normal(20, 16, 16)


def stream(layer):
    def fun(p, x):
        first = h = x @ p[0]
        for w in p[1:]:
            h = layer(h, w)
        return jnp.mean((h - first) ** 2)

    return fun


def viewed(there, back):
    return stream(lambda h, w: h + back(jax.nn.gelu(there(h) @ w)))


programs(
    "streams",
    (BLOCKS, PLAIN),
    {
        "transposed": viewed(jnp.transpose, jnp.transpose),
        "reshaped": viewed(lambda h: h.reshape(4, 4, 16), lambda h: h.reshape(16, 16)),
        "reversed": viewed(lambda h: h[::-1], lambda h: h[::-1]),
        "by vmap": stream(lambda h, w: jax.vmap(lambda y: y + jax.nn.gelu(y @ w))(h)),
        "by vmap of one": stream(
            lambda h, w: jax.vmap(lambda y: y + jax.nn.gelu(y[None] @ w)[0])(h[:, None])[:, 0]
        ),
    },
    eager=True,
)


# ---- dropout of attention's weights: "Transpose rule for 'name'" ---------------------------------


def dropped(drop, split=heads):
    def fun(p, x):
        q, k, v = (split(x @ w) for w in p)
        return jnp.mean((drop(jax.nn.softmax(q @ k.swapaxes(-1, -2) / 3)) @ v) ** 2)

    return fun


def kept(weights):
    return jax.random.bernoulli(jax.random.key(0), 0.9, weights.shape)


dropout = nn.Dropout(0.1, deterministic=False)
programs(
    "dropout",
    (QKV, normal(9, ROWS, TOKENS, 16)),
    {
        "selected": dropped(lambda w: jnp.where(kept(w), w / 0.9, 0.0)),
        "multiplied": dropped(lambda w: w * kept(w) / 0.9),
        "without heads": dropped(lambda w: jnp.where(kept(w), w / 0.9, 0.0), lambda x: x),
        "of Flax": dropped(lambda w: dropout.apply({}, w, rngs={"dropout": jax.random.key(2)})),
    },
    storages=("0.5", "8bit", "lean"),
)


# ---- many skip connections: RecursionError -------------------------------------------------------

SKIPS = 64


def u_shaped(joined):
    def fun(p, x):
        h, left = x @ p[0], []
        for i in range(SKIPS):
            h = jnp.tanh(h @ p[1 + i % 6])
            left.append(h)
        for i in range(SKIPS):
            h = jnp.tanh(joined(h, left.pop()) @ p[1 + i % 6])
        return jnp.mean(h**2)

    return fun


def to_the_end(p, x):
    h, outs = x @ p[0], []
    for i in range(2 * SKIPS):
        h = jnp.tanh(h @ p[1 + i % 6])
        outs.append(h)
    return jnp.mean(sum(outs) ** 2)


programs(
    "skips",
    (BLOCKS, PLAIN),
    {
        "added": u_shaped(lambda h, skip: h + skip),
        "joined": u_shaped(lambda h, skip: jnp.concatenate([h[:, :8], skip[:, 8:]], 1)),
        "to the end": to_the_end,
    },
    storages=("lean", "8bit"),
    thorough=True,
    eager=True,
)


# ---- levels taken off behind products, quotients, means and functions ----------------------------

LAYERS = [normal(i, 16, 16, scale=0.25) for i in range(3)]
LEVEL = normal(30, 16, 16)


def anomaly(made, taken):
    def fun(p, x):
        return jnp.mean((taken(made(x @ p[0]), x @ p[1]) @ p[2]) ** 2)

    return fun


def kelvin(h):
    return 288 + 10 * jnp.tanh(h)


def about_300(h):
    return 300 + h


def near_one(h):
    return 1 + 0.01 * h


def rows(t):
    """The mean of each row."""
    return t.mean(1, keepdims=True)


def blocks(t, size, of):
    """A function of blocks of rows."""
    return of(t.reshape(-1, size, 16)).reshape(t.shape)


programs(
    "levels",
    (LAYERS, LEVEL),
    {
        "a square less one": anomaly(near_one, lambda t, g: t * t - 1),
        "a square less its level": anomaly(about_300, lambda t, g: t * t / 300 - 300),
        "a product": anomaly(near_one, lambda t, g: t * near_one(g) - 1),
        "a quotient": anomaly(about_300, lambda t, g: t / (300 + g) - 1),
        "a quotient of near ones": anomaly(near_one, lambda t, g: t / near_one(g) - 1),
        "a reciprocal": anomaly(about_300, lambda t, g: 300 / t - rows(300 / t)),
        "an exponential": anomaly(lambda h: 0.01 * h, lambda t, g: jnp.exp(t) - 1),
        "a hyperbolic cosine": anomaly(lambda h: 0.1 * h, lambda t, g: jnp.cosh(t) - 1),
        "a logarithm": anomaly(about_300, lambda t, g: jnp.log(t) - jnp.log(300 + g)),
        "a square root": anomaly(about_300, lambda t, g: jnp.sqrt(t) - 300**0.5),
        "squares' mean": anomaly(about_300, lambda t, g: (t * t - rows(t * t)) / 300),
        "zonal": anomaly(kelvin, lambda t, g: t - rows(t)),
        "zonal, of blocks": anomaly(
            about_300, lambda t, g: blocks(t, 4, lambda b: b - b.mean(1, keepdims=True))
        ),
        "zonal, of pools": anomaly(
            about_300, lambda t, g: t - jnp.repeat(t.reshape(8, 2, 16).mean(1), 2, 0)
        ),
        "zonal, of a few": anomaly(
            near_one, lambda t, g: t - jnp.repeat(t.reshape(4, 4, 16).mean((1, 2)), 4)[:, None]
        ),
        "zonal, of segments": anomaly(
            about_300,
            lambda t, g: t - jax.ops.segment_sum(t / 4, np.arange(16) // 4, 4)[np.arange(16) // 4],
        ),
        "root mean square": anomaly(about_300, lambda t, g: t - jnp.sqrt(rows(t * t))),
        "a moment": anomaly(about_300, lambda t, g: rows(t * t) - rows(t) ** 2 + 0 * g),
    },
    eager=True,
)


# ---- units as an argument: beyond the range of float16 -------------------------------------------

UNITS = 3e5 * (1 + 0.1 * abs(normal(31, 16)))


def measured(there_and_back):
    def fun(p, x, s):
        return jnp.mean((there_and_back(x @ p[0], s) @ p[2]) ** 2)

    return fun


programs(
    "units",
    (LAYERS, LEVEL, UNITS),
    {
        "relu": measured(lambda y, s: jax.nn.relu(y * s) / s),
        "relu, reciprocal": measured(lambda y, s: jax.nn.relu(y * s) * (1 / s)),
        "relu, of rows": measured(lambda y, s: jax.nn.relu(y * s[:, None]) / s[:, None]),
        "absolute": measured(lambda y, s: jnp.abs(y * s) / s),
        "selected": measured(lambda y, s: jnp.where(y > 0, y * s, 0.1 * y * s) / s),
        "softplus": measured(lambda y, s: jnp.logaddexp(y * s, 0) / s),
        "a maximum": measured(lambda y, s: jnp.maximum(y * s, (y * s)[::-1]) / s),
        "a gate": measured(lambda y, s: (y * s) * jax.nn.sigmoid(y) / s),
    },
    eager=True,
)


# ---- expanded distances: one of three equal terms is rounded -------------------------------------


def distances(expanded, read=jnp.mean):
    """From what a matmul makes to what is near it: three terms of a gradient cancel."""

    def fun(p, x):
        a = x @ p[0]
        return read(expanded(a, a + 0.1 * (x @ p[1])))

    return fun


def rowwise(a, b):
    return jnp.einsum("ij,ij->i", a, b)


def diagonal(a, b):
    return jnp.diagonal(a @ b.T)


def expanded(dot):
    return lambda a, b: dot(a, a) - 2 * dot(a, b) + dot(b, b)


def of_all(a, b):
    return jnp.sum(a * a, -1)[:, None] + jnp.sum(b * b, -1) - 2 * a @ b.T


programs(
    "distances",
    (LAYERS, LEVEL),
    {
        "by einsum": distances(expanded(rowwise)),
        "by diagonals": distances(expanded(diagonal)),
        "in a kernel": distances(expanded(rowwise), lambda d: jnp.mean(jnp.exp(-d))),
        "one by one": distances(jax.vmap(expanded(jnp.vdot))),
        "of all": distances(of_all),
    },
    eager=True,
)


# ---- judged -------------------------------------------------------------------------------------


def cases():
    """The quick tier has every eighth program, in one 16-bit dtype."""
    for place, (name, program) in enumerate(PROGRAMS.items()):
        quick = HALVES[place % 2], program.storages[0]
        for half, storage in itertools.product(HALVES, program.storages):
            thorough = program.thorough or place % 8 != 1 or (half, storage) != quick
            case = (name, half, storage)
            marks = [pytest.mark.thorough] * thorough
            yield pytest.param(*case, marks=marks, id="-".join(case))


@pytest.mark.parametrize(("name", "half", "storage"), [*cases()])
def test_program_that_went_wrong_is_as_by_hand(name, half, storage, monkeypatch):
    monkeypatch.setattr(coding, "FEWEST", 64)  # so that these small arrays are coded too
    fun, args, *_, eager = PROGRAMS[name]
    # A code has three digits less than float16.
    times = 32 if (half, storage) == ("float16", "8bit") else 4
    wrong = planners.sound(fun, args, half, storage=storage, times=times, eager=eager)
    assert not wrong, "\n".join(map(str, wrong))
