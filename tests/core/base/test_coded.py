"""Values kept in 8 bits: how far they are off, what they do to Inf, NaN, zeros and limits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import thorough_but

from mpjax._src.core.base.coded import BLOCK, KINDS, block_of, coded_bytes, decode, encode

DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
SHAPES = [(), (3,), (4, 64), (3, 197), (2, 3, 256), (2, 1000), (0,), (4, 0)]
COMMUNICATION = re.compile(r"all-|collective|reduce-scatter")


@functools.partial(jax.jit, static_argnums=1)
def held(x, kind):
    """Returns codes, and what they stand for."""
    coded = encode(x, kind)
    return coded, decode(coded, x.dtype)


def entries(rng, shape, dtype, decades=3.0):
    """Returns entries whose size differs from one to the next."""
    return jnp.asarray(rng.normal(size=shape) * 10 ** rng.uniform(-decades, 1, size=shape), dtype)


def largest(x):
    """Returns the largest magnitude of each entry's block."""
    x = np.abs(np.atleast_1d(np.float64(x)))
    block = block_of(x.shape[-1])
    starts = np.arange(0, x.shape[-1], block)
    return np.repeat(np.maximum.reduceat(x, starts, axis=-1), block, -1)[..., : x.shape[-1]]


@pytest.mark.parametrize("shape", thorough_but([pytest.param(s) for s in SHAPES], 0, 3, 7))
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_off_by_half_a_level_of_the_roots(dtype, shape, rng):
    x = entries(rng, shape, dtype)
    coded, back = held(x, "int8")
    assert back.shape == shape and back.dtype == dtype and coded.codes.dtype == np.int8
    assert coded_bytes(shape, "int8") == coded.codes.nbytes + coded.scales.nbytes
    if x.size:
        # The least power of two of which 16,164.5 are more than the largest entry: halfway from the
        # square of 127 to twice the square of 90.
        unit = 2 ** (np.floor(np.log2(largest(x) / 16164.5)) + 1).reshape(shape)
        wide, back = np.float64(x), np.float64(back)
        units = np.abs(wide) / unit
        rounded = np.abs(back) * 2.0 ** -jnp.finfo(dtype).nmant  # the result, to its own dtype
        step = (np.sqrt(units) + 0.5) ** 2 - units
        assert (np.abs(back - wide) <= step * unit * (1 + 1e-5) + rounded).all()
        assert np.abs(coded.codes).max() >= 90
        # Signs stay down to a quarter of a unit.
        assert (np.sign(back) == np.sign(wide))[units > 0.26].all()


def test_int8_is_as_accurate_as_e4m3_beside_an_outlier_of_thirty_times(rng):
    x = jnp.asarray(rng.normal(size=(64, 1024)), jnp.bfloat16).at[:, ::BLOCK].multiply(30)
    wide = np.delete(np.float64(x), np.s_[::BLOCK], 1)
    units = np.exp2(np.floor(np.log2(448 / np.abs(np.float64(x)).reshape(64, -1, BLOCK).max(2))))
    units = np.repeat(units, BLOCK, 1)
    floats = np.float64(jnp.asarray(np.float64(x) * units, jnp.float8_e4m3fn)) / units
    off = [
        np.linalg.norm(np.delete(back, np.s_[::BLOCK], 1) - wide)
        for back in (np.float64(held(x, "int8")[1]), floats)
    ]
    assert off[0] < 1.1 * off[1]  # of 255 levels at equal distances: four times


@pytest.mark.parametrize("dtype", DTYPES)
def test_shares_are_off_by_half_a_level_of_their_roots(dtype, rng):
    x = jnp.asarray(2.0 ** -rng.uniform(0, 14, size=(40, 300)), dtype).at[0, 0].set(1)
    wide, back = np.float64(x), np.float64(held(x, "share")[1])
    rounded = wide * 2.0 ** -jnp.finfo(dtype).nmant  # the result, to its own dtype
    step = (wide**0.25 + 0.5 / 254) ** 4 - wide
    assert (np.abs(back - wide) <= step * (1 + 1e-5) + rounded).all() and back[0, 0] == 1
    codes = encode(x, "share")
    assert codes.scales is None and coded_bytes(x.shape, "share") == codes.codes.nbytes


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", thorough_but([pytest.param(d) for d in DTYPES], 0, 1))
def test_nonfinite_entry_makes_its_block_nonfinite_alone(dtype, wrong, rng):
    x = entries(rng, (2, 2 * BLOCK), dtype).at[0, BLOCK + 7].set(wrong)
    bad = np.zeros(x.shape, bool)
    bad[0, BLOCK + 7] = True
    block = bad.copy()
    block[0, BLOCK : 2 * BLOCK] = True
    for kind, code in KINDS.items():
        expected = block if code.blocks else bad
        np.testing.assert_array_equal(~np.isfinite(np.float64(held(x, kind)[1])), expected)


@pytest.mark.parametrize("kind", thorough_but([*KINDS], "int8", "share"))
@pytest.mark.parametrize("dtype", thorough_but([pytest.param(d) for d in DTYPES], 0, 1))
def test_zeros_limits_and_the_smallest_numbers_stay_in_range(dtype, kind):
    info = jnp.finfo(dtype)
    top, least = float(info.max), float(info.smallest_normal)
    x = np.zeros((4, 200), dtype)
    x[1] = [top, -top] * 100
    x[2] = [0.99 * top, least] * 100
    x[3] = least
    back = np.float64(held(jnp.asarray(x), kind)[1])
    assert (back[0] == 0).all() and np.isfinite(back).all()
    if kind == "int8":
        np.testing.assert_allclose(back[1], np.float64(x[1]), rtol=1 / 63)
        np.testing.assert_array_equal(back[2, 1::2], 0)
        np.testing.assert_allclose(back[3], np.float64(x[3]), rtol=1 / 63)


@pytest.mark.parametrize("kind", thorough_but([*KINDS], "int8", "share"))
def test_decoded_array_is_coded_without_loss(kind, rng):
    x = jnp.abs(entries(rng, (30, 300), jnp.bfloat16))
    back = held(x, kind)[1]
    np.testing.assert_array_equal(np.float32(back), np.float32(held(back, kind)[1]))


@pytest.mark.parametrize("kind", thorough_but([*KINDS], "int8", "share"))
def test_codes_under_vmap_and_scan_are_those_of_each_array(kind, rng):
    x = entries(rng, (5, 6, 200), jnp.bfloat16)
    each = [held(row, kind)[1] for row in x]
    mapped = jax.vmap(lambda row: encode(row, kind), in_axes=1, out_axes=-1)(x.swapaxes(0, 1))
    back = jax.vmap(lambda coded: decode(coded, x.dtype), in_axes=-1)(mapped)
    _, stacked = jax.lax.scan(lambda _, row: (None, encode(row, kind)), None, x)
    _, scanned = jax.lax.scan(lambda _, coded: (None, decode(coded, x.dtype)), None, stacked)
    np.testing.assert_array_equal(np.float32(back), np.float32(each))
    np.testing.assert_array_equal(np.float32(scanned), np.float32(each))


@pytest.mark.parametrize(
    ("length", "block"),
    [(0, 1), (1, 1), (128, 128), (129, 65), (197, 99), (512, 64), (768, 96), (4096, 128)],
)
def test_blocks_are_a_power_of_two_of_at_most_128_entries(length, block):
    assert block_of(length) == block
    for devices in (2, 4, 8) if length >= 512 else ():
        assert length // devices % block == 0


@pytest.mark.parametrize(
    ("axis", "length"), thorough_but([(0, 200), (1, 512), (1, 768), (1, 1024)], (1, 768))
)
@pytest.mark.parametrize("kind", thorough_but([*KINDS], "int8", "share"))
def test_sharded_arrays_are_coded_where_they_are(kind, axis, length, rng):
    """Also an axis of blocks."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spec = P(*(None,) * axis, "x")
    x = jnp.abs(entries(rng, (16, length), jnp.bfloat16))
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    compiled = held.lower(placed, kind).compile()
    assert not COMMUNICATION.search(compiled.as_text())
    inside = jax.jit(
        jax.shard_map(lambda x: held(x, kind)[1], mesh=mesh, in_specs=spec, out_specs=spec)
    )
    expected = np.float32(held(x, kind)[1])
    np.testing.assert_array_equal(np.float32(held(placed, kind)[1]), expected)
    if axis == 0 or length == 8 * BLOCK:  # else a part by itself has other blocks
        np.testing.assert_array_equal(np.float32(inside(placed)), expected)
