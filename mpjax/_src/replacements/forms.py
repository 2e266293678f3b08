"""A normal form of values: products of exponentials, sums and masks, in any spelling.

The logarithm of a value is read as a sum of terms: ``e / s``, ``e * (1 / s)``, ``e * s ** -1`` and
``exp(z - log(s))`` with ``e = exp(z)`` are all ``z - log(s)``. Changes of layout are skipped: each
term records how its axes correspond to the axes of the value that is read.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.views import Axes, before, is_view
from mpjax._src.replacements.flow import Flow

# ---- which values are the same ------------------------------------------------------------------


def numbered_values(flow: Flow) -> dict[Value, int]:
    """Returns a number for each value of a block; equal computations get equal numbers."""
    block = flow.block
    numbers: dict[Any, int] = {}
    numbered: dict[Value, int] = {}

    def number(value: Value) -> int:
        if value not in numbered:
            key: Any = value
            if value.literal:
                const = np.asarray(value.const)
                key = const.dtype, const.shape, const.tobytes()
            numbered[value] = numbers.setdefault(key, len(numbers))
        return numbered[value]

    for op in flow.ops:
        ins = tuple([number(v) for v in op.ins])
        key = flow.key(op), ins
        try:
            hash(key)
        except TypeError:
            continue
        if not op.eqn.effects:
            for place, value in enumerate(op.outs):
                numbered[value] = numbers.setdefault((key, place), len(numbers))
    for value in (*block.invars, *block.outvars):
        number(value)
    return numbered


# ---- the form -----------------------------------------------------------------------------------

EXPONENT, MASK, SUM, FACTOR, CONSTANT = "exponent", "mask", "sum", "factor", "constant"

# The kind of a term, the number of its value, its axes, and its factor.
Term = tuple[str, Any, Axes]
Form = dict[Term, float]

LN2 = math.log(2)
POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "square": 2.0}
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
        if (constant := _constant(value)) is not None and constant > 0:
            return {} if constant == 1 else {(CONSTANT, "", ()): math.log(constant)}
        op = self.flow.producer.get(value)
        if op is None or not depth or not self.flow.is_plain(op):
            return self._term(FACTOR, value, axes)
        depth -= 1
        if op.name in ("exp", "exp2"):
            self.ops[op] = None
            # 2**z = exp(z ln 2)
            rate = LN2 if op.name == "exp2" else 1.0
            return _times(self.exponent(op.ins[0], axes, depth), rate)
        if op.name == "reduce_sum":
            self.ops[op] = None
            return self._term(SUM, value, axes)
        if op.name == "select_n" and (chosen := self._selected(op, axes, depth)) is not None:
            return chosen
        if op.name in ("add", "max") and (guarded := self._guarded(op, axes, depth)) is not None:
            return guarded
        if op.name in ("mul", "div"):
            self.ops[op] = None
            sign = 1 if op.name == "mul" else -1
            first, second = (self._factor(v, narrowed(v, axes), depth) for v in op.ins)
            return _sum(first, _times(second, sign))
        if op.name == "integer_pow" or op.name in POWERS:
            self.ops[op] = None
            power = POWERS.get(op.name) or op.params["y"]
            return _times(self.logarithm(op.ins[0], axes, depth), power)
        if op.name == "abs" and self._is_sum(op.ins[0]):  # abs of a sum of exponentials
            self.ops[op] = None
            return self.logarithm(op.ins[0], axes, depth)
        if is_view(op):
            self.ops[op] = None
            return self.logarithm(op.ins[0], before(op, axes), depth)
        return self._term(FACTOR, value, axes)

    def exponent(self, value: Value, axes: Axes | None, depth: int = DEPTH) -> Form:
        """Returns the terms of a value itself."""
        # Where the exponent ends is what the softmax is a function of: its scores.
        if axes is None or self.end is None or self.numbers.get(value) == self.end:
            return self._term(EXPONENT, value, axes)
        if (constant := _constant(value)) is not None:
            return {(CONSTANT, "", ()): constant} if constant else {}
        op = self.flow.producer.get(value)
        if op is None or not depth or not self.flow.is_plain(op):
            return self._term(EXPONENT, value, axes)
        depth -= 1
        if op.name in ("add", "sub"):
            self.ops[op] = None
            first, second = (self.exponent(v, narrowed(v, axes), depth) for v in op.ins)
            return _sum(first, _times(second, -1 if op.name == "sub" else 1))
        if op.name == "neg":
            self.ops[op] = None
            return _times(self.exponent(op.ins[0], axes, depth), -1)
        if op.name in ("mul", "div"):
            factors = [self._known(v) for v in op.ins]
            # A factor that is known scales the form; any other product is a term of its own.
            if op.name == "mul" and factors[0] is not None:
                self.ops[op] = None
                return _times(
                    self.exponent(op.ins[1], narrowed(op.ins[1], axes), depth), factors[0]
                )
            if factors[1]:
                self.ops[op] = None
                factor = factors[1] if op.name == "mul" else 1 / factors[1]
                return _times(self.exponent(op.ins[0], narrowed(op.ins[0], axes), depth), factor)
        if op.name in ("log", "log2"):
            self.ops[op] = None
            form = self.logarithm(op.ins[0], axes, depth)
            return _times(form, 1 / LN2 if op.name == "log2" else 1)
        if is_view(op):
            self.ops[op] = None
            return self.exponent(op.ins[0], before(op, axes), depth)
        return self._term(EXPONENT, value, axes)

    def _known(self, value: Value) -> float | None:
        """Returns the number that fills a value, or whose logarithm does."""
        op = self.flow.producer.get(value)
        if op is not None and op.name == "log" and (_constant(op.ins[0]) or 0) > 0:
            return math.log(_constant(op.ins[0]) or 1)
        return _constant(value)

    def _term(self, kind: str, value: Value, axes: Axes | None) -> Form:
        number = self.numbers.get(value, value)
        # A term without known axes equals no other term.
        term = (kind, number, axes) if axes is not None else (kind, value, (((-1, 1, 1),),))
        self.values.setdefault(term, []).append(value)
        return {term: 1.0}

    def _factor(self, value: Value, axes: Axes | None, depth: int) -> Form:
        """Reads one of two factors; a boolean cast to float is a mask."""
        op = self.flow.producer.get(value)
        while op is not None and axes is not None and is_view(op):
            self.ops[op] = None
            value, axes = op.ins[0], before(op, axes)
            op = self.flow.producer.get(value)
        if op is not None and op.name == "convert_element_type":
            aval = op.ins[0].aval
            if getattr(aval, "dtype", None) == np.bool_ and axes is not None:
                self.ops[op] = None
                return self._mask(op.ins[0], axes, True)
        return self.logarithm(value, axes, depth)

    def _mask(self, which: Value, axes: Axes, kept: bool) -> Form:
        return {(MASK, (self.numbers.get(which, which), kept), axes): 1.0}

    def _selected(self, op: Op, axes: Axes, depth: int) -> Form | None:
        """Reads a `select_n` between a value and 0, a mask, or one that replaces 0 by 1."""
        if len(op.ins) != 3 or op.ins[0].aval.shape not in ((), op.outs[0].aval.shape):
            return None
        which, *cases = op.ins
        constants = [_constant(v) for v in cases]
        for place, value in enumerate(cases):
            other = constants[1 - place]
            if other == 0:
                self.ops[op] = None
                where = axes if which.aval.shape else ()
                rest = self.logarithm(value, narrowed(value, axes), depth)
                return _sum(self._mask(which, where, bool(place)), rest)
            if (
                other is not None
                and self._is_sum(value)
                and self._is_zero_test(which, value, place)
            ):
                self.ops |= {op: None, self.flow.producer[which]: None}
                rest = self.logarithm(value, narrowed(value, axes), depth)
                return _behind_guard("select_n", other, rest)
        return None

    def _is_zero_test(self, which: Value, value: Value, place: int) -> bool:
        """Returns whether a value compares a sum with 0 and so selects it where it is not 0."""
        op = self.flow.producer.get(which)
        tests = {"eq": 0, "ne": 1, "gt": 1, "le": 0}
        if op is None or tests.get(op.name) != place:
            return False
        return self.numbers.get(op.ins[0]) == self.numbers.get(value) and _constant(op.ins[1]) == 0

    def _guarded(self, op: Op, axes: Axes, depth: int) -> Form | None:
        """Reads a sum with a constant that keeps it away from 0."""
        for value, other in (op.ins, op.ins[::-1]):
            constant = _constant(other)
            if constant is not None and constant >= 0 and self._is_sum(value):
                self.ops[op] = None
                rest = self.logarithm(value, narrowed(value, axes), depth)
                return _behind_guard(op.name, constant, rest)
        return None

    def _is_sum(self, value: Value) -> bool:
        """Returns whether a value is a sum, perhaps after changes of layout and guards."""
        while (op := self.flow.producer.get(value)) is not None:
            if op.name == "reduce_sum":
                return True
            varying = [v for v in op.ins if v.const is None and v.is_f32]
            through = is_view(op) or op.name in ("abs", "add", "max", "select_n")
            if not through or len(varying) != 1 or not self.flow.is_plain(op):
                return False
            value = varying[0]
        return False


def _behind_guard(name: str, constant: float, form: Form) -> Form:
    return {(kind, (name, constant, of), axes): n for (kind, of, axes), n in form.items()}


def guards_of(term: Term) -> "tuple[list[tuple[str, float]], Any]":
    """Returns the guard that keeps a sum away from 0, and the number of the sum itself."""
    guards, number = [], term[1]
    while isinstance(number, tuple):
        guards.append(number[:2])
        number = number[2]
    return guards, number


def _constant(value: Value) -> float | None:
    """Returns the number that fills a value, or None if it is not known."""
    if value.const is None or np.size(value.const) != 1:
        return None
    return float(np.asarray(value.const).reshape(()))


def narrowed(value: Value, axes: Axes | None) -> Axes | None:
    """Returns the axes of an operand that an elementwise operation may broadcast."""
    shape = value.aval.shape
    if axes is None or not shape:
        return () if axes is not None else None
    return tuple(() if n == 1 else axis for axis, n in zip(axes, shape, strict=True))


def _times(form: Form, factor: float) -> Form:
    return {term: factor * count for term, count in form.items()}


def _sum(first: Form, second: Form) -> Form:
    """Adds two forms. Two equal masks are the same as one."""
    form = dict(first)
    for term, count in second.items():
        total = form.get(term, 0.0) + count
        form[term] = min(total, 1.0) if term[0] == MASK else total
    return {term: count for term, count in form.items() if abs(count) > 1e-6}


def same(first: Form, second: Form) -> bool:
    """Returns whether two forms are equal."""
    terms = first.keys() | second.keys()
    return all(abs(first.get(t, 0.0) - second.get(t, 0.0)) < 1e-6 for t in terms)


# ---- what scores are masked, shifted and weighed by ---------------------------------------------

# Entries this far below others have weight 0: their exponential underflows.
MASKED = -(2.0**13)


def is_constant_along(axes: Axes, summed: tuple[int, ...]) -> bool:
    return not any(place in summed for axis in axes for place, *_ in axis)


def is_number(value: Value) -> bool:
    return value.const is not None and np.size(value.const) == 1


def is_same_along(value: Value, where: Axes, axes: tuple[int, ...], flow: Flow) -> bool:
    """Returns whether a value is the same for all entries of a row, given its axes."""
    _, along = behind_views(value, narrowed(value, where), flow)
    return along is not None and is_constant_along(along, axes)


def behind_views(value: Value, axes: Axes | None, flow: Flow) -> "tuple[Value, Axes | None]":
    """Returns the value before changes of layout, and its axes."""
    while (op := flow.producer.get(value)) is not None and is_view(op) and axes is not None:
        value, axes = op.ins[0], before(op, axes)
    return value, axes


def is_linear(op: Op, value: Value) -> bool:
    if op.outs[0].aval != value.aval or value not in op.ins:
        return False
    place, zero = op.ins.index(value), [v.const for v in op.ins[1:] if v is not value]
    return (
        (op.name == "mul" and op.ins[1 - place] is not value)
        or (op.name == "div" and place == 0)
        or (op.name == "select_n" and len(zero) == 1 and _is_zero(zero[0]))
    )


def _is_zero(const: Any) -> bool:
    return const is not None and not np.any(np.asarray(const, np.float32))
