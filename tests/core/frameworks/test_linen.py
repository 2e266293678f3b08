"""Loops of Flax linen with `mpjax.linen.TrainState`."""

import functools
import operator
from typing import Any

import flax.linen as nn
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from flax.training import train_state
from jax.sharding import PartitionSpec as P
from problems import mesh
from support import normal, thorough_but

import mpjax.linen

X, Y = np.asarray(normal(1, 32, 4)), np.asarray(normal(2, 32, 8))
BAD = X.copy()
BAD[1, 1] = np.nan
POLICIES = thorough_but(
    ["float32", "mixed_bfloat16", "mixed_float16", "O2:bfloat16", "O2:float16"], "O2:float16"
)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16, use_bias=False)(x))
        return nn.Dense(8)(nn.Dropout(0.1, deterministic=not train)(nn.relu(x)))


class Plain(train_state.TrainState):
    batch_stats: Any


class Mixed(mpjax.linen.TrainState):
    batch_stats: Any


def loop(policy=None, tx=None, **options):
    """A loop of Flax's; in mixed precision two of its lines differ."""
    model, tx = Model(), tx or optax.adamw(1e-2)
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(model.init)(rngs, X)
    given = {"apply_fn": model.apply, "tx": tx, **variables}
    state = Mixed.create(policy=policy, **given, **options) if policy else Plain.create(**given)
    traced = []

    @jax.jit
    def step(state, x, y, number):
        traced.append(number)

        def loss_fn(params):
            out, new = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                mutable=["batch_stats"],
                rngs={"dropout": jax.random.fold_in(jax.random.key(2), number)},
            )
            return jnp.mean((out - y) ** 2), new

        differentiate = state.value_and_grad if policy else jax.value_and_grad
        (loss, new), grads = differentiate(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, batch_stats=new["batch_stats"]), loss

    return state, step, traced


shared = functools.cache(loop)  # its step is compiled once for all tests


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("policy", POLICIES)
def test_linen_loop_has_the_curve_of_float32_in_one_compilation(policy):
    state, step, traced = shared(policy)
    want, plain, _ = shared()
    begun, losses, wanted = len(traced), [], []  # traced by earlier tests
    for number in range(40):
        state, loss = step(state, X, Y, number)
        want, plain_loss = plain(want, X, Y, number)
        losses.append(float(loss))
        wanted.append(float(plain_loss))
    tolerance = 1e-5 if policy == "float32" else 0.03
    np.testing.assert_allclose(losses, wanted, rtol=tolerance)
    for got, expected in zip(arrays(state.batch_stats), arrays(want.batch_stats), strict=True):
        np.testing.assert_allclose(got, expected, atol=tolerance)
    assert len(traced) - begun <= 1 and int(state.step) == 40
    assert state.params["Dense_0"]["kernel"].dtype == mpjax.get_policy(policy).param_dtype


@pytest.mark.parametrize("policy", POLICIES)
def test_skipped_linen_step_leaves_no_trace(policy):
    state, step, _ = shared(policy)
    state, _ = step(state, X, Y, 0)
    after, _ = step(state, BAD, Y, 1)
    for name in ("step", "params", "opt_state.inner_state", "batch_stats"):
        pair = map(arrays, map(operator.attrgetter(name), (after, state)))
        assert all(map(np.array_equal, *pair)), name
    assert (int(after.skipped_steps), int(after.consecutive_skips)) == (1, 1)
    scales = [float(s.loss_scale.loss_scale) for s in (after, state)]
    assert scales[0] == scales[1] / (2 if "float16" in policy and "b" not in policy else 1)
    again, _ = step(after, X, Y, 1)
    assert (int(again.step), int(again.skipped_steps), int(again.consecutive_skips)) == (2, 1, 0)


def test_overflowing_gradient_lowers_the_loss_scale_of_a_linen_loop():
    scaled, *_ = loop("O2:float16", loss_scale=mpjax.DynamicLossScale(2.0**24))
    state, step, _ = shared("O2:float16")
    after, _ = step(state.replace(opt_state=scaled.opt_state), X, Y * np.float32(1e3), 0)
    assert float(after.loss_scale.loss_scale) == 2.0**23 and int(after.step) == 0


def test_nonfinite_batch_stats_of_linen_are_not_kept():
    state, _, _ = shared("mixed_float16")
    grads = jax.tree.map(jnp.ones_like, state.params)
    broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.inf), state.batch_stats)
    after = jax.jit(lambda s, g, b: s.apply_gradients(grads=g, batch_stats=b))(state, grads, broken)
    assert all(map(np.array_equal, arrays(after.batch_stats), arrays(state.batch_stats)))
    assert int(after.step) == 0 and int(after.skipped_steps) == 1
    assert float(after.loss_scale.loss_scale) == float(state.loss_scale.loss_scale)


@jax.custom_vjp
def noted(x, note):
    return x


noted.defvjp(lambda x, note: (x, note), lambda note, ct: (ct, note + 1))  # as float8's scales are


@pytest.mark.parametrize("policy", thorough_but(["mixed_float16", "O2:float16"], 1))
def test_overwrite_with_gradient_collection_is_not_scaled(policy):
    params = {"params": {"w": jnp.ones(4)}, OVERWRITE_WITH_GRADIENT: {"note": jnp.float32(3)}}
    state = mpjax.linen.TrainState.create(
        apply_fn=noted, params=params, tx=optax.sgd(0.5), policy=policy
    )

    def loss_fn(params):
        w = noted(params["params"]["w"], params[OVERWRITE_WITH_GRADIENT]["note"])
        return jnp.mean(w.astype(jnp.float32) ** 2)

    @jax.jit
    def step(state):
        _, grads = state.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads)

    state = step(state)
    assert float(state.params[OVERWRITE_WITH_GRADIENT]["note"]) == 4.0
    np.testing.assert_array_equal(state.params["params"]["w"], 0.75)


def test_linen_train_state_is_saved_by_flax():
    state, step, _ = shared("O2:float16")
    trained, _ = step(state, X, Y, 0)
    restored = flax.serialization.from_bytes(state, flax.serialization.to_bytes(trained))
    assert all(map(np.array_equal, arrays(restored), arrays(trained)))


@pytest.mark.parametrize(
    "was, to", [("O2:float16", "mixed_float16"), ("O3:float16", "O3:bfloat16")]
)
def test_bytes_of_another_policy_are_refused(was, to):
    """flax alone narrows parameters without a word, and does not say what converts."""
    scale = {"loss_scale": "dynamic"} if was.startswith("O3") else {}
    data = flax.serialization.to_bytes(loop(was, **scale)[0])
    with pytest.raises(ValueError, match="another policy.*checkpoint.save and restore convert"):
        flax.serialization.from_bytes(loop(to, **scale)[0], data)


def test_linen_train_state_refuses_bad_arguments():
    with pytest.raises(TypeError, match=r"tx=.* must be an optax optimizer"):
        loop("mixed_float16", tx=0.1)
    with pytest.raises(ValueError, match="policy"):
        loop("mixed_float17")
    with pytest.raises(ValueError, match="loss_scale"):
        loop("mixed_float16", loss_scale="automatic")
    state, *_ = shared("mixed_float16")
    with pytest.raises(TypeError, match="loss_fn=3 must be"):
        state.value_and_grad(3)
    with pytest.raises(TypeError, match="has_aux=True"):
        state.value_and_grad(lambda params: (jnp.float32(1), params))(state.params)


def test_value_and_grad_averages_over_replicas_by_axis_name():
    model = nn.Dense(8)
    params = {"kernel": np.asarray(normal(3, 4, 8)), "bias": np.zeros(8, np.float32)}
    state = mpjax.linen.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.sgd(0.1), policy="mixed_float16"
    )

    def step(state, x, y, axis_name=None):
        def loss_fn(params):
            return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)

        loss, grads = state.value_and_grad(loss_fn, axis_name=axis_name)(state.params)
        return loss, grads, state.apply_gradients(grads=grads)

    replica = functools.partial(step, axis_name="data")
    specs = P(), P("data"), P("data")
    run = jax.jit(jax.shard_map(replica, mesh=mesh(), in_specs=specs, out_specs=P()))
    for got, want in zip(run(state, X, Y)[:2], jax.jit(step)(state, X, Y)[:2], strict=True):
        # Each replica sums half of the rows in float16 matmuls.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3), got, want)
    loss, _, after = run(state, BAD, Y)  # NaN on one replica
    assert not jnp.isfinite(loss) and int(after.skipped_steps) == 1
    with pytest.raises(ValueError, match="no axis 'data' is mapped"):
        replica(state, X, Y)
