"""Facts about the half dtypes, and the names of values in messages."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.base.dtypes import HALVES, short_name


def dtype_of(x: Any) -> Any:
    """Returns the dtype of a value of the program, or None if it is not an array."""
    return getattr(getattr(x, "aval", x), "dtype", None)


def is_half(x: Any) -> bool:
    """Returns whether a value of the program, or an array, is float16 or bfloat16."""
    return dtype_of(x) in HALVES


def is_float(x: Any) -> bool:
    """Returns whether a value of the program, or an array, has a real floating dtype."""
    dtype = dtype_of(x)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.floating))


def digits(dtype: Any) -> int:
    """Returns the significant bits of a dtype: bfloat16 has 8, float16 11, float32 24."""
    return int(jnp.finfo(dtype).nmant) + 1


def stalls_at(dtype: Any) -> int:
    """Returns the number of equal terms after which a running sum stops growing: 256 or 2048.

    Half an ulp of the sum is then as large as a term, so the term is rounded away.
    """
    return int(2 ** digits(dtype))


def shown(x: Any) -> str:
    """Returns a value of the program as "bf16[8,128]"."""
    aval = getattr(x, "aval", x)
    return f"{short_name(np.dtype(aval.dtype))}[{','.join(map(str, aval.shape))}]"


def size(x: Any) -> int:
    return _jax.size_of(getattr(x, "aval", x).shape)
