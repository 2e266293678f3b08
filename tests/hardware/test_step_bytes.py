"""What a training step moves on an H100 that need not be there, beside one in plain optax."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import compiles, shape

import mpjax
from benchmarks.models import training_step

pytestmark = [pytest.mark.slow, compiles("h100")]

WIDTH = 1024
PARAMS = {name: shape(WIDTH, WIDTH) for name in "abc"}
BATCH = shape(16, WIDTH)
FLOAT32_BYTES = sum(4 * p.size for p in PARAMS.values())


def loss(params, batch):
    x = batch
    for weights in params.values():
        x = jnp.tanh(x @ weights)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def moved(state, step):
    """Returns bytes in units of the float32 parameters."""
    step = jax.jit(step, donate_argnums=0)
    return mpjax.compile_for("h100", step, state, BATCH).bytes_accessed / FLOAT32_BYTES


def plain(policy, optimizer):
    """Neither scaled, nor judged, nor gated."""
    cast = mpjax.autocast(lambda params, rest, batch: (loss(params, batch), rest), policy)
    state = PARAMS, {}, jax.eval_shape(optimizer.init, PARAMS)
    return moved(state, training_step(cast, optimizer))


def ours(policy, optimizer):
    init, step = mpjax.build_train_step(loss, optimizer, policy, loss_scale="dynamic")
    return moved(jax.eval_shape(init, PARAMS), step)


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_scale_verdict_and_gate_cost_at_most_one_read_of_the_gradients(policy):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
    assert ours(policy, clipped) <= plain(policy, clipped) + 0.01
    one_read = 1 if policy == "float32" else 0.5  # as they leave the backward pass
    assert ours(policy, optax.adamw(3e-4)) <= plain(policy, optax.adamw(3e-4)) + one_read + 0.01
