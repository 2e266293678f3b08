"""A normal form of values: products of exponentials, sums and masks, in any spelling.

The logarithm of a value is read as a sum of terms: ``e / s``, ``e * (1 / s)``, ``e * s ** -1`` and
``exp(z - log(s))`` with ``e = exp(z)`` are all ``z - log(s)``. Changes of layout are skipped: each
term records how its axes correspond to the axes of the value that is read.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from mpjax._src.core.base.rules import CAST, EXPONENTIALS, LOGARITHMS, SELECT
from mpjax._src.core.program.affine import RATES, Parts, number, powers, terms, total
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.views import Axes, before, is_view
from mpjax._src.replacements.flow import Flow

EXPONENT, MASK, SUM, FACTOR, CONSTANT = "exponent", "mask", "sum", "factor", "constant"

# The kind of a term, the number of its value, its axes, and its factor.
Term = tuple[str, Any, Axes]
Form = dict[Term, float]

DEPTH = 64


@dataclasses.dataclass(eq=False)
class Reading:
    """Reads values into the normal form, and records the operations that it passes."""

    flow: Flow  # the data flow of the block, with a number for each value
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
        if op.name in EXPONENTIALS:
            return self._sum(self.exponent, op, ((0, RATES[op.name]),), axes, depth)
        for special in (self._guarded_sum, self._mask_of_numbers, self._selected):
            if (form := special(op, axes, depth)) is not None:
                return form
        if parts := powers(op):
            return self._sum(self.logarithm, op, parts, axes, depth)
        return self._term(FACTOR, value, axes)

    def exponent(self, value: Value, axes: Axes | None, depth: int = DEPTH) -> Form:
        """Returns the terms of a value itself."""
        # Where the exponent ends is what the softmax is a function of: its scores.
        if axes is None or self.end is None or self.flow.numbers.get(value) == self.end:
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
        named = self.flow.numbers.get(value, value)
        # A term without known axes equals no other term.
        term = (kind, named, axes) if axes is not None else (kind, value, (((-1, 1, 1),),))
        self.values.setdefault(term, []).append(value)
        return {term: 1.0}

    def _mask(self, which: Value, axes: Axes, kept: bool) -> Form:
        return {(MASK, (self.flow.numbers.get(which, which), kept), axes): 1.0}

    def _mask_of_numbers(self, op: Op, axes: Axes, depth: int) -> Form | None:
        """Reads a boolean that is cast to float."""
        if op.name != CAST or getattr(op.ins[0].aval, "dtype", None) != np.bool_:
            return None
        self.ops[op] = None
        return self._mask(op.ins[0], axes, True)

    def _selected(self, op: Op, axes: Axes, depth: int) -> Form | None:
        """Reads a select between a value and 0."""
        shapes = (), op.outs[0].aval.shape
        if op.name != SELECT or len(op.ins) != 3 or op.ins[0].aval.shape not in shapes:
            return None
        for place in (1, 2):
            if number(op.ins[3 - place]) == 0:
                mask = self._mask(op.ins[0], before(op, axes) or (), place == 2)
                rest = self._sum(self.logarithm, op, ((place, 1.0),), axes, depth)
                return total([(mask, 1), (rest, 1)])
        return None

    def _guarded_sum(self, op: Op | None, axes: Axes | None, depth: int) -> Form | None:
        """Reads a sum, behind changes of layout and what keeps it away from 0."""
        guards, passed = [], []
        while op is not None and op.name != "reduce_sum" and self.flow.is_plain(op):
            varying = [i for i, v in enumerate(op.ins) if v.const is None and v.is_f32]
            if len(varying) != 1 or not (is_view(op) or op.name in GUARDS):
                return None
            (place,) = varying
            if op.name in ("add", "max", SELECT):
                constant = number(op.ins[3 - place if op.name == SELECT else 1 - place])
                if constant is None or constant < 0:
                    return None
                guards.append((op.name, constant))
            if op.name == SELECT:
                test = self.flow.producer.get(op.ins[0])
                if test is None or not self._is_not_zero(test, op.ins[place], place == 2):
                    return None
                passed.append(test)
            passed.append(op)
            axes, op = before(op, axes, place), self.flow.producer.get(op.ins[place])
        if op is None or op.name != "reduce_sum" or axes is None:
            return None
        self.ops |= dict.fromkeys([*passed, op])
        return {(SUM, (self.flow.numbers[op.outs[0]], tuple(guards)), axes): 1.0}

    def _is_not_zero(self, op: Op, value: Value, answer: bool) -> bool:
        """Returns whether an op compares a sum with 0, with this answer if it is not 0."""
        names = ("gt", "ne") if answer else ("eq", "le")
        same = op.name in names and self.flow.numbers.get(op.ins[0]) == self.flow.numbers.get(value)
        return same and number(op.ins[1]) == 0


# What keeps a sum away from 0, or leaves a positive one as it is.
GUARDS = frozenset(["abs", "add", "max", SELECT])


def _constant(value: float) -> Form:
    return {(CONSTANT, "", ()): value} if value else {}


def same(first: Form, second: Form) -> bool:
    """Returns whether two forms are equal. Two equal masks are the same as one."""

    def count(form, term):
        return min(form.get(term, 0.0), 1.0 if term[0] == MASK else math.inf)

    return all(abs(count(first, t) - count(second, t)) < 1e-6 for t in first.keys() | second.keys())


def is_constant_along(axes: Axes, summed: tuple[int, ...]) -> bool:
    return not any(place in summed for axis in axes for place, *_ in axis)
