"""Gates on steps that are not finite."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from pairs import OPTIMIZER, PARAMS, STATE, Pair, f32, loss

import mpjax


def updated(params, opt_state, x):
    grads = jax.grad(loss)(params, x)
    updates, new_state = OPTIMIZER.update(grads, opt_state, params)  # fault
    ok = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    return optax.apply_updates(params, updates), new_state, ok


def choose(ok, new, old):
    return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def partly(params, opt_state, x):
    grads = jax.grad(loss)(params, x)
    updates, new_state = OPTIMIZER.update(grads, opt_state, params)  # fault
    ok = jnp.all(jnp.array([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
    return choose(ok, optax.apply_updates(params, updates), params), new_state


def whole(params, opt_state, x):
    new, new_state, ok = updated(params, opt_state, x)
    return choose(ok, new, params), choose(ok, new_state, opt_state)


CASES = {"moments": Pair("ungated-state", partly, whole, (PARAMS, STATE, f32(2, 4)))}


def test_ungated_state_names_moments_that_a_gate_leaves_out():
    report = mpjax.lint(partly)(PARAMS, STATE, f32(2, 4))
    (finding,) = report.findings
    assert finding.rule == "ungated-state" and "opt_state[0].mu['b']" in finding.message
    assert finding.source in pairs.marked_lines(partly)


def test_gate_over_everything_has_no_finding():
    assert not mpjax.lint(whole)(PARAMS, STATE, f32(2, 4)).findings
    assert not mpjax.lint(jax.jit(whole, donate_argnums=(0, 1)))(PARAMS, STATE, f32(2, 4)).findings


def branched(params, state, x):
    """A branch decides over parameters and moments; what else is a state is not in it."""
    grads = jax.grad(loss)(params, x)
    ok = jnp.isfinite(sum(jnp.sum(g) for g in jax.tree.leaves(grads)))

    def apply():
        updates, new_state = OPTIMIZER.update(grads, state["adam"], params)
        return optax.apply_updates(params, updates), new_state

    new, new_state = jax.lax.cond(ok, apply, lambda: (params, state["adam"]))
    mean = 0.9 * state["mean"] + 0.1 * grads["b"]  # fault
    return new, {"adam": new_state, "mean": mean}, ok


def branched_whole(params, opt_state, x):
    new, new_state, ok = branched(params, opt_state, x)
    return new, jax.lax.cond(ok, lambda: new_state, lambda: opt_state)


def test_ungated_state_names_what_a_branch_leaves_out():
    state = {"adam": STATE, "mean": f32(4)}
    (finding,) = mpjax.lint(branched)(PARAMS, state, f32(2, 4)).findings
    assert finding.rule == "ungated-state" and "state['mean']" in finding.message
    assert "mu" not in finding.message and finding.source in pairs.marked_lines(branched)
    assert not mpjax.lint(branched_whole)(PARAMS, state, f32(2, 4)).findings


def test_step_without_a_gate_has_no_finding():
    def step(params, opt_state, x):
        return updated(params, opt_state, x)[:2]

    assert not mpjax.lint(step)(PARAMS, STATE, f32(2, 4)).findings


def test_average_of_gated_weights_needs_no_gate():
    def step(state, x):
        params, opt_state, average, scale = state
        new, new_state, ok = updated(params, opt_state, x)
        params = choose(ok, new, params)
        average = optax.incremental_update(params, average, 0.01)
        return params, choose(ok, new_state, opt_state), average, jnp.where(ok, scale, scale / 2)

    assert not mpjax.lint(step)((PARAMS, STATE, PARAMS, f32()), f32(2, 4)).findings


def test_build_train_step_gates_its_whole_state():
    init, step = mpjax.build_train_step(loss, OPTIMIZER, "mixed_float16")
    state = jax.eval_shape(init, PARAMS)
    report = mpjax.lint(step)(state, f32(2, 4))
    assert not report.findings, str(report)


def test_apply_if_finite_of_optax_has_no_finding():
    optimizer = optax.apply_if_finite(OPTIMIZER, 3)

    def step(params, opt_state, x):
        updates, opt_state = optimizer.update(jax.grad(loss)(params, x), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = jax.eval_shape(optimizer.init, PARAMS)
    assert not mpjax.lint(step)(PARAMS, state, f32(2, 4)).findings


SKIPPING = mpjax.optim.skip_nonfinite(OPTIMIZER)  # it asks again whether gradients are finite


def playing(gated):
    """Returns a step that plays a game by the weights, and averages activations."""

    def valued(params, x):
        hidden = jnp.tanh(x @ params["w"] + params["b"])
        return jnp.mean(hidden**2), (hidden.mean(0), hidden.var(0))

    def step(params, opt_state, game, averages, x):
        places, ages = game
        push = jnp.where(jnp.argmax(places @ params["w"], -1) > 0, 1.0, -1.0)
        places = places + 0.1 * push[:, None]
        grads, means = jax.grad(valued, has_aux=True)(params, x + places.mean())
        updates, opt_state = SKIPPING.update(grads, opt_state, params)
        fresh = jax.tree.map(lambda old, mean: 0.9 * old + 0.1 * mean, averages, means)
        averages = mpjax.select(mpjax.all_finite(grads), fresh, averages) if gated else fresh
        return optax.apply_updates(params, updates), opt_state, (places, ages + 1), averages

    return step


@pytest.mark.parametrize("gated", [True, False])
def test_averages_of_activations_need_a_gate_but_not_what_is_computed_of_choices(gated):
    state = jax.eval_shape(SKIPPING.init, PARAMS)
    args = PARAMS, state, (f32(3, 4), f32(3)), (f32(4), f32(4)), f32(2, 4)
    messages = [f.message for f in mpjax.lint(playing(gated), run=False)(*args).findings]
    assert len(messages) == (not gated), messages
    assert all(m.endswith("not for averages[0], averages[1].") for m in messages), messages


@pytest.mark.parametrize("name", CASES)
def test_mended_gates_have_no_finding(name):
    pair = CASES[name]
    assert not mpjax.lint(pair.mended)(*pair.args).findings
