"""Recognizes masks that depend on positions alone, such as causal masks and windows.

A mask of ``i >= j`` is as large as the scores, and a kernel with an option "causal" does not need
it. Any spelling is recognized: comparisons of sums of positions, selects and casts of them, and
conjunctions.
"""

import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.views import VIEWS, Axes, before
from mpjax._src.replacements.flow import Flow
from mpjax._src.replacements.forms import narrowed

# Part of an axis: (axis, stride, size), as in `forms`.
Digit = tuple[int, Any, Any]


class Line(NamedTuple):
    """A constant plus a sum of positions, each multiplied by a number."""

    slopes: frozenset[tuple[Digit, int]]
    constant: Any


class Choice(NamedTuple):
    """``yes`` where all of some sums of positions are >= 0, else ``no``."""

    lines: frozenset[Line]
    yes: Any
    no: Any


Known = Line | Choice

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    name: getattr(operator, name) for name in ("ge", "gt", "le", "lt", "eq", "ne")
}
COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "and": operator.and_,
    "or": operator.or_,
    "max": max,
    "min": min,
    **COMPARE,
}
DEPTH = 32
# The entries of larger constants are not read.
LARGEST = 1 << 26


def read(value: Value, axes: Axes | None, flow: Flow, depth: int = DEPTH) -> Known | None:
    """Returns a value as a function of positions, or None if it is not known to be one."""
    op = flow.producer.get(value)
    const = flow.constants.get(value) if value.const is None else value.const
    if const is not None and np.size(const) == 1:
        return Line(frozenset(), np.asarray(const).reshape(()).item())
    if axes is None or not depth:
        return None
    if const is not None and np.shape(const) == value.aval.shape:
        return _constant(np.asarray(const), axes)
    if op is None or op.eqn.effects:
        return None

    def operand(place: int) -> Known | None:
        return read(op.ins[place], narrowed(op.ins[place], axes), flow, depth - 1)

    if op.name == "iota":
        return _iota(op, axes)
    if op.name in VIEWS:
        return read(op.ins[0], before(op, axes), flow, depth - 1)
    if op.name == "slice" and not any(op.params["start_indices"]) and not op.params["strides"]:
        return read(op.ins[0], axes, flow, depth - 1)  # the first entries are the same
    if op.name == "convert_element_type":
        return _cast(operand(0), op.params["new_dtype"])
    if op.name == "neg":
        inner = operand(0)
        return _scaled(inner, -1) if isinstance(inner, Line) else _mapped(inner, operator.neg)
    if op.name == "not" and op.outs[0].aval.dtype == np.bool_:
        return _mapped(operand(0), operator.not_)
    if op.name == "select_n" and len(op.ins) == 3:
        which, no, yes = operand(0), operand(1), operand(2)
        if isinstance(which, Choice):
            chosen = _number(yes if which.yes else no), _number(yes if which.no else no)
            return None if None in chosen else Choice(which.lines, *chosen)
        return None
    if op.name in COMBINE and len(op.ins) == 2:
        return _combined(op.name, operand(0), operand(1))
    return None


def _iota(op: Op, axes: Axes) -> Known | None:
    axis = axes[op.params["dimension"]]
    if len(axis) > 1 or not np.issubdtype(op.params["dtype"], np.integer):
        return None
    return Line(frozenset((digit, 1) for digit in axis), 0)


def _number(entries: Known | None) -> Any:
    return entries.constant if isinstance(entries, Line) and not entries.slopes else None


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


def _mapped(entries: Known | None, fun: Callable[[Any], Any]) -> Known | None:
    """Applies a function to the numbers that a value can have."""
    if isinstance(entries, Choice):
        return entries._replace(yes=fun(entries.yes), no=fun(entries.no))
    number = _number(entries)
    return None if number is None else Line(frozenset(), fun(number))


def _cast(entries: Known | None, dtype: Any) -> Known | None:
    if isinstance(entries, Line) and entries.slopes:  # positions: the result must tell them apart
        exact = np.issubdtype(dtype, np.number) and np.dtype(dtype).itemsize >= 4
        return entries if exact else None
    # -1e9 becomes -Inf in float16, which masks as well.
    with np.errstate(all="ignore"):
        return _mapped(entries, lambda v: np.asarray(v).astype(dtype).item())


def _scaled(line: Line, factor: int) -> Line:
    return Line(frozenset((d, factor * n) for d, n in line.slopes), factor * line.constant)


def _sum(a: Line, b: Line) -> Line:
    slopes = dict(a.slopes)
    for digit, n in b.slopes:
        slopes[digit] = slopes.get(digit, 0) + n
    return Line(frozenset((d, n) for d, n in slopes.items() if n), a.constant + b.constant)


def _combined(name: str, a: Known | None, b: Known | None) -> Known | None:
    if a is None or b is None:
        return None
    run, x, y = COMBINE[name], _number(a), _number(b)
    if x is not None and y is not None:
        return Line(frozenset(), run(x, y))
    if isinstance(a, Line) and isinstance(b, Line):
        if name in ("add", "sub"):
            return _sum(a, b if name == "add" else _scaled(b, -1))
        return _compared(name, a, b)
    if isinstance(a, Choice) and y is not None:
        return _mapped(a, lambda v: run(v, y))
    if isinstance(b, Choice) and x is not None:
        return _mapped(b, lambda v: run(x, v))
    if isinstance(a, Choice) and isinstance(b, Choice):
        both = run(a.yes, b.yes)
        others = {run(a.yes, b.no), run(a.no, b.yes), run(a.no, b.no)}
        if len(others) == 1:  # the same answer wherever one of the two says no
            return Choice(a.lines | b.lines, both, others.pop())
    return None


def _compared(name: str, a: Line, b: Line) -> Known | None:
    """Compares sums of positions, which are integers."""
    if name in ("le", "lt"):
        name, a, b = {"le": "ge", "lt": "gt"}[name], b, a
    if name not in ("ge", "gt"):
        return None
    above = _sum(a, _scaled(b, -1))
    # Of integers, a > b is a - b - 1 >= 0.
    above = above._replace(constant=above.constant - (name == "gt"))
    return Choice(frozenset([above]), True, False)


def negated(line: Line) -> Line:
    """Returns the sum of positions that is >= 0 exactly where another one is not."""
    below = _scaled(line, -1)
    return below._replace(constant=below.constant - 1)
