import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import run_updates

import mpjax


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_a_bad_gradient_changes_nothing_and_is_counted(bad, rng):
    params = {"w": jnp.ones(3), "v": jnp.ones(2)}
    optimizer = mpjax.skip_nonfinite(optax.adam(optax.linear_schedule(1e-2, 0, 10)))
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


def test_it_never_gives_up():
    """optax.apply_if_finite applies the NaN after its limit."""
    params = jnp.ones(2)
    bad = [jnp.full(2, jnp.nan)] * 50
    new, state = run_updates(mpjax.skip_nonfinite(optax.sgd(1.0)), params, bad)
    assert (new == 1).all() and int(state.consecutive_skips) == 50


@pytest.mark.parametrize("verdict", [False, jnp.array(False)])
def test_it_takes_the_callers_verdict_too(verdict):
    params = jnp.ones(2)
    optimizer = mpjax.skip_nonfinite(optax.sgd(1.0))
    state = optimizer.init(params)
    updates, state = optimizer.update(params, state, params=params, finite=verdict)
    assert (updates == 0).all() and int(state.skipped_steps) == 1
    updates, state = optimizer.update(params * jnp.nan, state, params, finite=True)
    assert (updates == 0).all() and int(state.skipped_steps) == 2


def test_a_skip_keeps_even_a_negative_zero():
    params = jnp.array([-0.0, 1.0])
    optimizer = mpjax.skip_nonfinite(optax.sgd(1.0))
    updates, _ = optimizer.update(params * jnp.nan, optimizer.init(params), params)
    assert jnp.signbit(optax.apply_updates(params, updates)).tolist() == [True, False]


@pytest.mark.parametrize("wrong", [None, 1, jnp.array([True])])
def test_a_verdict_that_is_not_one_bool_is_refused(wrong):
    optimizer = mpjax.skip_nonfinite(optax.sgd(1.0))
    with pytest.raises(ValueError, match="finite=.*must be one bool"):
        optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)), finite=wrong)


def test_two_optimizers_each_judge_their_own_gradients():
    params = {"generator": jnp.ones(2), "critic": jnp.ones(2)}
    optimizer = optax.multi_transform(
        {name: mpjax.skip_nonfinite(optax.sgd(1.0)) for name in params},
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
    optimizer = optax.chain(mpjax.skip_nonfinite(spy), optax.scale(2.0))
    params = jnp.ones(2)
    updates, _ = optimizer.update(params, optimizer.init(params), params, finite=False, value=1.0)
    assert (updates == 0).all() and seen == {"value": 1.0}


def test_half_state_does_not_drift():
    params = jnp.ones(2, jnp.bfloat16)
    run_updates(mpjax.skip_nonfinite(optax.adam(1e-3)), params, [jnp.ones(2, jnp.float32)] * 2)


def other_states(optimizer):
    """Yields states of other optimizers, and of other parameters."""
    half = {"w": jnp.ones(2, jnp.bfloat16)}
    yield optax.adam(0.1).init(half)
    yield None
    yield mpjax.with_master_weights(optax.sgd(0.1)).init(half)
    yield mpjax.skip_nonfinite(optax.sgd(0.1)).init(half)
    yield optimizer.init({"v": jnp.ones(2, jnp.bfloat16)})
    yield optimizer.init({"w": jnp.ones(3, jnp.bfloat16)})


@pytest.mark.parametrize("wrap", [mpjax.with_master_weights, mpjax.skip_nonfinite])
@pytest.mark.parametrize("number", range(6))
def test_the_state_of_another_optimizer_is_named(wrap, number):
    half, optimizer = {"w": jnp.ones(2, jnp.bfloat16)}, wrap(optax.adam(0.1))
    state = [*other_states(optimizer)][number]
    with pytest.raises(ValueError, match="belongs to (another optimizer|other parameters)"):
        optimizer.update(half, state, half)


def test_an_optimizer_that_fails_by_itself_says_so():
    def update(updates, state, params=None):
        raise KeyError("its own")

    grads = {"w": jnp.ones(2)}
    skip = mpjax.skip_nonfinite
    for wrap, params in ((mpjax.with_master_weights, grads), (skip, grads), (skip, None)):
        optimizer = wrap(optax.GradientTransformation(optax.adam(0.1).init, update))
        with pytest.raises(KeyError, match="its own"):
            optimizer.update(grads, optimizer.init(grads), params)


def test_what_a_state_lacks_is_told_in_short():
    params = {"v": jnp.ones(2), "w": jnp.ones(2)}
    state = mpjax.skip_nonfinite(optax.sgd(0.1)).init(params)
    lacking = r"lacks 0/count \[\], 0/mu/v \[2\], 0/mu/w \[2\]\. Pass the"
    with pytest.raises(ValueError, match=lacking):
        mpjax.skip_nonfinite(optax.adam(0.1)).update(params, state, params)
