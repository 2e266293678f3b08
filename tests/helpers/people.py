"""Random programs as people write them: layers written out, weak scalars, units, masks, streams.

A program is a list of parts, drawn from a seed. Each part is a function of the activations, of its
own parameters and of what the program was given (the first activations, units, a mask). Parts may
be repeated as equal layers, scanned over stacked parameters, or run inside of a transformation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import measure
import numpy as np

ROWS, WIDTH, HEADS = 8, 16, 2


class Given(NamedTuple):
    """What every part may read beside its parameters."""

    first: Any  # the activations before all parts
    beside: Any  # other activations, float[ROWS, WIDTH]
    scale: Any  # units, float[WIDTH]: about 1
    offset: Any  # units, float[WIDTH]: about 300
    large: Any  # units, float[ROWS, WIDTH]: about 1e6
    keep: Any  # bool[ROWS, ROWS]


class Part(NamedTuple):
    """A part of a program: the shapes of its parameters, and its function."""

    shapes: tuple[tuple[int, ...], ...]
    run: Callable[..., Any]
    kinks: bool = False  # its gradient jumps: only its values are judged


SQUARE, VECTOR = (WIDTH, WIDTH), (WIDTH,)


def normalized(h):
    return (h - h.mean(-1, keepdims=True)) / jnp.sqrt(h.var(-1, keepdims=True) + 1e-5)


def attention(h, p, given):
    q, k, v = (jnp.swapaxes((h @ w).reshape(ROWS, HEADS, WIDTH // HEADS), 0, 1) for w in p[:3])
    scores = q @ jnp.swapaxes(k, 1, 2) / jnp.sqrt(WIDTH // HEADS)
    weights = jax.nn.softmax(jnp.where(given.keep, scores, -1e9))
    return h + jnp.swapaxes(weights @ v, 0, 1).reshape(ROWS, WIDTH) @ p[3]


def experts(h, p, given):
    gates = jax.nn.softmax(h @ p[0][:, :2])
    return jnp.einsum("te,etd->td", gates, jnp.einsum("td,edf->etf", h, jnp.stack(p[1:])))


def envelope(h, p, given):
    def turn(state, x):
        state = jnp.maximum(0.99 * state, jnp.abs(x))
        return state, state

    return jax.lax.scan(turn, jnp.zeros(WIDTH), h @ p[0])[1]


def online(h, p, given):
    def turn(carry, x):
        m, total = carry
        new = jnp.maximum(m - 0.1, x)
        total = total * jnp.exp(m - 0.1 - new) + jnp.exp(x - new)
        return (new, total), new + jnp.log(total)

    return jax.lax.scan(turn, (jnp.full(WIDTH, -9.0), jnp.zeros(WIDTH)), h @ p[0])[1]


def recurrence(h, p, given):
    def turn(state, x):
        state = jax.nn.sigmoid(p[1]) * state + 0.1 * x
        return state, state

    return jax.lax.scan(turn, jnp.zeros(WIDTH), h @ p[0])[1]


def chain(link, count):
    def run(h, p, given):
        h = h @ p[0]
        for _ in range(count):
            h = link(h)
        return h

    return run


PARTS = {
    "dense": Part((SQUARE, VECTOR), lambda h, p, g: jax.nn.gelu(h @ p[0] + p[1])),
    "tanh": Part((SQUARE,), lambda h, p, g: jnp.tanh(h @ p[0])),
    "relu": Part((SQUARE, VECTOR), lambda h, p, g: jax.nn.relu(h @ p[0] + p[1]), True),
    "block": Part((SQUARE,) * 2, lambda h, p, g: h + jax.nn.gelu(normalized(h) @ p[0]) @ p[1]),
    "scaled block": Part((SQUARE,) * 2, lambda h, p, g: h + 0.5 * (jax.nn.silu(h @ p[0]) @ p[1])),
    "gated": Part((SQUARE,) * 3, lambda h, p, g: (jax.nn.silu(h @ p[0]) * (h @ p[1])) @ p[2]),
    "norm": Part((VECTOR,) * 2, lambda h, p, g: normalized(h) * (1 + 0.1 * p[0]) + p[1]),
    "attention": Part((SQUARE,) * 4, attention),
    "experts": Part((SQUARE,) * 3, experts),
    "per head": Part(
        (SQUARE,),
        lambda h, p, g: jnp.einsum(
            "thd,hde->the", h.reshape(ROWS, HEADS, -1), p[0].reshape(HEADS, WIDTH // HEADS, WIDTH)
        ).sum(1),
    ),
    "celsius": Part((SQUARE,), lambda h, p, g: (273.15 + 10 * (h @ p[0]) - 273.15) / 10),
    "year": Part((SQUARE,), lambda h, p, g: (2024 - (2000 + 20 * (h @ p[0]))) / 20),
    "pixels": Part((SQUARE,), lambda h, p, g: ((jnp.tanh(h @ p[0]) + 1) * 127.5 - 120) / 60),
    "standardized": Part(
        (SQUARE,), lambda h, p, g: ((h @ p[0]) * g.scale + g.offset - g.offset) / g.scale
    ),
    "parameter": Part(
        (SQUARE, VECTOR), lambda h, p, g: h @ p[0] + (p[1] + 100) - (p[1] + 100).mean()
    ),
    "branch": Part(
        (SQUARE, VECTOR),
        lambda h, p, g: (lambda y: y - y.mean(1, keepdims=True))(
            h @ p[0] + 20 * (g.beside @ p[1])[:, None]
        ),
    ),
    "large": Part((SQUARE,), lambda h, p, g: (1 + 0.1 * jnp.tanh(h @ p[0])) * g.large / 1e6),
    "momentum": Part(
        (SQUARE,) * 2, lambda h, p, g: ((h + 0.1 * jax.nn.gelu(h @ p[0])) - h) @ p[1] * 10
    ),
    "since first": Part((SQUARE,), lambda h, p, g: (h - g.first) @ p[0]),
    "envelope": Part((SQUARE,), envelope, True),
    "online": Part((SQUARE,), online, True),
    "recurrence": Part((SQUARE, VECTOR), recurrence),
    "products": Part((SQUARE,), chain(lambda h: h * 1.02, 20)),
    "folds": Part((SQUARE,), chain(lambda h: jnp.abs(h * 0.97) + 0.05, 12), True),
    "leaks": Part((SQUARE,), chain(lambda h: jax.nn.leaky_relu(h * 1.05 - 0.02), 12), True),
    "log softmax": Part((SQUARE,), lambda h, p, g: jax.nn.log_softmax(h @ p[0])),
    "centered": Part((), lambda h, p, g: h - h.mean(0, keepdims=True)),
    "shifted rows": Part((SQUARE,), lambda h, p, g: (h[1:] - h[:-1]).mean(0) + h @ p[0]),
    "positions": Part((SQUARE,), lambda h, p, g: h @ p[0] + jnp.sin(jnp.arange(WIDTH) / 100.0)),
}
FORMS = ("once", "once", "once", "layers", "scanned", "jit", "remat", "named", "vmap")


class Step(NamedTuple):
    name: str
    form: str


def generate(seed: int) -> tuple[Step, ...]:
    rng = np.random.default_rng(seed)
    count = rng.integers(1, 5)
    return tuple(Step(rng.choice([*PARTS]), rng.choice(FORMS)) for _ in range(count))


def helper(run, params, given, h):
    """A layer under a name, as helpers of packages are."""
    return run(h, params, given)


def applied(step: Step, h: Any, params: Any, given: Given) -> Any:
    run = PARTS[step.name].run
    layer = lambda h, p: run(h, p, given)  # noqa: E731
    if step.form == "layers":
        for p in params:
            h = layer(h, p)
        return h
    if step.form == "scanned":
        stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *params)
        return jax.lax.scan(lambda h, p: (layer(h, p), None), h, stacked, length=len(params))[0]
    if step.form == "jit":
        return jax.jit(layer)(h, params[0])
    if step.form == "remat":
        return jax.checkpoint(layer)(h, params[0])
    if step.form == "vmap":
        return jax.vmap(layer, (0, None))(jnp.stack([h, 0.5 * h]), params[0]).sum(0)
    with jax.named_scope(step.name.replace(" ", "_")):
        return functools.partial(helper, run)(params[0], given, h)


def build(steps: tuple[Step, ...]) -> Callable[..., Any]:
    def fun(params, x, given):
        first = h = x @ params["in"]
        for step, p in zip(steps, params["parts"], strict=True):
            h = applied(step, h, p, given._replace(first=first))
        return h @ params["out"]

    return fun


def arguments(steps: tuple[Step, ...], seed: int) -> tuple[Any, ...]:
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0, mean=0.0):
        return jnp.asarray(mean + scale * rng.normal(size=shape), jnp.float32)

    def layer(step):
        return tuple(normal(*s, scale=s[0] ** -0.5) for s in PARTS[step.name].shapes)

    many = {"layers": 3, "scanned": 3}
    params = {
        "in": normal(*SQUARE, scale=WIDTH**-0.5),
        "parts": [tuple(layer(step) for _ in range(many.get(step.form, 1))) for step in steps],
        "out": normal(*SQUARE, scale=WIDTH**-0.5),
    }
    given = Given(
        jnp.zeros((ROWS, WIDTH)),
        normal(ROWS, WIDTH),
        normal(WIDTH, scale=0.1, mean=1),
        normal(WIDTH, scale=50, mean=300),
        normal(ROWS, WIDTH, scale=1e5, mean=1e6),
        jnp.asarray(np.tril(np.ones((ROWS, ROWS), bool))),
    )
    return params, normal(ROWS, WIDTH), given


def fault(steps: tuple[Step, ...], half: str, seed: int = 0) -> str:
    """Returns what is wrong with a program under autocast, or "" if it is sound."""
    argnums = None if any(PARTS[step.name].kinks for step in steps) else 0
    draw = lambda i: arguments(steps, seed + i)  # noqa: E731
    return "\n".join(map(str, measure.findings(build(steps), draw, half, argnums)))


def report(seed: int) -> str:
    """Judges the program of a seed; describes a smallest program that fails."""
    steps, half = generate(seed), ("bfloat16", "float16")[seed % 2]
    wrong = fault(steps, half, seed)
    for at in reversed(range(len(steps))) if wrong else ():
        less = steps[:at] + steps[at + 1 :]
        if less and (found := fault(less, half, seed)):
            steps, wrong = less, found
    shown = [tuple(map(str, step)) for step in steps]
    return f"program {seed} in {half}: {shown}\n{wrong}" if wrong else ""
