"""Masters and residuals: the part of a float32 value that a 16-bit weight lacks.

A bfloat16 number is the first 16 bits of a float32 number. With the other 16 bits as a residual, a
weight needs 4 bytes; with a float32 master it needs 6. The dtype of the array of a weight says
which kind it is: a row of `KINDS`.

Bits are split as integers, because XLA may remove a round trip of floats through bfloat16 under
jit, and the residual would be zero.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base._jax.rounded import as_reduced
from mpjax._src.core.base.dtypes import BFLOAT16, FLOAT16, FLOAT32

UINT8, UINT16, UINT32 = (np.dtype(name) for name in ("uint8", "uint16", "uint32"))

MAGNITUDE, INFINITY, QUIET_NAN, SIGN = np.array(
    [0x7FFFFFFF, 0x7F800000, 0x7FC00000, 0x80000000], UINT32
)


class Kind(NamedTuple):
    """A kind of master or residual of a 16-bit weight."""

    # ``full(weight, master)`` returns the float32 value.
    full: Callable[[jax.Array, jax.Array], jax.Array]
    # ``split(value, dtype)`` returns the weight and the array next to it.
    split: Callable[[jax.Array, np.dtype], tuple[jax.Array, jax.Array]]
    bits: int  # the bits of the significand that both hold together, of float32's 24


def full(param: Any, master: Any) -> jax.Array:
    """Returns the float32 value of a 16-bit weight and its master or residual."""
    return KINDS[np.dtype(master.dtype)].full(param, master)


def split(value: jax.Array, dtype: np.dtype, kind: Any) -> tuple[jax.Array, jax.Array]:
    """Splits a float32 value into a weight of a dtype and its master or residual."""
    return KINDS[np.dtype(kind)].split(value, np.dtype(dtype))


# ---- integers: the bits that a bfloat16 weight lacks --------------------------------------------


def _joined(width: int) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def joined(param: jax.Array, residual: jax.Array) -> jax.Array:
        top = jax.lax.bitcast_convert_type(param, UINT16)
        # If the residual is in the upper half of its range, the weight was rounded up.
        top = top - (residual >> (width - 1)).astype(UINT16)
        bits = top.astype(UINT32) << 16 | residual.astype(UINT32) << (16 - width)
        return jax.lax.bitcast_convert_type(bits, FLOAT32)

    return joined


def _cut(width: int) -> Callable[[jax.Array, np.dtype], tuple[jax.Array, jax.Array]]:
    unused = 16 - width

    def cut(value: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
        bits = jax.lax.bitcast_convert_type(value, UINT32)
        # Rounding the bits of a NaN could give those of infinity or zero.
        is_nan = bits & MAGNITUDE > INFINITY
        bits = jnp.where(is_nan, bits & SIGN | QUIET_NAN, bits)
        if unused:  # rounds to nearest, as what is cut off is not stored anywhere
            bits = bits + (1 << (unused - 1)) >> unused
        # Ties are rounded up, not to even: otherwise the residual at a tie would not tell whether
        # the weight was rounded up or down.
        top = (bits + (1 << (width - 1)) >> width).astype(UINT16)
        rest = (bits & (1 << width) - 1).astype(UINT8 if width == 8 else UINT16)
        return jax.lax.bitcast_convert_type(top, dtype), rest

    return cut


# ---- floats: a master, or the rounding error ----------------------------------------------------


def _summed(param: jax.Array, error: jax.Array) -> jax.Array:
    return param.astype(FLOAT32) + error.astype(FLOAT32)


def _compensated(value: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
    param = as_reduced(value, dtype).astype(dtype)
    rest = value - param.astype(FLOAT32)
    return param, jnp.where(jnp.isfinite(rest), rest, 0).astype(dtype)  # 0 for an infinite weight


# Two bfloat16 numbers hold 2 x 8 bits of a significand, two float16 numbers 2 x 11. Only bfloat16
# numbers are the first 16 bits of float32 numbers, so that bits can be cut.
KINDS: dict[np.dtype, Kind] = {
    FLOAT32: Kind(lambda param, master: master, lambda v, dtype: (v.astype(dtype), v), 24),
    UINT16: Kind(_joined(16), _cut(16), 24),
    UINT8: Kind(_joined(8), _cut(8), 16),
    BFLOAT16: Kind(_summed, _compensated, 16),
    FLOAT16: Kind(_summed, _compensated, 22),
}
