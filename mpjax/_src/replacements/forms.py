"""A normal form of values: products of exponentials, sums and masks, in any spelling.

The logarithm of a value is read as a sum of terms: ``e / s``, ``e * (1 / s)``, ``e * s ** -1`` and
``exp(z - log(s))`` with ``e = exp(z)`` are all ``z - log(s)``. Changes of layout are skipped: each
term records how its axes correspond to the axes of the value that is read.
"""

import contextlib
import dataclasses
import math
from typing import Any

import numpy as np

from mpjax._src.core.base.rules import CAST, EXPONENTIALS, LOGARITHMS, SELECT
from mpjax._src.core.program.affine import RATES, Parts, number, powers, terms, total
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.views import Axes, before, is_view
from mpjax._src.replacements.flow import Flow

# ---- which values are the same ------------------------------------------------------------------


def numbered_values(flow: Flow) -> dict[Value, int]:
    """Returns a number for each value of a block; equal computations get equal numbers."""
    numbers: dict[Any, int] = {}
    numbered: dict[Value, int] = {}

    def add(value: Value, key: Any) -> int:
        return numbered.setdefault(value, numbers.setdefault(key, len(numbers)))

    def number_of(value: Value) -> int:
        const = np.asarray(value.const) if value.literal else None
        return add(value, value if const is None else (const.dtype, const.shape, const.tobytes()))

    for op in flow.ops:
        key = flow.key(op), tuple(map(number_of, op.ins))
        # Operations with effects, or with parameters that have no hash, equal no others.
        with contextlib.suppress(TypeError):
            for place, value in enumerate(() if op.eqn.effects else op.outs):
                add(value, (key, place))
    for value in (*flow.block.invars, *flow.block.outvars):
        number_of(value)
    return numbered


# ---- the form -----------------------------------------------------------------------------------

EXPONENT, MASK, SUM, FACTOR, CONSTANT = "exponent", "mask", "sum", "factor", "constant"

# The kind of a term, the number of its value, its axes, and its factor.
Term = tuple[str, Any, Axes]
Form = dict[Term, float]

DEPTH = 64


@dataclasses.dataclass(eq=False)
class Reading:
    """Reads values into the normal form, and records the operations that it passes."""

    flow: Flow  # the data flow of the block
    numbers: dict[Value, int]  # the number of each value; equal values have equal numbers
    # The number of the exponent at which reading stops; None for no exponent.
    end: int | None = None
    ops: dict[Op, None] = dataclasses.field(default_factory=dict)  # the operations that were passed
    # The values of the terms.
    values: "dict[Term, list[Value]]" = dataclasses.field(default_factory=dict)

    def logarithm(self, value: Value, axes: Axes | None, depth: int = DEPTH) -> Form:
        """Returns the terms of the logarithm of a value."""
        if axes is None:
            return self._term(FACTOR, value, None)
        if (constant := number(value) or 0) > 0:
            return _constant(math.log(constant))
        op = self._maker(value, depth)
        if op is None:
            return self._term(FACTOR, value, axes)
        if op.name == "reduce_sum":
            self.ops[op] = None
            return self._term(SUM, value, axes)
        if op.name in EXPONENTIALS:
            return self._sum(self.exponent, op, ((0, RATES[op.name]),), axes, depth)
        for special in (self._mask_of_numbers, self._selected, self._guarded):
            if (form := special(op, axes, depth)) is not None:
                return form
        if parts := powers(op):
            return self._sum(self.logarithm, op, parts, axes, depth)
        return self._term(FACTOR, value, axes)

    def exponent(self, value: Value, axes: Axes | None, depth: int = DEPTH) -> Form:
        """Returns the terms of a value itself."""
        # Where the exponent ends is what the softmax is a function of: its scores.
        if axes is None or self.end is None or self.numbers.get(value) == self.end:
            return self._term(EXPONENT, value, axes)
        if (constant := number(value)) is not None:
            return _constant(constant)
        op = self._maker(value, depth)
        if op is not None and op.name in LOGARITHMS:
            return self._sum(self.logarithm, op, ((0, 1 / RATES[op.name]),), axes, depth)
        # A factor that is known scales the form; any other product is a term of its own.
        if op is not None and (parts := terms(op, self._known)):
            return self._sum(self.exponent, op, parts, axes, depth)
        return self._term(EXPONENT, value, axes)

    def _maker(self, value: Value, depth: int) -> Op | None:
        """Returns the op that computes a value, if it may be read."""
        op = self.flow.producer.get(value) if depth else None
        return op if op is not None and self.flow.is_plain(op) else None

    def _sum(self, read: Any, op: Op, parts: Parts, axes: Axes, depth: int) -> Form:
        """Passes an op, and returns the weighted sum of what is read of its operands."""
        self.ops[op] = None
        operands = ((op.ins[i], before(op, axes, i), weight) for i, weight in parts)
        return total((read(v, along, depth - 1), weight) for v, along, weight in operands)

    def _known(self, value: Value) -> float | None:
        """Returns the number that fills a value, or whose logarithm does."""
        op = self.flow.producer.get(value)
        if op is not None and op.name == "log" and (number(op.ins[0]) or 0) > 0:
            return math.log(number(op.ins[0]) or 1)
        return number(value)

    def _term(self, kind: str, value: Value, axes: Axes | None) -> Form:
        named = self.numbers.get(value, value)
        # A term without known axes equals no other term.
        term = (kind, named, axes) if axes is not None else (kind, value, (((-1, 1, 1),),))
        self.values.setdefault(term, []).append(value)
        return {term: 1.0}

    def _mask(self, which: Value, axes: Axes, kept: bool) -> Form:
        return {(MASK, (self.numbers.get(which, which), kept), axes): 1.0}

    def _mask_of_numbers(self, op: Op, axes: Axes, depth: int) -> Form | None:
        """Reads a boolean that is cast to float."""
        if op.name != CAST or getattr(op.ins[0].aval, "dtype", None) != np.bool_:
            return None
        self.ops[op] = None
        return self._mask(op.ins[0], axes, True)

    def _selected(self, op: Op, axes: Axes, depth: int) -> Form | None:
        """Reads a select between a value and 0, a mask, or one that replaces 0 by 1."""
        shapes = (), op.outs[0].aval.shape
        if op.name != SELECT or len(op.ins) != 3 or op.ins[0].aval.shape not in shapes:
            return None
        which, *cases = op.ins
        for place, value in enumerate(cases):
            other, part = number(cases[1 - place]), ((1 + place, 1.0),)
            if other == 0:
                mask = self._mask(which, before(op, axes, 0) or (), bool(place))
                return total([(mask, 1), (self._sum(self.logarithm, op, part, axes, depth), 1)])
            if other is not None and self._is_sum(value) and self._is_kept(which, value, place):
                self.ops[self.flow.producer[which]] = None
                return _behind_guard(op, other, self._sum(self.logarithm, op, part, axes, depth))
        return None

    def _is_kept(self, which: Value, value: Value, place: int) -> bool:
        """Returns whether a value compares a sum with 0 and so selects it where it is not 0."""
        op = self.flow.producer.get(which)
        if op is None or op.name not in TESTS_OF_ZERO[place]:
            return False
        return self.numbers.get(op.ins[0]) == self.numbers.get(value) and number(op.ins[1]) == 0

    def _guarded(self, op: Op, axes: Axes, depth: int) -> Form | None:
        """Reads a sum with a constant that keeps it away from 0, or its absolute value."""
        if op.name not in GUARDS:
            return None
        for place, value in enumerate(op.ins):
            constant = number(op.ins[1 - place]) if len(op.ins) == 2 else 0
            if constant is not None and constant >= 0 and self._is_sum(value):
                rest = self._sum(self.logarithm, op, ((place, 1.0),), axes, depth)
                return rest if op.name == "abs" else _behind_guard(op, constant, rest)
        return None

    def _is_sum(self, value: Value) -> bool:
        """Returns whether a value is a sum, perhaps after changes of layout and guards."""
        while (op := self.flow.producer.get(value)) is not None and op.name != "reduce_sum":
            varying = [v for v in op.ins if v.const is None and v.is_f32]
            through = is_view(op) or op.name in GUARDS or op.name == SELECT
            if not through or len(varying) != 1 or not self.flow.is_plain(op):
                return False
            (value,) = varying
        return op is not None


# What keeps a sum away from 0, or leaves a positive one as it is.
GUARDS = frozenset(["abs", "add", "max"])
# The comparisons of a number that is not negative with 0 that are false, and true, if it is not 0.
TESTS_OF_ZERO = frozenset(["eq", "le"]), frozenset(["gt", "ne"])


def _constant(value: float) -> Form:
    return {(CONSTANT, "", ()): value} if value else {}


def _behind_guard(op: Op, constant: float, form: Form) -> Form:
    return {(kind, (op.name, constant, of), axes): n for (kind, of, axes), n in form.items()}


def guards_of(term: Term) -> "tuple[list[tuple[str, float]], Any]":
    """Returns the guard that keeps a sum away from 0, and the number of the sum itself."""
    guards, named = [], term[1]
    while isinstance(named, tuple):
        guards.append(named[:2])
        named = named[2]
    return guards, named


def same(first: Form, second: Form) -> bool:
    """Returns whether two forms are equal. Two equal masks are the same as one."""

    def count(form, term):
        return min(form.get(term, 0.0), 1.0 if term[0] == MASK else math.inf)

    return all(abs(count(first, t) - count(second, t)) < 1e-6 for t in first.keys() | second.keys())


def is_constant_along(axes: Axes, summed: tuple[int, ...]) -> bool:
    return not any(place in summed for axis in axes for place, *_ in axis)
