"""The gate of the training step: what is skipped, and what the loss scale does."""

import itertools
import re

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from problems import METRICS, POLICIES, bits, linear_loss, linear_problem, net_loss, net_problem
from support import equations, thorough_but

import mpjax


def spoil(kind):
    """Returns a loss whose forward, or only its backward pass, is not finite where bad is set."""

    def loss_fn(params, batch, model_state, rng):
        loss, (new_state, aux) = net_loss(params, batch, model_state, rng)
        bad = batch["bad"].any()
        new_state = jax.tree.map(lambda x: jnp.where(bad, jnp.nan, x), new_state)
        if kind == "loss":
            return jnp.where(bad, jnp.inf, 1) * loss, (new_state, aux)
        first = params["Dense_0"]["bias"][0].astype(jnp.float32)
        # The derivative of sqrt at 0 is infinite; its value is not.
        hidden = jnp.sqrt(jnp.where(bad, first - jax.lax.stop_gradient(first), 1.0))
        return loss + hidden, (new_state, aux)

    return loss_fn


ALL = list(itertools.product([1, 2], ["loss", "gradient"], POLICIES))
QUICK = ((1, "gradient", "O2:float16"), (2, "loss", "mixed_bfloat16,casting=boundary"))


@pytest.mark.parametrize("accumulate_steps, kind, policy", thorough_but(ALL, *QUICK))
def test_a_skipped_step_is_a_transaction(policy, kind, accumulate_steps, rng):
    params, model_state, batch = net_problem(rng)
    optimizer = optax.sgd(optax.warmup_constant_schedule(0.0, 1e-2, 5), momentum=0.9)
    init, step = mpjax.build_train_step(
        spoil(kind),
        optimizer,
        policy,
        loss_scale=mpjax.DynamicLossScale(2.0**10, growth_interval=2),
        has_aux=True,
        accumulate_steps=accumulate_steps,
    )
    step = jax.jit(step, donate_argnums=0)
    state = jax.jit(init)(params, model_state, jax.random.key(0))
    # One bad example of eight: with accumulation, in one of the micro-batches.
    good, bad = ({**batch, "bad": np.arange(8) == index} for index in (-1, 5))
    state, _ = step(state, good)
    kept = ("params", "opt_state", "model_state", "step")
    before = {name: bits(getattr(state, name)) for name in kept}
    tracker, key = int(state.loss_scale.growth_tracker), bits(state.rng)
    for count in (1, 2):
        state, metrics = step(state, bad)
        for name in kept:
            assert bits(getattr(state, name)) == before[name], name
        assert (int(state.skipped_steps), int(state.consecutive_skips)) == (count, count)
        assert bool(metrics["loss_finite"]) == (kind == "gradient")
        assert not metrics["grads_finite"] or kind == "loss"
    assert bits(state.rng) != key
    if kind == "loss":
        assert float(state.loss_scale.loss_scale) == 2.0**10
        assert int(state.loss_scale.growth_tracker) == tracker == 1
    else:
        assert float(state.loss_scale.loss_scale) == 2.0**8
        assert int(state.loss_scale.growth_tracker) == 0
    state, metrics = step(state, good)
    assert int(state.step) == 2 and int(metrics["consecutive_skips"]) == 0
    assert int(metrics["skipped_steps"]) == 2 and metrics["grads_finite"]
    assert step._cache_size() == 1


def test_gradients_are_unscaled_by_the_loss_scale_that_scaled_them(rng):
    """On a growth or backoff step an adjusted scale would be off by a factor of 2."""
    params, batch = linear_problem(rng)
    scale = mpjax.DynamicLossScale(2.0**8, growth_interval=1)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(1.0), "float32", loss_scale=scale)
    grads = jax.jit(jax.grad(linear_loss))(params, batch)
    expected = jax.tree.map(lambda p, g: p - np.asarray(g), params, grads)
    state, metrics = jax.jit(step)(init(params), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, expected)
    assert float(metrics["loss_scale"]) == float(state.loss_scale.loss_scale) == 2.0**9


def test_gradients_whose_norm_overflows_are_skipped_like_infinite_ones():
    """Adam's second moment would stay infinite, and clipping would turn them into zeros."""
    init, step = mpjax.build_train_step(
        lambda params, x: jnp.sum(params["w"] * x), optax.adam(1e-3), "float32"
    )
    state, step = jax.jit(init)({"w": np.ones(4, np.float32)}), jax.jit(step)
    for size, applied in ((1e18, True), (1e20, False), (jnp.inf, False), (jnp.nan, False)):
        new, metrics = step(state, np.full(4, np.float32(size)))
        assert bool(metrics["grads_finite"]) == bool(np.isfinite(metrics["grad_norm"])) == applied
        assert int(new.step) == applied and int(new.skipped_steps) == (not applied)
        assert np.isfinite(
            np.concatenate([x.ravel() for x in jax.tree.leaves(new.opt_state)])
        ).all()


def test_verdict_and_norm_share_one_pass_over_the_gradients(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.adam(1e-3), "mixed_float16")
    compiled = jax.jit(step).lower(init(params), batch).compile().as_text()
    assert not re.search(r"pred\[\d.*? is-finite\(", compiled)
    squares = re.findall(r"= f32\[\] reduce\(", compiled)
    assert len(squares) == len(params) + 1  # and the loss's mean


def test_clipping_sees_unscaled_gradients(rng):
    params, batch = linear_problem(rng)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    runs = []
    for scale in ("none", 2.0**15):
        init, step = mpjax.build_train_step(linear_loss, optimizer, "float32", loss_scale=scale)
        runs.append(jax.jit(step)(init(params), batch)[0].params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *runs)


def test_float16_loss_scale_falls_until_gradients_fit(rng):
    """Gradients of about 100 overflow at 2**16; the scale halves until they do not."""
    params, (x, y) = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(1e-3), "mixed_float16")
    state, step = init(params), jax.jit(step, donate_argnums=0)
    for _ in range(12):
        state, metrics = step(state, (100 * x, 100 * y))
    assert 0 < int(state.skipped_steps) < 10 and metrics["grads_finite"]
    assert int(state.step) + int(state.skipped_steps) == 12
    assert float(state.loss_scale.loss_scale) == 2.0 ** (16 - int(state.skipped_steps))


def test_auto_loss_scale_is_dynamic_for_float16_compute_and_none_otherwise():
    def kind(policy):
        init, _ = mpjax.build_train_step(linear_loss, optax.sgd(0.1), policy)
        return type(init({"w": jnp.ones(1)}).loss_scale)

    dynamic = mpjax.get_policy("float32").override({"w": "float16"})
    assert {kind(p) for p in ("mixed_float16", "O2:f16", "O3:f16", dynamic)} == {
        mpjax.DynamicLossScale
    }
    assert {kind(p) for p in ("float32", "mixed_bfloat16", "O3:bf16")} == {mpjax.NoOpLossScale}


SCALES = [
    jmp.NoOpLossScale(),
    jmp.StaticLossScale(jnp.float32(128)),
    jmp.DynamicLossScale(jnp.asarray(2.0**15)),
    mpjax.StaticLossScale(128.0),
    64,
]


@pytest.mark.parametrize("scale", thorough_but(SCALES, 0, 2), ids=str)
def test_train_step_takes_any_loss_scale(scale, rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(
        linear_loss, optax.sgd(1e-3), "mixed_float16", loss_scale=scale
    )
    state, step = init(params), jax.jit(step, donate_argnums=0)
    for _ in range(3):
        state, metrics = step(state, batch)
    assert int(state.step) == 3 and step._cache_size() == 1
    assert metrics["loss_scale"].dtype == jnp.float32


def test_nothing_in_the_step_talks_to_the_host(rng):
    params, model_state, batch = net_problem(rng)
    init, step = mpjax.build_train_step(net_loss, optax.sgd(1e-2), "mixed_float16", has_aux=True)
    state = jax.jit(init)(params, model_state, jax.random.key(0))
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(state, batch))}
    assert not {name for name in names if "callback" in name or "infeed" in name}
    step, batch = jax.jit(step), jax.device_put(batch)
    with jax.transfer_guard("disallow"):
        _, metrics = step(state, batch)
    assert all(isinstance(m, jax.Array) for m in jax.tree.leaves(metrics))
    assert set(metrics) == {*METRICS, "aux"}
    assert all(metrics[name].shape == () for name in METRICS)
