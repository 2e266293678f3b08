"""autocast on whole models, as their frameworks write them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from models import MODELS, linen_transformer
from support import assert_near, full_matmuls, normal, thorough_but

import mpjax

PAIRS = [*((name, "bfloat16") for name in MODELS), ("linen transformer", "float16")]


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, ("mixture of experts", "bfloat16")))
def test_models_under_autocast_have_16_bit_matmuls_and_match_float32(name, half):
    loss, params = MODELS[name]()
    auto = mpjax.autocast(loss, f"mixed_{half}")
    gradient = jax.value_and_grad(auto, allow_int=True)
    assert not full_matmuls(auto, params)
    assert not full_matmuls(gradient, params)
    plain = jax.value_and_grad(loss, allow_int=True)
    (value, got), (want_value, want) = jax.jit(lambda p: (gradient(p), plain(p)))(params)
    assert_near(value, want_value, 0.02)
    got, want = ([x for x in jax.tree.leaves(t) if x.dtype == jnp.float32] for t in (got, want))
    assert_near(
        np.concatenate([g.ravel() for g in got]), np.concatenate([w.ravel() for w in want]), 0.05
    )


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            y = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(y))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


@pytest.mark.thorough
def test_batch_norm_network_under_autocast_matches_float32():
    model, x = ConvNet(), 20 + 100 * normal(0, 4, 8, 8, 3)
    variables = jax.jit(model.init)(jax.random.key(0), x)

    def loss(params, stats):
        both = {"params": params, "batch_stats": stats}
        y, new = model.apply(both, x, mutable=["batch_stats"])
        return jnp.mean(y**2), new["batch_stats"]

    auto = mpjax.autocast(loss, "mixed_bfloat16")
    args = variables["params"], variables["batch_stats"]
    (value, stats), grads = jax.jit(jax.value_and_grad(auto, has_aux=True))(*args)
    (want, want_stats), want_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
    assert_near(value, want, 0.05)
    assert_near(stats, want_stats, 0.02)
    assert_near(grads["Dense_0"], want_grads["Dense_0"], 0.08)
    assert not full_matmuls(jax.grad(auto, has_aux=True), *args)


@pytest.mark.thorough
def test_training_learns_as_in_float32():
    loss, params = linen_transformer()
    optimizer = optax.adam(1e-2)

    def train(loss):
        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        p, state = params, optimizer.init(params)
        for _ in range(30):
            p, state, value = step(p, state)
        return float(value)

    assert abs(train(mpjax.autocast(loss, "mixed_bfloat16")) - train(loss)) < 0.05
