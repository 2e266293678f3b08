"""Running sums and averages: what a state's next value is, and the rule of those that stall."""

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, short_name, shown
from mpjax._src.core.base.higher_order import SCAN
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import CHOSEN, SAME, Program, anything
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import alone, carried

# The largest relative distance from its input at which an average may stop changing.
STUCK = 1 / 8

# How many values are followed from a state to its next value; few are enough for averages.
FURTHEST = 300


class Share(NamedTuple):
    """The next value of a state as ``factor * state + rest * something``."""

    factor: float = 0.0  # the factor of the state
    rest: float = 0.0  # the factor of the added terms; 0 if there are none
    terms: tuple[Value, ...] = ()  # the added terms


def half_averages(program: Program) -> Iterator[Hit]:
    """Finds averages in 16 bits whose steps may be less than half an ulp.

    In the worst case, a step of ``m = d * m + (1 - d) * x`` is rounded away if
    ``|x - m| < 2**-digits / (1 - d)``, relative to m. It is a fault if this exceeds 1/8: d above
    0.97 in bfloat16, above 0.996 in float16. A first moment with d = 0.9 may be bfloat16.
    """
    pairs = [(each.before, each.after) for each in carried(program)]
    possible = [(each.before, each.after) for each in alone(program)]
    pairs += [(before, after) for _, before, after in carries(program)]
    for before, after in pairs + possible:
        share = share_of(program, after, before) if is_half(before) else None
        if share is None or not share.rest:
            continue
        step = 1 - share.factor
        if (before, after) in possible and abs(share.rest - step) > step / 2:
            continue  # not an average: its weights do not sum to 1
        if stops(share, dtype_of(before)):
            yield Hit(
                f"An average in {shown(before)} moves by {step:.3g} of its distance to the new "
                f"value. In {short_name(dtype_of(before))} it does not move where that distance is "
                f"less than {2.0 ** -digits(dtype_of(before)) / step:.0%} of the average.",
                last_sum(program, after),
            )


def carries(program: Program) -> Iterator[tuple[Op, Value, Value]]:
    """Yields the loops with each value that they carry, as it comes in and as it goes out."""
    for loop in program.ops:
        if loop.inside.kind == SCAN:
            (inside,) = loop.subs
            body = inside.program
            yield from ((loop, body.invars[a], body.outvars[r]) for r, a in inside.carry)


def last_sum(program: Program, after: Value) -> Op | None:
    """Returns the addition that produces a value, or what computes it if there is none."""
    sums = (op for op in program.makers(after, CHOSEN) if op.name in rules.SUMS_OF_TWO)
    return next(sums, program.maker(after))


def stops(share: Share, dtype: Any) -> bool:
    """Returns whether an average may stop changing in a dtype."""
    # A factor of 1 is a plain sum, which `half_accumulators` judges.
    return 0 < 1 - share.factor <= 2.0 ** -digits(dtype) / STUCK


def share_of(program: Program, after: Value, before: Value, products: bool = True) -> Share | None:
    """Returns the `Share` of a state in its next value, or None if it is not linear or unknown.

    Without ``products``, only sums are followed: whatever else is computed of the state is a term.
    """
    moved = {*program.forward(before, anything)}
    return _Reader(program, before, moved, products).read(after) if after in moved else None


@dataclasses.dataclass(eq=False)
class _Reader:
    """Reads values as the `Share` of a state."""

    program: Program
    state: Value
    moved: set[Value]  # what is computed of the state
    products: bool
    known: dict[Value, Share | None] = dataclasses.field(default_factory=dict)

    def read(self, value: Value) -> Share | None:
        if value not in self.known:
            self.known[value] = None  # computed from itself
            if len(self.known) < FURTHEST:
                self.known[value] = self._read(value)
        return self.known[value]

    def _read(self, value: Value) -> Share | None:
        op, term = self.program.maker(value), Share(rest=1.0, terms=(value,))
        if value is self.state:
            return Share(1.0)
        if value not in self.moved:
            # What is added: its factor is a number in (1 - d) * x, and 1 where none is seen.
            return (op and op.name in rules.PRODUCTS and self._product(op)) or term
        if op is not None and op.name in SAME and len(op.ins) == 1:
            return self.read(op.ins[0])
        if op is not None and op.name in rules.SUMS_OF_TWO:
            a, b = self.read(op.ins[0]), self.read(op.ins[1])
            sign = -1 if op.name == "sub" else 1
            if a is None or b is None:
                return None
            return Share(a.factor + sign * b.factor, a.rest + sign * b.rest, a.terms + b.terms)
        if not self.products:
            return term
        if op is None:
            # Several sources are the branches of a conditional, or the start of a carry and its
            # last iteration: one factor does not describe them.
            sources = self.program.sources(value)
            return self.read(sources[0]) if len(sources) == 1 else None
        if op.name == "select_n":  # a gate keeps the state in one branch: the one that adds counts
            cases = [self.read(v) for v in op.ins[1:]]
            return next((each for each in cases if each is None or each.rest), None)
        return self._product(op) if op.name in rules.PRODUCTS else None

    def _product(self, op: Op) -> Share | None:
        # The state itself may begin as a constant.
        fixed = [None if v in self.moved else v for v in op.ins]
        numbers = [v and self.program.number(v) for v in fixed]
        place = 1 if numbers[1] is not None else 0
        by = numbers[place]
        if by is None and op.name == "mul":
            # Discounted sums are multiplied by a mask such as 1 - done, whose largest number
            # counts: where nothing is masked.
            masks = [v and bounds_of(self.program, v) for v in fixed]
            parts = [(i, b.high) for i, b in enumerate(masks) if b and b.low == 0 < b.high <= 1]
            place, by = parts[0] if parts else (0, None)
        if not by or (op.name == "div" and place == 0):
            return None
        inner = self.read(op.ins[1 - place])
        times = 1 / by if op.name == "div" else by
        return inner and Share(inner.factor * times, inner.rest * times, inner.terms)
