"""The figures of one array: its magnitude, its losses in 16 bits, and its rounding noise.

They are one reduction over the array and its bits, so that devices that flush subnormal numbers
count them too. Figures are combined by maxima and sums over loop iterations, devices and branches.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT16, FLOAT32, limits_of
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import pytree_of

# An entry counts as near overflow within this many powers of two of the largest number.
NEAR = 4

# Rounding noise is computed from entries between the first two powers of two, scaled by the third
# before they are squared. Squares of other entries leave the range of float32; larger entries are
# attention masks.
LEAST, MOST, SHIFT = -70, 30, 20
COUNTS = ("entries", "looked_at", "zeros", "flushed", "subnormal", "near", "overflowed", "nan")
COLUMNS = len(COUNTS) + 2

# In a large array only the largest magnitude is taken over all entries. The other figures use every
# ROWS-th row at least, and ENOUGH entries at least, so shares are known to one part in 2**18.
# Measuring all entries would move as many bytes as the step itself.
ROWS, ENOUGH = 16, 1 << 18

# An array is reduced in runs of this length first, because long float32 sums lose precision.
FIRST = 1024

SIGN, INFINITE = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000)


@public("mpjax.reports")
@pytree_of("largest", "turn", "sums")
@dataclasses.dataclass(frozen=True)
class Figures:
    """Figures of n arrays.

    Attributes:
        largest: The largest finite magnitude of each array, before rounding to 16 bits; float32.
        turn: The iteration of the innermost loop where it occurred, int32; -1 outside of loops.
        sums: Float32, of shape (n, `COLUMNS`): numbers of entries, by `COUNTS`; then the
            sums of squares, of the entries that were looked at and of rounding's errors.
    """

    largest: jax.Array
    turn: jax.Array
    sums: jax.Array


def nothing(count: int) -> Figures:
    """Returns the figures of arrays that were not measured."""
    turns = jnp.full(count, -1, jnp.int32)
    return Figures(jnp.zeros(count, FLOAT32), turns, jnp.zeros((count, COLUMNS), FLOAT32))


def joined(parts: Sequence[Figures]) -> Figures:
    """Returns figures one after another."""
    return jax.tree.map(lambda *arrays: jnp.concatenate(arrays), *parts) if parts else nothing(0)


def combined(one: Figures, other: Figures) -> Figures:
    """Returns the combined figures of two measurements of the same arrays."""
    turn = jnp.where((other.largest > one.largest) | (one.turn < 0), other.turn, one.turn)
    return Figures(jnp.maximum(one.largest, other.largest), turn, one.sums + other.sums)


def over_devices(figures: Figures, axes: tuple[str, ...]) -> Figures:
    """Returns the combined figures of the devices along mapped axes."""
    largest = jax.lax.pmax(figures.largest, axes)
    # Of equal maxima the last turn, so that all devices agree.
    turn = jax.lax.pmax(jnp.where(figures.largest == largest, figures.turn, -1), axes)
    return Figures(largest, turn, jax.lax.psum(figures.sums, axes))


def in_turn(figures: Figures, turn: jax.Array) -> Figures:
    """Sets the loop iteration of figures; those of an inner loop keep its iterations."""
    return dataclasses.replace(figures, turn=jnp.where(figures.turn < 0, turn, figures.turn))


def measure(x: jax.Array, half: Any, rounded: bool, stored: jax.Array | None = None) -> Figures:
    """Measures a floating array that is in 16 bits, or is about to be.

    What rounding did to one that is ``rounded`` already is not known, and is put at what it does on
    average, a twelfth of a squared unit in the last place. ``stored`` is what it becomes in 16
    bits, where the program has that.
    """
    x = jax.lax.stop_gradient(x)
    x, limits = x.reshape(x.shape or (1,)), Limits.of(half)
    part = _rows(x)
    bits, *sums = _reduced(_columns(_magnitude_bits(part), limits, rounded), part.shape)
    if part is not x:
        # What is stored is read: the float32 that is cast may never have been written down.
        if stored is None:
            stored = x if rounded else x.astype(half)
        stored = jax.lax.optimization_barrier(jax.lax.stop_gradient(stored))
        top, finite = _tops(stored)
        bits = jnp.where(top < INFINITE, top, jnp.maximum(finite, bits))
        off = COUNTS.index("overflowed") - 2
        sums[off] = jnp.maximum(sums[off], top >= INFINITE)  # one, if it is in no row looked at
        sums[off + 1] = jnp.maximum(sums[off + 1], top > INFINITE)
    sizes = [jnp.float32(_jax.size_of(v.shape)) for v in (x, part)]
    largest = jax.lax.bitcast_convert_type(bits, FLOAT32)
    every = jnp.stack([*sizes, *sums])
    return Figures(largest[None], jnp.full(1, -1, jnp.int32), every[None])


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of a 16-bit dtype, as bits of float32 magnitudes."""

    mantissa: int  # the number of float32 mantissa bits that the dtype drops
    lowest: int  # the biased float32 exponent of its smallest normal number
    flush: int  # the largest magnitude that is rounded to zero
    normal: int  # the smallest normal magnitude
    near: int  # the smallest magnitude that counts as near overflow
    overflow: int  # the smallest magnitude that is rounded to infinity

    @classmethod
    @functools.cache
    def of(cls, dtype: Any) -> "Limits":
        digits, flush, normal, overflow = limits_of(dtype)
        largest = 2.0**overflow * (1 - 2.0**-digits)
        # From half a unit beyond the largest number on; that tie goes to the even number, infinity.
        beyond = 2.0**overflow * (1 - 2.0 ** -(digits + 1))
        magnitudes = np.array([2.0**flush, 2.0**normal, largest / 2**NEAR, beyond], np.float32)
        return cls(24 - digits, 127 + normal, *map(int, magnitudes.view(np.uint32)))


def _magnitude_bits(x: jax.Array) -> jax.Array:
    """Returns an array's magnitudes as the bits of float32."""
    if x.dtype.itemsize == 2 and x.dtype != FLOAT16:  # bfloat16 is the upper half of a float32
        bits = jax.lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << 16
    else:
        bits = jax.lax.bitcast_convert_type(x.astype(FLOAT32), jnp.uint32)
    return bits & SIGN


def _tops(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the bits of the largest magnitude, and of the largest finite one.

    XLA fuses the two reductions to one pass, except on a CPU. The second pass there is made only
    if there is Inf or NaN.
    """

    def finite(x, top):
        bits = _magnitude_bits(x)
        return jnp.max(jnp.where(bits < INFINITE, bits, 0))

    def if_needed(x, top):
        return jax.lax.cond(top < INFINITE, lambda x, top: top, finite, x, top)

    top = jnp.max(_magnitude_bits(x))
    return top, jax.lax.platform_dependent(x, top, cpu=if_needed, default=finite)


def _rows(x: jax.Array) -> jax.Array:
    """Returns what of an array is looked at closer."""
    size = _jax.size_of(x.shape)
    # Not along the last axis, whose entries a device reads together; the longest other one divides
    # most evenly.
    axis = max(range(max(x.ndim - 1, 1)), key=lambda i: _jax.size_of(x.shape[i : i + 1]))
    steps = [n for n in range(1, ROWS + 1) if size // n >= ENOUGH]
    return x if len(steps) < 2 else jax.lax.slice_in_dim(x, 0, x.shape[axis], steps[-1], axis)


def _number(which: jax.Array) -> jax.Array:
    return which.astype(jnp.uint32)


def _columns(bits: jax.Array, limits: Limits, rounded: bool) -> list[jax.Array]:
    """Returns what is reduced: the finite magnitudes, the counts, the squares and the errors'."""
    zero, fits = bits == 0, bits < limits.overflow
    flushed, small = (bits <= limits.flush) & ~zero, (bits < limits.normal) & ~zero
    near = (bits >= limits.near) & fits
    size = jax.lax.bitcast_convert_type(bits, FLOAT32)
    # The root of the mean square of an error that is uniform over one unit.
    error = _unit(bits, limits) / np.sqrt(12) if rounded else _error(bits, limits)
    low, high = ((127 + power) << 23 for power in (LEAST, MOST))
    here = fits & (bits >= low) & (bits < high)
    scaled = [jnp.where(here, value * np.float32(2.0**SHIFT), 0) for value in (size, error)]
    counts = zero, flushed, small & ~flushed, near, ~fits, bits > INFINITE
    finite = jnp.where(bits < INFINITE, bits, 0)
    return [finite, *map(_number, counts), *(value * value for value in scaled)]


def _error(bits: jax.Array, limits: Limits) -> jax.Array:
    """Returns by how much rounding to 16 bits moves magnitudes. XLA might drop casts."""
    size = jax.lax.bitcast_convert_type(bits, FLOAT32)
    drop = limits.mantissa
    # To nearest, ties to even: half a unit is added, or just less if the last kept bit is 0.
    up = np.uint32((1 << (drop - 1)) - 1) + ((bits >> drop) & 1)
    kept = (bits + up) & np.uint32(0xFFFFFFFF << drop & 0xFFFFFFFF)
    half = jax.lax.bitcast_convert_type(kept, FLOAT32)
    if limits.lowest > 1:  # subnormal numbers of float16, evenly spaced
        unit = np.float32(2.0 ** (limits.lowest - 127 - (23 - drop)))
        half = jnp.where(bits < limits.normal, jnp.round(size / unit) * unit, half)
    return size - half


def _unit(bits: jax.Array, limits: Limits) -> jax.Array:
    """Returns the 16-bit dtype's unit in the last place at magnitudes."""
    kept = 23 - limits.mantissa
    exponent = jnp.maximum(bits >> 23, max(limits.lowest, kept + 1)) - kept
    return jax.lax.bitcast_convert_type(exponent << 23, FLOAT32)


def _largest(columns: Sequence[jax.Array], axes: tuple[int, ...]) -> list[jax.Array]:
    first, *rest = columns
    return [jnp.max(first, axes, initial=0), *(jnp.sum(x, axes, x.dtype) for x in rest)]


def _reduced(columns: Sequence[jax.Array], shape: Sequence[int]) -> list[jax.Array]:
    """Reduces columns to scalars: the first by a maximum, the others by sums.

    XLA fuses several of them to one pass. (One reduction of many operands may take more shared
    memory than a GPU has, which XLA does not count.)
    """
    rank = len(shape)
    # The last axes that have FIRST entries together.
    split = max((k for k in range(rank) if _jax.size_of(shape[k:]) >= FIRST), default=0)
    head, *rest = _largest(columns, tuple(range(split, rank)))
    reduced = [head, *(column.astype(FLOAT32) for column in rest)]
    return _largest(reduced, tuple(range(split))) if split else reduced
