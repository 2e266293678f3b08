"""Numbers that a program is written with, before JAX rounds them: a jaxpr has the rounded ones.

JAX rounds them where it makes arrays of them, which is written down here, and where it folds a cast
of a constant, which is left unfolded, so that the program shows the cast.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax._src.interpreters import partial_eval
from jax._src.lax import lax
from jax._src.numpy import array_constructors

from mpjax._src._jax.sources import line_here


class Rounded(NamedTuple):
    """A number that was rounded to a dtype.

    Attributes:
        value: The number as it was written.
        dtype: What it was rounded to.
        source: "file:line" of the user's code.
    """

    value: float
    dtype: np.dtype
    source: str

    @property
    def result(self) -> float:
        with np.errstate(over="ignore", under="ignore"):
            return float(np.asarray(self.value).astype(self.dtype))


# Where JAX makes arrays of numbers: `jnp.full` and operations of lax; `jnp.asarray(0.999, dtype)`.
_PLACES = (
    (lax, "_convert_element_type"),
    (array_constructors, "array"),
    (jnp, "array"),
)
_LOCK = threading.RLock()


@contextlib.contextmanager
def numbers_rounded(found: list[Rounded]) -> Iterator[None]:
    """Collects the numbers that are rounded to half while this thread traces.

    What a jit traced before is not traced again, unless the context that it is traced in is new.
    """
    thread = threading.get_ident()

    def watched(convert):
        def wrapper(x, *args, **kwargs):
            dtype = args[0] if args else kwargs.get("new_dtype", kwargs.get("dtype"))
            if threading.get_ident() == thread and _is_number(x) and _is_half(dtype):
                found.append(Rounded(float(x), np.dtype(dtype), line_here()))
            return convert(x, *args, **kwargs)

        return wrapper

    def unfolded(constants, params, avals):
        mine = threading.get_ident() == thread
        return None if mine and _is_half(params["new_dtype"]) else fold(constants, params, avals)

    with _LOCK:
        before = [getattr(module, name) for module, name in _PLACES]
        fold = partial_eval.const_fold_rules[lax.convert_element_type_p]
        try:
            partial_eval.const_fold_rules[lax.convert_element_type_p] = unfolded
            for (module, name), convert in zip(_PLACES, before, strict=True):
                setattr(module, name, watched(convert))
            with np.errstate(over="ignore"):  # -1e9 in float16
                yield
        finally:
            partial_eval.const_fold_rules[lax.convert_element_type_p] = fold
            for (module, name), convert in zip(_PLACES, before, strict=True):
                setattr(module, name, convert)


def _is_half(dtype: Any) -> bool:
    return dtype is not None and dtype in (jnp.bfloat16, jnp.float16)


def _is_number(x: Any) -> bool:
    """Tells a number of Python's or NumPy's that is wider than half."""
    if isinstance(x, bool):
        return False
    if isinstance(x, int | float):
        return True
    wide = isinstance(x, np.ndarray | np.generic) and np.size(x) == 1
    return wide and x.dtype in (np.float32, np.float64, np.int32, np.int64)
