"""Values that are kept for the backward pass in 8 bits.

``int8`` cuts the last axis into blocks of at most 128 entries. Each entry is rounded to the nearest
of 255 multiples of its block's unit, a power of two, so it is off by at most half a unit: 1/127 of
the largest entry of its block. What is below 1/254 of the largest entry becomes zero.

``e4m3`` rounds each entry by itself, to 4 significant bits: off by at most 1/16 of itself. Entries
above 448 become 448, those below 2**-6 are off by at most 2**-10.

A block with Inf or NaN decodes to Inf and NaN alone. Zeros stay zeros, without their sign in
``int8``. ``int8`` keeps what float32 holds above 2**-127; the rest becomes zero.

Blocks with a scale each: Dettmers et al. 2021 (arXiv 2110.02861). Powers of two as scales: OCP
Microscaling Formats 1.0.
"""

import dataclasses
import functools
import math

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

INT8, E4M3 = KINDS = ("int8", "e4m3")
DTYPES = {INT8: np.dtype(np.int8), E4M3: np.dtype(jnp.float8_e4m3fn)}
BLOCK = 128
LEVELS = 127
# The largest number of units that is rounded to the largest level.
TOP = np.nextafter(np.float32(LEVELS + 0.5), np.float32(0))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["codes", "scales"], meta_fields=["kind"]
)
@dataclasses.dataclass(frozen=True)
class Coded:
    """An array in 8 bits.

    Attributes:
        codes: The codes, of the array's shape.
        scales: For "int8", the exponent field of each block's unit, as uint8, of shape
            ``shape[:-1] + (blocks,)``; else None.
        kind: "int8" or "e4m3".
    """

    codes: jax.Array
    scales: jax.Array | None
    kind: str


def encode(x: jax.Array, kind: str) -> Coded:
    """Returns a floating array of at most 32 bits as codes of a kind."""
    wide = x.astype(FLOAT32)
    if kind == E4M3:
        top = float(jnp.finfo(DTYPES[kind]).max)  # what is above would become NaN
        wide = jnp.where(jnp.isfinite(wide), jnp.clip(wide, -top, top), wide)
        return Coded(wide.astype(DTYPES[kind]), None, kind)
    wide = jnp.atleast_1d(wide)
    block = block_of(wide.shape[-1])
    largest = jnp.max(jnp.abs(split(wide, block)), axis=-1)
    scales = jnp.clip(reaching(bits_of(largest), TOP), 1, _largest_scale(x.dtype))
    scales = jnp.where(jnp.isfinite(largest), scales, INFINITY)
    levels = jnp.round(wide * inverse(spread(scales, wide.shape, block)))
    codes = jnp.clip(levels, -LEVELS, LEVELS).astype(DTYPES[kind])
    return Coded(codes.reshape(x.shape), scales.astype(jnp.uint8), kind)


def decode(coded: Coded, dtype: np.dtype) -> jax.Array:
    """Returns the array that codes stand for, of a dtype."""
    if coded.scales is None:
        return coded.codes.astype(dtype)
    codes = jnp.atleast_1d(coded.codes)
    units = unit_of(spread(coded.scales, codes.shape, block_of(codes.shape[-1])))
    return (codes.astype(FLOAT32) * units).astype(dtype).reshape(coded.codes.shape)


def coded_bytes(shape: tuple[int, ...], kind: str) -> int:
    """Returns the bytes of an array's codes and scales."""
    scales = 0
    if kind == INT8:
        *rows, length = shape or (1,)
        scales = math.prod(rows) * -(-length // block_of(length))
    return math.prod(shape) + scales


def block_of(length: int) -> int:
    """Returns the length of the blocks of an axis: equal ones, as far as that is possible."""
    blocks = max(1, math.ceil(length / BLOCK))
    return max(1, math.ceil(length / blocks))


def _largest_scale(dtype: np.dtype) -> int:
    """Returns the largest scale at which all levels are finite in a dtype."""
    return BIAS + int(jnp.finfo(dtype).maxexp) - LEVELS.bit_length()
