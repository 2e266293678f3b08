"""Random loops of views, stacks, reductions and functions that make levels: to be planned only.

A body is a list of steps ``(part, i, j)``: a function of two of its latest values. It may hold
another loop. Its carries are what it computed last, in any order.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROWS, SIDE = 3, 4
SHAPE = (ROWS, SIDE, SIDE)
CARRIES = 3


def lse(x, axis):
    return jax.nn.logsumexp(x, axis)


def normed(a, axis):
    return (a - a.mean(axis, keepdims=True)) * lax.rsqrt(a.var(axis, keepdims=True) + 1e-5)


# Functions of two values, a vector, a matrix and an array as large as the values.
PARTS = {
    # views
    "transpose": lambda a, b, v, w, x: jnp.swapaxes(a, 1, 2),
    "reverse": lambda a, b, v, w, x: a[:, ::-1],
    "shift": lambda a, b, v, w, x: jnp.pad(a, ((0, 0), (1, 0), (0, 0)))[:, :-1],
    "roll": lambda a, b, v, w, x: jnp.roll(a, 1, 0),
    "merge": lambda a, b, v, w, x: jnp.roll(a.reshape(ROWS, -1), 1, 1).reshape(SHAPE),
    "split": lambda a, b, v, w, x: (a.reshape(ROWS, 2, 2, SIDE) + b[:, :2, None]).reshape(SHAPE),
    "spread": lambda a, b, v, w, x: jnp.broadcast_to(a[:, :1], SHAPE) + b,
    "repeat": lambda a, b, v, w, x: jnp.repeat(a[:, ::2], 2, 1),
    # stacks and reductions
    "stacked first": lambda a, b, v, w, x: lse(jnp.stack([a, b]), 0),
    "stacked last": lambda a, b, v, w, x: lse(jnp.stack([a, b[:, ::-1]], -1), -1),
    "stacked sum": lambda a, b, v, w, x: jnp.sum(jnp.stack([a, b, a], 2), 2),
    "stacked mean": lambda a, b, v, w, x: jnp.mean(jnp.stack([a, b], 1), 1),
    "stacked max": lambda a, b, v, w, x: jnp.max(jnp.stack([a, b], 1), 1),
    "joined": lambda a, b, v, w, x: lse(jnp.concatenate([a[None], b[None]]), 0),
    "log matmul": lambda a, b, v, w, x: lse(a[:, :, :, None] + b[:, None], 2),
    "product": lambda a, b, v, w, x: jnp.sum(a[:, :, :, None] * b[:, None], 2),
    "largest": lambda a, b, v, w, x: a - a.max(-1, keepdims=True),
    "sorted": lambda a, b, v, w, x: jnp.sort(a, -1),
    "running": lambda a, b, v, w, x: jnp.cumsum(a, 1) / SIDE,
    # levels: what is constant along an axis is added, and subtracted again
    "bias": lambda a, b, v, w, x: a + v,
    "bias of rows": lambda a, b, v, w, x: a + v[:, None],
    "bias of b": lambda a, b, v, w, x: a + b[:, :1],
    "centered": lambda a, b, v, w, x: a - a.mean(-1, keepdims=True),
    "centered rows": lambda a, b, v, w, x: a - a.mean(0),
    "normed": lambda a, b, v, w, x: normed(a, (1, 2)),
    "softmax": lambda a, b, v, w, x: jax.nn.softmax(a, 1),
    # arithmetic
    "add": lambda a, b, v, w, x: a + b,
    "injected": lambda a, b, v, w, x: (x + a) + b,
    "subtract": lambda a, b, v, w, x: a - b,
    "multiply": lambda a, b, v, w, x: a * b,
    "scale": lambda a, b, v, w, x: 0.1 * a,
    "negative": lambda a, b, v, w, x: -a,
    "tanh": lambda a, b, v, w, x: jnp.tanh(a),
    "exp": lambda a, b, v, w, x: jnp.exp(-(a**2)),
    "log": lambda a, b, v, w, x: jnp.log1p(jnp.abs(a)),
    "where": lambda a, b, v, w, x: jnp.where(a > b, a, b),
    "matmul": lambda a, b, v, w, x: a @ w,
    "of both": lambda a, b, v, w, x: a @ b,
    "layer": lambda a, b, v, w, x: a + jnp.tanh(a @ w),
}
LOOPS = ("scan", "scan of slices", "fori", "while", "associative", "cond", "checkpoint")


def drawn(seed, depth=2):
    """Returns a function of a vector, a matrix and an array, from a seed."""
    rng = np.random.default_rng((seed, depth))
    loop, names = str(rng.choice(LOOPS)), [*PARTS]
    steps = [(str(rng.choice(names)), *rng.integers(6, size=2)) for _ in range(rng.integers(2, 9))]
    order = rng.integers(6, size=CARRIES)
    inner = drawn(seed, depth - 1) if depth and rng.random() < 0.4 else None

    def turn(values, v, w, x):
        values = [*values]
        for part, i, j in steps:
            a, b = (values[-1 - k % len(values)] for k in (i, j))
            values.append(PARTS[part](a, b, v, w, x))
        if inner is not None:
            values.append(inner(v, w, values[-1]))
        return tuple(values[-1 - k % len(values)] for k in order)

    def fun(v, w, x):
        start = (x, x @ w, x + v)
        if loop == "scan":
            end, ys = lax.scan(lambda c, _: (turn(c, v, w, x), c[0]), start, None, length=4)
            return sum(end) + ys.mean(0)
        if loop == "scan of slices":
            body = lambda c, e: (turn(c, v, w, x + e), c[0] + e)  # noqa: E731
            end, ys = lax.scan(body, start, x @ w)
            return sum(end) + ys.sum(0)
        if loop == "fori":
            return sum(lax.fori_loop(0, 4, lambda i, c: turn(c, v, w, x), start))
        if loop == "while":
            begin = jnp.int32(0), start
            body = lambda c: (c[0] + 1, turn(c[1], v, w, x))  # noqa: E731
            return sum(lax.while_loop(lambda c: c[0] < 4, body, begin)[1])
        if loop == "associative":
            merge = jax.vmap(lambda a, b: turn((a, b), v, w, x)[0])
            return lax.associative_scan(merge, jnp.stack(start)).sum(0)
        if loop == "cond":
            return sum(lax.cond(v[0] > 0, lambda c: turn(c, v, w, x), lambda c: c, start))
        return sum(jax.checkpoint(lambda c: turn(c, v, w, x))(start))

    return fun


def arguments():
    return (jnp.ones(SIDE), jnp.ones((SIDE, SIDE)), jnp.ones(SHAPE))
