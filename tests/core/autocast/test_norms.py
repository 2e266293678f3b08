"""Norms before activations: their gradients, and those of what is normalized."""

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pytest
from measure import run
from support import HALVES, cast, normal, thorough_but

X, W, V = normal(0, 4, 8, 8, 16), normal(1, 16, 32, scale=0.3), normal(2, 32, 16, scale=0.3)
KEEP = np.random.default_rng(5).random((4, 8, 8, 32)) < 0.8
P = {"w": W, "v": V, "scale": 1 + normal(3, 32, scale=0.2), "shift": normal(4, 32, scale=0.2)}


def normed(p, x, axes):
    centered = x - jnp.mean(x, axes, keepdims=True)
    scaled = centered * jax.lax.rsqrt(jnp.mean(centered**2, axes, keepdims=True) + 1e-5)
    return scaled * p["scale"] + p["shift"]


NORMS = {
    "batch": lambda p, x: normed(p, x, (0, 1, 2)),
    "layer": lambda p, x: normed(p, x, (-1,)),
    "instance": lambda p, x: normed(p, x, (1, 2)),
}
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "exact gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "squeezed": lambda x: jax.nn.silu(x) * jnp.mean(jax.nn.silu(x), (1, 2), keepdims=True),
    "pooled": lambda x: jax.nn.silu(x) - jnp.mean(jax.nn.silu(x)),
    "dropped": lambda x: jax.nn.silu(x) * KEEP / 0.8,
    "masked": lambda x: jax.nn.silu(x * KEEP),
}


def loss_of(norm, activation):
    def loss(p, x):
        return jnp.mean(jnp.sin(activation(norm(p, x @ p["w"])) @ p["v"]))

    return loss


def error_of(fun, exact, *args):
    # Compiled: outside of jit, XLA:CPU multiplies by another kernel than by_hand has in a program.
    found, true = jax.jit(lambda *args: (jax.grad(fun)(*args), jax.grad(exact)(*args)))(*args)
    errors = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), found, true)
    return max(jax.tree.leaves(errors))


# Every other activation once: norms and 16-bit dtypes by turns.
CASES = [(n, a, half) for n in NORMS for a in ACTIVATIONS for half in HALVES]
QUICK = [([*NORMS][i % 3], a, HALVES[i % 2]) for i, a in enumerate(ACTIVATIONS)][::4]


@pytest.mark.parametrize(("norm", "activation", "half"), thorough_but(CASES, *QUICK))
def test_gradients_of_norms_are_no_worse_than_with_rounded_matmuls(norm, activation, half):
    loss = loss_of(NORMS[norm], ACTIVATIONS[activation])

    def by_hand(p, x):
        h = (x.astype(half) @ p["w"].astype(half)).astype(jnp.float32)
        h = ACTIVATIONS[activation](NORMS[norm](p, h).astype(half))
        return jnp.mean(jnp.sin((h @ p["v"].astype(half)).astype(jnp.float32)))

    ours, theirs = error_of(cast(loss, half), loss, P, X), error_of(by_hand, loss, P, X)
    assert ours <= max(1.25 * theirs, 0.005)


AXES = {"batch": (0, 1, 2), "instance": (1, 2), "layer": (-1,)}
PAIRS = [(norm, half) for norm in AXES for half in ("bfloat16", "float16")]


@pytest.mark.parametrize(("norm", "half"), thorough_but(PAIRS, ("batch", "bfloat16")))
def test_a_mean_is_taken_off_before_a_cotangent_is_rounded(norm, half):
    """Else the sum of a norm's cotangents, which is zero, is that of their roundings."""

    def loss(p, x):
        for q in p["layers"]:
            x = jax.nn.silu(normed(q, x @ q["w"], AXES[norm]))
        return jnp.mean(jnp.sin(x @ p["v"]))

    layers = [{**P, "w": w} for w in (W, normal(6, 32, 32, scale=0.2))]
    args = {"layers": layers, "v": V}, normal(7, 8, 16, 16, 16)
    rows = measure.check(loss, args, half)
    assert all(row.autocast <= 2 * row.yardstick for row in rows if row.part == "gradient")


@pytest.mark.parametrize("around", thorough_but([jax.jit, jax.checkpoint, jax.vmap], 1, 2))
def test_norm_gradients_match_float32_under_jit_checkpoint_and_vmap(around):
    loss = loss_of(NORMS["batch"], jax.nn.silu)
    half = cast(loss)
    fun = (
        around(half) if around is not jax.vmap else lambda p, x: jax.vmap(half, (None, 0))(p, x)[0]
    )
    x = X if around is not jax.vmap else X[None]
    assert error_of(fun, lambda p, _: loss(p, X), P, x) <= 0.02
    true = run(jax.grad(loss), P, X)["w"]
    slope = run(lambda: jax.jvp(lambda w: half({**P, "w": w}, X), (W,), (W,))[1])
    assert abs(slope - np.vdot(true, W)) <= 0.05 * np.linalg.norm(true)
