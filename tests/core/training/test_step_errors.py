"""The warnings and errors of the training step, and divergence."""

import collections
import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec
from problems import linear_loss, linear_problem, mesh

import mpjax
from mpjax._src.core.training.step import TrainState

# ---- divergence and warnings ---------------------------------------------------------------------


def test_raise_if_diverged_is_called_outside_of_jit():
    metrics = {"consecutive_skips": 4, "loss_scale": 1.0, "loss_finite": True}
    with pytest.raises(TypeError, match="metrics are traced.*outside of jit"):
        jax.eval_shape(lambda m: mpjax.raise_if_diverged(m, 3), metrics)


def test_raise_if_diverged_says_how_many_at_what_scale_and_why():
    metrics = {"consecutive_skips": 3, "loss_scale": jnp.float32(512), "loss_finite": True}
    mpjax.raise_if_diverged(metrics, 4)
    mpjax.raise_if_diverged({**metrics, "consecutive_skips": 0}, 1)
    with pytest.raises(
        mpjax.errors.DivergenceError, match="3 steps in a row .*scale 512.*learning rate"
    ):
        mpjax.raise_if_diverged(metrics, 3)
    with pytest.raises(mpjax.errors.DivergenceError, match="loss itself was non-finite.*the data"):
        mpjax.raise_if_diverged({**metrics, "loss_finite": jnp.array(False)}, 2)
    with pytest.raises(
        mpjax.errors.DivergenceError, match="the new model_state was not.*an outlier"
    ):
        mpjax.raise_if_diverged({**metrics, "state_finite": jnp.array(False)}, 2)
    with pytest.raises(mpjax.errors.DivergenceError, match="loss itself was non-finite"):
        mpjax.raise_if_diverged({**metrics, "state_finite": False, "loss_finite": False}, 2)
    stuck = {**metrics, "consecutive_skips": 30, "loss_scale": 1.0}
    with pytest.warns(
        mpjax.errors.PrecisionWarning, match="30 steps .* scale 1.*scaled_by="
    ) as found:
        mpjax.raise_if_diverged(stuck, 100)
    assert found[0].filename == __file__
    with pytest.raises(mpjax.errors.DivergenceError, match="at any loss scale"):
        mpjax.raise_if_diverged(stuck, 30)
    mpjax.raise_if_diverged({**stuck, "loss_scale": 2.0}, 100)
    for wrong in ({}, None):
        with pytest.raises(TypeError, match="metrics=.*must be the metrics"):
            mpjax.raise_if_diverged(wrong, 2)
    with pytest.raises(ValueError, match="several steps"):
        mpjax.raise_if_diverged({**metrics, "consecutive_skips": np.zeros(3)}, np.int64(2))
    for limit in (0, 1.5, True):
        with pytest.raises(ValueError, match="limit=.*must be an integer"):
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
        assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("ops", ["half", "full", "follow"])
def test_op_lists_that_have_no_effect_are_warned_about(ops):
    policy = mpjax.get_policy("p=f32,c=bf16").with_ops(**{ops: "exp"})
    with pytest.warns(UserWarning, match=f"{ops}.* has no effect.*casting=op") as caught:
        mpjax.build_train_step(linear_loss, optax.sgd(0.1), policy)
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    "text", ["storage=lean", "fused_attention=true", "chunked_loss=true", "reduce=half"]
)
def test_op_level_settings_without_effect_are_warned_about(text):
    with pytest.warns(UserWarning, match=f"{text.split('=')[0]} has no effect.*casting=op"):
        mpjax.build_train_step(linear_loss, optax.sgd(0.1), f"O3:bfloat16,{text}")


# ---- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss_fn": 3}, TypeError, "loss_fn=3 must be a function"),
        ({"optimizer": "adam"}, TypeError, "optimizer='adam' must be an optax optimizer"),
        ({"policy": "mixed_f16"}, ValueError, "Did you mean 'mixed_float16'"),
        ({"loss_scale": "dynamik"}, ValueError, "Unknown loss_scale='dynamik'.*mean 'dynamic'"),
        ({"accumulate_steps": 0}, ValueError, "accumulate_steps=0 must be an integer"),
        ({"accumulate_steps": 2.0}, ValueError, "accumulate_steps=2.0 must be an integer"),
        ({"has_aux": "yes"}, ValueError, "has_aux='yes' must be True or False"),
        ({"loss_scale": mpjax.DynamicLossScale}, ValueError, "Unknown loss_scale="),
    ],
)
def test_build_train_step_refuses_bad_arguments(arguments, error, message):
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
def test_init_refuses_bad_parameters_and_keys(params, rng, message):
    init, _ = mpjax.build_train_step(linear_loss, optax.sgd(0.1))
    with pytest.raises((TypeError, ValueError), match=message):
        init(params, rng=rng)


@pytest.mark.parametrize(
    ("loss_fn", "options", "state", "message"),
    [
        (lambda p: 0.0, {}, {}, r"loss_fn is called as loss_fn\(params, batch\)"),
        (lambda p, b: 0.0, {}, {"rng": jax.random.key(0)}, r"loss_fn\(params, batch, rng=...\)"),
        (lambda p, b, rng: 0.0, {}, {}, r"'rng'\. Pass rng= to init: init\(params, rng=jax"),
        (lambda p, b, *, rng, model_state: 0.0, {}, {}, "Pass rng= and model_state= to init"),
        (lambda p, b, key: 0.0, {}, {}, "'key'. It is passed no others: take a random key as rng"),
        (lambda p, b: (p["w"], 1), {}, {}, "must return loss, but it returned a tuple of 2"),
        (lambda p, b: p["w"], {"has_aux": True}, {}, r"must return \(loss, aux\), .*no model"),
        (
            lambda p, b, model_state: p["w"],
            {},
            {"model_state": {"n": 1}},
            r"must return \(loss, new_model_state\), .* carries a model_state",
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
            "new model_state of the same structure",
        ),
        (lambda p, b: jnp.ones(2) * p["w"], {}, {}, r"loss must be one real floating number"),
    ],
)
def test_error_names_a_loss_function_of_the_wrong_form(loss_fn, options, state, message):
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32", **options)
    with pytest.raises(TypeError, match=message):
        jax.eval_shape(step, init({"w": jnp.float32(1)}, **state), None)


def test_error_of_a_missing_key_points_to_rng_of_init():
    def loss_fn(params, batch, rng=None):
        return jax.random.normal(rng) * params["w"]

    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32")
    with pytest.raises(TypeError) as caught:
        jax.eval_shape(step, init({"w": jnp.float32(1)}), None)
    assert "pass rng= to init: init(params, rng=" in caught.value.__notes__[0]


def test_a_loss_function_without_a_signature_is_just_called():
    weight = collections.namedtuple("Params", "weight")
    init, step = mpjax.build_train_step(getattr, optax.sgd(0.1), "float32")
    _, metrics = jax.eval_shape(lambda state: step(state, "weight"), init(weight(2.0)))
    assert metrics["loss"].shape == ()


def test_step_called_with_swapped_arguments_is_an_error(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1))
    with pytest.raises(TypeError, match="state is a tuple, not a TrainState.*step.state, batch"):
        step(batch, init(params))
    assert isinstance(init(params), TrainState)


# ---- the state of another step, and axes that are not mapped ------------------------------------


def built(optimizer, policy="float32", **options):
    return mpjax.build_train_step(linear_loss, optimizer, policy, **options)


@pytest.mark.parametrize("wrap", [lambda step: step, jax.jit])
@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ("adam", "sgd", r"it holds inner_state/0/count \[\]"),  # ran silently
        ("sgd", "adam", r"lacks inner_state/0/count \[\], inner_state/0/mu/b \[3\]"),
        ("adam", "adafactor", "lacks inner_state/0/v/b"),
    ],
)
def test_the_state_of_another_optimizer_is_refused(first, then, message, wrap, rng):
    params, batch = linear_problem(rng)
    state = built(getattr(optax, first)(0.1))[0](params)
    step = wrap(built(getattr(optax, then)(0.1))[1])
    with pytest.raises(ValueError, match=rf"state.opt_state .*{message}"):
        step(state, batch)


def test_the_optimizer_state_of_other_parameters_is_refused(rng):
    params, batch = linear_problem(rng)
    init, step = built(optax.adam(0.1))
    for others in ({**params, "w": jnp.ones(5)}, {"w": params["w"], "c": params["b"]}, None):
        opt_state = others and init(others).opt_state
        with pytest.raises(ValueError, match="state.opt_state .* parameters of other"):
            step(dataclasses.replace(init(params), opt_state=opt_state), batch)


@pytest.mark.parametrize("axis", [3, 2.5, b"data", "", (), ("data", 3), ("data", "data"), object()])
def test_bad_axis_name_is_refused_by_build_train_step(axis):
    with pytest.raises(ValueError, match="axis_name=.* must be the name of a mapped axis"):
        built(optax.sgd(0.1), axis_name=axis)


@pytest.mark.parametrize("axis", ["nowhere", ("data", "nowhere")])
def test_error_names_the_axis_that_is_not_mapped(axis, rng):
    params, batch = linear_problem(rng)
    init, step = built(optax.sgd(0.1), axis_name=axis)
    with pytest.raises(ValueError, match=r"axis_name=.*: no axis .* is mapped.*Mapped axes: none"):
        jax.jit(step)(init(params), batch)
    spec = PartitionSpec
    specs = {"in_specs": (spec(), spec("data")), "out_specs": spec()}
    mapped = jax.jit(jax.shard_map(step, mesh=mesh(), **specs))
    with pytest.raises(ValueError, match=r"no axis 'nowhere' is mapped.*Mapped axes: 'data'\."):
        mapped(init(params), batch)


@pytest.mark.parametrize("steps", [2**70, 1 << 100000, 2**31, -1, True], ids=lambda n: f"{n:x}"[:8])
def test_accumulate_steps_beyond_int32_are_refused(steps):
    with pytest.raises(ValueError, match=r"accumulate_steps=.* integer from 1 to 2\*\*31 - 1"):
        built(optax.sgd(0.1), accumulate_steps=steps)


def test_more_micro_batches_than_examples_are_refused(rng):
    params, batch = linear_problem(rng)
    init, step = built(optax.sgd(0.1), accumulate_steps=2**31 - 1)
    with pytest.raises(ValueError, match="must divide the leading axis"):
        step(init(params), batch)


def with_temperature():
    def update(grads, state, params=None, *, temperature):
        return optax.tree.scale(temperature, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: (), update)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (optax.lbfgs, "'grad' and 'value_fn'"),
        (lambda: optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1), opaque_mode=True), "grad_fn"),
        (lambda: optax.contrib.sophia(0.1), "obj_fn"),
        (with_temperature, "'temperature'"),
    ],
)
def test_optimizer_that_asks_for_more_than_the_loss_is_refused_with_the_way_out(make, names):
    init, step = mpjax.build_train_step(lambda w, batch: jnp.sum(w**2), make(), "float32")
    message = f"optimizer: .*{names}.*mpjax.mixed_precision.*value_fn=lambda params: loss_fn"
    with pytest.raises(TypeError, match=message):
        step(init(np.ones(3, np.float32)), None)
