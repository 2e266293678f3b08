"""Interval arithmetic: bounds of a value, and whether it is an integer.

Bounds come from constants, counts (iota, the iterations of a loop), and narrow integer dtypes. The
bounds of values that are computed from floating arguments are unknown, and no rule uses them.
"""

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import dtype_of
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
    if op is not None and (op.name in OPS or rules.RANKS in op.spec.traits):
        # The ends of an interval may overflow, and Inf - Inf is NaN, which counts as unknown.
        with np.errstate(all="ignore"):
            ins = [bounds_of(program, v, depth - 1) for v in program.operands(op, value)]
            ranks = rules.RANKS in op.spec.traits
            bounds = _ranked(op, ins, op.outs.index(value)) if ranks else OPS[op.name](op, ins)
        if bounds is not None and not math.isnan(bounds.low + bounds.high):
            return bounds
    if op is not None and op.name in ENDS and (clipped := _clipped(program, op, depth)):
        return clipped
    # The length of the scan bounds a counter. Its sources do not: one of them is computed from it.
    if op is None and (turns := program.counts(value)) is not None:
        return Bounds(*turns, True)
    if op is None and (sources := program.sources(value)):
        return _join([bounds_of(program, v, depth - 1) for v in sources])
    # Of wider integers, the range of the dtype says nothing that a rule could use.
    if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize == 1:
        return Bounds(float(jnp.iinfo(dtype).min), float(jnp.iinfo(dtype).max), True)
    return Bounds(0.0, 1.0, True) if dtype == np.bool_ else None


ENDS = rules.CLAMPS - {"clamp"}  # the larger or smaller of two


def _clipped(program: Program, op: Op, depth: int) -> Bounds | None:
    """Returns the bounds of an unknown number that ``jnp.clip`` bounds on both sides."""
    for limit, value in (op.ins, op.ins[::-1]):
        outer, inner = bounds_of(program, limit, depth - 1), program.maker(value)
        if outer is None or inner is None or inner.name not in ENDS or inner.name == op.name:
            continue
        known = [b for v in inner.ins if (b := bounds_of(program, v, depth - 1))]
        if known:
            both = sorted((outer, known[0]), key=lambda each: each.low)
            whole = bool(jnp.issubdtype(dtype_of(op.outs[0]), jnp.integer))
            return Bounds(both[0].low, max(each.high for each in both), whole)
    return None


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


def _ends(
    apply: Callable[..., Any], whole: bool = False, where: Callable[..., bool] | None = None
) -> Rule:
    """Returns the bounds of a function that is monotone in each operand while others are fixed.

    They are its values at the ends of the operands. ``whole`` says that integers give an integer,
    and ``where`` for which bounds the function is monotone, if not for all.
    """

    def rule(op: Op, ins: list[Any]) -> Bounds | None:
        if not ins or None in ins or not (where is None or where(*ins)):
            return None
        corners = itertools.product(*((each.low, each.high) for each in ins))
        ends = [float(apply(*corner)) for corner in corners]
        return Bounds(min(ends), max(ends), whole and all(each.whole for each in ins))

    return rule


# A quotient near a pole may be anything.
_real_quotient = _ends(operator.truediv, where=lambda a, b: not b.low <= 0 <= b.high)


def _quotient(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    return _cast(op, [_real_quotient(op, ins)])


def _folded(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    """Returns the bounds of a magnitude, a square, or another power with a constant exponent."""
    a, y = ins[0], op.params.get("y", 2)
    if a is None or (y < 0 and a.low <= 0 <= a.high):
        return None
    ends = [float(abs(x) if op.name == "abs" else np.float_power(x, y)) for x in (a.low, a.high)]
    # An even power is least inside of an interval that contains 0, not at an end.
    low = 0.0 if a.low <= 0 <= a.high and y % 2 == 0 else min(ends)
    return Bounds(low, max(ends), a.whole and y > 0)


def _iota(op: Op, ins: list[Any]) -> Bounds | None:
    length = op.params["shape"][op.params["dimension"]]
    return Bounds(0.0, float(length - 1), True) if isinstance(length, int) and length else None


def _moved(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    return ins[0] if ins else None


def _cast(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    a = ins[0]
    if a is None or not jnp.issubdtype(op.outs[0].aval.dtype, jnp.integer):
        return a
    # Integers are cut off towards zero.
    return Bounds(float(np.trunc(a.low)), float(np.trunc(a.high)), True)


def _within(low: float, high: float, whole: bool = False) -> Rule:
    return lambda op, ins: Bounds(low, high, whole)


def _count(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    a, axes = ins[0], op.params["axes" if op.name == "reduce_sum" else "axis"]
    if a is None:
        return None
    size = math.prod(op.ins[0].aval.shape[i] for i in np.atleast_1d(axes))
    # A running sum starts with one term, so the ends of one term bound it too.
    return Bounds(min(a.low, a.low * size), max(a.high, a.high * size), a.whole)


def _ranked(op: Op, ins: list[Any], place: int) -> Bounds | None:
    """Returns the bounds of a result of a sort, or of the places that a search returns."""
    if "num_keys" in op.params:
        return ins[place]
    if place < len(op.outs) - 1:
        return ins[0]
    axes = op.params.get("axes") or (op.params.get("axis", -1),)
    return Bounds(0.0, float(op.ins[0].aval.shape[axes[0]] - 1), True)


def _bits(op: Op, ins: list[Any]) -> Bounds | None:
    """Returns the bounds of random bits, of which `jax.random.uniform` makes numbers of [1, 2)."""
    a, b = (*ins, None)[:2]
    dtype = dtype_of(op.ins[0])
    if dtype.kind != "u":
        return None
    if op.name == rules.OR:  # no more than the sum, and no less than either
        known = a is not None and b is not None and min(a.low, b.low) >= 0
        return Bounds(max(a.low, b.low), a.high + b.high, True) if known else None
    if op.name == rules.SHIFT:
        shift = b.low if b is not None and b.low == b.high else 0
        return Bounds(0.0, float(2 ** (8 * dtype.itemsize) - 1) // 2**shift, True)
    if a is None or dtype_of(op.outs[0]).itemsize != dtype.itemsize:
        return None
    ends = [np.array(int(x), dtype).view(dtype_of(op.outs[0])) for x in (a.low, a.high)]
    return Bounds(float(ends[0]), float(ends[1]))


def _outer(op: Op, ins: list[Any]) -> Bounds | None:
    """Returns the bounds of products that no axis sums up, such as of positions and frequencies."""
    numbers = op.params.get("dimension_numbers")
    if not isinstance(numbers, tuple) or len(numbers) != 2 or None in ins:
        return None
    (summed, _), _ = numbers
    shape = op.ins[0].aval.shape
    return OPS["mul"](op, ins) if all(shape[axis] == 1 for axis in summed) else None


def _remainder(op: Op, ins: list[Bounds | None]) -> Bounds | None:
    a, b = ins
    if b is None:
        return None
    # It has the sign of the dividend, which may be either, and is smaller than the divisor: of
    # integers by one at least.
    integer = bool(jnp.issubdtype(op.outs[0].aval.dtype, jnp.integer))
    whole = integer or (a is not None and a.whole and b.whole)
    most = b.largest - whole
    # An unsigned one is not negative.
    unsigned = dtype_of(op.outs[0]).kind == "u" or (a is not None and a.low >= 0)
    return Bounds(0.0 if unsigned else -most, most, whole)


OPS: dict[str, Rule] = {
    "iota": _iota,
    **dict.fromkeys(rules.ADDITIONS, _ends(operator.add, True)),
    "sub": _ends(operator.sub, True),
    # An end may be infinite; 0 times any number of the interval is 0, not NaN.
    "mul": _ends(lambda x, y: x * y if x and y else 0.0, True),
    "max": _ends(max, True),
    "min": _ends(min, True),
    "neg": _ends(operator.neg, True),
    "div": _quotient,
    # Only of a positive base is a power monotone in its base and in its exponent.
    "pow": _ends(np.float_power, where=lambda base, exponent: base.low > 0),
    "sqrt": _ends(np.sqrt, where=lambda a: a.low >= 0),
    **{name: _ends(getattr(np, name)) for name in (*rules.EXPONENTIALS, "floor")},
    **dict.fromkeys(rules.SQUARES | {"abs"}, _folded),
    **dict.fromkeys((*rules.WAVES - {"tan"}, "tanh", "erf"), _within(-1, 1)),
    "logistic": _within(0, 1),
    "sign": _within(-1, 1, True),
    "rem": _remainder,
    **dict.fromkeys((rules.BITCAST, rules.OR, rules.SHIFT), _bits),
    rules.DOT: _outer,
    "select_n": lambda op, ins: _join(ins[1:]),
    "concatenate": lambda op, ins: _join(ins),
    # The limits bound the result, even if the operand between them is unknown.
    "clamp": lambda op, ins: _join([ins[0], ins[2]]),
    **dict.fromkeys(("reduce_sum", "cumsum"), _count),
    # A pad also returns its padding value, which is another operand.
    **dict.fromkeys(rules.EXTREMES | MOVES - {"pad"}, _moved),
    **dict.fromkeys(CASTS, _cast),
}
