"""Looks at arrays: how many entries are NaN or Inf, and the range of the others."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import at_least_float32, short_name
from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Document
from mpjax._src.tools.document.report import Report


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Range(Report):
    """The range of an array: its least and greatest finite values, and its counts of NaN and Inf.

    Attributes:
        dtype: The short name of the dtype, such as "f16".
        shape: The shape of the array.
        low: The least finite value, or NaN if there is none.
        high: The greatest finite value, or NaN if there is none.
        nans: The number of NaN entries.
        infs: The number of Inf and -Inf entries.
        path: The path of the parameter or argument, or "" for any other array.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float
    high: float
    nans: int
    infs: int
    path: str = ""

    def __str__(self) -> str:
        shape = ",".join(map(str, self.shape))
        text = f"{self.dtype}[{shape}]  "
        text += "no finite value" if math.isnan(self.low) else f"{self.low:.3g} to {self.high:.3g}"
        for count, name in ((self.nans, "NaN"), (self.infs, "Inf")):
            text += f", {count} x {name}" if count else ""
        return f"{text}  {self.path}".rstrip()

    def document(self) -> Document:
        return Document("The range of an array", str(self))


def is_number(x: Any) -> bool:
    """Returns whether a value is an array of numbers, and not of keys or booleans."""
    array = isinstance(x, jax.Array | np.ndarray | np.generic)
    return array and bool(jnp.issubdtype(x.dtype, jnp.number))


# Up to so many entries, NumPy has counted before XLA has compiled.
SMALL = 2**16


def is_small(*arrays: Any) -> bool:
    """Returns whether arrays are looked at by NumPy: JAX compiles a program for each shape."""
    return all(np.size(x) <= SMALL and getattr(x, "is_fully_addressable", True) for x in arrays)


def _module_for(x: Any) -> tuple[Any, Any]:
    """Returns the module that looks at an array, and the array as one of its own."""
    return (np, np.asarray(x)) if is_small(x) else (jnp, x)


def counts(x: Any) -> tuple[int, int]:
    """Returns how many entries are NaN, and how many are Inf."""
    if not (is_number(x) and np.size(x) and jnp.issubdtype(x.dtype, jnp.inexact)):
        return 0, 0
    # The usual case, in one reduction to one bool.
    if not is_small(x) and isinstance(x, jax.Array) and _all_finite(x):
        return 0, 0
    x = np.asarray(x)
    return int(np.isnan(x).sum()), int(np.isinf(x).sum())


@jax.jit
def _all_finite(x):
    return jnp.all(jnp.isfinite(x))


def _ends(x, xp):
    finite = xp.isfinite(x)
    low = xp.min(xp.where(finite, x, xp.inf), initial=xp.inf)
    high = xp.max(xp.where(finite, x, -xp.inf), initial=-xp.inf)
    return low, high


_compiled_ends = jax.jit(_ends, static_argnums=1)


def range_of(x: Any, path: str = "") -> Range:
    """Returns the range of an array; that of the magnitudes if it is complex."""
    name, shape, numbers = short_name(jnp.result_type(x)), tuple(np.shape(x)), counts(x)
    xp, x = _module_for(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = xp.abs(x)
    ends = _ends if xp is np else _compiled_ends
    low, high = map(float, ends(x.astype(at_least_float32(x.dtype)), xp))
    # Without finite entries, these are the ends that the reductions start with.
    if low > high:
        low = high = math.nan
    return Range(name, shape, low, high, *numbers, path)


def largest_finite(x: Any) -> float:
    """Returns the largest magnitude among the finite entries of an array."""
    xp, x = _module_for(x)
    return float(xp.max(xp.where(xp.isfinite(x), xp.abs(x), 0)))
