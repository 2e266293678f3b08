"""Angles that roundings to 16 bits turn: by their ranges, and by the values of a step."""

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
from pairs import Pair, bf16, f16

import mpjax

FREQUENCIES = 1.0 / 10000 ** (np.arange(0, 8, 2) / 8)
TIMES = jnp.array([999.4, 1.5, 313.7])


def angles(length):
    return jnp.arange(length, dtype=jnp.float32)[:, None] * FREQUENCIES.astype(np.float32)


def rotated(x):
    return x * jnp.sin(angles(x.shape[0]).astype(x.dtype))  # fault


def rotated_wide(x):
    return x * jnp.sin(angles(x.shape[0])).astype(x.dtype)


def embedded(t):
    return jnp.sin(t.astype(jnp.bfloat16))  # fault


def embedded_wide(t):
    return jnp.sin(t).astype(jnp.bfloat16)


def turned(t):
    p = t.astype(jnp.bfloat16).astype(jnp.complex64)  # fault
    return jnp.exp(1j * p)


def turned_wide(t):
    return jnp.exp(1j * t.astype(jnp.complex64))


CASES = {
    "rope": Pair("half-phase", rotated, rotated_wide, (f16(2000, 4),)),
    "times": Pair("rounded-phase", embedded, embedded_wide, (TIMES,)),
    "complex": Pair("rounded-phase", turned, turned_wide, (TIMES,)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_phases_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def clean(fun, *args):
    return not mpjax.lint(fun)(*args).findings


def test_small_angles_are_no_fault():
    assert clean(rotated, f16(200, 4)) and clean(rotated, bf16(31, 4))
    assert not clean(rotated, bf16(40, 4))
    assert clean(embedded, jnp.array([0.3, 20.7])), "rounded by 1/16 at most"


def test_angles_that_16_bits_represent_are_no_fault():
    assert clean(lambda x: x * jnp.sin(jnp.arange(200, dtype=x.dtype)), bf16(200))
    assert clean(embedded, jnp.array([100.0, 999.4 // 4 * 4])), "multiples of the ulp"
    assert clean(embedded, jnp.array([0.5, np.inf, np.nan]))
    halved = lambda x: x * jnp.sin(jnp.arange(200, dtype=x.dtype) * 0.5)  # noqa: E731
    assert clean(halved, bf16(200)), "a power of two moves the exponent"


def test_errors_of_positions_grow_with_their_factor():
    def scaled(factor):
        return lambda x: jnp.sin(jnp.linspace(0, 8, 99).astype(jnp.bfloat16) * factor + x)

    assert clean(scaled(1.0), jnp.float32(0)) and not clean(scaled(64.0), jnp.float32(0))


def test_a_whole_turn_is_no_error():
    def turns(t):
        return jnp.sin(2 * np.pi * t.astype(jnp.bfloat16).astype(jnp.float32))

    lint = mpjax.lint(turns, select="rounded-phase")
    assert not lint(jnp.array([257.0, 513.0])).findings, "each is rounded by a whole turn"
    assert lint(jnp.array([257.0, 513.5])).findings


def test_phases_are_measured_in_loops_and_gradients():
    def loss(t):
        def turn(total, w):
            return total + jnp.sum(jnp.sin(t.astype(jnp.bfloat16).astype(jnp.float32) * w)), None

        return jax.lax.scan(jax.checkpoint(turn), 0.0, jnp.arange(1.0, 3.0))[0]

    for fun, options in ((loss, {"argnums": 0}), (jax.vmap(loss), {}), (jax.jit(loss), {})):
        times = TIMES[None] if fun is not loss and not hasattr(fun, "lower") else TIMES
        found = {f.rule for f in mpjax.lint(fun, **options)(times).findings}
        assert "rounded-phase" in found
