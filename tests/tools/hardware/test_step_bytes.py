"""The bytes that a training step moves on an absent H100, beside a step in plain optax."""

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import compiles, shape

import mpjax
from benchmarks.models import training_step
from mpjax._src.core.training import step as steps

pytestmark = [pytest.mark.thorough, compiles("h100")]

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


def with_statistics(params, batch, model_state):
    x, new = batch, {}
    for name, weights in params.items():
        x = x @ weights
        mean, var = x.mean(0), x.var(0)
        new[name] = {"mean": mean, "var": 0.9 * model_state[name]["var"] + 0.1 * var}
        x = jnp.tanh((x - mean) * jax.lax.rsqrt(var + 1e-5))
    return jnp.mean(x**2), new


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_the_verdict_on_the_model_state_costs_nothing(policy, monkeypatch):
    statistics = {name: {"mean": shape(WIDTH), "var": shape(WIDTH)} for name in PARAMS}

    def bytes_moved():
        init, step = mpjax.build_train_step(with_statistics, optax.adamw(3e-4), policy)
        return moved(jax.eval_shape(init, PARAMS, statistics), step)

    judged = bytes_moved()
    monkeypatch.setattr(steps, "stays_finite", lambda new, old: jnp.array(True))
    assert judged <= bytes_moved() + 0.01


OPTIMIZERS = {
    "adamw": lambda: optax.adamw(3e-4),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4)),
    "momentum": lambda: optax.sgd(3e-4, 0.9),
    "lion": lambda: optax.lion(3e-4),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_8bit_moments_are_never_written_down_in_float32(name):
    """Computed twice: no more is moved than with float32 moments."""
    large = {"embedding": shape(50257, WIDTH), **PARAMS}

    def report(optimizer):
        def update(params, state, grads):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(optimizer.init, large)
        return mpjax.compile_for(
            "h100", jax.jit(update, donate_argnums=(0, 1)), large, state, large
        )

    full, eight = (
        report(wrap(OPTIMIZERS[name]())) for wrap in (lambda x: x, mpjax.optim.with_8bit_moments)
    )
    weights = sum(p.size for p in large.values())
    assert eight.bytes_accessed <= full.bytes_accessed
    assert eight.temp_bytes <= 0.4 * weights
    moments = 1 if name in ("momentum", "lion") else 2
    assert full.argument_bytes - eight.argument_bytes >= 2.96 * moments * weights
