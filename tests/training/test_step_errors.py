"""What the training step warns of and refuses, and divergence."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_loss, linear_problem

import mpjax
from mpjax._src.training.step import TrainState

# ---- divergence and warnings ---------------------------------------------------------------------


def test_raise_if_diverged_says_how_many_at_what_scale_and_why():
    metrics = {"consecutive_skips": 3, "loss_scale": jnp.float32(512), "loss_finite": True}
    mpjax.raise_if_diverged(metrics, 4)
    with pytest.raises(mpjax.DivergenceError, match="3 steps in a row .*scale 512.*learning rate"):
        mpjax.raise_if_diverged(metrics, 3)
    with pytest.raises(mpjax.DivergenceError, match="loss itself was not finite.*the data"):
        mpjax.raise_if_diverged({**metrics, "loss_finite": jnp.array(False)}, 2)
    with pytest.raises(mpjax.DivergenceError, match="the new model_state was not.*an outlier"):
        mpjax.raise_if_diverged({**metrics, "state_finite": jnp.array(False)}, 2)
    with pytest.raises(mpjax.DivergenceError, match="loss itself was not finite"):
        mpjax.raise_if_diverged({**metrics, "state_finite": False, "loss_finite": False}, 2)
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


# ---- bad input -----------------------------------------------------------------------------------


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
