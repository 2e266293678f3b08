"""The state of the training step: donated, compiled once, saved, of lasting dtypes."""

import dataclasses
import itertools
import pickle

import flax.core
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from problems import bits, dtypes, linear_loss, linear_problem, mesh, net_loss, net_problem
from support import calls_of, thorough_but

import mpjax


def test_donation_never_eats_the_callers_arrays(rng):
    params, model_state, _ = jax.tree.map(jnp.asarray, net_problem(rng))
    key = jax.random.key(0)
    for policy in ("float32", "O2:bf16"):
        init, _ = mpjax.build_train_step(net_loss, optax.sgd(1e-2), policy, has_aux=True)
        for leaf in jax.tree.leaves(init(params, model_state, key)):
            leaf.delete()  # as donation does, where it can
        for leaf in jax.tree.leaves((params, model_state, key)):
            assert not leaf.is_deleted()


@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_call_of_a_jitted_step_runs_little_python(policy, rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1, momentum=0.9), policy)
    state, step = init(params), jax.jit(step, donate_argnums=0)
    for _ in range(3):
        state, _ = step(state, batch)
    # The state and its loss scale: flattened, rebuilt, made. Three named tuples: rebuilt, made.
    assert calls_of(lambda: step(state, batch)) <= 2 * 3 + 3 * 2 + 3


UNUSUAL = {
    "schedule_free": optax.contrib.schedule_free_adamw(1e-2),
    "ema": optax.ema(0.9),
    "plateau": optax.chain(
        optax.scale_by_adam(), optax.contrib.reduce_on_plateau(), optax.scale(-1e-2)
    ),
    "MultiSteps": optax.MultiSteps(optax.adam(1e-2), 2),
    "inject": optax.inject_hyperparams(optax.adamw)(1e-2),
    "skip": mpjax.optim.skip_nonfinite(optax.adam(1e-2)),
    "masters": mpjax.optim.with_master_weights(optax.adam(1e-2)),
}
ALL = list(itertools.product(["mixed_float16", "O2:bf16", "O3:bf16"], UNUSUAL))


@pytest.mark.parametrize("policy, name", thorough_but(ALL, 0, 3, 11, 16))
def test_unusual_optimizers_are_donated_and_compiled_once(policy, name, rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, UNUSUAL[name], policy)
    state, step = jax.jit(init)(params), jax.jit(step, donate_argnums=0)
    for _ in range(3):
        state, metrics = step(state, batch)
    assert step._cache_size() == 1 and metrics["grads_finite"]


def test_python_numbers_weak_types_and_numpy_make_one_compilation():
    params = {"a": 1.0, "b": jnp.asarray(2.0), "c": np.ones(2), "d": np.float32(3)}
    loss_fn = lambda p, batch: sum(jnp.sum(x).astype(jnp.float32) for x in p.values())  # noqa: E731
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-2), "O2:bfloat16")
    state, step = init(params), jax.jit(step, donate_argnums=0)
    assert dtypes(state.params) == {"bfloat16"}
    for _ in range(2):
        state, _ = step(state, None)
    assert step._cache_size() == 1


@pytest.mark.parametrize("place", thorough_but(["device", "replicated", "sharded"], 2))
def test_committed_parameters_make_one_compilation(place, rng):
    where = {
        "device": jax.devices()[0],
        "replicated": NamedSharding(mesh(), PartitionSpec()),
        "sharded": NamedSharding(mesh(), PartitionSpec("data")),
    }
    params, batch = linear_problem(rng)
    params = {"w": jax.device_put(params["w"], where[place]), "b": params["b"]}
    init, step = mpjax.build_train_step(linear_loss, optax.adam(1e-2), "O2:float16")
    state, step = init(params), jax.jit(step, donate_argnums=0)
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    counts = []
    for _ in range(3):
        state, _ = step(state, batch)
        counts.append(len(compiled))
    jax.monitoring.clear_event_listeners()
    assert counts[0] >= 1 and counts[1:] == counts[:1] * 2


def test_train_state_is_a_pytree_of_arrays(rng):
    params, model_state, _ = net_problem(rng)
    init, _ = mpjax.build_train_step(net_loss, optax.adam(1e-2), "mixed_float16", has_aux=True)
    state = init(params, model_state, jax.random.PRNGKey(0))
    assert dataclasses.is_dataclass(state)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    copy = pickle.loads(pickle.dumps(jax.device_get(state)))
    assert bits(copy) == bits(state)
    shapes = jax.eval_shape(init, params, model_state, jax.random.PRNGKey(0))
    assert jax.tree.structure(shapes) == jax.tree.structure(state)
    assert bits(jax.jit(init)(params, model_state, jax.random.PRNGKey(0))) == bits(state)


@pytest.mark.thorough
def test_orbax_checkpoint_of_the_train_state_goes_on_bit_for_bit(rng, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params, model_state, batch = net_problem(rng)
    init, step = mpjax.build_train_step(net_loss, optax.adam(1e-2), "O2:float16", has_aux=True)
    step = jax.jit(step)
    state, _ = step(jax.jit(init)(params, model_state, jax.random.PRNGKey(0)), batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    assert bits(step(restored, batch)) == bits(step(state, batch))


def test_running_statistics_stay_float32_though_the_model_returns_half(rng):
    def loss_fn(params, batch, model_state):
        x = batch @ params["w"]
        mean = 0.9 * model_state["mean"].astype(x.dtype) + 0.1 * x.mean(0)
        return jnp.mean(x.astype(jnp.float32) ** 2), {
            "mean": mean,
            "count": model_state["count"] + 1,
        }

    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_bfloat16")
    state = init({"w": jnp.ones((3, 2))}, {"mean": jnp.zeros(2), "count": 0})
    state, _ = jax.jit(step)(state, jnp.ones((4, 3)))
    assert state.model_state["mean"].dtype == jnp.float32
    assert state.model_state["count"].dtype == jnp.int32 and int(state.model_state["count"]) == 1


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_model_state_may_hold_python_numbers_and_frozen_dicts(accumulate_steps):
    def loss_fn(params, batch, model_state):
        return params["w"] * batch.sum(), {"n": 1, "stats": {"mean": 0.5}}

    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), "float32", accumulate_steps=accumulate_steps
    )
    state = init({"w": 1.0}, flax.core.freeze({"n": 0, "stats": {"mean": 0.0}}))
    state, _ = jax.jit(step)(state, jnp.ones(2))
    assert isinstance(state.model_state, flax.core.FrozenDict)
    assert int(state.model_state["n"]) == 1 and float(state.model_state["stats"]["mean"]) == 0.5


@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_model_state_that_changes_its_shape_is_named(accumulate_steps):
    loss_fn = lambda p, b, model_state: (p["w"], {"m": jnp.ones(3)})  # noqa: E731
    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), "float32", accumulate_steps=accumulate_steps
    )
    with pytest.raises(
        TypeError, match=r"model_state\['m'\] with shape \(3,\), but was given .*\(2,\)"
    ):
        jax.eval_shape(step, init({"w": 1.0}, {"m": jnp.ones(2)}), jnp.ones(2))
