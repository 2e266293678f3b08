import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from problems import run_updates
from support import thorough_but

import mpjax


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_skip_nonfinite_changes_nothing_on_a_bad_gradient_and_counts_it(bad, rng):
    params = {"w": jnp.ones(3), "v": jnp.ones(2)}
    optimizer = mpjax.optim.skip_nonfinite(optax.adam(optax.linear_schedule(1e-2, 0, 10)))
    update = jax.jit(optimizer.update)
    good = jax.tree.map(jnp.ones_like, params)
    _, state = update(good, optimizer.init(params), params)
    before = jax.tree.leaves(state.inner_state)
    for count in (1, 2):
        updates, state = update({**good, "w": jnp.array([1, bad, 1])}, state, params)
        assert all((leaf == 0).all() for leaf in jax.tree.leaves(updates))
        jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(state.inner_state), before)
        assert (int(state.skipped_steps), int(state.consecutive_skips)) == (count, count)
    updates, state = update(good, state, params)
    assert (int(state.skipped_steps), int(state.consecutive_skips)) == (2, 0)
    assert (updates["w"] != 0).all() and update._cache_size() == 1


def test_skip_nonfinite_has_no_limit_of_consecutive_skips():
    """optax.apply_if_finite applies the NaN after its limit."""
    params = jnp.ones(2)
    bad = [jnp.full(2, jnp.nan)] * 50
    new, state = run_updates(mpjax.optim.skip_nonfinite(optax.sgd(1.0)), params, bad)
    assert (new == 1).all() and int(state.consecutive_skips) == 50


@pytest.mark.parametrize("verdict", [False, jnp.array(False)])
def test_skip_nonfinite_takes_the_callers_verdict_too(verdict):
    params = jnp.ones(2)
    optimizer = mpjax.optim.skip_nonfinite(optax.sgd(1.0))
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params=params, finite=verdict)
    assert (updates == 0).all() and int(state.skipped_steps) == 1
    updates, state = optimizer.update(params * jnp.nan, state, params, finite=True)
    assert (updates == 0).all() and int(state.skipped_steps) == 2


def test_skip_nonfinite_keeps_even_a_negative_zero():
    params = jnp.array([-0.0, 1.0])
    optimizer = mpjax.optim.skip_nonfinite(optax.sgd(1.0))
    updates, _ = optimizer.update(params * jnp.nan, optimizer.init(params), params)
    assert jnp.signbit(optax.apply_updates(params, updates)).tolist() == [True, False]


@pytest.mark.parametrize("wrong", [None, 1, jnp.array([True])])
def test_finite_argument_that_is_not_one_bool_is_refused(wrong):
    optimizer = mpjax.optim.skip_nonfinite(optax.sgd(1.0))
    with pytest.raises(ValueError, match="finite=.*must be a single bool"):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)), finite=wrong)


def test_skip_nonfinite_in_multi_transform_judges_each_part_alone():
    params = {"generator": jnp.ones(2), "critic": jnp.ones(2)}
    optimizer = optax.multi_transform(
        {name: mpjax.optim.skip_nonfinite(optax.sgd(1.0)) for name in params},
        {name: name for name in params},
    )
    grads = {"generator": jnp.ones(2), "critic": jnp.array([1.0, jnp.inf])}
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    assert (updates["generator"] == -1).all() and (updates["critic"] == 0).all()


def test_the_verdict_passes_through_a_chain_and_other_arguments_reach_inner():
    seen = {}

    def update(updates, state, params=None, **extra_args):
        seen.update(extra_args)
        return updates, state

    spy = optax.GradientTransformationExtraArgs(lambda params: (), update)
    optimizer = optax.chain(mpjax.optim.skip_nonfinite(spy), optax.scale(2.0))
    params = jnp.ones(2)
    updates, _ = optimizer.update(params, optimizer.init(params), params, finite=False, value=1.0)
    assert (updates == 0).all() and seen == {"value": 1.0}


def sam(learning_rate=0.1):
    """Knows no value=, unlike reduce_on_plateau, and raises a TypeError if it is passed one."""
    return optax.contrib.sam(optax.sgd(learning_rate), optax.sgd(0.1))


def plateau():
    return optax.contrib.reduce_on_plateau(patience=1)


CHOOSY = {
    "alone": sam,
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), sam(), plateau()),
    "named_chain": lambda: optax.named_chain(("sam", sam()), ("plateau", plateau())),
    "masked": lambda: optax.masked(optax.chain(sam(), plateau()), {"w": True, "v": False}),
    "partition": lambda: optax.partition({"w": sam(), "v": plateau()}, {"w": "w", "v": "v"}),
    "MultiSteps": lambda: optax.MultiSteps(optax.chain(sam(), plateau()), 2),
    "functions": lambda: optax.MultiSteps(
        optax.chain(sam(), plateau()), 2
    ).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(sam)(0.1),
    "apply_if_finite": lambda: optax.chain(optax.apply_if_finite(sam(), 3), plateau()),
    "skip_nonfinite": lambda: mpjax.optim.skip_nonfinite(optax.chain(sam(), plateau())),
}


@pytest.mark.parametrize("name", thorough_but(CHOOSY, "chain", "functions", "inject_hyperparams"))
def test_extra_arguments_reach_the_parts_that_take_them_and_no_others(name):
    params = {"w": np.ones(3, np.float32), "v": np.ones(2, np.float32)}
    optimizer = mpjax.mixed_precision(CHOOSY[name](), "float32")
    update = jax.jit(
        lambda grads, state, value: optimizer.update(grads, state, params, value=value)
    )
    updates, state = update(params, optimizer.init(params), np.float32(3))
    if name not in ("alone", "inject_hyperparams", "MultiSteps", "functions"):
        assert float(optax.tree.get(state, "best_value")) == 3
    assert int(state.skipped_steps) == 0 and mpjax.all_finite(updates)
    loss_fn = lambda params, batch: jnp.sum(params["w"] ** 2) + jnp.sum(params["v"] ** 2)  # noqa: E731
    init, step = mpjax.build_train_step(loss_fn, CHOOSY[name](), "float32")
    state, metrics = jax.jit(step)(init(params), None)
    assert metrics["grads_finite"]


def test_extra_arguments_reach_no_part_beside_mixed_precision_that_takes_none():
    inner = mpjax.mixed_precision(optax.sgd(0.1), "float32")
    optimizer = mpjax.optim.skip_nonfinite(optax.chain(inner, sam()))
    params = {"w": np.ones(3, np.float32)}
    updates, state = optimizer.update(params, optimizer.init(params), params, value=np.float32(3))
    assert mpjax.all_finite(updates) and int(state.skipped_steps) == 0


def test_skip_nonfinite_state_of_bfloat16_does_not_drift():
    params = jnp.ones(2, jnp.bfloat16)
    run_updates(
        mpjax.optim.skip_nonfinite(optax.adam(1e-3)), params, [jnp.ones(2, jnp.float32)] * 2
    )


def other_states(optimizer):
    """Yields states of other optimizers, and of other parameters."""
    half = {"w": jnp.ones(2, jnp.bfloat16)}
    yield optax.adam(0.1).init(half)
    yield None
    yield mpjax.optim.with_master_weights(optax.sgd(0.1)).init(half)
    yield mpjax.optim.skip_nonfinite(optax.sgd(0.1)).init(half)
    yield optimizer.init({"v": jnp.ones(2, jnp.bfloat16)})
    yield optimizer.init({"w": jnp.ones(3, jnp.bfloat16)})


@pytest.mark.parametrize("wrap", [mpjax.optim.with_master_weights, mpjax.optim.skip_nonfinite])
@pytest.mark.parametrize("number", range(6))
def test_wrappers_refuse_the_state_of_another_optimizer(wrap, number):
    half, optimizer = {"w": jnp.ones(2, jnp.bfloat16)}, wrap(optax.adam(0.1))
    state = [*other_states(optimizer)][number]
    with pytest.raises(ValueError, match="(different optimizer|for other parameters)"):
        optimizer.update(half, state, half)


def test_error_of_the_inner_optimizer_itself_passes_through():
    def update(updates, state, params=None):
        raise KeyError("its own")

    grads = {"w": jnp.ones(2)}
    skip = mpjax.optim.skip_nonfinite
    for wrap, params in ((mpjax.optim.with_master_weights, grads), (skip, grads), (skip, None)):
        optimizer = wrap(optax.GradientTransformation(optax.adam(0.1).init, update))
        with pytest.raises(KeyError, match="its own"):
            optimizer.update(grads, optimizer.init(grads), params)


WRAPPERS = {
    "skip": mpjax.optim.skip_nonfinite,
    "masters": mpjax.optim.with_master_weights,
    "kahan": mpjax.optim.with_kahan_summation,
    "stochastic": mpjax.optim.with_stochastic_rounding,
    "8bit": mpjax.optim.with_8bit_moments,
    "mixed": mpjax.mixed_precision,
    "O3": lambda inner: mpjax.mixed_precision(inner, "O3:bfloat16"),
}


@pytest.mark.parametrize("name", thorough_but(WRAPPERS, "skip", "8bit", "O3"))
def test_error_compares_updates_that_are_no_gradients_with_params(name):
    optimizer, params = WRAPPERS[name](optax.adam(0.1)), {"w": np.ones(3, np.float32)}
    params = mpjax.cast(params, "bfloat16") if name not in ("skip", "mixed") else params
    state = optimizer.init(params)
    grads = {"w": np.ones(3, np.float32)}
    for wrong, message in (
        ({"v": np.ones(3, np.float32)}, r"lacks w \[3\] and holds v \[3\]\.$"),
        ({"w": np.ones(4, np.float32)}, r"lacks w \[3\] and holds w \[4\]"),
        ((np.float32(1), grads), r"holds 0 \[\], 1/w \[3\]\. .*returns \(loss, grads\)"),
        (None, r"lacks w \[3\]\.$"),
    ):
        with pytest.raises(ValueError, match=f"updates must be the gradients of .*{message}"):
            optimizer.update(wrong, state, params)


@pytest.mark.parametrize("name", ["skip", "mixed"])
def test_stateless_optimizer_refuses_updates_that_are_no_gradients(name):
    params = {"w": np.ones(3, np.float32), "n": 3}
    optimizer = WRAPPERS[name](optax.sgd(0.1))
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"updates must be .* but it holds v \[3\]\.$"):
        optimizer.update({"v": np.ones(3, np.float32)}, state, params)
    optimizer.update({"w": np.ones(3, np.float32), "n": None}, state, params)
    optimizer.update({"w": None, "n": None}, state, params)  # a part that is not trained


@pytest.mark.parametrize("name", thorough_but(WRAPPERS, "skip", "mixed"))
def test_optimizer_init_with_a_whole_module_says_how_to_filter(name):
    optimizer, model = WRAPPERS[name](optax.adam(0.1)), {"f": jnp.tanh, "w": np.ones(2, np.float16)}
    if name == "O3":  # which wants bfloat16
        model = mpjax.cast(model, "bfloat16")
    if name == "mixed":
        model = mpjax.cast(model, "float32")
    with pytest.raises(TypeError, match=r"params\['f'\] is .*eqx\.filter\(model, eqx\.is_inexact"):
        optimizer.init(model)
    WRAPPERS[name](optax.sgd(0.1)).init(model)  # needs no state of a function


def test_skip_nonfinite_refuses_a_value_that_is_no_scalar():
    params = {"w": np.ones(3, np.float32)}
    optimizer = mpjax.optim.skip_nonfinite(optax.adam(0.1))
    state = optimizer.init(params)
    with pytest.raises(ValueError, match=r"value is of shape \(3,\).*jnp\.mean\(losses\)"):
        optimizer.update(params, state, params, value=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="value is 'x', but must be the loss"):
        optimizer.update(params, state, params, value="x")


def test_missing_attribute_of_a_wrapper_state_is_looked_up_in_inner_state():
    params = {"w": np.ones(2, np.float32)}
    state = mpjax.optim.skip_nonfinite(optax.contrib.schedule_free_sgd(0.1)).init(params)
    with pytest.raises(AttributeError, match=r"no attribute 'b1', but the ScheduleFreeState ins"):
        optax.contrib.schedule_free_eval_params(state, params)
    with pytest.raises(AttributeError, match=r"pass state\.inner_state instead of state"):
        state.b1  # noqa: B018
    with pytest.raises(AttributeError, match="'skiped_steps'. Did you mean 'skipped_steps'"):
        state.skiped_steps  # noqa: B018
    masters = mpjax.optim.with_master_weights(optax.chain(optax.adam(0.1))).init(params)
    with pytest.raises(AttributeError, match=r"read state\.inner_state\[0\]\[0\]\.mu\."):
        masters.mu  # noqa: B018
    assert not hasattr(state, "hyperparams")
    assert copy.deepcopy(state).skipped_steps == 0


def test_error_lists_what_the_optimizer_state_lacks_in_short():
    params = {"v": jnp.ones(2), "w": jnp.ones(2)}
    state = mpjax.optim.skip_nonfinite(optax.sgd(0.1)).init(params)
    lacking = r"lacks 0/count \[\], 0/mu/v \[2\], 0/mu/w \[2\]\. Pass the"
    with pytest.raises(ValueError, match=lacking):
        mpjax.optim.skip_nonfinite(optax.adam(0.1)).update(params, state, params)
