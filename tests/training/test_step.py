import dataclasses
import functools
import pickle
import warnings
from functools import partial

import equinox as eqx
import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import equations, matmul_dtypes

import mpjax
from mpjax._src.training.step import TrainState

BY_OP = ["mixed_bfloat16", "mixed_float16", "O2:float16", "O2:bfloat16"]
AT_BOUNDARY = ["float32", "O3:bf16", "p=f32,c=f16,o=f32", "mixed_bfloat16,casting=boundary"]
POLICIES = [*BY_OP, *AT_BOUNDARY]

METRICS = (
    *("loss", "grad_norm", "grads_finite", "loss_finite", "loss_scale"),
    *("skipped_steps", "consecutive_skips"),
)


def linear_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y).astype(jnp.float32) ** 2)


def linear_problem(rng, examples=8):
    # Small enough for gradients times 2**16 to fit float16.
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 10, jnp.float32)  # noqa: E731
    return {"w": draw(4, 3), "b": draw(3)}, (draw(examples, 4), draw(examples, 3))


class Net(nn.Module):
    """A small network with BatchNorm and Dropout: model state and rng."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(nn.relu(x)))


def net_loss(params, batch, model_state, rng):
    logits, new_state = Net().apply(
        {"params": params, **model_state},
        batch["x"],
        rngs={"dropout": rng},
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
    return losses.mean(), (new_state, {"logits": logits})


def net_problem(rng, examples=8):
    x = jnp.asarray(rng.normal(size=(examples, 4)), jnp.float32)
    batch = {"x": x, "y": x[:, :3].argmax(1)}
    variables = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["x"])
    return variables.pop("params"), variables, batch


def bits(tree):
    """Every leaf as raw bytes, so that NaN equals NaN and -0.0 does not equal 0.0."""
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(data(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def described(leaf):
    return leaf.dtype, leaf.shape, getattr(leaf, "weak_type", None)


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


# ---------------------------------------------------------------- it trains


def test_float32_is_the_loop_by_hand(rng):
    params, batch = linear_problem(rng)
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, 10))
    init, step = mpjax.build_train_step(linear_loss, optimizer, "float32")
    state, step = init(params), jax.jit(step)

    @jax.jit
    def by_hand(params, opt_state):
        loss, grads = jax.value_and_grad(linear_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    opt_state = optimizer.init(params)
    for number in range(5):
        state, metrics = step(state, batch)
        params, opt_state, loss, norm = by_hand(params, opt_state)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
        assert int(state.step) == number + 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, params)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_learns_and_keeps_its_dtypes(policy, rng):
    params, model_state, batch = net_problem(rng, 32)
    init, step = mpjax.build_train_step(net_loss, optax.adam(3e-2), policy, has_aux=True)
    state = init(params, model_state, jax.random.key(int(rng.integers(1000))))
    before = jax.tree.map(described, state)
    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert jax.tree.map(described, state) == before
    assert step._cache_size() == 1
    assert dtypes(state.model_state) == {"float32"}
    policy = mpjax.get_policy(policy)
    handed_out = policy.output_dtype if policy.casting == "op" else policy.compute_dtype
    assert metrics["aux"]["logits"].dtype == handed_out


@pytest.mark.parametrize("policy", POLICIES)
def test_matmuls_run_in_the_compute_dtype_backward_too(policy, rng):
    params, model_state, batch = net_problem(rng)
    init, step = mpjax.build_train_step(net_loss, optax.sgd(0.1), policy, has_aux=True)
    found = matmul_dtypes(step, init(params, model_state, jax.random.key(0)), batch)
    half = mpjax.get_policy(policy).compute_dtype.name
    assert len(found) == 5 and set(found) == {(half, half)}


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_o2_parameters_are_their_masters_rounded(half, rng):
    params, model_state, batch = net_problem(rng)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(5.0))
    init, step = mpjax.build_train_step(net_loss, optimizer, f"O2:{half}", has_aux=True)
    state, step = init(params, model_state, jax.random.key(0)), jax.jit(step)
    assert state.params["Dense_0"]["kernel"].dtype == half
    assert state.params["BatchNorm_0"]["scale"].dtype == jnp.float32
    for _ in range(5):
        state, _ = step(state, batch)
        masters = mpjax.master_params(state.opt_state, state.params)
        assert dtypes(masters) == {"float32"}
        rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, state.params)
        assert bits(rounded) == bits(state.params)


def test_o3_has_half_parameters_and_no_masters(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.adam(1e-2), "O3:bfloat16")
    state, _ = jax.jit(step)(init(params), batch)
    assert dtypes(state.params) == {"bfloat16"}
    assert len(jax.tree.leaves(state.opt_state)) == 5  # count, two moments for two parameters
    assert dtypes(state.opt_state) == {"int32", "float32"}


def test_overrides_are_obeyed_and_checked_once(rng):
    params, batch = linear_problem(rng)
    seen = {}

    def loss_fn(params, batch):
        seen.update(jax.tree.map(lambda x: x.dtype.name, params))
        return linear_loss(params, jax.tree.map(lambda x: x.astype(jnp.float32), batch))

    policy = mpjax.get_policy("O3:float16").override({"b": "float32"})
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy)
    state, _ = step(init(params), batch)
    assert seen == {"w": "float16", "b": "float32"}
    assert state.params["b"].dtype == jnp.float32
    init, _ = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy.override({"bias": "f32"}))
    with pytest.raises(ValueError, match="pattern 'bias' matches no parameter path.*nearest"):
        init(params)


def test_the_batch_is_cast_but_for_what_is_not_floating(rng):
    seen = {}

    def loss_fn(params, batch):
        seen.update({k: getattr(v, "dtype", None) for k, v in batch.items()})
        return jnp.float32(0) * params["w"].sum().astype(jnp.float32)

    batch = {"x": np.ones(2, np.float32), "labels": np.array([70000, 1]), "key": jax.random.key(0)}
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "p=f32,c=f16,o=f32")
    jax.jit(step)(init({"w": jnp.ones(2)}), batch)
    assert seen["x"] == jnp.float16 and seen["labels"] == jnp.int32
    assert seen["key"] == jax.random.key(0).dtype


def test_numpys_float64_is_cast_without_jit_too():
    seen = []
    loss_fn = lambda p, batch: (seen.append(batch.dtype), p["w"].astype(jnp.float32))[1]  # noqa: E731
    for policy in ("p=f32,c=bf16", "mixed_bfloat16"):
        init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy)
        step(init({"w": 1.0}), np.ones(3))
    assert seen == [jnp.bfloat16, jnp.float32]


def test_a_batch_is_rounded_for_matmuls_alone(rng):
    def loss_fn(params, batch):
        assert batch["x"].dtype == batch["weight"].dtype == jnp.float32
        return jnp.sum(batch["weight"]) + jnp.mean(batch["x"] @ params["w"])

    x, weight = (jnp.asarray(rng.normal(size=(3, 3)) + 1000, jnp.float32) for _ in range(2))
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_bfloat16")
    _, metrics = jax.jit(step)(init({"w": jnp.zeros((3, 3))}), {"x": x, "weight": weight})
    np.testing.assert_allclose(metrics["loss"], jnp.sum(weight), rtol=1e-6)


def test_an_override_may_name_a_scope(rng):
    def loss_fn(params, batch):
        x, y = batch
        with jax.named_scope("head"):
            return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    params, batch = linear_problem(rng)
    policy = mpjax.get_policy("mixed_float16").override({"head": "float32"})
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy)
    state = init(params)
    assert matmul_dtypes(step, state, batch) == [("float32", "float32")] * 2
    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), policy.override({"*/heat/*": "float32"})
    )
    with pytest.raises(ValueError, match="pattern '\\*/heat/\\*' matches neither.*nearest"):
        step(init(params), batch)


def test_op_lists_act_in_the_step(rng):
    params, batch = linear_problem(rng)
    policy = mpjax.get_policy("mixed_bfloat16").with_ops(full=("dot_general",))
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1), policy)
    assert matmul_dtypes(step, init(params), batch) == [("float32", "float32")] * 2


# ---------------------------------------------------------------- the gate


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_a_skipped_step_is_a_transaction(policy, kind, accumulate_steps, rng):
    params, model_state, batch = net_problem(rng)
    optimizer = optax.adamw(optax.warmup_constant_schedule(0.0, 1e-2, 5))
    init, step = mpjax.build_train_step(
        spoil(kind),
        optimizer,
        policy,
        loss_scale=mpjax.DynamicLossScale(2.0**10, growth_interval=2),
        has_aux=True,
        accumulate_steps=accumulate_steps,
    )
    step = jax.jit(step, donate_argnums=0)
    state = init(params, model_state, jax.random.key(0))
    # One bad example of eight: with accumulation, in one of the micro-batches.
    good, bad = ({**batch, "bad": jnp.arange(8) == index} for index in (-1, 5))
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


def test_the_scale_that_unscales_is_the_one_that_scaled(rng):
    """On a growth or backoff step an adjusted scale would be off by a factor of 2."""
    params, batch = linear_problem(rng)
    scale = mpjax.DynamicLossScale(2.0**8, growth_interval=1)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(1.0), "float32", loss_scale=scale)
    expected = jax.tree.map(lambda p, g: p - g, params, jax.grad(linear_loss)(params, batch))
    state, metrics = jax.jit(step)(init(params), batch)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, expected)
    assert float(metrics["loss_scale"]) == float(state.loss_scale.loss_scale) == 2.0**9


def test_clipping_sees_true_gradients(rng):
    params, batch = linear_problem(rng)
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(1.0))
    runs = []
    for scale in ("none", 2.0**15):
        init, step = mpjax.build_train_step(linear_loss, optimizer, "float32", loss_scale=scale)
        runs.append(jax.jit(step)(init(params), batch)[0].params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *runs)


def test_float16_scales_itself_down_until_it_fits(rng):
    """Gradients of about 100 overflow at 2**16; the scale halves until they do not."""
    params, (x, y) = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(1e-3), "mixed_float16")
    state, step = init(params), jax.jit(step, donate_argnums=0)
    for _ in range(12):
        state, metrics = step(state, (100 * x, 100 * y))
    assert 0 < int(state.skipped_steps) < 10 and metrics["grads_finite"]
    assert int(state.step) + int(state.skipped_steps) == 12
    assert float(state.loss_scale.loss_scale) == 2.0 ** (16 - int(state.skipped_steps))


def test_auto_is_dynamic_for_float16_compute_and_none_otherwise():
    def kind(policy):
        init, _ = mpjax.build_train_step(linear_loss, optax.sgd(0.1), policy)
        return type(init({"w": jnp.ones(1)}).loss_scale)

    dynamic = mpjax.get_policy("float32").override({"w": "float16"})
    assert {kind(p) for p in ("mixed_float16", "O2:f16", "O3:f16", dynamic)} == {
        mpjax.DynamicLossScale
    }
    assert {kind(p) for p in ("float32", "mixed_bfloat16", "O3:bf16")} == {mpjax.NoOpLossScale}


@pytest.mark.parametrize(
    "scale",
    [
        jmp.NoOpLossScale(),
        jmp.StaticLossScale(jnp.float32(128)),
        jmp.DynamicLossScale(jnp.asarray(2.0**15)),
        mpjax.StaticLossScale(128.0),
        64,
    ],
    ids=str,
)
def test_any_loss_scale_goes(scale, rng):
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
    init, step = mpjax.build_train_step(net_loss, optax.adam(1e-2), "mixed_float16", has_aux=True)
    state = init(params, model_state, jax.random.key(0))
    names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(step)(state, batch))}
    assert not {name for name in names if "callback" in name or "infeed" in name}
    step = jax.jit(step)
    step(state, batch)
    with jax.transfer_guard("disallow"):
        _, metrics = step(state, batch)
    assert all(isinstance(m, jax.Array) for m in jax.tree.leaves(metrics))
    assert set(metrics) == {*METRICS, "aux"}
    assert all(metrics[name].shape == () for name in METRICS)


# ---------------------------------------------------------------- the state


def test_donation_never_eats_the_callers_arrays(rng):
    params, model_state, batch = net_problem(rng)
    key = jax.random.key(0)
    for policy in ("float32", "O2:bf16"):
        init, step = mpjax.build_train_step(net_loss, optax.adam(1e-2), policy, has_aux=True)
        state = init(params, model_state, key)
        jax.jit(step, donate_argnums=0)(state, batch)
        for leaf in jax.tree.leaves((params, model_state, key)):
            assert not leaf.is_deleted()


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.contrib.schedule_free_adamw(1e-2),
        optax.ema(0.9),
        optax.chain(optax.scale_by_adam(), optax.contrib.reduce_on_plateau(), optax.scale(-1e-2)),
        optax.MultiSteps(optax.adam(1e-2), 2),
        optax.inject_hyperparams(optax.adamw)(1e-2),
        mpjax.skip_nonfinite(optax.adam(1e-2)),
        mpjax.with_master_weights(optax.adam(1e-2)),
    ],
    ids=["schedule_free", "ema", "plateau", "MultiSteps", "inject", "skip", "masters"],
)
@pytest.mark.parametrize("policy", ["mixed_float16", "O2:bf16", "O3:bf16"])
def test_unusual_optimizers_are_donated_and_compiled_once(optimizer, policy, rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optimizer, policy)
    state, step = init(params), jax.jit(step, donate_argnums=0)
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


@pytest.mark.parametrize("place", ["device", "replicated", "sharded"])
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


def test_the_loss_is_handed_only_to_optimizers_that_take_it(rng):
    """SAM's update knows no value=."""
    params, batch = linear_problem(rng)
    sam = optax.contrib.sam(optax.sgd(1e-2), optax.sgd(1e-3), sync_period=2)
    init, step = mpjax.build_train_step(linear_loss, sam, "mixed_bfloat16")
    jax.jit(step)(init(params), batch)


def test_the_state_is_a_pytree_of_arrays(rng):
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


def test_the_state_is_checkpointed_and_goes_on_bit_for_bit(rng, tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    params, model_state, batch = net_problem(rng)
    init, step = mpjax.build_train_step(net_loss, optax.adam(1e-2), "O2:float16", has_aux=True)
    step = jax.jit(step)
    state, _ = step(init(params, model_state, jax.random.PRNGKey(0)), batch)
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
def test_a_model_state_of_python_numbers_and_frozen_dicts(accumulate_steps):
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
        TypeError, match=r"model_state\['m'\] of shape \(3,\), but was given .*\(2,\)"
    ):
        jax.eval_shape(step, init({"w": 1.0}, {"m": jnp.ones(2)}), jnp.ones(2))


# ---------------------------------------------------------------- accumulation


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "O2:bf16"])
@pytest.mark.parametrize("steps", [2, 4])
def test_accumulation_equals_the_full_batch(policy, steps, rng):
    params, batch = linear_problem(rng)
    metrics, states = [], []
    for count in (1, steps):
        init, step = mpjax.build_train_step(
            linear_loss, optax.sgd(0.1), policy, accumulate_steps=count, loss_scale=8.0
        )
        state, metric = jax.jit(step)(init(params), batch)
        states.append(mpjax.master_params(state.opt_state, state.params))
        metrics.append(metric)
    rtol = 1e-5 if policy == "float32" else 0.02
    np.testing.assert_allclose(metrics[0]["loss"], metrics[1]["loss"], rtol=rtol)
    np.testing.assert_allclose(metrics[0]["grad_norm"], metrics[1]["grad_norm"], rtol=rtol)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), *states)


def test_accumulation_is_in_float32():
    """256 + 1 is 256 in bfloat16; the mean over micro-batches must not lose the ones."""
    loss_fn = lambda p, batch: jnp.sum((p["w"] * batch).astype(jnp.float32))  # noqa: E731
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(1.0), "O3:bf16", accumulate_steps=4)
    _, metrics = jax.jit(step)(init({"w": jnp.zeros(1)}), jnp.array([256.0, 1, 1, 1])[:, None])
    assert float(metrics["grad_norm"]) == 259 / 4


def test_model_state_threads_through_and_aux_and_rng_are_per_micro_batch():
    def loss_fn(params, batch, model_state, rng):
        noise = jax.random.uniform(rng)
        loss = jnp.mean((batch * params["w"]) ** 2).astype(jnp.float32)
        seen = {"before": model_state["n"], "noise": noise, "x": batch[0]}
        return loss, ({"n": model_state["n"] + 1}, seen)

    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), "float32", has_aux=True, accumulate_steps=3
    )
    state = init({"w": jnp.ones(())}, {"n": jnp.int32(5)}, jax.random.key(7))
    state, metrics = jax.jit(step)(state, jnp.arange(6.0))
    aux = metrics["aux"]
    assert aux["before"].tolist() == [5, 6, 7] and int(state.model_state["n"]) == 8
    assert aux["x"].tolist() == [0, 2, 4] and len(set(aux["noise"].tolist())) == 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": jnp.ones((7, 2))}, r"accumulate_steps=2 must divide .*batch\['x'\].*axis of 7"),
        ({"x": jnp.ones((8, 2)), "t": jnp.float32(1)}, r"batch\['t'\], of shape \(\), is a scalar"),
    ],
)
def test_a_leading_axis_that_does_not_divide_is_an_error_while_tracing(batch, message):
    loss_fn = lambda p, batch: jnp.mean(batch["x"] @ p["w"])  # noqa: E731
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32", accumulate_steps=2)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, init({"w": jnp.ones(2)}), batch)


# ---------------------------------------------------------------- transformations


def test_steps_in_a_scan_are_the_steps_one_by_one(rng):
    params, model_state, batch = net_problem(rng)
    init, step = mpjax.build_train_step(net_loss, optax.adam(1e-2), "mixed_float16", has_aux=True)
    state = init(params, model_state, jax.random.key(0))
    batches = jax.tree.map(lambda x: jnp.stack([x] * 3), batch)
    scanned, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    for _ in range(3):
        state, _ = jax.jit(step)(state, batch)
    assert metrics["loss"].shape == (3,) and int(scanned.step) == 3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3),
        scanned.params,
        state.params,
    )


def test_an_ensemble_under_vmap_judges_each_member(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1), "mixed_float16")
    members = jax.tree.map(lambda p: jnp.stack([p, p.at[0].set(jnp.nan), p]), params)
    state, metrics = jax.jit(jax.vmap(step, in_axes=(0, None)))(jax.vmap(init)(members), batch)
    assert metrics["loss_finite"].tolist() == [True, False, True]
    assert state.step.tolist() == [1, 0, 1]


def test_remat_of_the_loss_changes_nothing(rng):
    params, batch = linear_problem(rng)
    results = []
    for loss_fn in (linear_loss, jax.checkpoint(linear_loss)):
        init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_bfloat16")
        results.append(jax.jit(step)(init(params), batch)[0].params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), *results)


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def replicas(kind, step):
    """Returns ``step`` over two replicas, each with its half of the batch."""
    if kind == "pmap":
        mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), out_axes=None)
        return lambda state, batch: mapped(
            state, jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)
        )
    spec = PartitionSpec
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh(),
            in_specs=(spec(), spec("data")),
            out_specs=spec(),
            check_vma=kind == "checked",
        )
    )


@pytest.mark.parametrize("kind", ["checked", "unchecked", "pmap"])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("policy", ["float32", "O2:bf16"])
def test_replicas_average_once_and_decide_together(kind, accumulate_steps, policy, rng):
    params, (x, y) = linear_problem(rng)
    options = {"accumulate_steps": accumulate_steps, "loss_scale": "dynamic"}
    build = partial(mpjax.build_train_step, linear_loss, optax.sgd(0.1), policy, **options)
    init, whole = build(accumulate_steps=1)
    _, local = build(axis_name="data")
    expected, want = jax.jit(whole)(init(params), (x, y))
    state, got = replicas(kind, local)(init(params), (x, y))
    rtol = 1e-5 if policy == "float32" else 0.02
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(got[name], want[name], rtol=rtol)
    masters = [mpjax.master_params(s.opt_state, s.params) for s in (state, expected)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), *masters)
    # One replica's NaN stops both.
    state, metrics = replicas(kind, local)(init(params), (x.at[0].set(jnp.nan), y))
    assert int(state.step) == 0 and int(state.skipped_steps) == 1 and not metrics["loss_finite"]
    assert bits(state.params) == bits(init(params).params)


def test_replicas_average_model_state_and_draw_their_own_randomness(rng):
    def loss_fn(params, batch, model_state, rng):
        new = {"mean": batch.mean(), "n": model_state["n"] + 1}
        aux = jax.random.uniform(rng, (1,))
        return jnp.mean(batch * params["w"]).astype(jnp.float32), (new, aux)

    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), "float32", has_aux=True, axis_name="data"
    )
    state = init({"w": jnp.ones(())}, {"mean": jnp.zeros(()), "n": 0}, jax.random.key(0))
    spec = PartitionSpec
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh(),
            in_specs=(spec(), spec("data")),
            out_specs=(spec(), {**dict.fromkeys(METRICS, spec()), "aux": spec("data")}),
        )
    )
    state, metrics = step(state, jnp.array([1.0, 3.0]))
    assert float(state.model_state["mean"]) == 2 and int(state.model_state["n"]) == 1
    assert len(set(metrics["aux"].tolist())) == 2


@pytest.mark.parametrize("accumulate_steps", [1, 2])
@pytest.mark.parametrize("kind", ["checked", "unchecked", "pmap"])
def test_replicas_agree_on_keys_flags_and_constants_in_the_model_state(kind, accumulate_steps):
    def loss_fn(params, batch, model_state):
        new = {"key": jax.random.fold_in(model_state["key"], 1), "flag": batch.sum() > 0, "f": 3.0}
        return jnp.mean(batch * params["w"]), new

    options = {"accumulate_steps": accumulate_steps, "axis_name": "data"}
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32", **options)
    state = init({"w": 1.0}, {"key": jax.random.key(0), "flag": False, "f": 0.0})
    state, _ = replicas(kind, step)(state, jnp.array([1.0, 1.0, -1.0, -1.0]))
    assert bool(state.model_state["flag"]) and float(state.model_state["f"]) == 3
    folds = range(accumulate_steps)
    key = functools.reduce(lambda key, _: jax.random.fold_in(key, 1), folds, jax.random.key(0))
    assert bits(state.model_state["key"]) == bits(key)


def test_sharded_arrays_under_plain_jit_need_nothing(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1), "O2:bf16", accumulate_steps=2)
    expected, _ = jax.jit(step)(init(params), batch)
    sharded = jax.device_put(batch, NamedSharding(mesh(), PartitionSpec("data")))
    state = jax.device_put(init(params), NamedSharding(mesh(), PartitionSpec()))
    state, _ = jax.jit(step, donate_argnums=0)(state, sharded)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02, atol=0.02
        ),
        state.params,
        expected.params,
    )


# ---------------------------------------------------------------- other people's models


def test_an_nnx_model(rng):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(4, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.norm(self.hidden(x))))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, model_state):
        model = nnx.merge(graph, params, model_state)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch["x"]).astype(jnp.float32), batch["y"]
        )
        return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

    policy = mpjax.get_policy("O2:bfloat16").override({"head/*": "float32"})
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-2), policy)
    state, step = init(params, rest), jax.jit(step, donate_argnums=0)
    assert state.params["hidden"]["kernel"][...].dtype == jnp.bfloat16
    assert state.params["norm"]["scale"][...].dtype == jnp.float32
    assert state.params["head"]["kernel"][...].dtype == jnp.float32
    _, _, batch = net_problem(rng)
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0] and step._cache_size() == 1


def test_an_equinox_model(rng):
    model = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["y"]
        ).mean()

    _, _, batch = net_problem(rng)
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-2), "mixed_float16")
    state, step = init(params), jax.jit(step, donate_argnums=0)
    first = step(init(params), batch)[1]["loss"]
    for _ in range(30):
        state, metrics = step(state, batch)
    assert metrics["loss"] < first
    with pytest.raises(TypeError, match=r"params\['.*activation'\] .*eqx.partition"):
        init(model)


# ---------------------------------------------------------------- divergence and warnings


def test_raise_if_diverged_says_how_many_at_what_scale_and_why():
    metrics = {"consecutive_skips": 3, "loss_scale": jnp.float32(512), "loss_finite": True}
    mpjax.raise_if_diverged(metrics, 4)
    with pytest.raises(mpjax.DivergenceError, match="3 steps in a row .*scale 512.*learning rate"):
        mpjax.raise_if_diverged(metrics, 3)
    with pytest.raises(mpjax.DivergenceError, match="loss itself was not finite.*the data"):
        mpjax.raise_if_diverged({**metrics, "loss_finite": jnp.array(False)}, 2)
    for wrong in ({}, None):
        with pytest.raises(TypeError, match="metrics=.*must be the metrics"):
            mpjax.raise_if_diverged(wrong, 2)
    with pytest.raises(ValueError, match="those of several steps"):
        mpjax.raise_if_diverged({"consecutive_skips": np.zeros(3)}, np.int64(2))
    for limit in (0, 1.5, True):
        with pytest.raises(ValueError, match="limit=.*must be a whole number"):
            mpjax.raise_if_diverged(metrics, limit)


def test_a_float16_loss_is_warned_about_once():
    loss_fn = lambda p, batch: jnp.mean(p["w"] * batch)  # noqa: E731
    for accumulate_steps in (1, 2):
        init, step = mpjax.build_train_step(
            loss_fn, optax.sgd(0.1), "p=f32,c=f16", accumulate_steps=accumulate_steps
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state, step = init({"w": jnp.ones(2)}), jax.jit(step)
            for _ in range(2):
                state, _ = step(state, jnp.ones((2, 2)))
        assert [c for c in caught if "The loss is float16" in str(c.message)] == caught
        assert len(caught) == 1


def test_op_lists_that_have_no_effect_are_warned_about():
    policy = mpjax.get_policy("p=f32,c=bf16").with_ops(half=("exp",))
    with pytest.warns(UserWarning, match="its op lists have no effect.*casting=op"):
        mpjax.build_train_step(linear_loss, optax.sgd(0.1), policy)


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_an_autocast_loss_trains(half, rng):
    params, model_state, batch = net_problem(rng, 32)
    loss_fn = mpjax.autocast(net_loss, f"mixed_{half}")
    init, step = mpjax.build_train_step(
        loss_fn, optax.adam(3e-2), "float32", loss_scale="dynamic", has_aux=True
    )
    state = init(params, model_state, jax.random.key(0))
    assert {half} == {dtype for row in matmul_dtypes(step, state, batch) for dtype in row}
    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert dtypes(state.model_state) == dtypes(state.params) == {"float32"}
    assert step._cache_size() == 1


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_fn": 3}, TypeError, "loss_fn=3 must be a function"),
        ({"optimizer": "adam"}, TypeError, "optimizer='adam' must be an optax optimizer"),
        ({"policy": "mixed_f16"}, ValueError, "Did you mean 'mixed_float16'"),
        ({"loss_scale": "automatic"}, ValueError, "loss_scale='automatic' is not known"),
        ({"accumulate_steps": 0}, ValueError, "accumulate_steps=0 must be a whole number"),
        ({"accumulate_steps": 2.0}, ValueError, "accumulate_steps=2.0 must be a whole number"),
        ({"has_aux": "yes"}, ValueError, "has_aux='yes' must be True or False"),
        ({"loss_scale": mpjax.DynamicLossScale}, ValueError, "loss_scale=.*is not known"),
    ],
)
def test_bad_arguments(arguments, error, message):
    good = {"loss_fn": linear_loss, "optimizer": optax.sgd(0.1)}
    with pytest.raises(error, match=message):
        mpjax.build_train_step(**{**good, **arguments})


@pytest.mark.parametrize(
    ("params", "rng", "message"),
    [
        ({}, None, "params has no leaves"),
        (
            {"w": jnp.ones(1), "n": jnp.arange(2)},
            None,
            "params\\['n'\\] is int32, which has no gradient",
        ),
        ({"f": jnp.tanh}, None, r"params\['f'\] is .* not an array"),
        ({"w": jnp.ones(1)}, 0, r"rng=0 must be one PRNG key, such as jax.random.key\(0\)"),
        ({"w": jnp.ones(1)}, jax.random.split(jax.random.key(0)), "must be one PRNG key"),
    ],
)
def test_bad_states(params, rng, message):
    init, _ = mpjax.build_train_step(linear_loss, optax.sgd(0.1))
    with pytest.raises((TypeError, ValueError), match=message):
        init(params, rng=rng)


@pytest.mark.parametrize(
    ("loss_fn", "options", "state", "message"),
    [
        (lambda p: 0.0, {}, {}, r"loss_fn is called as loss_fn\(params, batch\)"),
        (lambda p, b: 0.0, {}, {"rng": jax.random.key(0)}, r"loss_fn\(params, batch, rng=...\)"),
        (lambda p, b: (p["w"], 1), {}, {}, "must return loss, but it returned a tuple of 2"),
        (lambda p, b: p["w"], {"has_aux": True}, {}, r"must return \(loss, aux\)"),
        (
            lambda p, b, model_state: p["w"],
            {},
            {"model_state": {"n": 1}},
            r"must return \(loss, new_model_state\)",
        ),
        (
            lambda p, b, model_state: (p["w"], 1),
            {"has_aux": True},
            {"model_state": {"n": 1}},
            r"must return \(loss, \(new_model_state, aux\)\)",
        ),
        (
            lambda p, b, model_state: (p["w"], {"m": 1}),
            {},
            {"model_state": {"n": 1}},
            "new model_state of another structure",
        ),
        (lambda p, b: jnp.ones(2) * p["w"], {}, {}, r"loss must be one real floating number"),
    ],
)
def test_a_loss_function_of_the_wrong_form_is_named(loss_fn, options, state, message):
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32", **options)
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(step, init({"w": jnp.float32(1)}, **state), None)


def test_a_swapped_call_is_named(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match="state is a tuple, not a TrainState.*step.state, batch"):
        step(batch, init(params))
    assert isinstance(init(params), TrainState)
