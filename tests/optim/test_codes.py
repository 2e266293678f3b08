"""Codes of 8 bits: what they hold, how far they are off, and that rounding has no bias."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import thorough_but

from mpjax._src.optim.codes import BLOCK, SIGNED, UNSIGNED, decode, encode, scales_of

CODES = {"signed": SIGNED, "unsigned": UNSIGNED}
SHAPES = [(1,), (31,), (32,), (33,), (100, 70), (300, 1), (3, 5, 64), (2, 96)]


@functools.partial(jax.jit, static_argnums=1)
def held(x, code, number=0):
    """Returns codes and scales, and what they stand for."""
    number = jnp.asarray(number, jnp.int32)
    scales = scales_of(x, code, number)
    codes = encode(x, scales, code, number)
    return codes, scales, decode(codes, scales, code)


def entries(code, rng, shape, decades=4):
    x = rng.normal(size=shape) * 10 ** rng.uniform(-decades, 0, size=shape)
    return np.float32(x if code.signed else np.abs(x))


# Few shapes, for each is compiled.
arrays = hnp.arrays(
    np.float32,
    st.sampled_from([(1,), (32,), (33,), (3, 70), (2, 3, 5)]),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False),
)


@pytest.mark.parametrize("name", CODES)
@given(x=arrays, number=st.integers(0, 2**31 - 1))
def test_code_keeps_shape_sign_and_magnitude_of_any_array(name, x, number):
    code = CODES[name]
    x = x if code.signed else np.abs(x)
    codes, scales, back = map(np.asarray, held(jnp.asarray(x), code, number))
    assert codes.shape == x.shape and codes.dtype == code.dtype
    assert scales.shape == (*x.shape[:-1], -(-x.shape[-1] // BLOCK)) and scales.dtype == np.uint8
    assert np.isfinite(back).all() and (back * np.sign(x) >= 0).all()
    # A step of the levels at an entry: the power's slope, and one level at least.
    largest = np.repeat(blockwise(x), BLOCK, -1)[..., : x.shape[-1]]
    share = np.abs(x) / np.maximum(largest, 1e-30)
    step = code.power * (share ** (1 - 1 / code.power) + 2.0 / code.levels) / code.levels
    # Scales are powers of two: levels reach up to twice as far as the largest entry.
    assert (np.abs(back - x) <= 2.1 * step * largest + 2.0**-100).all()
    if not code.signed:
        assert ((back > 0) == (x > 0)).all()


def blockwise(x):
    """Returns the largest size in each block."""
    pad = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % BLOCK)]
    return np.abs(np.pad(x, pad)).reshape(*x.shape[:-1], -1, BLOCK).max(-1)


@pytest.mark.parametrize("shape", thorough_but([pytest.param(shape) for shape in SHAPES], 3))
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_decoded_array_encodes_to_the_same_code_for_any_draw(code, shape, rng):
    x = entries(code, rng, shape)
    codes, scales, back = held(x, code)
    for number in rng.integers(0, 2**31 - 1, size=3):
        again, new, _ = held(back, code, number)
        np.testing.assert_array_equal(again, codes)
        np.testing.assert_array_equal(new, scales)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_code_holds_every_level_of_every_scale_exactly(code):
    """Each code with each scale, the block's largest level beside it."""
    levels = np.arange(256).astype(np.uint8).view(code.dtype)
    levels = levels[levels != -128] if code.signed else levels
    codes = np.stack([levels, np.full_like(levels, code.levels)], -1)
    scales = np.arange(1, code.largest_scale + 1, dtype=np.uint8)
    codes = np.broadcast_to(codes[None], (len(scales), *codes.shape))
    scales = np.broadcast_to(scales[:, None, None], (*codes.shape[:2], 1))
    back = np.asarray(jax.jit(decode, static_argnums=2)(codes, scales, code))
    assert np.isfinite(back).all() and (np.abs(back) >= 2.0**-126)[codes != 0].all()
    again, new, _ = held(back, code, 5)
    np.testing.assert_array_equal(again, codes)
    np.testing.assert_array_equal(new, scales)


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_code_mean_over_draws_is_exact(code, rng):
    """Also where a block's largest entry lies between two scales."""
    top = float(code.top) * 2.0**-20
    between = np.float32(top * np.linspace(0.9, 1.1, 64)[:, None] * np.ones((1, 32)))
    x = np.concatenate([entries(code, rng, (16, 32), 2), between])
    draws = jax.jit(jax.vmap(lambda number: held(x, code, number)[2]))(np.arange(2000))
    draws = np.asarray(draws, np.float64)
    spread = draws.std(0)
    off = (draws.mean(0) - np.asarray(x, np.float64)) / (spread + 1e-30) * np.sqrt(len(draws))
    # Where both neighbors are drawn often enough for a mean of draws to be normal.
    common = (spread > 0.15 * np.ptp(draws, 0)) & (np.abs(draws).min(0) > 0)
    assert common.sum() > 300 and np.abs(off[common]).max() < 6.5


@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_moving_average_below_a_step_of_its_code_still_moves(code):
    """To the nearest level, 0.999 of a level is that level again, for good."""
    x = np.float32(np.full((8, 64), 0.3) * np.linspace(0.1, 1.0, 64))

    def body(number, back):
        return held(0.999 * back, code, number)[2]

    back = jax.jit(lambda x: jax.lax.fori_loop(0, 1000, body, x))(x)
    np.testing.assert_allclose(np.mean(back), x.mean() * 0.999**1000, rtol=0.15)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("code", CODES.values(), ids=CODES)
def test_nonfinite_entry_spoils_its_block_of_codes_alone(code, wrong):
    x = np.ones((2, 100), np.float32)
    x[0, 40] = wrong
    back = held(x, code)[2]
    bad = np.zeros((2, 100), bool)
    bad[0, 32:64] = True
    np.testing.assert_array_equal(~np.isfinite(back), bad)


def test_unsigned_code_refuses_negatives_and_keeps_tiny_entries_above_zero():
    x = np.float32([[-1e-3, 1.0], [-0.0, 1.0], [1e-30, 1.0], [0.0, 1.0]])
    back = np.asarray(held(x, UNSIGNED)[2])
    assert not np.isfinite(back[0]).any() and back[1, 0] == 0 and back[3, 0] == 0
    assert 0 < back[2, 0] < 1e-9


def test_code_holds_the_largest_floats_for_any_draw():
    x = np.float32([np.finfo(np.float32).max, 1e38])
    for code in CODES.values():
        draws = jax.jit(jax.vmap(lambda number, code=code: held(x, code, number)[2]))
        back = draws(np.arange(200))
        np.testing.assert_allclose(back, np.broadcast_to(x, back.shape), rtol=0.05)
    assert (np.asarray(held(np.zeros((2, 40), np.float32), UNSIGNED)[2]) == 0).all()
