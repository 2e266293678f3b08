"""Programs of every kind that a planner must tell apart: as accurate as matmuls rounded by hand.

Each table is a kind: what is added to a state, what a function makes of a matmul's result, how
values are moved, chosen and joined. The yardstick is the float32 program, differentiated by JAX,
whose matmuls round their operands and results, forward and backward (`planners.sound`).
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import planners
import pytest
from jax import lax
from support import HALVES, normal, thorough_but

ROWS, WIDTH = 12, 24
X = normal(0, ROWS, WIDTH)
P = {name: normal(i, WIDTH, WIDTH, scale=WIDTH**-0.5) for i, name in enumerate("abcd", 1)}
P |= {"scalar": jnp.float32(0.1), "vector": normal(6, WIDTH), "stack": normal(7, 6, WIDTH, WIDTH)}
P["stack"] *= 0.5 * WIDTH**-0.5
KNOWN = np.linspace(0.5, 1, WIDTH, dtype=np.float32)
FLAGS = np.arange(WIDTH) % 3 > 0
LABELS = jnp.arange(ROWS) * 5 % WIDTH
stop = lax.stop_gradient

PROGRAMS = {}


def programs(kind, around, table):
    """Registers the programs of a table, each by a function that is written around it."""
    PROGRAMS.update({f"{kind}: {name}": functools.partial(around, f) for name, f in table.items()})


def head(p, y):
    return jnp.mean(jnp.tanh(y @ p["d"]) ** 2)


def total(e):
    return jnp.sum(e, -1, keepdims=True)


def normed(h):
    return h * lax.rsqrt(jnp.mean(h * h, -1, keepdims=True) + 1e-6)


def centered(h):
    return (h - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-5)


# ---- states and steps ---------------------------------------------------------------------------


def stepped(step, p, x):
    """The new state is read, and by how much it is another one."""
    state = x @ p["a"]
    new = state + step(p, x, x @ p["b"])
    return head(p, centered(new)) + jnp.mean(jnp.tanh(8 * (new - state) @ p["c"]) ** 2)


programs(
    "step",
    stepped,
    {
        "a block": lambda p, x, b: b,
        "a fifth of one": lambda p, x, b: 0.2 * b,
        "a fifth, by division": lambda p, x, b: b / 5,
        "a negative tenth": lambda p, x, b: -0.1 * b,
        "a tenth, and something": lambda p, x, b: 0.1 * b + 1,
        "times a scalar": lambda p, x, b: p["scalar"] * b,
        "times a vector": lambda p, x, b: p["vector"] * b,
        "times a known vector": lambda p, x, b: KNOWN / 9 * b,
        "a normed block": lambda p, x, b: p["vector"] * normed(b),
        "a masked block": lambda p, x, b: (p["vector"] > 0).astype(jnp.float32) * b,
        "a chosen block": lambda p, x, b: jnp.where(FLAGS, b, 0),
        "a mean": lambda p, x, b: jnp.mean(b, -1, keepdims=True) * jnp.ones_like(b),
        "a scalar": lambda p, x, b: p["scalar"],
        "a vector": lambda p, x, b: p["vector"],
        "an argument": lambda p, x, b: x,
        "taps of a filter": lambda p, x, b: p["vector"] * b + p["scalar"] * (x @ p["c"]),
    },
)


def repeated(weights, p, x):
    """A stream of six blocks, whose last state is compared with the first."""
    first = h = x @ p["a"]
    for i in range(6):
        h = h + 0.3 * jnp.tanh(h @ weights(p, i))
    return head(p, h) + jnp.mean((h - first) ** 2)


programs(
    "weights",
    repeated,
    {
        "the same": lambda p, i: p["b"],
        "the same, transposed in turn": lambda p, i: p["b"].T if i % 2 else p["b"],
        "of a stack": lambda p, i: p["stack"][i],
        "of a swapped stack": lambda p, i: jnp.swapaxes(p["stack"], 1, 2)[0],
        "sliced": lambda p, i: lax.dynamic_slice(p["stack"], (i, 0, 0), (1, WIDTH, WIDTH))[0],
        "looked up": lambda p, i: p["stack"][jnp.asarray([i, 0])].sum(0),
    },
)

# ---- functions of what a matmul makes -----------------------------------------------------------


def read_twice(fun, p, x):
    """What a function makes of a matmul's result is summed, and multiplied, as the result is."""
    h = x @ p["a"]
    y = fun(h, p)
    return jnp.mean(jnp.cos(y)) + head(p, jnp.broadcast_to(y, h.shape)) + head(p, h)


programs(
    "function",
    read_twice,
    {
        "three times": lambda h, p: 3 * h,
        "a thousandth": lambda h, p: h * 2.0**-11 * 2.0**10,
        "a wide tanh": lambda h, p: jnp.tanh(h) * 100,
        "a square": lambda h, p: h * (h @ p["b"]),
        "a gate": lambda h, p: jnp.tanh(h) * (h @ p["b"]),
        "a quotient": lambda h, p: h / (1.5 + jnp.tanh(h @ p["b"])),
        "a share of a sum": lambda h, p: h / (9 + total(jnp.tanh(h @ p["b"]))),
        "a running sum": lambda h, p: lax.cumsum(jnp.tanh(h), 1),
        "a logarithm": lambda h, p: jnp.log(1 + h * h),
        "a phase": lambda h, p: jnp.sin(8 * h),
        "a small phase": lambda h, p: jnp.sin(0.1 * h),
        "a phase of a product": lambda h, p: jnp.sin(4 * h * jnp.tanh(h)),
        "a phase of a sum": lambda h, p: jnp.sin(4 * (h + jnp.tanh(h))),
        "two phases": lambda h, p: jnp.sin(0.5 * h) + jnp.sin(6 * h),
        "an exponential": lambda h, p: jnp.exp(h),
        "a root": lambda h, p: lax.rsqrt(1 + h * h),
        "a quotient of its own": lambda h, p: h / (1 + h**2),
        "a rectifier": lambda h, p: jnp.maximum(h, -0.5) + h,
        "a rounding of its author": lambda h, p: lax.reduce_precision(h, 8, 10),
    },
)

programs(
    "norm",
    read_twice,
    {
        "root of a mean square": lambda h, p: normed(h),
        "scale first": lambda h, p: lax.rsqrt(total(h * h) + 1) * (h @ p["b"]),
        "of a weight": lambda h, p: p["vector"] * lax.rsqrt(total(h * h) + 1) * (h @ p["b"]),
        "a negative power": lambda h, p: h * lax.integer_pow(1 + total(h * h), -2) * 99,
        "twice": lambda h, p: normed(2 * normed(h)),
        "and an epsilon": lambda h, p: normed(h) + 1e-5,
        "and another": lambda h, p: normed(h) + h @ p["b"],
        "times another": lambda h, p: normed(h) * (h @ p["b"]),
        "in an exponential": lambda h, p: jnp.exp(normed(h)),
        "two of one size": lambda h, p: h * lax.rsqrt(total(h * h)) * lax.rsqrt(total(h * h) + 1),
        "centered": lambda h, p: centered(h),
        "by columns": lambda h, p: centered(h.T).T,
        "by a standard deviation": lambda h, p: (h - 1) / (jnp.std(h) + 1e-3),
    },
)

# What is taken off scores before their exponential, of their maximum.
MAXIMA = {
    "itself": lambda m: m,
    "negated": lambda m: -m,
    "absolute": jnp.abs,
    "at least something": lambda m: jnp.maximum(m, 1.0),
    "where it is finite": lambda m: jnp.where(jnp.isfinite(m), m, 0.0),
    "at most something": lambda m: jnp.minimum(m, 1.0),
    "clipped": lambda m: lax.clamp(0.0, m, 1.0),
    "one of two": lambda m: jnp.where(m > 1, m, jnp.max(P["a"])),
    "halved": lambda m: 0.5 * m,
    "squared": lambda m: m * m,
    "a root of it": lambda m: jnp.sqrt(jnp.abs(m)),
    "bounded": jnp.tanh,
    "more": lambda m: m + 1.0,
    "its logarithm": lambda m: jnp.log(1 + jnp.abs(m)),
}


def shifted(shift, p, x):
    s = x @ p["a"]
    e = jnp.exp(s - shift(jnp.max(s, -1, keepdims=True)))
    return head(p, e) + jnp.mean(jnp.log(total(e)))


programs("maximum", shifted, MAXIMA)


def exponential(exponent, p, x):
    s = x @ p["a"]
    e = jnp.exp(exponent(s, s - jnp.max(s, -1, keepdims=True), p))
    return head(p, e / total(e)) + head(p, e) / 8


programs(
    "exponent",
    exponential,
    {
        "shifted": lambda s, z, p: z,
        "half of that": lambda s, z, p: 0.5 * z,
        "minus that": lambda s, z, p: -z / 2,
        "nought times that": lambda s, z, p: 0.0 * z,
        "that, and more": lambda s, z, p: z + 1,
        "another's maximum": lambda s, z, p: s - jnp.max(s @ p["b"], -1, keepdims=True),
        "a maximum of columns": lambda s, z, p: s - jnp.max(s, 0),
        "a stopped mean": lambda s, z, p: s - stop(jnp.mean(s, -1, keepdims=True)),
    },
)

# ---- sums of exponentials -----------------------------------------------------------------------


def top(s):
    return jnp.max(s, -1, keepdims=True)


def by_hand(s, shift):
    return shift[..., 0] + jnp.log(jnp.sum(jnp.exp(s - shift), -1))


def weighed(fun, p, x):
    y = fun(3 * (x @ p["a"]))
    return jnp.mean(jnp.cos(jnp.arange(1.0, 1 + y.size)) * y.ravel())


SUMS = {
    "logsumexp": lambda s: jax.nn.logsumexp(s, -1),
    "with its axis": lambda s: s - jax.nn.logsumexp(s, -1, keepdims=True),
    "over columns": lambda s: jax.nn.logsumexp(s.T, 0),
    "log_softmax": lambda s: jnp.sin(jax.nn.log_softmax(s)),
    "of labels": lambda s: jax.nn.log_softmax(s)[jnp.arange(ROWS), LABELS],
    "by hand": lambda s: by_hand(s, stop(top(s))),
    "by hand, not stopped": lambda s: by_hand(s, top(s)),
    "at least zero": lambda s: by_hand(s, stop(jnp.maximum(top(s), 0.0))),
    "another shift": lambda s: by_hand(s, stop(jnp.mean(s, -1, keepdims=True))),
    "in base 2": lambda s: jnp.log2(jnp.sum(jnp.exp2(s - stop(top(s))), -1)) + top(s)[..., 0],
    "over two axes": lambda s: jax.nn.logsumexp(s.reshape(2, 6, WIDTH), (0, 2)),
    "scaled after": lambda s: jnp.sum(jnp.exp(0.5 * (s - stop(top(s)))), -1),
    "masked": lambda s: jnp.sum(jnp.where(s > 0, jnp.exp(s - stop(top(s))), 0), -1),
    "read too": lambda s: (lambda e: jnp.log(total(e)) + jnp.sin(e))(jnp.exp(s - stop(top(s)))),
    "no shift": lambda s: jnp.log(jnp.sum(jnp.exp(s / 3), -1)),
    "of everything": lambda s: jnp.sum(jnp.exp(s - jnp.max(s)), -1),
    "twice": lambda s: jax.nn.logsumexp(s, -1) + jnp.sin(jax.nn.logsumexp(s, -1)),
}
programs("sum of exponentials", weighed, SUMS)

# ---- moves, choices, casts ----------------------------------------------------------------------


def moved(move, p, x):
    """What a move makes of results and arguments is multiplied, and read in float32."""
    y = move(x @ p["a"], x, p)
    return head(p, y) + jnp.mean(jnp.cos(3 * y))


FEW, MANY = jnp.arange(ROWS - 3), jnp.asarray([3, 1, 1, 8, 0, 11, 3])
programs(
    "move",
    moved,
    {
        "transposed": lambda h, x, p: jnp.tanh(h).T.reshape(h.shape),
        "of a square": lambda h, x, p: jnp.square(h).reshape(2, 6, WIDTH)[::-1].reshape(h.shape),
        "joined with an argument": lambda h, x, p: jnp.concatenate([h, x]),
        "joined with float32": lambda h, x, p: jnp.concatenate([h, jnp.square(x @ p["b"])]),
        "joined with a mask": lambda h, x, p: jnp.concatenate([h, (x > 0) * -100.0]),
        "written into an argument": lambda h, x, p: lax.dynamic_update_slice(x, h[:2], (3, 0)),
        "rows set": lambda h, x, p: h.at[:2].set(0.3),
        "rows added to": lambda h, x, p: h.at[MANY].add(x[:7]),
        "rows multiplied": lambda h, x, p: h.at[:5].multiply(0.999),
        "padded by nearly one": lambda h, x, p: lax.pad(h, 0.999, ((1, 1, 0), (0, 0, 0))),
        "rows taken": lambda h, x, p: h[MANY],
        "one row taken": lambda h, x, p: jnp.broadcast_to(h[MANY[0]], x.shape) + h,
        "a table's rows": lambda h, x, p: p["b"][MANY] + h[:7],
        "of a stack": lambda h, x, p: h @ p["stack"][MANY[1]],
        "rolled and taken off": lambda h, x, p: 4 * (jnp.roll(h, 1, 0) - h),
        "differences": lambda h, x, p: 2 * h[1:] - h[:-1],
        "a nearly equal half": lambda h, x, p: (
            lambda both: 30 * (both[:ROWS] - 0.99 * both[ROWS:])
        )(jnp.concatenate([h, h])),
        "sorted": lambda h, x, p: jnp.sort(h, -1),
        "one hot": lambda h, x, p: jax.nn.one_hot(LABELS, ROWS) @ h,
        "widened": lambda h, x, p: h.astype(jnp.bfloat16).astype(jnp.float32),
        "a spread bias": lambda h, x, p: h + jnp.exp(jnp.broadcast_to(p["vector"], h.shape)),
        "counted": lambda h, x, p: h + jnp.arange(WIDTH) / WIDTH,
        "scaled by counts": lambda h, x, p: h * (1 + jnp.cumsum(FLAGS) / WIDTH),
    },
)


def chosen(s):
    return jnp.einsum("nk,nk->n", s, jax.nn.one_hot(LABELS, s.shape[-1]))


BIG = 1e9
programs(
    "choice",
    lambda fun, p, x: jnp.mean(jnp.square(fun(x @ p["a"], p))),
    {
        "of log probabilities": lambda z, p: chosen(jax.nn.log_softmax(3 * z)),
        "of a loop's last state": lambda z, p: chosen(
            lax.scan(lambda c, r: (jnp.logaddexp(c, c + r), None), z, jnp.sin(z))[0]
        ),
        "by a comparison": lambda z, p: (LABELS[:, None] % 3 == LABELS % 3) * 1.0 @ jnp.exp(z),
        "of rectified ones": lambda z, p: jnp.sin(4 * chosen(jnp.maximum(z, 0))),
        "before a matmul": lambda z, p: (jax.nn.one_hot(LABELS, ROWS).T @ jnp.exp(z)) @ p["b"],
        "of a masked softmax": lambda z, p: jax.nn.softmax(jnp.where(FLAGS, z, -BIG)) @ p["b"],
        "bounded below": lambda z, p: jnp.maximum(jnp.where(FLAGS, z, -BIG), -50) @ p["b"] / 50,
        "masked by little": lambda z, p: jnp.where(FLAGS, z, -1e3) @ p["b"] / 1e3,
        "in other units": lambda z, p: ((1e4 * z + BIG) / BIG - 1) * 1e5 @ p["b"],
        "the largest": lambda z, p: (
            jnp.max(jnp.where(FLAGS, z, -BIG), -1, keepdims=True) * (z @ p["b"])
        ),
        "a branch": lambda z, p: lax.cond(z[0, 0] > 0, lambda z: z @ p["b"], jnp.square, z),
        "a branch in float32": lambda z, p: (
            lax.cond(z[0, 0] > 0, jnp.exp, lambda z: z + 0.1 * (z @ p["b"]), z) @ p["c"]
        ),
        "branches of sums": lambda z, p: (
            lax.cond(z[0, 0] > 0, total, lambda z: total(2 * z), z) + z @ p["c"]
        ),
    },
)

# ---- constants ----------------------------------------------------------------------------------

programs(
    "constant",
    lambda fun, p, x: head(p, fun(x @ p["a"])),
    {
        "nearly one": lambda h: 50 * (h - h * 0.999),
        "nearly minus one": lambda h: 50 * (h + h * -0.9999),
        "an epsilon": lambda h: h / (jnp.abs(h) + 1e-8) * jnp.tanh(h),
        "of an array, one small": lambda h: h / (h * h + np.float32([1e-8] + [0.5] * 23)) * h,
        "of an array, one large": lambda h: jnp.tanh(h * np.float32([2e5] + [0.5] * 23)),
        "kelvin": lambda h: 10 * (jnp.log(h + 288) - jnp.log(288.0)),
        "a large product": lambda h: (h * 3e38) / 3e38,
        "a tiny product": lambda h: (h * 1e-30) * 1e30,
    },
)

# ---- chains of elementwise operations -----------------------------------------------------------

SCALES, SHIFTS = 1 + normal(8, 12, WIDTH, scale=0.2), normal(9, 12, WIDTH, scale=0.2)


def chained(links, p, x):
    link, count = links
    h = x @ p["a"]
    for i in range(count):
        h = link(h, i)
    return head(p, h)


CHAINS = {
    "scaled": (lambda h, i: h * 1.01, 40),
    "shifted": (lambda h, i: (h - 0.3) * 0.97, 20),
    "folded": (lambda h, i: jnp.sqrt((h * 0.97) ** 2 + 0.05), 20),
    "softplus": (lambda h, i: jax.nn.softplus(h * SCALES[i] + SHIFTS[i]), 12),
    "clipped": (lambda h, i: jnp.tanh(h * 1.1 - 0.1), 12),
    "products": (lambda h, i: h * SCALES[i] + h * 0.1, 8),
}
programs("chain", chained, CHAINS)
programs(
    "chain in a loop",
    lambda links, p, x: lax.scan(
        lambda c, r: (c + chained(links, p, r), None), 0.0, jnp.stack([x, jnp.sin(x)])
    )[0],
    CHAINS,
)
programs(
    "chain computed again",
    lambda links, p, x: jax.checkpoint(functools.partial(chained, links))(p, x),
    CHAINS,
)

# ---- judged -------------------------------------------------------------------------------------

CASES = [*itertools.product(PROGRAMS, HALVES)]
QUICK = [(name, HALVES[i // 24 % 2]) for i, name in enumerate(PROGRAMS) if i % 24 == 1]


@pytest.mark.parametrize(("name", "half"), thorough_but(CASES, *QUICK))
def test_program_of_a_kind_is_as_accurate_as_by_hand(name, half):
    options = {"times": 2, "confirm": True, "eager": True}
    wrong = planners.sound(PROGRAMS[name], (P, X), half, (0, 1), **options)
    assert not wrong, "\n".join(map(str, wrong))
