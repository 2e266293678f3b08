"""Values that are stored for the backward pass in 8 bits.

- "int8": the squares of the integers up to 127, and their negatives, in units. The last axis is cut
  into blocks of at most 128 entries. The unit of a block is a power of two, kept in one byte. The
  largest entry of a block is off by at most 1/90 of itself, an entry of 1/1,000 of it by at most
  2/5 of itself. Normal entries are off by as much as with 255 levels at equal distances, but
  entries near zero by less: they keep their signs, which a ReLU reads, down to 1/32,000 of the
  largest. e4m3 in blocks has three times the error, and no smaller one next to an entry that is
  thirty times as large.
- "share": values from 0 to 1, such as the result of a softmax. A level is 254 times the fourth root
  of the value, so that small shares have smaller errors: off by at most 1/127 of itself at 1, 1/22
  at 2**-10. Below 1e-11 it becomes zero. The range is known, so there are no scales, and XLA writes
  the codes in any kernel that makes or reads the values.

A block with Inf or NaN decodes to Inf and NaN alone; a share that is Inf or NaN decodes to NaN.
Zeros stay zeros; the sign of zero is lost in "int8". Units are at least 2**-126.

Blocks with a scale each: Dettmers et al. 2021 (arXiv 2110.02861). Powers of two as scales: OCP
Microscaling Formats 1.0. Roots as levels: Dettmers et al. 2021, and FlashOptim 2026 (arXiv
2602.23349).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.blocks import (
    BIAS,
    INFINITY,
    bits_of,
    inverse,
    reaching,
    split,
    spread,
    unit_of,
)
from mpjax._src.core.base.dtypes import FLOAT32

BLOCK = 128
DEVICES = 8  # a long axis has at least as many blocks


class Code(NamedTuple):
    """A code of 8 bits."""

    dtype: np.dtype  # the dtype of the codes
    top: float  # the largest number of units that a code represents
    squarings: int  # how often a code is squared to give units
    blocks: bool  # whether each block has its own unit; else the unit is 1

    @property
    def reach(self) -> np.float32:
        """The largest number of units that may be rounded to the top.

        An entry of slightly more than half of it becomes a square of at least half of it. So the
        unit of what codes represent is theirs.
        """
        least = 2 * math.ceil(math.sqrt(self.top / 2)) ** 2
        return np.nextafter(np.float32((self.top + least) / 2), np.float32(self.top))


KINDS = {
    "int8": Code(np.dtype(np.int8), 127.0**2, squarings=1, blocks=True),
    "share": Code(np.dtype(np.uint8), 1.0, squarings=2, blocks=False),
}
LEVELS = 254.0  # of shares; the code 255 represents Inf and NaN


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["kind"]
)
@dataclasses.dataclass(frozen=True)
class Coded:
    """An array in 8 bits."""

    codes: jax.Array  # the codes, of the array's shape
    # The exponent field of each block's unit, as uint8, of shape ``shape[:-1] + (blocks,)``; None
    # for a kind without blocks.
    scales: Any
    kind: str  # one of `KINDS`


def encode(x: jax.Array, kind: str, rounded: bool = False, in_order: bool = True) -> Coded:
    """Returns a floating array of at most 32 bits as codes of a kind.

    Of one that was computed in float32 and ``rounded``, XLA:GPU would write the float32 array to
    memory, and round it wherever it is read. So codes are computed from the array behind a barrier.
    With ``in_order``, XLA:GPU must lay out blocks in the order of the axes (`row_major`). Of what a
    convolution reads or makes, it should choose the order.
    """
    code, fenced = KINDS[kind], _jax.again_barrier(x) if rounded else x
    if not code.blocks:
        return Coded(_levels_of(fenced.astype(FLOAT32), code), None, kind)
    codes, scales = _in_blocks(jnp.atleast_1d(x), jnp.atleast_1d(fenced), code)
    codes = codes.reshape(x.shape)
    if in_order:
        codes, scales = _jax.row_major(codes), _jax.row_major(scales)
    return Coded(codes, scales, kind)


def decode(coded: Coded, dtype: np.dtype) -> jax.Array:
    """Returns the array that codes represent, of a dtype."""
    code = KINDS[coded.kind]
    if not code.blocks:
        return _of_levels(coded.codes, code).astype(dtype)
    codes = jnp.atleast_1d(coded.codes)
    units = unit_of(spread(coded.scales, codes.shape, block_of(codes.shape[-1])))
    wide = codes.astype(FLOAT32)
    for _ in range(code.squarings):
        # A plain square would lose the sign.
        wide = wide * jnp.abs(wide)
    return (wide * units).astype(dtype).reshape(coded.codes.shape)


def coded_bytes(shape: Sequence[Any], kind: str) -> int:
    """Returns the bytes of an array's codes and scales; its last axis is not symbolic."""
    *rows, length = shape or (1,)
    blocks = -(-length // block_of(length)) if KINDS[kind].blocks else 0
    return _jax.size_of(shape) + _jax.size_of(rows) * blocks


def block_of(length: int) -> int:
    """Returns the length of the blocks of an axis, at most 128.

    There are a power of two of them, so that an axis whose parts are on as many devices is cut
    between blocks, not in them. Else devices would exchange the whole array.
    """
    blocks = 1 << (max(1, -(-length // BLOCK)) - 1).bit_length()
    if length >= DEVICES * BLOCK // 2:
        blocks = max(blocks, DEVICES)
    return max(1, -(-length // blocks))


def _in_blocks(x: jax.Array, fenced: jax.Array, code: Code) -> tuple[jax.Array, jax.Array]:
    """Returns codes of an array, and the scale of each block.

    The largest entries are those of ``x``, which XLA finds in the kernel that computes it; the
    codes are those of ``fenced``, the same array.
    """
    block = block_of(x.shape[-1])
    largest = jnp.max(jnp.abs(split(x.astype(FLOAT32), block)), axis=-1)
    # From 1 on, units are normal numbers. Smaller ones are subnormal, which XLA may flush.
    scales = jnp.clip(reaching(bits_of(largest), code.reach), 1, _largest_scale(x.dtype, code))
    scales = jnp.where(jnp.isfinite(largest), scales, INFINITY)
    units = fenced.astype(FLOAT32) * inverse(spread(scales, x.shape, block))
    # Up to `reach` units, which is more than the top, are rounded to the top.
    units = jnp.clip(units, -code.top, code.top)
    roots = _roots(jnp.abs(units), code)
    levels = jnp.round(jnp.where(units < 0, -roots, roots))
    return levels.astype(code.dtype), scales.astype(jnp.uint8)


def _largest_scale(dtype: np.dtype, code: Code) -> int:
    """Returns the largest scale at which all codes are finite in a dtype."""
    return BIAS + int(jnp.finfo(dtype).maxexp) - int(code.top).bit_length()


def _roots(units: jax.Array, code: Code) -> jax.Array:
    for _ in range(code.squarings):
        units = jnp.sqrt(units)
    return units


def _levels_of(x: jax.Array, code: Code) -> jax.Array:
    roots = _roots(jnp.clip(x, 0, code.top), code)
    levels = jnp.where(jnp.isfinite(x), jnp.round(roots * LEVELS), LEVELS + 1)
    return levels.astype(code.dtype)


def _of_levels(levels: jax.Array, code: Code) -> jax.Array:
    roots = levels.astype(FLOAT32) * np.float32(1 / LEVELS)
    x = roots
    for _ in range(code.squarings):
        x = x * x
    return jnp.where(levels > LEVELS, jnp.nan, x)
