"""Loops, and layers that Python wrote out: as accurate as matmuls rounded by hand.

The yardstick is that of `test_sound_rules`.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import planners
import pytest
import random_loops
from jax import lax
from support import HALVES, normal, thorough_but

import mpjax

ROWS, WIDTH, TURNS = 8, 24, 6
X = normal(0, ROWS, WIDTH)
SCALE = WIDTH**-0.5
P = {name: normal(i, WIDTH, WIDTH, scale=SCALE) for i, name in enumerate("abcd", 1)}
P |= {"stack": normal(5, TURNS, WIDTH, WIDTH, scale=0.7 * SCALE)}
P |= {"up": normal(6, TURNS, WIDTH, 2 * WIDTH, scale=SCALE)}
P |= {"down": normal(7, TURNS, 2 * WIDTH, WIDTH, scale=0.5 * SCALE)}
lse = jax.nn.logsumexp

PROGRAMS = {}


def programs(kind, around, table):
    """Registers the programs of a table, each by a function that is written around it."""
    PROGRAMS.update({f"{kind}: {name}": functools.partial(around, f) for name, f in table.items()})


def head(p, y):
    return jnp.mean(jnp.tanh(y @ p["d"]) ** 2)


# ---- the state of each turn ---------------------------------------------------------------------


def turned(turn, p, x):
    inputs = jnp.sin(jnp.arange(1.0, 1 + TURNS)[:, None, None] + x)
    state, states = lax.scan(lambda h, r: (turn(h, r, p),) * 2, x @ p["a"], inputs)
    return head(p, state) + jnp.mean(jnp.cos(states))


programs(
    "scan",
    turned,
    {
        "a recurrent network": lambda h, x, p: jnp.tanh(h @ p["b"] + x @ p["c"]),
        "a residual network, the same weights": lambda h, x, p: h + jnp.tanh(h @ p["b"]),
        "a running sum": lambda h, x, p: h + x,
        "a running sum of products": lambda h, x, p: h + x @ p["b"],
        "an average": lambda h, x, p: 0.9 * h + 0.1 * (x @ p["b"]),
        "a slow average": lambda h, x, p: 0.999 * h + 0.001 * jnp.tanh(x @ p["b"]),
        "a gate": lambda h, x, p: (lambda g: g * h + (1 - g) * x)(jax.nn.sigmoid(x @ p["b"])),
        "a decay of a matmul": lambda h, x, p: jnp.exp(-jax.nn.softplus(x @ p["b"])) * h + x,
        "an exponential": lambda h, x, p: jnp.exp(-jnp.abs(h @ p["b"])),
        "a square and a step": lambda h, x, p: 0.1 * h**2 + x @ p["b"],
        "a phase of what a matmul reads": lambda h, x, p: jnp.tanh(h @ p["b"]) + jnp.sin(8 * h),
        "a norm": lambda h, x, p: (lambda y: y / jnp.sqrt(jnp.mean(y**2, -1, keepdims=True)))(
            h + x @ p["b"]
        ),
        "a maximum": lambda h, x, p: jnp.logaddexp(h, x @ p["b"]),
        "a product of parts": lambda h, x, p: jnp.concatenate([h[1:], h[:1]]) * 0.5 + x @ p["b"],
    },
)


def lstm(p, x):
    def step(state, r):
        h, c = state
        i, f, o, z = jnp.split(r @ p["up"][0] + h @ p["up"][1], 4, -1)
        c = jax.nn.sigmoid(f + 3) * c + jax.nn.sigmoid(i) * jnp.tanh(z)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((ROWS, WIDTH // 2))
    rows = jnp.sin(jnp.arange(1.0, 33)[:, None, None] + x)[..., : WIDTH // 2]
    p = {"up": p["up"][:, : WIDTH // 2], "d": p["d"][: WIDTH // 2]}
    return head(p, lax.scan(step, (start, start), rows)[1])


def pairs(turn):
    """Two carries."""

    def fun(p, x):
        start = x @ p["a"], x @ p["b"]
        state = lax.scan(lambda c, _: (turn(*c, p), None), start, None, length=TURNS)[0]
        return head(p, state[0]) + head(p, state[1])

    return fun


def taken(stack, i):
    return lax.dynamic_index_in_dim(stack, i, keepdims=False)


def fori(weights):
    def fun(p, x):
        turn = lambda i, h: h + 0.5 * jnp.tanh(h @ weights(p, i))  # noqa: E731
        return head(p, lax.fori_loop(0, TURNS, turn, x @ p["a"]))

    return fun


def of_constants(p, x):
    scale = jnp.tanh(x @ p["a"])
    turn = lambda s, _: (jnp.tanh(s @ p["b"]) * scale, None)  # noqa: E731
    return head(p, lax.scan(turn, x @ p["c"], None, length=TURNS)[0])


def gated_after(p, x):
    steps = jnp.sin(jnp.arange(1.0, 9)[:, None, None] + x)
    state, _ = lax.scan(lambda h, r: (0.999 * h + 0.001 * r, None), x, steps)
    return head(p, (x @ p["a"]) * state)


def beside_a_solution(p, x):
    h = x @ p["a"]
    start = 0.3 * stop(h), 0
    going = lambda c: (jnp.sum(c[0] ** 2) > 1e-4) & (c[1] < 50)  # noqa: E731
    solved, _ = lax.while_loop(going, lambda c: (0.3 * (c[0] @ stop(p["b"])), c[1] + 1), start)
    return jnp.mean(jnp.exp(solved + h)) + head(p, h)


stop = lax.stop_gradient
PROGRAMS |= {
    "LSTM": lstm,
    "pair: one reads the other": pairs(
        lambda a, b, p: (jnp.sin(a @ p["c"]) @ p["b"] + b, a @ p["a"] * 0.5)
    ),
    "pair: swapped": pairs(lambda a, b, p: (b, a + jnp.tanh(b @ p["c"]))),
    "pair: a phase a turn later": pairs(lambda a, b, p: (jnp.tanh(b) @ p["c"] + jnp.sin(8 * b), a)),
    "fori: weights of each turn": fori(lambda p, i: taken(p["stack"], i)),
    "fori: the same weights": fori(lambda p, i: taken(p["stack"], 0)),
    "constants of a loop": of_constants,
    "a gate after a slow average": gated_after,
    "beside a solution": beside_a_solution,
}

# ---- alignments, lattices and stencils ----------------------------------------------------------


def late(a):
    return jnp.pad(a, ((0, 0), (1, 0)), constant_values=-9.0)[:, :-1]


BODIES = {
    "reversed": lambda a, e: lse(jnp.stack([a, a[:, ::-1]]), 0) + e,
    "alignment": lambda a, e: lse(jnp.stack([a, late(a), late(late(a))]), 0) + e,
    "last axis": lambda a, e: lse(jnp.stack([a, e], -1), -1) + e,
    "middle axis": lambda a, e: lse(jnp.stack([a, late(a)], 1), 1) + e,
    "sums": lambda a, e: 0.5 * jnp.sum(jnp.stack([a, e]), 0) + e.mean(-1, keepdims=True),
    "means": lambda a, e: jnp.mean(jnp.stack([a - a.mean(0), e], 2), 2) + e[0],
    "injected": lambda a, e: jnp.tanh((e + a) + 0.1 * a @ jnp.ones((WIDTH, WIDTH))),
}


def recursion(body, nested, p, x):
    e = jnp.sin(jnp.arange(1.0, 1 + TURNS)[:, None, None] + x) @ p["a"]
    if nested:
        inner = lambda a, e: lax.scan(lambda a, _: (body(a, e), a), a, None, length=2)  # noqa: E731
    else:
        inner = lambda a, e: (body(a, e), a)  # noqa: E731
    end, states = lax.scan(inner, e[0], e[1:])
    return jnp.mean(lse(end, -1)) / TURNS + jnp.mean(jnp.cos(states))


for nested in (False, True):
    kind = "recursion in two loops" if nested else "recursion"
    programs(kind, lambda body, *args, nested=nested: recursion(body, nested, *args), BODIES)

# ---- layers that Python wrote out ---------------------------------------------------------------


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def mlp(p, i, x, act=jax.nn.gelu):
    return x + act(normed(x) @ p["up"][i]) @ p["down"][i]


def attention(p, i, x):
    q, k, v = (normed(x) @ w for w in (p["a"], p["stack"][i], p["c"]))
    scores = jnp.where(jnp.tri(ROWS, dtype=bool), q @ k.T * SCALE, -1e9)
    return x + jax.nn.softmax(scores) @ v


def layered(layer, p, x):
    for i in range(TURNS):
        x = layer(p, i, x)
    return head(p, normed(x))


def skipping(p, x):
    kept = []
    for i in range(TURNS):
        x = mlp(p, i, x)
        kept.append(jnp.sin(x))
    return jnp.mean(sum(kept) ** 2) + jnp.mean(kept[1] * x)


def runge_kutta(p, x):
    def slope(x):
        return jnp.tanh(x @ p["up"][0]) @ p["down"][0]

    for _ in range(8):
        x = x + 0.1 * slope(x + 0.05 * slope(x))
    return head(p, x)


def in_regions(p, i, x):
    with mpjax.precision("float32"):
        return mlp(p, i, x)


def in_scopes(p, i, x):
    with jax.named_scope(f"layer_{i}"):
        return mlp(p, i, x)


def several_in_a_scan(p, x):
    def body(x, _):
        for i in range(2):
            x = mlp(p, i, x)
        return x, jnp.mean(x)

    x, means = lax.scan(body, x, None, length=3)
    return head(p, x) + jnp.sum(means)


LAYERS = {
    "MLPs": mlp,
    "rectified": lambda p, i, x: mlp(p, i, x, jax.nn.softplus),
    "attention": lambda p, i, x: mlp(p, i, attention(p, i, x)),
    "computed again": lambda p, i, x: jax.checkpoint(lambda p, x: mlp(p, i, x))(p, x),
    "in regions": lambda p, i, x: (in_regions if i == 2 else mlp)(p, i, x),
    "in scopes": in_scopes,
}
programs("layers", layered, LAYERS)
PROGRAMS |= {
    "layers: skips": skipping,
    "layers: Runge-Kutta": runge_kutta,
    "layers: several in a scan": several_in_a_scan,
}

# ---- judged -------------------------------------------------------------------------------------

CASES = [*itertools.product(PROGRAMS, HALVES)]
QUICK = [(name, HALVES[i // 16 % 2]) for i, name in enumerate(PROGRAMS) if i % 16 == 2]


@pytest.mark.parametrize(("name", "half"), thorough_but(CASES, *QUICK))
def test_loop_or_written_out_layer_is_as_accurate_as_by_hand(name, half):
    wrong = planners.sound(PROGRAMS[name], (P, X), half, (0, 1))
    assert not wrong, "\n".join(map(str, wrong))


USES = {
    "tangent": lambda f: lambda p, x: jax.jvp(f, (p, x), (p, x))[1],
    "vmap of gradients": lambda f: (
        lambda p, x: jax.vmap(jax.grad(f), (None, 0))(p, jnp.stack([x, 2 * x]))
    ),
    "gradient of a vmap": lambda f: jax.grad(
        lambda p, x: jnp.sum(jax.vmap(f, (None, 0))(p, jnp.stack([x, 2 * x])))
    ),
    "curvature": lambda f: lambda p, x: jax.jvp(jax.grad(f), (p, x), (p, x))[1],
}
PAIRS = [*itertools.product(USES, ["layers: attention", "layers: Runge-Kutta"])]


@pytest.mark.parametrize(("use", "name"), thorough_but(PAIRS, 1))
def test_other_derivatives_of_written_out_layers_are_as_accurate_as_by_hand(use, name):
    fun, of = PROGRAMS[name], USES[use]
    planned = lambda _, policy: of(mpjax.autocast(fun, policy))  # noqa: E731
    wrong = planners.sound(of(fun), (P, X), "bfloat16", None, planned=planned)
    assert not wrong, "\n".join(map(str, wrong))


# ---- random loops -------------------------------------------------------------------------------


def planned(seed):
    half = f"mixed_{HALVES[seed % 2]}"
    auto, args = mpjax.autocast(random_loops.drawn(seed), half), random_loops.arguments()
    shape = jax.eval_shape(auto, *args)
    assert shape == jax.eval_shape(random_loops.drawn(seed), *args)


@pytest.mark.parametrize("seed", range(6))
def test_random_loop_is_planned(seed):
    planned(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_random_loops_are_planned(first):
    for seed in range(first, first + 100):
        planned(seed)
