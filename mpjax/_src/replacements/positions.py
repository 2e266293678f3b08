"""Recognizes masks that depend on positions alone, such as causal masks and windows.

A mask of ``i >= j`` is as large as the scores, and a kernel with an option "causal" does not need
it. Any spelling is recognized: comparisons of sums of positions, selects and casts of them, and
conjunctions.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base.rules import CAST, MOVE, ORDERS, VIEWS
from mpjax._src.core.program.affine import terms, total
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.respellings import computed
from mpjax._src.core.program.views import Axes, Axis, Digit, before
from mpjax._src.replacements.flow import Flow


class Line(NamedTuple):
    """A constant plus a sum of positions, each multiplied by a whole number."""

    slopes: frozenset[tuple[Digit, float]]
    constant: Any


class Choice(NamedTuple):
    """``yes`` where all of some sums of positions are >= 0, else ``no``."""

    lines: frozenset[Line]
    yes: Any
    no: Any


Known = Line | Choice

DEPTH = 32
# The entries of larger constants are not read.
LARGEST = 1 << 26


def read(value: Value, axes: Axes | None, flow: Flow, depth: int = DEPTH) -> Known | None:
    """Returns a value as a function of positions, or None if it is not known to be one.

    ``axes`` are its axes in terms of the array whose positions count: the scores.
    """
    op = flow.producer.get(value)
    const = flow.constants.get(value) if value.const is None else value.const
    if const is not None and np.size(const) == 1:
        return _number(np.asarray(const).reshape(()).item())
    if axes is None or not depth:
        return None
    if const is not None and np.shape(const) == value.aval.shape:
        return _constant(np.asarray(const), axes)
    if op is None or op.eqn.effects or op.subs:
        return None
    if op.name == "iota":
        whole = np.issubdtype(op.params["dtype"], np.integer)
        return along(axes[op.params["dimension"]]) if whole else None
    if op.name in VIEWS or _is_start(op):
        return read(op.ins[0], before(op, axes), flow, depth - 1)
    exact = op.spec.runs_again and (op.spec.linear or op.spec.multiplies)
    if not exact or op.spec.need == MOVE:  # it does not compute each entry by itself
        return None
    entries = [read(v, before(op, axes, i), flow, depth - 1) for i, v in enumerate(op.ins)]
    if None in entries:
        return None
    if any(isinstance(entry, Line) and entry.slopes for entry in entries):
        return _of_lines(op, entries)
    return _of_choices(op, entries)


def _is_start(op: Op) -> bool:
    """Returns whether an op takes the first entries along each axis, whose positions stay."""
    return op.name == "slice" and not any(op.params["start_indices"]) and not op.params["strides"]


def _is_exact(dtype: Any) -> bool:
    """Returns whether a dtype has all positions and their differences."""
    signed = np.issubdtype(dtype, np.signedinteger) or np.issubdtype(dtype, np.floating)
    return signed and np.dtype(dtype).itemsize >= 4


def along(axis: Axis) -> Line | None:
    """Returns the positions along an axis, unless it runs over several."""
    return Line(frozenset((digit, 1) for digit in axis), 0) if len(axis) < 2 else None


def _number(number: Any) -> Line:
    return Line(frozenset(), number)


def _constant(array: np.ndarray, axes: Axes) -> Known | None:
    """Reads a constant: equal steps, or one number up to the diagonal and another above it."""
    if array.size > LARGEST:
        return None
    # The program may read only the first entries, by a slice that `read` has passed.
    array = array[tuple(slice(math.prod(size for *_, size in axis)) for axis in axes)]
    long = []
    for d, axis in enumerate(axes):
        first = array.take([0], d)
        if np.array_equal(first.repeat(array.shape[d], d), array):
            array = first  # all are the same
        else:
            long.append(axis)
    if any(len(axis) != 1 for axis in long):
        return None
    if len(long) == 1 and np.issubdtype(array.dtype, np.integer):
        steps = np.diff(array.ravel())
        line = Line(frozenset([(long[0][0], int(steps[0]))]), int(array.flat[0]))
        return line if np.all(steps == steps[0]) else None
    if len(long) != 2:
        return None
    (rows,), (columns,) = long
    table = array.reshape(rows[2], columns[2])
    yes, no = table[0, 0], table[0, -1]
    if not np.array_equal(table, np.where(np.tri(*table.shape, dtype=bool), yes, no)):
        return None
    line = Line(frozenset([(rows, 1), (columns, -1)]), 0)
    return Choice(frozenset([line]), yes.item(), no.item())


def _of_lines(op: Op, entries: Sequence[Any]) -> Known | None:
    """Returns what an op makes of sums of positions: another one, or a comparison of two."""
    if not all(isinstance(entry, Line) and math.isfinite(entry.constant) for entry in entries):
        return None
    if op.name == CAST:  # the result must tell positions apart
        return entries[0] if _is_exact(op.params["new_dtype"]) else None
    if op.name in ORDERS:
        larger, smaller = entries if op.name in ("ge", "gt") else entries[::-1]
        above = _sum([(larger, 1), (smaller, -1)])
        strict = op.name in ("gt", "lt")
        # Of whole numbers, a > b is a - b - 1 >= 0, and fractions are rounded.
        constant = math.ceil(above.constant) - 1 if strict else math.floor(above.constant)
        return Choice(frozenset([above._replace(constant=constant)]), True, False)
    numbers = {v: e.constant for v, e in zip(op.ins, entries, strict=True) if not e.slopes}
    parts = terms(op, numbers.get)
    whole = parts and all(weight == int(weight) for _, weight in parts)
    return _sum((entries[i], int(weight)) for i, weight in parts) if whole else None


def _sum(parts: Iterable[tuple[Line, int]]) -> Line:
    """Returns a sum of sums of positions, each multiplied by a whole number."""
    slopes = total(({**dict(line.slopes), None: line.constant}, n) for line, n in parts)
    constant = slopes.pop(None, 0)
    return Line(frozenset(slopes.items()), constant)


def _of_choices(op: Op, entries: Sequence[Any]) -> Known | None:
    """Returns what an op makes of numbers, by running it on all that its operands can be."""
    numbers = [(e.yes, e.no) if isinstance(e, Choice) else (e.constant,) for e in entries]
    first, *others = [_run(op, each) for each in itertools.product(*numbers)]
    if not others:
        return _number(first)
    if len({*others}) > 1:  # not the same answer wherever one of several says no
        return None
    lines = [e.lines for e in entries if isinstance(e, Choice)]
    return Choice(frozenset().union(*lines), first, others[0])


def _run(op: Op, numbers: Sequence[Any]) -> Any:
    # -1e9 becomes -Inf in float16, which masks as well.
    arrays = [np.asarray(n, v.aval.dtype) for n, v in zip(numbers, op.ins, strict=True)]
    return np.asarray(computed(op, arrays)[0]).item()


def negated(line: Line) -> Line:
    """Returns the sum of positions that is >= 0 exactly where another one is not."""
    return _sum([(line, -1), (_number(1), -1)])
