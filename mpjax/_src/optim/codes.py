"""Arrays in 8 bits: companded codes, and a power-of-two scale for every 32 entries.

The last axis is cut into blocks of 32 entries. Each entry is divided by the scale of its block, a
power of two. The square root or fourth root of the result is rounded to 8 bits, so that small
entries have smaller rounding errors. Codes have the shape of the array; scales take one byte per
block.

Rounding is stochastic, so that its mean is exact. With rounding to nearest, averages that change by
less than half a step, such as the second moments of Adam, would never change. The random bits are a
hash of the entry's own bits and of a number that the caller counts. They need no key and no
position, so they do not depend on how arrays are sharded. Encoding a decoded array gives the same
codes.

Companding and blocks: Dettmers et al. 2021 (arXiv 2110.02861), FlashOptim 2026 (arXiv 2602.23349).
Power-of-two scales for every 32 entries: OCP Microscaling Formats 1.0.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import blocks
from mpjax._src.optim.rounding import mixed

BLOCK = 32


@dataclasses.dataclass(frozen=True)
class Code:
    """A code of 8 bits. Its integer is a level; a power of the level is a number of units.

    A unit is the value of the block's scale.
    """

    dtype: type  # int8 with a sign, uint8 without one
    squarings: int  # how often a level is squared to give units

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
        """The largest number of units."""
        return np.float32(self.levels**self.power)

    @property
    def largest_scale(self) -> int:
        """The largest scale at which the largest number of units is finite in float32."""
        return blocks.INFINITY - (self.levels**self.power).bit_length()

    def units(self, level: jax.Array) -> jax.Array:
        """Returns the units of a level, in integers, which no compiler fuses to multiply-adds."""
        for _ in range(self.squarings):
            level = level * level
        return level.astype(jnp.uint32).astype(jnp.float32)

    def level(self, units: jax.Array) -> jax.Array:
        """Returns the level at or below a number of units, off by one if a root is rounded up."""
        for _ in range(self.squarings):
            units = jnp.sqrt(units)
        return units.astype(jnp.int32)


SIGNED = Code(np.int8, 1)
# For divisors: an entry that is not zero becomes at least level 1.
UNSIGNED = Code(np.uint8, 2)


def by_dtype(dtype: np.dtype) -> Code | None:
    """Returns the code with this dtype, or None."""
    return next((code for code in (SIGNED, UNSIGNED) if dtype == code.dtype), None)


def scales_of(x: jax.Array, code: Code, number: jax.Array) -> jax.Array:
    """Returns the scales of an array's blocks: uint8, of shape ``x.shape[:-1] + (blocks,)``.

    A scale is the float32 exponent field of a block's unit: the least whose levels reach the
    block's largest entry. If that entry is slightly above the top level of the next lower scale, it
    is between that level and a level of this scale. Then the scale is chosen at random, with the
    random bits that round the entry itself.

    A block with an entry that the code cannot represent (Inf, NaN, a negative entry of an unsigned
    code) has the unit infinity, so that all of it decodes to Inf or NaN.

    ``number`` seeds the random bits; it is an int32 scalar, different for each update.
    """
    x = blocks.split(x.astype(jnp.float32), _block(x.shape))
    bits = blocks.bits_of(jnp.abs(x if code.signed else jnp.where(x < 0, jnp.inf, x)))
    bits = jnp.max(bits, axis=-1)  # in the order of the floats, with NaN above all
    size = blocks.float_of(bits)
    # Below 1 the unit would be subnormal, and its reciprocal infinite.
    scale = jnp.clip(blocks.reaching(bits, code.top), 1, code.largest_scale)
    first = np.float32((1 + int(code.levels / 2 ** (1 / code.power))) ** code.power)
    # In units of the next lower scale: how far the largest entry is above its top level, and how
    # far the first level of this scale is. `encode` draws the same number: an entry whose scale
    # stays rises to that level, so the mean is exact.
    over = size * blocks.inverse(scale - 1) - code.top
    falls = _draw(size, number) * (2 * first - code.top) >= over
    scale = scale - falls.astype(jnp.int32)
    infinite = bits >= blocks.INFINITY << blocks.MANTISSA
    scale = jnp.where(infinite, blocks.INFINITY, jnp.maximum(scale, 1))
    return scale.astype(jnp.uint8)


def encode(x: jax.Array, scales: jax.Array, code: Code, number: jax.Array) -> jax.Array:
    """Returns the codes of an array, of its shape; ``number`` is that of its scales."""
    # Read once, because XLA:GPU stores a value that is read often instead of recomputing it.
    bits = blocks.bits_of(x.astype(jnp.float32))
    sign, size = bits >> 31, blocks.float_of(bits & 0x7FFFFFFF)
    units = size * blocks.inverse(blocks.spread(scales, x.shape, _block(x.shape)))
    level = code.level(units)
    below = code.units(level)
    # If a root was rounded to the next level, this comparison is certain and corrects it.
    rises = _draw(size, number) * (code.units(level + 1) - below) < units - below
    level = jnp.minimum(level + rises.astype(jnp.int32), code.levels)
    if code.signed:
        level = (level ^ sign) - sign  # sign is 0 or -1: a negative number in two's complement
    else:
        level = jnp.maximum(level, (size > 0).astype(jnp.int32))
    return level.astype(code.dtype)


def decode(codes: jax.Array, scales: jax.Array, code: Code) -> jax.Array:
    """Returns the float32 array that codes and scales represent."""
    units = codes.astype(jnp.float32)
    for _ in range(code.squarings):  # gives the same rounding as the integers of `Code.units`
        units = units * jnp.abs(units)
    return units * blocks.unit_of(blocks.spread(scales, codes.shape, _block(codes.shape)))


def _draw(size: jax.Array, number: jax.Array) -> jax.Array:
    """Returns random floats in [0, 1), of 23 bits: a hash of the bits of floats and ``number``."""
    # 2**32 over the golden ratio spreads the counter over all bits, so that successive updates draw
    # unrelated numbers.
    bits = mixed(
        blocks.bits_of(size).astype(jnp.uint32) ^ number.astype(jnp.uint32) * np.uint32(0x9E3779B9)
    )
    # 23 bits as the mantissa of a number from 1 to 2, whose floats are equally spaced.
    return blocks.float_of((bits >> 9).astype(jnp.int32) | (blocks.BIAS << blocks.MANTISSA)) - 1


def _block(shape: tuple[int, ...]) -> int:
    return min(BLOCK, shape[-1])
