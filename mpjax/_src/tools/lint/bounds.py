"""Interval arithmetic: bounds of a value, and whether it is an integer.

Bounds come from constants, counts (iota, the iterations of a loop), and narrow integer dtypes. The
bounds of values that are computed from floating arguments are unknown, and no rule uses them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.program import CASTS, MOVES, Program


class Bounds(NamedTuple):
    """An interval, and whether the value is always an integer."""

    low: float
    high: float
    whole: bool = False

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))


# How deep a chain of operations is followed.
DEPTH = 100


def bounds_of(program: Program, value: Value, depth: int = DEPTH) -> Bounds | None:
    """Returns the bounds of a value without its infinities, or None if they are unknown."""
    bounds: dict[Value, Bounds | None] = program.notes.setdefault("bounds", {})
    if value not in bounds:
        bounds[value] = None  # unknown if it is computed from itself
        bounds[value] = _bounds(program, value, depth) if depth else None
    return bounds[value]


def _bounds(program: Program, value: Value, depth: int) -> Bounds | None:
    dtype = getattr(value.aval, "dtype", None)
    if dtype is None or not _jax.is_array(value.aval) or jnp.issubdtype(dtype, jnp.complexfloating):
        return None
    constant = program.constant(value)
    if constant is not None:
        return _of_array(constant)
    op = program.maker(value)
    rule = OPS.get(op.name) if op else None
    if op is not None and rule is not None:
        # The ends of an interval may overflow, and Inf - Inf is NaN, which counts as unknown.
        with np.errstate(all="ignore"):
            bounds = rule(op, [bounds_of(program, v, depth - 1) for v in op.ins])
        if bounds is not None and not math.isnan(bounds.low + bounds.high):
            return bounds
    # The length of the scan bounds a counter. Its sources do not: one of them is computed from it.
    if op is None and (turns := program.counts(value)) is not None:
        return Bounds(*turns, True)
    if op is None and (sources := program.sources(value)):
        every = [bounds_of(program, v, depth - 1) for v in sources]
        return _join(every)
    # Of wider integers, the range of the dtype says nothing that a rule could use.
    if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1:
        return Bounds(float(jnp.iinfo(dtype).min), float(jnp.iinfo(dtype).max), True)
    return Bounds(0.0, 1.0, True) if dtype == np.bool_ else None


def _of_array(array: Any) -> Bounds | None:
    array = np.asarray(array)
    if array.dtype == np.bool_:
        return Bounds(0.0, 1.0, True)
    array = array.astype(np.float64)
    finite = array[np.isfinite(array)]
    if not finite.size:
        return None
    return Bounds(float(finite.min()), float(finite.max()), bool(np.all(finite == np.rint(finite))))


def _join(every: list[Bounds | None]) -> Bounds | None:
    bounds = [each for each in every if each is not None]
    if not bounds or len(bounds) < len(every):
        return None
    lows, highs, wholes = zip(*bounds, strict=True)
    return Bounds(min(lows), max(highs), all(wholes))


Rule = Callable[[Op, list[Bounds | None]], Bounds | None]


def _known(rule: Callable[..., Bounds | None]) -> Rule:
    """Returns the bounds of an operation's result if those of all its operands are known."""

    def apply(op: Op, ins: list[Bounds | None]) -> Bounds | None:
        return None if not ins or None in ins else rule(op, *ins)

    return apply


def _corners(combine: Callable[[float, float], float], whole: bool = True) -> Rule:
    """Returns the bounds of a function of two operands, from the four pairs of their ends."""

    def rule(op: Op, a: Bounds, b: Bounds) -> Bounds:
        # With one operand fixed, all of these functions are monotone in the other one.
        ends = [combine(x, y) for x in (a.low, a.high) for y in (b.low, b.high)]
        return Bounds(min(ends), max(ends), whole and a.whole and b.whole)

    return _known(rule)


def _monotone(apply: Callable[[float], float], whole: bool = False) -> Rule:
    def rule(op: Op, a: Bounds) -> Bounds:
        low, high = sorted((float(apply(a.low)), float(apply(a.high))))
        return Bounds(low, high, whole and a.whole)

    return _known(rule)


def _quotient(op: Op, a: Bounds, b: Bounds) -> Bounds | None:
    if b.low <= 0 <= b.high:  # a quotient near a pole may be anything
        return None
    ends = [x / y for x in (a.low, a.high) for y in (b.low, b.high)]
    return _cast(op, [Bounds(min(ends), max(ends))])


def _power(op: Op, a: Bounds, b: Bounds) -> Bounds | None:
    # Only of a positive base is a power monotone in its base and in its exponent.
    if a.low <= 0:
        return None
    ends = [float(np.float_power(x, y)) for x in (a.low, a.high) for y in (b.low, b.high)]
    return Bounds(min(ends), max(ends))


def _integer_power(op: Op, a: Bounds) -> Bounds | None:
    y = op.params["y"]
    if y < 0 and a.low <= 0 <= a.high:
        return None
    ends = [float(a.low) ** y, float(a.high) ** y]
    # An even power is least inside of an interval that contains 0, not at an end.
    low = 0.0 if a.low <= 0 <= a.high and y % 2 == 0 else min(ends)
    return Bounds(low, max(ends), a.whole and y > 0)


def _magnitude(op: Op, a: Bounds) -> Bounds:
    low = 0.0 if a.low <= 0 <= a.high else min(abs(a.low), abs(a.high))
    return Bounds(low, a.largest, a.whole)


def _iota(op: Op, ins: list[Any]) -> Bounds | None:
    length = op.params["shape"][op.params["dimension"]]
    return Bounds(0.0, float(length - 1), True) if isinstance(length, int) and length else None


def _moved(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    return ins[0] if ins else None


def _cast(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    a = ins[0]
    if a is None:
        return None
    if not jnp.issubdtype(op.outs[0].aval.dtype, jnp.integer):
        return a
    # Integers are cut off towards zero.
    return Bounds(float(np.trunc(a.low)), float(np.trunc(a.high)), True)


def _within(low: float, high: float, whole: bool = False) -> Rule:
    return lambda op, ins: Bounds(low, high, whole)


def _count(axes: str) -> Rule:
    def rule(op: Op, ins: list[Bounds | None]) -> Bounds | None:
        where = op.params[axes]
        size = math.prod(op.ins[0].aval.shape[i] for i in np.atleast_1d(where))
        a = ins[0]
        if a is None:
            return None
        # A running sum starts with one term, so the ends of one term bound it too.
        return Bounds(min(a.low, a.low * size), max(a.high, a.high * size), a.whole)

    return rule


def _remainder(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    a, b = ins
    if b is None:
        return None
    # It has the sign of the dividend, which may be either, and is smaller than the divisor: of
    # integers by one at least.
    integer = bool(jnp.issubdtype(op.outs[0].aval.dtype, jnp.integer))
    whole = integer or (a is not None and a.whole and b.whole)
    most = b.largest - whole
    return Bounds(-most, most, whole)


OPS: dict[str, Rule] = {
    "iota": _iota,
    "add": _corners(lambda x, y: x + y),
    "add_any": _corners(lambda x, y: x + y),
    "sub": _corners(lambda x, y: x - y),
    # An end may be infinite; 0 times any number of the interval is 0, not NaN.
    "mul": _corners(lambda x, y: x * y if x and y else 0.0),
    "max": _corners(max),
    "min": _corners(min),
    "div": _known(_quotient),
    "pow": _known(_power),
    "integer_pow": _known(_integer_power),
    "square": _known(lambda op, a: Bounds(_magnitude(op, a).low ** 2, a.largest**2, a.whole)),
    "abs": _known(_magnitude),
    "neg": _monotone(lambda x: -x, True),
    "exp": _monotone(np.exp),
    "exp2": _monotone(np.exp2),
    "sqrt": _known(lambda op, a: Bounds(a.low**0.5, a.high**0.5) if a.low >= 0 else None),
    "floor": _monotone(math.floor),
    "sin": _within(-1, 1),
    "cos": _within(-1, 1),
    "tanh": _within(-1, 1),
    "erf": _within(-1, 1),
    "logistic": _within(0, 1),
    "sign": _within(-1, 1, True),
    "rem": _remainder,
    "select_n": lambda op, ins: _join(ins[1:]),
    "concatenate": lambda op, ins: _join(ins),
    # The limits bound the result, even if the operand between them is unknown.
    "clamp": lambda op, ins: _join([ins[0], ins[2]]),
    "reduce_sum": _count("axes"),
    "cumsum": _count("axis"),
    "reduce_max": _moved,
    "reduce_min": _moved,
    # A pad also returns its padding value, which is another operand.
    **dict.fromkeys(MOVES - {"pad"}, _moved),
    **dict.fromkeys(CASTS, _cast),
}
