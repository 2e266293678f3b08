"""The first state of `mixed_precision`: of unusual parameters, and of a run in optax alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_loss, linear_problem
from support import thorough_but

import mpjax

STORED = ["O2:bfloat16", "O3:float16", "O3:bf16,rounding=kahan", "mixed_bfloat16"]


@pytest.mark.parametrize("policy", thorough_but(STORED, 0, 3))
@pytest.mark.parametrize("make", [np.ones, np.float64], ids=["array", "scalar"])
def test_numpy_float64_is_float32_to_jax_from_the_first_step_on(policy, make):
    optimizer = mpjax.mixed_precision(optax.adam(0.1), policy)
    given = {"w": make(3)}
    stored = optimizer.policy.cast_to_param(given)
    assert stored["w"].dtype == optimizer.policy.param_dtype
    if optimizer.policy.param_dtype != np.float32:
        with pytest.raises(ValueError, match=r"params\['w'\] is float64.* stores it in .*float16"):
            optimizer.init(given)
    params, state = stored, optimizer.init(stored)
    update = optimizer.update
    for _ in range(2):
        updates, state = update({"w": np.ones_like(given["w"], np.float32)}, state, params)
        params = optax.apply_updates(params, updates)
    assert params["w"].dtype == optimizer.policy.param_dtype


OVERRIDDEN = mpjax.get_policy("mixed_bfloat16").override({"w": "float16"})


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O3:float16", OVERRIDDEN], ids=str)
def test_python_numbers_that_are_stored_in_16_bits_are_refused_by_name(policy):
    optimizer = mpjax.mixed_precision(optax.adam(0.1), policy)
    with pytest.raises(ValueError, match=r"params\['w'\] is a Python number.* stores it in "):
        optimizer.init({"w": 1.0})
    mpjax.mixed_precision(optax.adam(0.1), "mixed_bfloat16").init({"w": 1.0})


WAYS = ["mixed_bfloat16", "O2:bfloat16", "O2:bfloat16,masters=split", "O3:bf16,rounding=stochastic"]
WAYS += ["mixed_float16,moments=8bit"]


@pytest.mark.parametrize("policy", thorough_but(WAYS, 1, 4))
def test_run_of_optax_goes_on_with_its_moments_and_back(policy, rng):
    params, _ = linear_problem(rng)
    params = {**params, "large": np.ones((64, 64), np.float32)}  # large enough for codes
    adam = optax.adamw(1e-2)
    grads = jax.tree.map(lambda x: np.asarray(rng.normal(size=x.shape), np.float32), params)
    _, plain = jax.jit(adam.update)(grads, adam.init(params), params)
    optimizer = mpjax.mixed_precision(adam, policy)
    stored = optimizer.policy.cast_to_param(params)
    state = optimizer.from_optax(plain, stored)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(stored))
    back = optimizer.to_optax(state, stored)
    coded = "8bit" in policy
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(plain), strict=True):
        # A code has 7 or 8 bits for the square root of its share of a block's largest moment.
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * float(jnp.abs(b).max()) * coded)
        assert a.dtype == b.dtype
    updates, state = optimizer.update(grads, state, stored)
    expected, _ = jax.jit(adam.update)(grads, plain, params)
    if policy == "mixed_bfloat16":
        for a, b in zip(jax.tree.leaves(updates), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
    assert int(optimizer.to_optax(state, stored)[0].count) == 2


NARROW = {
    "16-bit moments": optax.adam(1e-2, mu_dtype="bfloat16"),
    "moments of frozen weights": optax.chain(optax.adam(1e-2), optax.freeze({"w": True, "v": 0})),
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
}


@pytest.mark.parametrize("way", NARROW)
def test_state_that_goes_on_has_the_dtypes_of_init(way):
    tx, params = NARROW[way], {"w": np.ones((2, 2), np.float32), "v": np.ones(3, np.float32)}
    optimizer = mpjax.mixed_precision(tx, "O2:bfloat16")
    stored, plain = optimizer.policy.cast_to_param(params), tx.init(params)
    state, first = optimizer.from_optax(plain, stored), optimizer.init(stored)
    dtypes = lambda tree: [str(x.dtype) for x in jax.tree.leaves(tree)]  # noqa: E731
    assert dtypes(state) == dtypes(first)
    if "frozen" not in way:
        assert dtypes(optimizer.to_optax(state, stored)) == dtypes(plain)


def test_state_of_another_optimizer_is_refused():
    params = {"w": np.ones(3, np.float32)}
    optimizer = mpjax.mixed_precision(optax.adam(1e-2))
    with pytest.raises(ValueError, match="opt_state was created by a different optimizer"):
        optimizer.from_optax(optax.sgd(0.1).init(params), params)
    with pytest.raises(ValueError, match="not the MixedPrecisionState of mixed_precision"):
        optimizer.to_optax(optax.adam(0.1).init(params), params)


def test_training_step_goes_on_with_the_state_of_optax(rng):
    params, batch = linear_problem(rng)
    adam = optax.adam(1e-2)
    _, plain = adam.update(params, adam.init(params), params)
    init, step = mpjax.build_train_step(linear_loss, adam, "mixed_bfloat16")
    optimizer = mpjax.mixed_precision(adam, "mixed_bfloat16")
    state = init(params)
    state = dataclasses.replace(state, opt_state=optimizer.from_optax(plain, params).inner_state)
    state, _ = jax.jit(step)(state, batch)
    assert int(optax.tree.get(state.opt_state, "count")) == 2


@pytest.mark.parametrize("policy", thorough_but(WAYS, 1))
def test_frozen_parameters_have_no_master_in_a_run_that_goes_on(policy):
    params = {"w": np.ones((2, 2), np.float32), "base": np.ones(3, np.int8)}
    labels = {"w": "train", "base": "frozen"}
    tx = optax.multi_transform({"train": optax.adam(1e-2), "frozen": optax.set_to_zero()}, labels)
    optimizer = mpjax.mixed_precision(tx, policy)
    stored = {**params, "w": optimizer.policy.cast_to_param(params["w"])}
    plain = tx.init(params)
    state = optimizer.from_optax(plain, stored)
    assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(stored))
    back = optimizer.to_optax(state, stored)
    assert jax.tree.structure(back) == jax.tree.structure(plain)


@pytest.mark.parametrize("policy", ["mixed_float16", "O2:bfloat16"])
@pytest.mark.parametrize("value", [1, True, np.ones(2, int), jax.random.key(0)], ids=str)
def test_update_names_a_trained_parameter_without_a_gradient(value, policy):
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), policy)
    params = {**optimizer.policy.cast_to_param({"w": np.ones(2, np.float32)}), "n": value}
    with pytest.raises(TypeError, match=r"params\['n'\] is .*no gradient.*optax.set_to_zero"):
        optimizer.update({"w": np.ones(2, np.float32), "n": None}, optimizer.init(params), params)
