"""Results of elementwise operations are recomputed where a gate reads them, and not kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from measure import run
from support import HALVES, cast, normal, thorough_but

X, W, V = normal(0, 3, 4, 4, 8), normal(1, 8, 32, scale=0.3), normal(2, 32, 8, scale=0.3)
P = {"w": W, "v": V, "in": normal(3, 32, 8, scale=0.3), "out": normal(4, 8, 32, scale=0.3)}
P |= {"scale": 1 + normal(5, 32, scale=0.2), "shift": normal(6, 32, scale=0.2)}


def activated(p, x):
    h = x @ p["w"]
    scale = jax.lax.rsqrt(jnp.var(h, (0, 1, 2)) + 1e-5)
    return jax.nn.silu((h - jnp.mean(h, (0, 1, 2))) * (scale * p["scale"]) + p["shift"])


def gate(p, y):
    return jax.nn.sigmoid(jax.nn.silu(jnp.mean(y, (1, 2), keepdims=True) @ p["in"]) @ p["out"])


def squeezed(p, x):
    y = activated(p, x)
    return jnp.mean(jnp.sin(y * gate(p, y) @ p["v"]))


def read_by_a_matmul(p, x):
    y = activated(p, x)
    return jnp.mean(jnp.sin(y * gate(p, y) @ p["v"] + y @ p["v"]))


def of_more(p, x):
    y = activated(p, x) * jax.nn.silu(x @ p["w"][:, ::-1])
    return jnp.mean(jnp.sin(y * gate(p, y) @ p["v"]))


def kept(fun, *args):
    """Returns the dtypes of the arrays as large as an activation that a backward pass is given."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fun, *a)[1]))(*args).jaxpr
    fresh = {*jaxpr.outvars} - {*jaxpr.invars} - {*jaxpr.constvars}
    whole = (*X.shape[:-1], W.shape[-1])
    return [str(v.aval.dtype) for v in fresh if v.aval.shape == whole]


@pytest.mark.parametrize(("fun", "arrays"), [(squeezed, 2), (read_by_a_matmul, 2), (of_more, 3)])
def test_only_products_and_the_operands_of_matmuls_are_kept_around_a_gate(fun, arrays):
    assert kept(cast(fun), P, X) == ["bfloat16"] * arrays


AROUND = {
    "jit": jax.jit,
    "vmap": lambda fun: lambda p, x: jnp.sum(jax.vmap(fun, (None, 0))(p, x[None])),
    "remat": jax.checkpoint,
    "scan": lambda fun: lambda p, x: jax.lax.scan(lambda c, x: (c + fun(p, x), c), 0.0, x[None])[0],
}


CASES = [(squeezed, around) for around in AROUND] + [(read_by_a_matmul, "jit"), (of_more, "jit")]


PAIRS = [(*case, half) for half in HALVES for case in CASES]


@pytest.mark.parametrize(("fun", "around", "half"), thorough_but(PAIRS, 2, 7, 9))
def test_recomputed_gates_match_float32_values_and_gradients(fun, around, half):
    def by_hand(p, x):
        rounded = jax.tree.map(lambda w: w.astype(half), p)
        return fun(rounded, x.astype(half)).astype(jnp.float32)

    def errors(candidate):
        ways = [jax.value_and_grad(f, (0, 1)) for f in (candidate, fun)]
        got, true = run(lambda *args: [way(*args) for way in ways], P, X)
        far = jax.tree.map(lambda a, b: np.linalg.norm(a - b) / np.linalg.norm(b), got, true)
        return max(jax.tree.leaves(far))

    assert errors(AROUND[around](cast(fun, half))) <= max(errors(by_hand), 0.005)


def test_jvp_of_a_recomputed_gate_matches_float32():
    ours, true = run(lambda: [jax.jvp(f, (P, X), (P, X))[1] for f in (cast(squeezed), squeezed)])
    assert abs(ours - true) <= 0.05 * abs(true)


@pytest.mark.parametrize("around", thorough_but(["jit", "scan"], "scan"))
def test_second_derivatives_of_recomputed_gates_match_float32(around):
    def second(fun):
        return run(lambda: jax.jvp(jax.grad(AROUND[around](fun)), (P, X), (P, X))[1])

    for ours, true in zip(
        *map(jax.tree.leaves, map(second, (cast(squeezed), squeezed))), strict=True
    ):
        assert np.linalg.norm(ours - true) <= 0.05 * np.linalg.norm(true)
