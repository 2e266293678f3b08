"""Blocks along the last axis of an array, each with a power of two as its scale, in one byte.

A scale is stored as the exponent field of a float32, so that scaling is exact, and needs no
logarithm. The field 255 represents a block with Inf or NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np

BIAS, MANTISSA = 127, 23  # the bias of float32's exponent, and the bits of its mantissa
INFINITY = 255  # the exponent field of infinity and NaN


def bits_of(x: jax.Array) -> jax.Array:
    """Returns the bits of float32 values, as int32."""
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def float_of(bits: jax.Array) -> jax.Array:
    """Returns the float32 values of int32 bits."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def unit_of(scale: jax.Array) -> jax.Array:
    """Returns the power of two that an int32 scale represents."""
    return float_of(scale << MANTISSA)


def inverse(scale: jax.Array) -> jax.Array:
    """Returns the exact reciprocal of a scale's unit."""
    # A unit is 2**(scale - BIAS), so its reciprocal is the power of the opposite exponent.
    return float_of((2 * BIAS - scale) << MANTISSA)


def reaching(bits: jax.Array, top: np.float32) -> jax.Array:
    """Returns the least scale at which ``top`` units reach the float32 with these bits.

    It may be below 1 or above the largest scale: the caller clips it.
    """
    # Bits are in the order of the floats, so the exponent field of their difference is the greatest
    # k with size * 2**k <= top.
    return BIAS - ((int(top.view(np.int32)) - bits) >> MANTISSA)


def split(x: jax.Array, block: int) -> jax.Array:
    """Splits the last axis into blocks, (..., blocks, block), and pads the last with zeros."""
    if rest := -x.shape[-1] % block:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])
    return x.reshape(*x.shape[:-1], x.shape[-1] // block, block)


def spread(scales: jax.Array, shape: tuple[int, ...], block: int) -> jax.Array:
    """Returns the scale of each entry of an array of this shape, as int32."""
    each = jnp.repeat(scales, block, axis=-1)
    return each[..., : shape[-1]].astype(jnp.int32)
