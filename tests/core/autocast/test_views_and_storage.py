"""Programs of views, norms and activations are planned under every setting of storage."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import HALVES, normal, thorough_but

import mpjax

STORAGES = ("fast", "fast", "lean", "8bit", "0.5")
SIDE = 8
WS, X = normal(0, 4, SIDE, SIDE, scale=0.3), normal(1, SIDE, SIDE)


def traced(fun, policy):
    jax.eval_shape(jax.grad(mpjax.autocast(fun, policy)), WS, X)


# ---- as people write them -----------------------------------------------------------------------

ANGLES = {
    "repeated": lambda ws, x: jnp.repeat(jnp.outer(jnp.arange(8.0), rates()), 2, 1),
    "tiled": lambda ws, x: jnp.tile(jnp.outer(jnp.arange(8.0), rates()), (1, 2)),
    "of data": lambda ws, x: jnp.repeat(jnp.outer(x[:, 0], rates()), 2, 1),
    "learned": lambda ws, x: jnp.repeat(jnp.outer(jnp.arange(8.0), ws[3, 0, :4]), 2, 1),
}


def rates():
    return 10000.0 ** (-jnp.arange(4.0) / 4)


def turned(angles):
    """Attention with rotary embeddings."""

    def fun(ws, x):
        a = angles(ws, x)
        other = lambda h: jnp.stack([-h[:, 1::2], h[:, ::2]], -1).reshape(h.shape)  # noqa: E731
        q, k = (h * jnp.cos(a) + other(h) * jnp.sin(a) for h in (x @ ws[0], x @ ws[1]))
        return jnp.mean((jax.nn.softmax(q @ k.T) @ (x @ ws[2])) ** 2)

    return fun


AROUND = {
    "transpose": lambda layer, x: layer(x.T).T,
    "reshape": lambda layer, x: layer(x.reshape(2, 4, 8)).reshape(8, 8),
    "vmap": lambda layer, x: jax.vmap(layer)(x[None])[0],
}


def compared(around, activation):
    """Residual layers whose last stream is compared with the first."""

    def fun(ws, x):
        h = x
        for w in ws:
            h = around(lambda h, w=w: h + activation(h @ w), h)
        return jnp.mean((h - x) ** 2)

    return fun


PROGRAMS = {f"angles {name}": turned(angles) for name, angles in ANGLES.items()} | {
    f"{name} around {activation.__name__}": compared(around, activation)
    for name, around in AROUND.items()
    for activation in (jnp.tanh, jax.nn.gelu)
}


CASES = [*itertools.product(PROGRAMS, HALVES)]


@pytest.mark.parametrize(("name", "half"), thorough_but(CASES, *range(0, len(CASES), 3)))
def test_views_between_activations_are_planned(name, half):
    for storage in ("fast", "lean"):
        traced(PROGRAMS[name], f"mixed_{half},storage={storage}")


# ---- random ones --------------------------------------------------------------------------------


def normed(h, axis):
    return (h - h.mean(axis, keepdims=True)) * jax.lax.rsqrt(h.var(axis, keepdims=True) + 1e-5)


PARTS = (
    lambda a, b, w: a.T,
    lambda a, b, w: jax.nn.gelu(a),
    lambda a, b, w: a + b,
    lambda a, b, w: a * b,
    lambda a, b, w: a @ w,
    lambda a, b, w: jnp.roll(a.reshape(-1), 1).reshape(a.shape),
    lambda a, b, w: jax.nn.softmax(a),
    lambda a, b, w: normed(a, -1),
    lambda a, b, w: normed(a.reshape(SIDE, -1, 2), 2).reshape(a.shape),
    lambda a, b, w: jnp.broadcast_to(a.sum(0), a.shape),
    lambda a, b, w: jax.vmap(lambda h: h + jax.nn.silu(h))(a[None])[0],
    lambda a, b, w: jnp.repeat(jnp.sin(a[:, ::2]), 2, 1) * b,
    lambda a, b, w: a + jnp.tanh(a.T @ w).T,
    lambda a, b, w: jnp.exp(-(a**2)).reshape(2, -1).reshape(a.shape),
)


def drawn(seed):
    rng = np.random.default_rng(seed)
    steps = rng.integers((len(PARTS), 6, 6), size=(rng.integers(4, 14), 3))

    def fun(ws, x):
        values = [x, x @ ws[0]]
        for part, i, j in steps:
            a, b = (values[-1 - k % len(values)] for k in (i, j))
            values.append(PARTS[part](a, b, ws[(i + j) % len(ws)]))
        return jnp.mean((values[-1] - values[1]) ** 2) + jnp.mean(values[-2] * values[-3])

    return fun


def planned(seed):
    policy = f"mixed_{HALVES[seed % 2]},storage={STORAGES[seed % len(STORAGES)]}"
    traced(drawn(seed), policy)


FEW = (66, 3, 21, 47)  # in the first, something reads what only a view reads


@pytest.mark.parametrize("seed", FEW)
def test_a_random_program_of_views_and_activations_is_planned(seed):
    planned(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 1000, 100))
def test_random_programs_of_views_and_activations_are_planned(first):
    for seed in range(first, first + 100):
        planned(seed)
