"""Skip connections around each other: checkpoints within each other, up to a bound."""

import jax
import jax.numpy as jnp
import pytest
from measure import run
from support import assert_near, normal

import mpjax
from mpjax._src.autocast import lean
from mpjax._src.base import _jax

W, X = normal(0, 8, 8, scale=0.5), normal(1, 4, 8)


def skips(count):
    def fun(w, x):
        saved, h = [], x
        for _ in range(count):
            h = jax.nn.gelu(h @ w)
            saved.append(h)
        for _ in range(count):
            h = jax.nn.gelu((h + saved.pop()) @ w)
        return jnp.mean(h**2)

    return fun


def deepest(jaxpr):
    """Returns how many checkpoints are within each other."""
    inner = [
        (eqn.primitive.name == "remat2") + deepest(getattr(program, "jaxpr", program))
        for eqn in jaxpr.eqns
        for program in _jax.inner_jaxprs(eqn)
    ]
    return max(inner, default=0)


@pytest.mark.parametrize("storage", ["lean", "8bit"])
def test_checkpoints_of_many_skip_connections_are_as_deep_as_allowed(storage, monkeypatch):
    auto = mpjax.autocast(skips(7), f"mixed_bfloat16,storage={storage}")
    free = deepest(jax.make_jaxpr(auto)(W, X).jaxpr)
    monkeypatch.setattr(lean, "DEEPEST", 2)
    auto = mpjax.autocast(skips(7), f"mixed_bfloat16,storage={storage}")
    assert 1 < deepest(jax.make_jaxpr(auto)(W, X).jaxpr) < free
    assert_near(*run(lambda *a: (jax.grad(auto)(*a), jax.grad(skips(7))(*a)), W, X), 0.03)


@pytest.mark.thorough
@pytest.mark.parametrize("storage", ["lean", "8bit"])
@pytest.mark.parametrize("count", [60, 150])
def test_gradients_of_many_skip_connections_are_traced(count, storage):
    auto = mpjax.autocast(skips(count), f"mixed_bfloat16,storage={storage}")
    assert jax.eval_shape(jax.grad(auto), W, X).shape == W.shape
