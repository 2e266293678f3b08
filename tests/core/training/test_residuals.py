"""A half weight and what lies beside it: which float32 values they hold, bit for bit."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given

from mpjax._src.core.training import residuals

BFLOAT16 = np.dtype(jnp.bfloat16)
MAX = float(np.finfo(np.float32).max)
split = jax.jit(residuals.split, static_argnums=(1, 2))
full = jax.jit(residuals.full)


@jax.jit
def there_and_back(bits):
    """The bits of the weight, and of the value that it holds with its residual of 16 bits."""
    value = jax.lax.bitcast_convert_type(bits, jnp.float32)
    param, beside = residuals.split(value, BFLOAT16, residuals.UINT16)
    both = residuals.full(param, beside)
    return jax.lax.bitcast_convert_type(param, jnp.uint16), jax.lax.bitcast_convert_type(
        both, jnp.uint32
    )


def check_all(bits):
    top, back = map(np.asarray, there_and_back(bits))
    nan = bits & 0x7FFFFFFF > 0x7F800000
    np.testing.assert_array_equal(back[~nan], bits[~nan])
    # A NaN stays one, in the weight too, of the same sign.
    np.testing.assert_array_equal(top & 0x7FFF > 0x7F80, nan)
    np.testing.assert_array_equal(back & 0x7FFFFFFF > 0x7F800000, nan)
    np.testing.assert_array_equal(back >> 31, bits >> 31)
    # Rounded to the nearest: half of the last place away at most.
    distance = (top.astype(np.int64) << 16) - bits.astype(np.int64)
    assert (abs(distance[~nan]) <= 0x8000).all()


def test_residual_restores_every_kind_of_float32_number(rng):
    """All exponents, at all edges of what is rounded, and random ones between."""
    tops = np.arange(1 << 16, dtype=np.uint32) << 16
    edges = np.array(
        [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, *rng.integers(0, 1 << 16, 6)], np.uint32
    )
    check_all((tops[:, None] | edges).ravel())


@pytest.mark.thorough
def test_residual_restores_all_float32_numbers():
    for start in range(0, 1 << 32, 1 << 24):
        check_all(np.arange(start, start + (1 << 24), dtype=np.int64).astype(np.uint32))


def test_residual_split_rounds_as_a_cast_but_at_ties(rng):
    x = np.float32(rng.normal(size=4096) * np.exp(rng.normal(size=4096) * 20))
    param, _ = split(x, BFLOAT16, residuals.UINT16)
    ties = x.view(np.uint32) & 0xFFFF == 0x8000
    np.testing.assert_array_equal(np.asarray(param)[~ties], x.astype(jnp.bfloat16)[~ties])
    tie = np.float32([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8])  # away from zero, not to even
    param, _ = split(tie, BFLOAT16, residuals.UINT16)
    assert param.tolist() == [1 + 2**-7, 1 + 2**-6, -1 - 2**-7]


FLOATS = st.floats(width=32, allow_nan=False)


@given(FLOATS, st.sampled_from(["uint8", "bfloat16", "float16"]))
@example(MAX, "uint8")
@example(MAX, "bfloat16")
@example(-0.0, "uint8")
@example(float("inf"), "float16")
def test_shorter_residuals_hold_as_many_bits_as_they_say(x, kind):
    dtype = np.dtype(jnp.float16) if kind == "float16" else BFLOAT16
    bits = residuals.KINDS[np.dtype(kind)].bits
    x = np.float32(x)
    param, beside = split(x, dtype, kind)
    assert beside.dtype == kind and param.dtype == dtype
    back = np.float32(full(param, beside))
    largest = float(jnp.finfo(dtype).max) * (1 + 2.0**-12)
    if not abs(x) < largest:
        assert back == np.float32(jnp.asarray(x).astype(dtype)) or abs(back) >= largest
        return
    least = float(jnp.finfo(dtype if kind == "float16" else np.float32).smallest_subnormal)
    allowed = max(abs(float(x)) * 2.0**-bits, least * 2 ** (8 if kind == "uint8" else 1))
    allowed = max(allowed, 2.0**-125 if kind == "bfloat16" else 0)  # what a CPU flushes to zero
    assert abs(float(back) - float(x)) <= allowed


def test_xla_keeps_the_residual_of_a_rounding():
    """XLA may drop a round trip through half: a residual of floats would be zero then."""

    @jax.jit
    def compensated(x):
        return residuals.split(x * 3, BFLOAT16, BFLOAT16)

    param, beside = compensated(jnp.float32(1.001))
    assert float(beside) != 0 and float(param) == 3
    assert float(residuals.full(param, beside)) == pytest.approx(3.003, rel=2**-16)


def test_a_weight_that_is_subnormal_in_float16_is_not_0():
    value, half = jnp.array([1e-6, -3e-5], jnp.float32), np.dtype(jnp.float16)
    param, error = split(value, half, half)
    np.testing.assert_array_equal(param, value.astype(half))
    np.testing.assert_allclose(full(param, error), value, rtol=0, atol=2**-25)
