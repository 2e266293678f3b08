"""Keeps the numbers of a program unrounded in its jaxpr.

JAX rounds Python numbers when it makes arrays of them, and when it folds the cast of a constant.
Here, both leave a cast of the unrounded number in the program instead.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.lax import convert_element_type_p

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.programs import patched


def _showing(convert: Callable[..., Any], thread: int) -> Callable[..., Any]:
    """Returns a conversion that casts a number to 16 bits by an equation, in one thread."""

    def cast(x, *args, **kwargs):
        dtype, *more = args or (kwargs.get("new_dtype", kwargs.get("dtype")),)
        if threading.get_ident() == thread and _is_number(x) and _is_half(dtype):
            weak = bool(more[0]) if more else bool(kwargs.get("weak_type", False))
            params = {"new_dtype": np.dtype(dtype), "weak_type": weak, "sharding": None}
            return convert_element_type_p.bind(np.float32(x), **params)
        return convert(x, *args, **kwargs)

    return cast


@contextlib.contextmanager
def casts_of_numbers() -> Iterator[None]:
    """Returns a context in which traces of this thread show each cast of a number to 16 bits.

    Cached traces of a jit are used again, unless the context of the trace is new.
    """
    thread, (folder, name) = threading.get_ident(), internals.home_of("const_fold_rules")
    rules = getattr(folder, name)
    fold = rules[convert_element_type_p]

    def unfolded(constants, params, avals):
        mine = threading.get_ident() == thread
        return None if mine and _is_half(params["new_dtype"]) else fold(constants, params, avals)

    # Where JAX makes arrays of numbers: `jnp.full` and lax operations; `jnp.asarray`.
    places = (*map(internals.home_of, ("convert_element_type", "array")), (jnp, "array"))
    shown = [(place, _showing(getattr(*place), thread)) for place in places]
    unfolding = {**rules, convert_element_type_p: unfolded}
    # An array may contain -1e9, which overflows in float16.
    with patched(*shown, ((folder, name), unfolding)), np.errstate(over="ignore"):
        yield


def _is_half(dtype: Any) -> bool:
    return dtype is not None and dtype in (jnp.bfloat16, jnp.float16)


def _is_number(x: Any) -> bool:
    """Returns whether a value is a Python or NumPy number that is wider than 16 bits."""
    if isinstance(x, bool):
        return False
    if isinstance(x, int | float):
        return True
    wide = isinstance(x, np.ndarray | np.generic) and np.shape(x) == ()
    return wide and x.dtype in (np.float32, np.float64, np.int32, np.int64)
