"""Blocks and their scales: exact powers of two, and the entries that a scale belongs to."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax._src.core.base.blocks import (
    BIAS,
    bits_of,
    float_of,
    inverse,
    reaching,
    split,
    spread,
    unit_of,
)


def test_units_and_inverses_are_the_powers_of_two_of_their_scales():
    scales = np.arange(1, 254)
    units, inverses = map(np.float64, (unit_of(scales), inverse(scales)))
    np.testing.assert_array_equal(units, 2.0 ** (scales - BIAS))
    np.testing.assert_array_equal(units * inverses, 1)
    assert np.isinf(unit_of(np.int32(255)))


def test_reaching_scale_is_the_least_whose_top_reaches(rng):
    x = np.float32(2.0 ** rng.uniform(-100, 100, size=1000))
    x[:2] = 127, np.nextafter(np.float32(127), np.float32(200))
    scale = np.asarray(reaching(bits_of(jnp.asarray(x)), np.float32(127)))
    unit = 2.0 ** (scale - BIAS)
    assert (x <= 127 * unit).all() and (x > 127 * unit / 2).all()
    np.testing.assert_array_equal(scale[:2], [BIAS, BIAS + 1])


def test_bits_come_back_as_the_same_floats(rng):
    x = jnp.asarray(rng.normal(size=100), jnp.float32)
    np.testing.assert_array_equal(float_of(bits_of(x)), x)


@pytest.mark.parametrize(("length", "block"), [(64, 32), (70, 32), (3, 3)])
def test_spread_scales_belong_to_the_entries_of_their_block(length, block, rng):
    x = rng.normal(size=(2, length)).astype(np.float32)
    parts = np.asarray(split(jnp.asarray(x), block))
    assert parts.shape == (2, -(-length // block), block)
    number = jnp.broadcast_to(jnp.arange(parts.shape[1], dtype=jnp.uint8), parts.shape[:2])
    each = np.asarray(jax.jit(spread, static_argnums=(1, 2))(number, x.shape, block))
    np.testing.assert_array_equal(each, np.broadcast_to(np.arange(length) // block, x.shape))
    np.testing.assert_array_equal(parts.reshape(2, -1)[:, :length], x)
    assert (parts.reshape(2, -1)[:, length:] == 0).all()
