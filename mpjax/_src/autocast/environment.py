"""The environment of the rewrite: the arrays of a block, in each dtype in which they were read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.autocast.derivatives import KEPT, PASSING, keep, known
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax
from mpjax._src.base.coded import Coded, encode
from mpjax._src.base.contexts import CONSTANTS_AS_CASTS
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.trees import vary_like
from mpjax._src.policy.policy import Policy
from mpjax._src.program.graph import Op, Value
from mpjax._src.replacements.derivatives import cast


class Settings(NamedTuple):
    """Settings for all blocks of a program that is evaluated."""

    policy: Policy
    analysis: Analysis  # the tables of the plan
    # The row numbers that ops get as scopes, for a report.
    rows: Mapping[Op, int] = MappingProxyType({})
    as_written: bool = False  # whether every op runs as it was traced
    returned: frozenset[Value] = frozenset()  # the values that are returned, in float32
    # ``fold(steps, results, settings)`` gathers repeated steps (`repeats`).
    fold: Callable[..., Sequence[Any]] = lambda steps, results, settings: steps


class Env:
    """The arrays of a block while it is evaluated, in each dtype in which they were read."""

    def __init__(self, settings: Settings, in_loop: bool, depth: int = 0):
        self.settings = settings
        tables = settings.analysis
        self.rulings, self.choices, self.stored = tables.rulings, tables.choices, tables.stored
        self.marks = tables.marks
        self.in_loop = in_loop
        self.depth = depth  # the number of names of an op's stack that were entered
        self.shared: dict[Any, Any] = {}  # rewritten stretches, by their keys
        self._arrays: dict[Value, dict[Any, Any]] = {}
        self._makers: dict[Value, Callable[[Any], Any]] = {}
        self._exact: dict[Value, Any] = {}
        self._known: dict[Value, Any] = {}
        self._codes: dict[Value, Coded] = {}

    def write(self, value: Value, array: Any, rounded: bool = False) -> None:
        """Records an array in its own dtype; ``rounded`` if it was computed in float32."""
        analysis = self.settings.analysis
        name = self.name(value)
        if name and value not in analysis.codes:
            array = keep(array, name)
        self._arrays[value] = {array.dtype if value.is_f32 else None: array}
        if value in analysis.codes:  # here, where reports see which operation computed it
            self.code(value, rounded)

    def name(self, value: Value) -> str:
        """Returns the name under which checkpoints keep a value; "" if they do not."""
        analysis = self.settings.analysis
        return KEPT if value in analysis.kept else PASSING if value in analysis.passing else ""

    def held(self, value: Value) -> tuple[list[Any], list[Any]]:
        """Returns the arrays of a value, for `hold`."""
        exact = [self._exact[value]] if value in self._exact else []
        return [*self._arrays[value].values()], exact

    def array(self, value: Value) -> Any:
        """Returns the array of a value in its storage dtype."""
        return self.as_stored(value)[0][0]

    def code(self, value: Value, rounded: bool = False) -> Coded | None:
        """Returns the code in which a value is kept, if it is kept as a code."""
        analysis = self.settings.analysis
        kind = analysis.codes.get(value)
        if kind is not None and value not in self._codes:
            array = jax.lax.stop_gradient(self.array(value))
            in_order = array.shape not in analysis.convolved
            self._codes[value] = encode(array, kind, rounded, in_order)
        return self._codes.get(value)

    def hold_codes(self, codes: Mapping[Value, Coded | None]) -> None:
        """Records the codes of values."""
        self._codes.update((v, code) for v, code in codes.items() if code is not None)

    def codes_of(self, values: Iterable[Value]) -> dict[Value, Coded]:
        """Returns the codes that are there, of some values."""
        return {v: self._codes[v] for v in values if v in self._codes}

    def known_of(self, values: Iterable[Value]) -> dict[Value, Any]:
        """Returns the arrays of those of some values that are not computed again."""
        return {v: self._known[v] for v in values if v in self._known}

    def as_stored(self, value: Value) -> tuple[list[Any], list[Any]]:
        """Returns the array of a value in its storage dtype alone, for `hold`."""
        arrays, exact = self.held(value)
        return [x for x in arrays if x.dtype == self.stored[value].dtype] or arrays[:1], exact

    def hold(self, value: Value, record: tuple[list[Any], list[Any]]) -> None:
        """Records the arrays that another environment held for a value."""
        arrays, exact = record
        self._arrays[value] = {array.dtype if value.is_f32 else None: array for array in arrays}
        if exact:
            (self._exact[value],) = exact

    def store(self, value: Value, array: Any) -> None:
        """Records a result in the dtype in which the plan stores it."""
        if value in self._known:
            array = known(array, self._known[value])
        rounded = value.is_f32 and array.dtype != self.stored[value].dtype
        if rounded:
            if value in self.settings.returned:
                self._exact[value] = array
            array = cast(array, self.stored[value].dtype)
        self.write(value, array, rounded)

    def inside(self, depth: int, known: dict[Value, Any] | None = None) -> "Env":
        """Returns an environment for steps that are traced separately, below ``depth`` names.

        Values in ``known`` are not computed again.
        """
        env = Env(self.settings, self.in_loop, depth)
        env._known = known or {}
        return env

    def make(self, value: Value, maker: Callable[[Any], Any]) -> None:
        """Records a function that computes a value in a requested dtype."""
        self._makers[value] = maker

    def read(self, value: Value, dtype: Any = None) -> Any:
        """Returns the array of a value. A float32 value is returned in ``dtype`` if given."""
        arrays = self._arrays.get(value, {})
        if not value.is_f32:
            return arrays[None] if arrays else _literal(value)
        dtype = np.dtype(dtype or self.stored[value].dtype)
        if dtype in arrays:
            return arrays[dtype]
        if value in self._makers:
            array = self._makers[value](dtype)
        elif not arrays:
            if dtype in HALVES and CONSTANTS_AS_CASTS.value:
                # The barrier prevents JAX from folding the cast.
                return cast(_jax.cpu_barrier(jnp.asarray(_literal(value), FLOAT32)), dtype)
            return np.asarray(_literal(value), dtype)
        elif value.const is not None and dtype in HALVES and not CONSTANTS_AS_CASTS.value:
            whole = next(iter(arrays.values()))
            array = vary_like(_round_constant(whole, value.const, dtype), whole)
        else:
            array = cast(next(iter(arrays.values())), dtype)
            if self.settings.analysis.is_raw(value) and dtype in HALVES:
                return array
        self._arrays.setdefault(value, {})[dtype] = array
        return array

    def best(self, value: Value) -> Any:
        """Returns the array of a value as it is held, unrounded if that array exists."""
        return self._exact[value] if value in self._exact else self.read(value)

    def result(self, value: Value, dtype: Any) -> Any:
        """Returns a result of the program: the unrounded float32 array if there is one."""
        if value in self._exact and dtype == FLOAT32:
            return self._exact[value]
        if not value.is_f32:
            return self.read(value)
        if value not in self._arrays and value not in self._makers:
            return jnp.asarray(_literal(value), dtype)
        return self.read(value, dtype)


def _literal(value: Value) -> Any:
    """Returns the number of a literal, the only value that is read without having been written."""
    if not value.literal:
        raise AssertionError(
            f"A fault in mpjax: a {value.aval} is read before it is computed. Please report this "
            "program. As a workaround, put the lines of the traceback in "
            'mpjax.precision("float32").'
        )
    return value.const


def _round_constant(array: Any, const: Any, dtype: Any) -> Any:
    """Casts a constant while tracing, without a cast in the program."""
    with np.errstate(over="ignore"):
        return np.broadcast_to(np.asarray(const).astype(dtype), np.shape(array))
