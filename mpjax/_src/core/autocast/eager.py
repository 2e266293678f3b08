"""Calls outside of transformations: compiled programs, and when they are used again.

Each call is traced, because a function may read anything: objects, global variables, closures. A
program that was compiled is used again if the trace is the same. Its constants are what the
function has read. The plan may depend on their values, until they change: then they are arguments
of the compiled program.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.trees import is_key
from mpjax._src.core.program.graph import CONSTANT_LIMIT

# The number of programs of a function that are kept.
KEPT_PROGRAMS = 128


class Entry:
    """A compiled program.

    Attributes:
        made: The constants whose values its plan depends on, by their places: the `jax.Array` that
            the function has read, if it is one, and a copy of its value. And the program, as a
            function of its other constants and of its arguments. None before the first call.
        others: What overrides make of its kernels, see `kernels.Tracing`.
    """

    def __init__(self) -> None:
        self.made: tuple[dict[int, tuple[Any, Any]], Callable[..., Any]] | None = None
        self.others: Any = None

    def __call__(self, traced: Any, arrays: Sequence[Any], compiled: Callable[..., Any]) -> Any:
        """Runs a trace of the program; ``compiled`` is called with it and its known constants."""
        jaxpr, consts = _jax.open_jaxpr(traced.jaxpr)
        known, run = self.made or (_read(jaxpr.constvars, consts), None)
        # A constant that has changed once may change again. From then on it is an argument, so that
        # not each of its values is compiled.
        same = {i: pair for i, pair in known.items() if _is_same(consts[i], *pair)}
        if run is None or len(same) < len(known):
            run = compiled(traced, {i: value for i, (_, value) in same.items()})
            self.made = same, run
        return run([x for i, x in enumerate(consts) if i not in same], arrays)


class Kept:
    """The compiled programs of a function."""

    def __init__(self) -> None:
        self.entries = functools.lru_cache(KEPT_PROGRAMS)(lambda key: Entry())
        _jax.cleared_with_jax(self.entries)

    def __reduce__(self) -> Any:  # what wraps a function, as jax.grad, has its attributes
        return Kept, ()

    def entry(self, traced: Any, arrays: Sequence[Any]) -> Entry | None:
        """Returns the entry of a program; None within a transformation, or if it has no key."""
        consts = _jax.open_jaxpr(traced.jaxpr)[1]
        if any(isinstance(x, jax.core.Tracer) for x in (*arrays, *consts)):
            return None
        settings = traced.avals, traced.paths, traced.out_dtypes, _jax.tracing_key()
        try:
            return self.entries((_jax.program_key(traced.jaxpr), *settings))
        except Exception:  # of a part that is traced, and of __hash__, __eq__ and closures of users
            return None


def _read(constvars: Sequence[Any], consts: Sequence[Any]) -> dict[int, tuple[Any, Any]]:
    """Returns the constants whose values a plan may depend on, and copies of them."""

    def is_read(aval, x):
        plain = not (is_key(x) or getattr(aval, "weak_type", False) or _jax.is_explicit(aval))
        here = getattr(x, "is_fully_addressable", True)
        return plain and here and np.size(x) <= CONSTANT_LIMIT

    # JAX casts a NumPy array once for as long as the result is alive, so it is not held.
    pairs = enumerate(zip(constvars, consts, strict=True))
    return {
        i: (x if isinstance(x, jax.Array) else None, np.array(x))
        for i, (v, x) in pairs
        if is_read(v.aval, x)
    }


def _is_same(x: Any, earlier: Any, value: np.ndarray) -> bool:
    return x is earlier or np.asarray(x).tobytes() == value.tobytes()
