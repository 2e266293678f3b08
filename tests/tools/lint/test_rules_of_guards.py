"""Overflow that is hidden, and loss scales that nothing stops."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from flax.training.dynamic_scale import DynamicScale
from pairs import Pair, f16, f32

import mpjax


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def replaced(w, x):
    grads = jax.grad(loss)(w, x)
    grads = jnp.where(jnp.isfinite(grads), grads, 0.0)  # fault
    return w - 0.1 * grads


ZERO_NANS = optax.chain(optax.zero_nans(), optax.sgd(0.1))


def replaced_by_optax(w, x):
    grads = jax.grad(loss)(w, x) / 1024.0
    updates, _ = ZERO_NANS.update(grads, ZERO_NANS.init(w))  # fault
    return optax.apply_updates(w, updates)


def skipped(w, x):
    grads = jax.grad(loss)(w, x)
    return jnp.where(jnp.all(jnp.isfinite(grads)), w - 0.1 * grads, w)


def branched(scale, finite):
    return jax.lax.cond(
        finite,
        lambda s: s * 2.0,  # fault
        lambda s: jnp.maximum(s / 2.0, 1.0),
        scale,
    )


def branched_with_a_limit(scale, finite):
    return jax.lax.cond(
        finite,
        lambda s: jnp.clip(s * 2.0, 1.0, 65536.0),
        lambda s: s / 2.0,
        scale,
    )


def chosen(state, finite):
    grown = state["scale"] / 0.5  # fault
    return {"scale": jnp.where(finite, grown, state["scale"] * 0.5)}


def chosen_below_a_limit(state, finite):
    grown = state["scale"] / 0.5
    grown = jnp.where(grown <= 2.0**16, grown, state["scale"])
    return {"scale": jnp.where(finite, grown, state["scale"] * 0.5)}


def chosen_factor(state, finite):
    factor = jnp.where(finite, 2.0, 0.5)
    return {"scale": state["scale"] * factor}  # fault


def half_loss(w, x):
    return jnp.mean((jnp.tanh(x @ w) ** 2).astype(jnp.float32))


def scaled_late(w, x):
    grads = jax.grad(half_loss)(w, x) * 1024  # fault
    return w.astype(jnp.float32) - 1e-3 * (grads.astype(jnp.float32) / 1024)


def scaled_late_by_the_state(w, x, scale):
    grads = jax.grad(half_loss)(w, x).astype(jnp.float32) * scale  # fault
    finite = jnp.all(jnp.isfinite(grads))
    return jnp.where(finite, w.astype(jnp.float32) - 1e-3 * (grads / scale), w)


def scaled_early(w, x, scale=1024.0):
    grads = jax.grad(lambda w: half_loss(w, x) * scale)(w).astype(jnp.float32)
    return w.astype(jnp.float32) - 1e-3 * (grads / scale)


FINITE = jax.ShapeDtypeStruct((), jnp.bool_)
CASES = {
    "where": Pair("hidden-nonfinite", replaced, skipped, (f32(4, 4), f32(2, 4))),
    "optax": Pair("hidden-nonfinite", replaced_by_optax, skipped, (f32(4, 4), f32(2, 4))),
    "branches": Pair("endless-scale", branched, branched_with_a_limit, (f32(), FINITE)),
    "a choice of factors": Pair(
        "endless-scale", chosen_factor, chosen_below_a_limit, ({"scale": f32()}, FINITE)
    ),
    "late": Pair("late-scale", scaled_late, scaled_early, (f16(4, 4), f16(2, 4))),
    "late, by a state": Pair(
        "late-scale", scaled_late_by_the_state, scaled_early, (f16(4, 4), f16(2, 4), f32())
    ),
    "choice": Pair("endless-scale", chosen, chosen_below_a_limit, ({"scale": f32()}, FINITE)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_guards_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_masks_and_inputs_hide_no_overflow():
    def masked(w, x, mask):
        grads = jax.grad(loss)(w, jnp.nan_to_num(x))
        return jnp.where(mask, grads, 0.0)

    def attended(x):
        return jnp.sum(jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)) * x)

    mask = jax.ShapeDtypeStruct((4, 4), jnp.bool_)
    assert not mpjax.lint(masked)(f32(4, 4), f32(2, 4), mask).findings
    assert not mpjax.lint(attended, argnums=0)(f32(4)).findings


def test_loss_scales_with_a_limit_are_left_alone():
    scale = mpjax.DynamicLossScale()
    assert not mpjax.lint(lambda s, finite: s.adjust(finite))(scale, FINITE).findings

    def flax_step(scale, w, x):
        scale, finite, _, grads = scale.value_and_grad(loss)(w, x)
        return scale, jnp.where(finite, w - 0.1 * grads, w)

    assert not mpjax.lint(flax_step)(DynamicScale(), f32(4, 4), f32(2, 4)).findings


def test_number_that_grows_anyway_is_no_loss_scale():
    def schedule(rate, step):
        return jnp.where(step > 10, rate, rate * 0.5), step + 1

    step = jax.ShapeDtypeStruct((), jnp.int32)
    assert not mpjax.lint(schedule)(f32(), step).findings
    assert not mpjax.lint(lambda count: count * 2.0)(f32()).findings


def test_number_that_a_loop_chooses_from_itself_is_no_loss_scale():
    def steps(x, count):
        def turn(_, carry):
            y, rate = carry
            rate = jnp.where(y.sum() > 3.0, rate, 0.5)
            return y / rate, jnp.where(rate > 0.1, rate, 0.25)

        return jax.lax.fori_loop(0, count, turn, (x, jnp.float32(1.0)))

    assert not mpjax.lint(steps)(jax.ShapeDtypeStruct((4,), jnp.float32), 5).findings


def test_lint_survives_long_chains_of_sums():
    def deep(x):
        y = x
        for _ in range(400):
            y = y + x * 0.5
        return y

    half = jax.ShapeDtypeStruct((4,), jnp.bfloat16)
    mpjax.lint(deep, select="half-average")(half)
    mpjax.lint(deep, select="mask-overflow")(half)


def test_other_factors_of_float16_gradients_are_no_loss_scale():
    def clipped(w, x, rate):
        grads = jax.grad(half_loss)(w, x)
        norm = optax.tree.norm(grads.astype(jnp.float32))
        return w - rate.astype(w.dtype) * (grads * jnp.minimum(1, 1 / norm).astype(w.dtype))

    def scaled_twice(w, x, scale):
        grads = jax.grad(lambda w: half_loss(w, x) * scale)(w).astype(jnp.float32)
        return (grads * 256) / (256 * scale)

    found = mpjax.lint(clipped)(f16(4, 4), f16(2, 4), f32()).findings
    assert [f.rule for f in found] == ["unscaled-gradient"]
    assert not mpjax.lint(scaled_twice)(f16(4, 4), f16(2, 4), f32()).findings
