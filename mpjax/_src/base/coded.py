"""Values that are kept for the backward pass in 8 bits.

Two kinds of codes cut the last axis into blocks of at most 128 entries. The unit of a block is a
power of two, kept in one byte.

- "int8": the squares of the integers up to 127, and their negatives. The largest entry of a block
  is off by at most 1/90 of itself, an entry of 1/1,000 of it by at most 2/5 of itself. Normal
  entries are off by as much as with 255 levels at equal distances, but entries near zero by less:
  they keep their signs, which a ReLU reads, down to 1/32,000 of the largest.
- "e4m3": 4 significant bits for each entry, off by at most 1/16 of itself, down to 1/14,336 of the
  largest entry of its block. Three times the error of "int8", unless few entries of a block are
  much larger than the others.

The third needs no scales, because the range of its values is known. So XLA writes its codes in any
kernel that makes or reads the values:

- "share": values from 0 to 1, such as the result of a softmax. A level is 254 times the fourth root
  of the value, so that small shares have smaller errors: off by at most 1/127 of itself at 1, 1/22
  at 2**-10. Below 1e-11 it becomes zero.

A block with Inf or NaN decodes to Inf and NaN alone; a share that is Inf or NaN decodes to NaN.
Zeros stay zeros; the sign of zero is lost in "int8". Units are at least 2**-126.

Blocks with a scale each: Dettmers et al. 2021 (arXiv 2110.02861). Powers of two as scales: OCP
Microscaling Formats 1.0. Roots as levels: Dettmers et al. 2021, and FlashOptim 2026 (arXiv
2602.23349).
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.base.blocks import (
    BIAS,
    INFINITY,
    bits_of,
    inverse,
    reaching,
    split,
    spread,
    unit_of,
)
from mpjax._src.base.dtypes import FLOAT32

BLOCK = 128
DEVICES = 8  # a long axis has at least as many blocks


class Code(NamedTuple):
    """A code of 8 bits.

    Attributes:
        dtype: The dtype of the codes.
        top: The largest number of units that a code stands for.
        squarings: How often a code is squared to give units.
        blocks: Whether each block has a unit of its own. Else the unit is 1.
    """

    dtype: np.dtype
    top: float
    squarings: int = 0
    blocks: bool = True

    @property
    def reach(self) -> np.float32:
        """The largest number of units that may be rounded to the top.

        An entry of slightly more than half of it becomes a square of at least half of it. So the
        unit of what codes stand for is theirs.
        """
        least = 2 * math.ceil(math.sqrt(self.top / 2)) ** 2 if self.squarings else self.top
        return np.nextafter(np.float32((self.top + least) / 2), np.float32(self.top))


INT8, UINT8, FLOAT8 = map(np.dtype, (np.int8, np.uint8, jnp.float8_e4m3fn))
KINDS = {
    "int8": Code(INT8, 127.0**2, squarings=1),
    "e4m3": Code(FLOAT8, 448.0),
    "share": Code(UINT8, 1.0, squarings=2, blocks=False),
}
LEVELS = 254.0  # of shares; the code 255 stands for Inf and NaN


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["kind"]
)
@dataclasses.dataclass(frozen=True)
class Coded:
    """An array in 8 bits.

    Attributes:
        codes: The codes, of the array's shape.
        scales: The exponent field of each block's unit, as uint8, of shape ``shape[:-1] +
            (blocks,)``; None for a kind without blocks.
        kind: One of `KINDS`.
    """

    codes: jax.Array
    scales: Any
    kind: str


def encode(x: jax.Array, kind: str) -> Coded:
    """Returns a floating array of at most 32 bits as codes of a kind."""
    code, wide = KINDS[kind], x.astype(FLOAT32)
    if code.blocks:
        return _in_blocks(jnp.atleast_1d(wide), x, kind)
    return Coded(_levels_of(wide, code), None, kind)


def decode(coded: Coded, dtype: np.dtype) -> jax.Array:
    """Returns the array that codes stand for, of a dtype."""
    code = KINDS[coded.kind]
    if not code.blocks:
        return _of_levels(coded.codes, code).astype(dtype)
    codes = jnp.atleast_1d(coded.codes)
    units = unit_of(spread(coded.scales, codes.shape, block_of(codes.shape[-1])))
    wide = codes.astype(FLOAT32)
    for _ in range(code.squarings):
        wide = wide * jnp.abs(wide)
    return (wide * units).astype(dtype).reshape(coded.codes.shape)


def coded_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Returns the bytes of an array's codes and scales."""
    *rows, length = shape or (1,)
    blocks = -(-length // block_of(length)) if KINDS[kind].blocks else 0
    return math.prod(shape) + math.prod(rows) * blocks


def block_of(length: int) -> int:
    """Returns the length of the blocks of an axis, at most 128.

    There are a power of two of them, so that an axis whose parts lie on as many devices is cut
    between blocks, not in them. Else devices would exchange the whole array.
    """
    blocks = 1 << (max(1, -(-length // BLOCK)) - 1).bit_length()
    if length >= DEVICES * BLOCK // 2:
        blocks = max(blocks, DEVICES)
    return max(1, -(-length // blocks))


def _in_blocks(wide: jax.Array, x: jax.Array, kind: str) -> Coded:
    """Returns an array as codes with a scale for each block; ``wide`` is the array in float32."""
    code, block = KINDS[kind], block_of(wide.shape[-1])
    largest = jnp.max(jnp.abs(split(wide, block)), axis=-1)
    scales = jnp.clip(reaching(bits_of(largest), code.reach), 1, _largest_scale(x.dtype, code))
    scales = jnp.where(jnp.isfinite(largest), scales, INFINITY)
    units = wide * inverse(spread(scales, wide.shape, block))
    units = jnp.clip(units, -code.top, code.top)
    if code.squarings:
        roots = _roots(jnp.abs(units), code)
        units = jnp.round(jnp.where(units < 0, -roots, roots))
    return Coded(units.astype(code.dtype).reshape(x.shape), scales.astype(jnp.uint8), kind)


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
