"""The verdict on a step covers the model state as well as the loss and gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from problems import POLICIES, bits, linear_loss, linear_problem, mesh, net_loss, net_problem
from support import thorough_but

import mpjax
from mpjax._src.core.base.trees import stays_finite


def carries(new_state):
    """Returns a loss whose model state ``batch`` decides."""
    return lambda params, batch, model_state: (params["w"] ** 2, new_state(model_state, batch))


def stepping(loss_fn, policy="float32", **options):
    """Returns what takes a step from a model state: the state before, the state after, metrics."""
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy, **options)
    step = jax.jit(step)

    def stepped(model_state, batch):
        state = init({"w": np.float32(1)}, model_state)
        return state, *step(state, batch)

    return stepped


carried = stepping(carries(lambda _, batch: batch))  # compiled once for each kind of state


# ---- the model state -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "accumulate_steps, policy",
    thorough_but(itertools.product([1, 2], POLICIES), (2, "O2:bfloat16")),
)
def test_outlier_never_reaches_the_model_state(policy, accumulate_steps, rng):
    def loss_fn(params, batch, model_state, rng):
        loss, (new_state, aux) = net_loss(params, batch, model_state, rng)
        # As BatchNorm's does where the square of an outlier overflows, and its output is 0.
        outlier = jnp.where(batch["bad"].any(), jnp.float32(1e20), 1.0) ** 2
        return loss, (jax.tree.map(lambda x: x * outlier, new_state), aux)

    params, model_state, batch = net_problem(rng)
    scale = mpjax.DynamicLossScale(2.0**10, growth_interval=2)
    options = {"has_aux": True, "accumulate_steps": accumulate_steps, "loss_scale": scale}
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(1e-2, 0.9), policy, **options)
    step = jax.jit(step, donate_argnums=0)
    state = jax.jit(init)(params, model_state, jax.random.key(0))
    good, bad = ({**batch, "bad": np.arange(8) == index} for index in (-1, 5))
    state, metrics = step(state, good)
    assert metrics["state_finite"]
    kept = ("params", "opt_state", "model_state", "step", "loss_scale")
    before = {name: bits(getattr(state, name)) for name in kept}
    state, metrics = step(state, bad)
    assert metrics["loss_finite"] and metrics["grads_finite"] and not metrics["state_finite"]
    assert {name: bits(getattr(state, name)) for name in kept} == before
    assert int(metrics["skipped_steps"]) == int(metrics["consecutive_skips"]) == 1
    state, metrics = step(state, good)
    assert int(state.step) == 2 and not int(metrics["consecutive_skips"])
    assert bool(mpjax.all_finite(state.model_state)) and metrics["state_finite"]


@pytest.mark.thorough
def test_batch_norm_of_an_outlier_is_skipped(rng):
    params, model_state, batch = net_problem(rng)
    init, step = mpjax.build_train_step(net_loss, optax.sgd(0.1), "float32", has_aux=True)
    state = jax.jit(init)(params, model_state, jax.random.key(0))
    batch["x"][0] = 1e25
    new, metrics = jax.jit(step)(state, batch)
    assert not metrics["state_finite"] and bits(new.model_state) == bits(state.model_state)


@pytest.mark.parametrize(("bad", "scale"), [("state", 1024.0), ("both", 512.0)])
def test_loss_scale_is_lowered_by_gradients_alone(bad, scale):
    """Which of the two failed first cannot be told, and a scale too high must come down."""

    def loss_fn(params, batch, model_state):
        flat = params["w"] - jax.lax.stop_gradient(params["w"])
        steep = jnp.sqrt(flat) if bad == "both" else flat  # 0, of infinite derivative
        return params["w"] + steep, jnp.full(2, jnp.nan)

    options = {"loss_scale": mpjax.DynamicLossScale(1024.0, growth_interval=1)}
    _, new, metrics = stepping(loss_fn, **options)(np.ones(2, np.float32), None)
    assert metrics["loss_finite"] and not metrics["state_finite"]
    assert bool(metrics["grads_finite"]) == (bad == "state")
    assert float(new.loss_scale.loss_scale) == scale and not int(new.step)


@pytest.mark.parametrize(
    ("old", "new", "good"),
    [
        (1.0, jnp.inf, False),
        (1.0, -jnp.inf, False),
        (1.0, jnp.nan, False),
        (1.0, 2.0, True),
        (-jnp.inf, -jnp.inf, True),
        (-jnp.inf, 1.0, True),
        (jnp.nan, jnp.inf, True),
        (jnp.bfloat16(1), jnp.bfloat16(jnp.inf), False),
        (np.complex64(1), np.complex64(complex(1, jnp.inf)), False),
        (np.ones(3, np.float32), np.array([1, 2, jnp.nan], np.float32), False),
        (np.array([-jnp.inf, 0], np.float32), np.array([-jnp.inf, jnp.inf], np.float32), True),
        (np.zeros((0, 2), np.float32), np.zeros((0, 2), np.float32), True),
    ],
)
def test_model_state_leaf_that_was_finite_must_stay_finite(old, new, good):
    old, new = jnp.asarray(old), jnp.asarray(new)
    assert bool(jax.jit(stays_finite)([jnp.ones(2), new], [jnp.ones(2), old])) == good
    state = {"n": jnp.int32(2), "ok": True, "key": jax.random.key(0), "x": old}
    given = {"n": jnp.int32(3), "ok": jnp.array(False), "key": jax.random.key(1), "x": new}
    state, after, metrics = carried(state, given)
    assert bool(metrics["state_finite"]) == good == bool(int(after.step))
    assert bits(after.model_state) == bits(given if good else state.model_state)


def test_model_state_that_overflows_its_stored_dtype_is_not_finite():
    """Statistics are judged as they would be kept."""
    loss_fn = carries(lambda state, _: state.astype(jnp.float32) * 1e6)
    state, after, metrics = stepping(loss_fn)(np.float16(1), None)
    assert not metrics["state_finite"] and bits(after.model_state) == bits(state.model_state)


def test_state_finite_is_true_without_a_model_state(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1))
    assert jax.jit(step)(init(params), batch)[1]["state_finite"]


@pytest.mark.parametrize("check_vma", thorough_but([True, False], 0))
@pytest.mark.parametrize("accumulate_steps", thorough_but([1, 2], 1))
def test_nonfinite_model_state_of_one_replica_skips_all(check_vma, accumulate_steps):
    def loss_fn(params, batch, model_state):
        return params["w"] * jnp.mean(jnp.tanh(batch)), {"max": batch.max() ** 2}

    options = {"axis_name": "data", "accumulate_steps": accumulate_steps}
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32", **options)
    spec = PartitionSpec
    specs = {"mesh": mesh(), "in_specs": (spec(), spec("data")), "out_specs": spec()}
    step = jax.jit(jax.shard_map(step, check_vma=check_vma, **specs))
    state = init({"w": jnp.ones(())}, {"max": jnp.zeros(())})
    good = jnp.array([1.0, 2.0, 3.0, 4.0])
    new, metrics = step(state, good)
    assert metrics["state_finite"] and float(new.model_state["max"]) == 10
    new, metrics = step(state, good.at[2:].set(1e20))
    assert metrics["loss_finite"] and metrics["grads_finite"] and not metrics["state_finite"]
    assert bits((new.params, new.model_state)) == bits((state.params, state.model_state))


def test_each_member_of_an_ensemble_has_its_own_verdict():
    loss_fn = carries(lambda _, batch: batch)
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32")
    states = jax.vmap(init)({"w": jnp.ones(2)}, jnp.ones(2))
    new, metrics = jax.jit(jax.vmap(step))(states, jnp.array([jnp.inf, 3.0]))
    assert metrics["state_finite"].tolist() == [False, True]
    assert new.model_state.tolist() == [1, 3] and new.step.tolist() == [0, 1]


# ---- updated parameters, which are not judged ----------------------------------------------------


@pytest.mark.parametrize("policy", ["float32", "O2:float16", "O3:f16"])
def test_an_update_that_overflows_is_applied_and_told_by_the_steps_after_it(policy):
    """A verdict on new parameters would have to be known before they are written."""

    def loss_fn(params, batch):
        return jnp.sum(params["w"].astype(jnp.float32) * batch)

    rate = 3e38 if policy == "float32" else 1e5
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(rate), policy, loss_scale=1.0)
    state, step = init({"w": jnp.ones(2)}), jax.jit(step)
    state, metrics = step(state, jnp.array([2.0, 0.0]))
    assert int(state.step) == 1 and np.isinf(state.params["w"]).tolist() == [True, False]
    assert metrics["loss_finite"] and metrics["grads_finite"]
    for _ in range(2):
        state, metrics = step(state, jnp.ones(2))
    assert int(state.step) == 1 and int(metrics["consecutive_skips"]) == 2
    with pytest.raises(mpjax.errors.DivergenceError, match="weights that have diverged.*65504"):
        mpjax.raise_if_diverged(metrics, 2)
