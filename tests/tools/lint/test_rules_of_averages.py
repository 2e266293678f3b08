"""Running averages in half."""

import jax
import jax.numpy as jnp
import pairs
import pytest
from pairs import Pair, bf16, f16, f32

import mpjax


def wide(x):
    return x.astype(jnp.float32)


def average(decay):
    def step(state, x):
        m = wide(state["m"])
        return {"m": (decay * m + (1 - decay) * wide(x)).astype(state["m"].dtype)}  # fault

    return step


def moved(state, x):
    return {"m": state["m"] + 0.01 * (x - state["m"])}  # fault


def moved_wide(state, x):
    return {"m": state["m"] + 0.1 * (x - state["m"])}


def forgets_nothing(state, x):
    return {"m": 0.999 * state["m"] + 0.001 * x}  # fault


def in_a_loop(xs):
    def turn(m, x):
        return m * 0.99 + x * 0.01, m  # fault

    return jax.lax.scan(turn, jnp.zeros(4, xs.dtype), xs)[1]


def in_a_loop_wide(xs):
    def turn(m, x):
        return m * 0.99 + wide(x) * 0.01, m.astype(xs.dtype)

    return jax.lax.scan(turn, jnp.zeros(4), xs)[1]


def cast_later(state, x):
    new = 0.99 * wide(state["m"]) + 0.01 * x  # fault
    return {"m": new.astype(state["m"].dtype)}


def alone(decay):
    def step(m, x):
        return (decay * wide(m) + (1 - decay) * x).astype(m.dtype)  # fault

    return step


HALF, WIDE = {"m": bf16(4)}, {"m": f32(4)}

CASES = {
    "in float32, kept in half": Pair("half-average", average(0.99), average(0.9), (HALF, f32(4))),
    "cast on another line": Pair("half-average", cast_later, average(0.9), (HALF, f32(4))),
    "by the difference": Pair("half-average", moved, moved_wide, (HALF, bf16(4))),
    "a single array": Pair("half-average", alone(0.9999), alone(0.9), (bf16(8), f32(8))),
    "in a loop": Pair("half-average", in_a_loop, in_a_loop_wide, (bf16(8, 4),)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_averages_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_a_decay_that_became_one_is_an_average_too():
    findings = mpjax.lint(forgets_nothing)(HALF, bf16(4)).findings
    assert [f.rule for f in findings] == ["half-average", "lost-constant"]
    assert {f.source for f in findings} == {*pairs.marked_lines(forgets_nothing)}


def test_averages_that_half_can_move_are_no_fault():
    for decay, state in ((0.9, HALF), (0.96, HALF), (0.995, {"m": f16(4)}), (0.9999, WIDE)):
        assert not mpjax.lint(average(decay))(state, f32(4)).findings, decay
    assert mpjax.lint(average(0.997))({"m": f16(4)}, f32(4)).findings


def test_a_gate_around_an_average_hides_nothing():
    def gated(state, x):
        new = average(0.99)(state, x)
        return mpjax.select(jnp.all(jnp.isfinite(x)), new, state)

    assert [f.rule for f in mpjax.lint(gated)(HALF, f32(4)).findings] == ["half-average"]
