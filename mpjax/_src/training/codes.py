"""Arrays in 8 bits an entry: companded codes, and a power of two for every 32 along the last axis.

The last axis is cut into blocks. What a block holds is divided by a power of two, its scale, and
the power of it that the code keeps (a half, a quarter) is what is rounded to 8 bits: steps are fine
near zero and relative to an entry's size. Codes have the shape of the array, scales a byte for
every block.

Which of its two neighbours an entry becomes is drawn, so that the mean is exact. Averages that move
by less than half a step, as the second moments of Adam do, would otherwise stay where they are for
good. The draw is a hash of the entry's own bits and of a number that the caller counts: it needs no
key and no position, so it is the same however arrays are sharded. What a code holds exactly
becomes the same code again.

Steps after powers and blocks: Dettmers et al. 2021 (arXiv 2110.02861), FlashOptim 2026
(arXiv 2602.23349); scales of powers of two for every 32: OCP Microscaling Formats 1.0.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.training.rounding import mixed

BLOCK = 32
BIAS, MANTISSA = 127, 23  # of float32's exponents, and how many bits lie below them
INFINITY = 255  # as an exponent


@dataclasses.dataclass(frozen=True)
class Code:
    """What 8 bits mean: a level, of which a power counts units of the block.

    Attributes:
        dtype: int8 with a sign, uint8 without one.
        squarings: How often a level is squared to give units.
    """

    dtype: type
    squarings: int

    @property
    def signed(self) -> bool:
        return self.dtype is np.int8

    @property
    def levels(self) -> int:
        return int(np.iinfo(self.dtype).max)

    @property
    def power(self) -> int:
        return int(2**self.squarings)

    @property
    def top(self) -> np.float32:
        """The largest count of units."""
        return np.float32(self.levels**self.power)

    @property
    def largest_scale(self) -> int:
        """The scale whose largest count float32 still holds."""
        return INFINITY - (self.levels**self.power).bit_length()

    def units(self, level: jax.Array) -> jax.Array:
        """Returns the units that a level counts, by integers, which no compiler contracts."""
        for _ in range(self.squarings):
            level = level * level
        return level.astype(jnp.uint32).astype(jnp.float32)

    def level(self, units: jax.Array) -> jax.Array:
        """Returns the level at or below a count of units; next to it where a root is rounded."""
        for _ in range(self.squarings):
            units = jnp.sqrt(units)
        return units.astype(jnp.int32)


SIGNED = Code(np.int8, 1)
# What divides: an entry that is not zero is never zero again, but the least level at least.
UNSIGNED = Code(np.uint8, 2)


def by_dtype(dtype: np.dtype) -> Code | None:
    """Returns the code that arrays of a dtype are of, or None."""
    return next((code for code in (SIGNED, UNSIGNED) if dtype == code.dtype), None)


def scales_of(x: jax.Array, code: Code, number: jax.Array) -> jax.Array:
    """Returns the scales of an array's blocks: uint8, of shape ``x.shape[:-1] + (blocks,)``.

    A scale is the exponent of a block's unit, as float32 has it: the least whose levels reach the
    largest entry. Just above what the scale before it reaches, an entry lies between the last level
    there and the first one here: the scale is drawn, by the draw that rounds the entry itself.

    A block with an entry that the code does not hold (Inf, NaN, negative without a sign) has the
    unit infinity: nothing in it is finite.

    Args:
        x: A floating array of at least one axis.
        code: Which code.
        number: What the draws are drawn by beside the entries, an int32 scalar: another one each
            time.
    """
    x = _blocks(x.astype(jnp.float32))
    bits = _bits(jnp.abs(x if code.signed else jnp.where(x < 0, jnp.inf, x)))
    bits = jnp.max(bits, axis=-1)  # ordered as the floats are, NaN above all
    size = _float(bits)
    scale = BIAS - ((int(code.top.view(np.int32)) - bits) >> MANTISSA)
    scale = jnp.clip(scale, 1, code.largest_scale)
    first = np.float32((1 + int(code.levels / 2 ** (1 / code.power))) ** code.power)
    over = size * _inverse(scale - 1) - code.top
    falls = _draw(size, number) * (2 * first - code.top) >= over
    scale = scale - falls.astype(jnp.int32)
    scale = jnp.where(bits >= INFINITY << MANTISSA, INFINITY, jnp.maximum(scale, 1))
    return scale.astype(jnp.uint8)


def encode(x: jax.Array, scales: jax.Array, code: Code, number: jax.Array) -> jax.Array:
    """Returns the codes of an array, of its shape.

    Args:
        x: A floating array of at least one axis.
        scales: Those of its blocks.
        code: Which code.
        number: That of the scales.
    """
    # Read once: XLA:GPU writes down what is read often, rather than compute it again.
    bits = _bits(x.astype(jnp.float32))
    sign, size = bits >> 31, _float(bits & 0x7FFFFFFF)
    units = size * _inverse(_spread(scales, x.shape))
    level = code.level(units)
    below = code.units(level)
    # Where a root was rounded to a neighbour, the draw is certain, and right.
    rises = _draw(size, number) * (code.units(level + 1) - below) < units - below
    level = jnp.minimum(level + rises.astype(jnp.int32), code.levels)
    if code.signed:
        level = (level ^ sign) - sign
    else:
        level = jnp.maximum(level, (size > 0).astype(jnp.int32))
    return level.astype(code.dtype)


def decode(codes: jax.Array, scales: jax.Array, code: Code) -> jax.Array:
    """Returns the float32 array that codes and scales stand for."""
    units = codes.astype(jnp.float32)
    for _ in range(code.squarings):  # rounded as the integers of `Code.units` are
        units = units * jnp.abs(units)
    return units * _float(_spread(scales, codes.shape) << MANTISSA)


def _inverse(scale: jax.Array) -> jax.Array:
    """Returns how many units are one, exactly."""
    return _float((2 * BIAS - scale) << MANTISSA)


def _draw(size: jax.Array, number: jax.Array) -> jax.Array:
    """Returns floats in [0, 1), of 23 bits, that depend on the bits of floats and on ``number``."""
    bits = mixed(_bits(size).astype(jnp.uint32) ^ number.astype(jnp.uint32) * np.uint32(0x9E3779B9))
    return _float((bits >> 9).astype(jnp.int32) | (BIAS << MANTISSA)) - 1


def _bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.int32)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _blocks(x: jax.Array) -> jax.Array:
    """Returns the last axis in blocks, (..., blocks, block), the last of them filled with zeros."""
    length = x.shape[-1]
    block = min(BLOCK, length)
    if rest := -length % block:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])
    return x.reshape(*x.shape[:-1], -1, block)


def _spread(scales: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns the scale of each entry of an array of this shape, as int32."""
    each = jnp.repeat(scales, min(BLOCK, shape[-1]), axis=-1)
    return each[..., : shape[-1]].astype(jnp.int32)
