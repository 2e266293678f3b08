"""Haiku: our policies drive `hk.mixed_precision`, and its states fit `build_train_step`."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import full_matmuls, matmul_dtypes, normal, thorough_but

import mpjax

X, Y = np.asarray(normal(1, 32, 8)), np.asarray(normal(2, 32, 8))


class Net(hk.Module):
    def __call__(self, x):
        x = hk.BatchNorm(True, True, 0.9)(hk.Linear(16)(x), is_training=True)
        return hk.Linear(8)(hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(x)))


@pytest.mark.parametrize("name", thorough_but(["mixed_float16", "O3:bfloat16", "float32"], 1))
def test_policy_drives_haiku_modules(name):
    policy = mpjax.get_policy(name)
    full = mpjax.get_policy("float32").with_output_dtype(policy.compute_dtype)
    hk.mixed_precision.set_policy(Net, policy)
    hk.mixed_precision.set_policy(hk.BatchNorm, full)
    try:
        model = hk.transform_with_state(lambda x: Net()(x))
        params, state = jax.jit(model.init)(jax.random.key(0), X)
        out, _ = jax.eval_shape(model.apply, params, state, jax.random.key(1), X)
        dtypes = matmul_dtypes(lambda p: model.apply(p, state, jax.random.key(1), X), params)
    finally:
        hk.mixed_precision.clear_policy(Net)
        hk.mixed_precision.clear_policy(hk.BatchNorm)
    half = policy.compute_dtype.name
    assert set(dtypes) == {(half, half)} and out.dtype == policy.output_dtype
    assert params["net/linear"]["w"].dtype == policy.param_dtype
    assert params["net/batch_norm"]["scale"].dtype == np.float32


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_float16", "O2:bfloat16"])
def test_build_train_step_carries_the_state_of_haiku(policy):
    model = hk.transform_with_state(lambda x: Net()(x))
    params, first = jax.jit(model.init)(jax.random.key(0), X)

    def loss_fn(params, batch, model_state, rng):
        out, new = model.apply(params, model_state, rng, batch["x"])
        return jnp.mean((out - batch["y"]) ** 2), new

    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-2), policy)
    state, step = jax.jit(init)(params, first, jax.random.key(1)), jax.jit(step)
    losses = []
    for _ in range(30):
        state, metrics = step(state, {"x": X, "y": Y})
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.9 * losses[0] and metrics["grads_finite"]
    assert not full_matmuls(step, state, {"x": X, "y": Y})
    bad = X.copy()
    bad[0] = np.inf
    after, metrics = step(state, {"x": bad, "y": Y})
    assert not metrics["loss_finite"]
    old, new = (jax.tree.leaves(s.model_state) for s in (state, after))
    assert all(map(np.array_equal, old, new))


def test_overrides_match_the_paths_of_haiku_modules():
    model = hk.without_apply_rng(hk.transform(lambda x: hk.Linear(8, name="head")(jnp.tanh(x))))
    params = jax.eval_shape(model.init, jax.random.key(0), X)
    policy = mpjax.get_policy("mixed_bfloat16").override({"head/*": "float32"})
    assert full_matmuls(mpjax.autocast(model.apply, policy), params, X)
    assert not full_matmuls(mpjax.autocast(model.apply, "mixed_bfloat16"), params, X)
