"""The arrays of a block as a rewrite evaluates it, in each dtype that they were read in."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src import _jax
from mpjax._src.autocast.derivatives import cast, keep, known
from mpjax._src.autocast.graph import Value
from mpjax._src.dtypes import FLOAT32, HALVES
from mpjax._src.policy import Policy

_FOLDS = contextvars.ContextVar("mpjax folds constants", default=True)


@contextlib.contextmanager
def constants_as_casts() -> Iterator[None]:
    """Traces the rounding of constants as casts, for those who want to see what it costs."""
    token = _FOLDS.set(False)
    try:
        yield
    finally:
        _FOLDS.reset(token)


class Settings(NamedTuple):
    """What holds for all blocks of a program that is evaluated.

    Attributes:
        policy: The policy.
        rows: Whether what an op becomes is named by its number, for a report.
    """

    policy: Policy
    rows: bool = False


class Env:
    """The arrays of a block as it is evaluated, in each dtype that they were read in."""

    def __init__(self, settings: Settings, in_loop: bool, depth: int = 0):
        self.settings = settings
        self.in_loop = in_loop
        self.depth = depth  # how many names of an op's stack are entered already
        self.shared: dict[Any, Any] = {}  # stretches that were rewritten, by what they compute
        self._arrays: dict[Value, dict[Any, Any]] = {}
        self._makers: dict[Value, Callable[[Any], Any]] = {}
        self._exact: dict[Value, Any] = {}
        self._known: dict[Value, Any] = {}

    def write(self, value: Value, array: Any) -> None:
        """Records an array in the dtype that it has."""
        if value.kept:
            array = keep(array)
        self._arrays[value] = {array.dtype if value.is_f32 else None: array}

    def held(self, value: Value) -> tuple[list[Any], list[Any]]:
        """Returns the arrays of a value, for `hold`."""
        exact = [self._exact[value]] if value in self._exact else []
        return [*self._arrays[value].values()], exact

    def stored(self, value: Value) -> tuple[list[Any], list[Any]]:
        """As `held`, in the dtype alone that the value is stored in."""
        arrays, exact = self.held(value)
        return [x for x in arrays if x.dtype == value.dtype] or arrays[:1], exact

    def hold(self, value: Value, held: tuple[list[Any], list[Any]]) -> None:
        """Records what another environment held of a value."""
        arrays, exact = held
        self._arrays[value] = {array.dtype if value.is_f32 else None: array for array in arrays}
        if exact:
            (self._exact[value],) = exact

    def store(self, value: Value, array: Any) -> None:
        """Records a result in the dtype that the plan stores it in."""
        if value in self._known:
            array = known(array, self._known[value])
        if value.is_f32 and array.dtype != value.dtype:
            if value.want.returned:
                self._exact[value] = array
            array = cast(array, value.dtype)
        self.write(value, array)

    def inside(self, depth: int, known: dict[Value, Any] | None = None) -> "Env":
        """Returns the environment of steps that are traced on their own, below so many names.

        Values of ``known`` are not computed again.
        """
        env = Env(self.settings, self.in_loop, depth)
        env._known = known or {}
        return env

    def make(self, value: Value, maker: Callable[[Any], Any]) -> None:
        """Records how to make a value in the dtype that somebody asks for."""
        self._makers[value] = maker

    def read(self, value: Value, dtype: Any = None) -> Any:
        """Returns the array of a value; a float32 one in ``dtype`` if given."""
        if not value.is_f32:
            return self._arrays[value][None] if value in self._arrays else value.const
        arrays = self._arrays.setdefault(value, {})
        dtype = np.dtype(dtype or value.dtype)
        if dtype in arrays:
            return arrays[dtype]
        if value in self._makers:
            made = self._makers[value](dtype)
        elif not arrays:  # a literal
            if dtype in HALVES and not _FOLDS.get():
                # The barrier keeps JAX from folding it.
                return cast(_jax.cpu_barrier(jnp.asarray(value.const, FLOAT32)), dtype)
            return np.asarray(value.const, dtype)
        elif value.const is not None and dtype in HALVES and _FOLDS.get():
            made = _round_constant(next(iter(arrays.values())), value.const, dtype)
        else:
            made = cast(next(iter(arrays.values())), dtype)
            if value.raw and dtype in HALVES:
                return made
        arrays[dtype] = made
        return made

    def best(self, value: Value) -> Any:
        """Returns the array of a value as it is held, or as computed where it is handed out so."""
        return self._exact[value] if value in self._exact else self.read(value)

    def result(self, value: Value, dtype: Any) -> Any:
        """Returns what a program hands out: the float32 array itself where one was returned."""
        if value in self._exact and dtype == FLOAT32:
            return self._exact[value]
        if not value.is_f32:
            return self.read(value)
        if value not in self._arrays and value not in self._makers:
            return jnp.asarray(value.const, dtype)
        return self.read(value, dtype)


def _round_constant(array: Any, const: Any, dtype: Any) -> Any:
    """Folds the cast of a constant."""
    with np.errstate(over="ignore"):
        return np.broadcast_to(np.asarray(const).astype(dtype), np.shape(array))
