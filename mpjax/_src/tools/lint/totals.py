"""Rules of sums, products and averages that a loop carries, or a step keeps, in 16 bits."""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, short_name, shown, stalls_at
from mpjax._src.core.base.higher_order import SCAN, turns_of
from mpjax._src.core.program.graph import Op, Value, walked
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import (
    CHOSEN,
    SAME,
    Program,
    anything,
    cases,
    moves_one,
)
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import Carried, alone, carried, is_updated
from mpjax._src.tools.lint.sums import limit_of, most_factors
from mpjax._src.tools.lint.updates import is_compensated, is_rounded_by_bits

ADDED = CHOSEN | rules.SCATTERS | rules.SUMS_OF_TWO
SUM = "reduce_sum"


def half_accumulators(program: Program) -> Iterator[Hit]:
    """Finds sums that a loop carries in 16 bits, or that a step adds to in each call.

    If the added term does not depend on the sum (gradients over micro-batches, a metric), the sum
    is an accumulator. n iterations lose log2(n) of its significant bits, and the limit is half of
    them: 16 iterations in bfloat16, 46 in float16. If it depends on the sum (residual blocks, whose
    terms are as large as the sum), or JAX derived the sum, the limit is 2**digits, where such a sum
    stops growing. A sum that decays counts as many terms as it remembers, and a product of slices
    has the limit of `half_sums`. Whole numbers that 16 bits represent are exact.

    A state of a step has as many terms as there are calls, and a loop whose end is unknown may have
    any number. There, a sum is found if it is one number, or if its terms never change their sign,
    as those of counts and squares.
    """
    for loop, before, after in carries(program):
        if not is_half(before):
            continue
        turns = _turns(program, loop)
        share = share_of(program, after, before, products=False)
        op = last_sum(program, after)
        if share is None or share.factor != 1 or not share.terms or op is None:
            if turns < math.inf:
                yield from _decaying(program, turns, after, before)
                yield from _multiplied(program, loop, after, before)
            continue
        dtype, limit = before.aval.dtype, limit_of(before.aval.dtype, True)
        # Whether terms depend on the sum is asked last: it takes a walk through the loop.
        if turns == math.inf:
            found = _adds_up(program, op, before, share)
            found = found and not program.is_backward(op)
            found = found and not _depends(program, share, before, loop)
        else:
            found = turns > limit or not (
                program.is_backward(op) or _depends(program, share, before, loop)
            )
            found = found and turns > limit_of(dtype, False)
            found = found and _largest(program, before, share, turns) > stalls_at(dtype)
        if found:
            length = f"{turns:g} iterations" if turns < math.inf else "unknown length"
            yield Hit(
                f"A loop of {length} carries a sum in {shown(before)}. Each iteration "
                f"rounds it to {digits(dtype)} binary digits, and late terms are lost.",
                op,
            )
    yield from _over_calls(program)


def _over_calls(program: Program) -> Iterator[Hit]:
    """Finds states of a step to which each call adds a term that does not depend on them."""
    states = carried(program)
    # A single number is state only among others: one function of a number and its argument is none.
    numbers = [each for each in alone(program) if each.before.is_one and is_half(each.before)]
    if numbers and not states:
        updated = {each.before for each in alone(program) if is_updated(program, each)}
        numbers = numbers if len(updated) > 1 else []
    known = {each.before for each in states}
    arrays = (each for each in alone(program) if is_half(each.before) and not each.before.is_one)
    tables = (each for each in arrays if each.before not in known and _tallies(program, each))
    states = [*states, *numbers, *tables]
    of_arrays = {_root(each.name)[0] for each in states if not each.before.is_one}
    for each in states:
        before, dtype = each.before, dtype_of(each.before)
        if not is_half(before) or before not in program.back(each.after, ADDED):
            continue
        share = share_of(program, each.after, before, products=False)
        op = last_sum(program, each.after)
        if share is None or share.factor != 1 or not share.terms or op is None:
            continue
        root, path = _root(each.name)
        # An argument of the same form has the gradients or updates of weights.
        given = {_root(name)[1] for v in share.terms for name in _arguments(program, v)}
        if (root in of_arrays and path in given) or is_compensated(program, op, before):
            continue
        found = _adds_up(program, op, before, share)
        found = found and not is_rounded_by_bits(program, op, each.after)
        if found and not _depends(program, share, before):
            yield Hit(
                f"Each call adds to {each.name}, {shown(before)}, and rounds the sum to "
                f"{digits(dtype)} binary digits: it stops growing at {stalls_at(dtype)} times a "
                "term.",
                op,
            )


def _tallies(program: Program, each: Carried) -> bool:
    """Returns whether an array gets counts of its own shape: sums of ones, or scattered ones.

    Few functions but that of a total add them, so this tells an array that is state without others.
    """
    op = last_sum(program, each.after)
    if op is None or each.before not in program.back(each.after, ADDED):
        return False
    counting = {SUM, rules.DOT, *rules.SCATTERS}
    tallies = [op, *(m for v in op.ins for m in program.makers(v, SAME))]
    size = each.before.size
    made = [m for m in tallies if m.name in counting and m.outs[0].size == size]
    terms = [m.ins[2:] if m.name in rules.SCATTERS else m.ins for m in made]
    bounds = [[bounds_of(program, v) for v in each] for each in terms]
    return any(all(b and b.whole and b.low >= 0 for b in each) for each in bounds)


def _root(name: str) -> tuple[str, str]:
    """Returns the name of an argument, and what leads from it to one of its arrays."""
    root = re.split(r"\W", name)[0]
    return root, name[len(root) :]


def _arguments(program: Program, value: Value) -> Iterator[str]:
    """Yields the names of the arguments that a value was computed from, entry by entry."""
    names = dict(zip(program.block.invars, program.names, strict=True))
    behind = program.back(value, ADDED | rules.PRODUCTS)
    return (names[v] for v in behind if v in names)


def _adds_up(program: Program, op: Op, before: Value, share: "Share") -> bool:
    """Returns whether a sum over calls grows: it is one number, or its terms have one sign."""
    if before.is_one:
        return True
    # A constant that is added to an array may be a bias; one that is scattered counts.
    constant = any(program.number(v) is not None for v in share.terms)
    signs = {_sign(program, v) for v in share.terms}
    return signs in ({1}, {-1}) and (op.name in rules.SCATTERS or not constant)


def _sign(program: Program, value: Value, depth: int = 20) -> int:
    """Returns 1 for counts, squares and what is made of them, -1 for their negatives, or 0."""
    op, bounds = program.maker(value), bounds_of(program, value)
    if bounds is not None and bounds.whole and bounds.low >= 0:
        return 1
    if op is None or not depth:
        return 0
    if op.name in rules.SQUARES and op.params.get("y", 2) % 2 == 0:
        return 1
    if op.name in rules.PRODUCTS and op.ins[0] is op.ins[-1]:
        return 1
    entries = op.ins[::2] if op.name in rules.SCATTERS else cases(op) or op.ins
    signs = [_sign(program, v, depth - 1) for v in entries]
    if op.name in rules.PRODUCTS | {rules.DOT}:
        return signs[0] * signs[1]
    if op.name in rules.ADDITIONS | {rules.SCATTER_ADD} or cases(op):
        return signs[0] if len({*signs}) == 1 else 0
    moves = SAME | rules.ALL_SUMS | {SUM}
    return signs[0] if op.name in moves else 0


def _largest(program: Program, before: Value, share: "Share", turns: float) -> float:
    """Returns the largest magnitude of a sum of whole numbers; inf of others."""
    bounds = [bounds_of(program, v) for v in (program.sources(before)[0], *share.terms)]
    whole = [each.largest for each in bounds if each is not None and each.whole]
    return whole[0] + turns * sum(whole[1:]) if len(whole) == len(bounds) else math.inf


def _decaying(program: Program, turns: float, after: Value, before: Value) -> Iterator[Hit]:
    """Finds a carry ``c = d * c + x`` that sums more terms than half of the digits can count.

    With a constant d, the sum is that of the last 1 / (1 - d) terms: discounted returns and
    advantages, traces. Averages, whose weights sum to 1, have their own limit.
    """
    share = share_of(program, after, before)
    dtype = before.aval.dtype
    if share is None or not share.rest or not 0 < share.factor < 1 or stops(share, dtype):
        return
    step = 1 - share.factor
    # Weights that sum to about 1 are those of an average.
    if abs(share.rest - step) > step / 2 and min(turns, 1 / step) > limit_of(dtype, False):
        yield Hit(
            f"A loop of {turns:g} iterations carries a sum in {shown(before)} that decays by "
            f"{share.factor:.4g}: a sum of the last {1 / step:.0f} terms. Each iteration rounds it "
            f"to {digits(dtype)} binary digits.",
            last_sum(program, after),
        )


def _multiplied(program: Program, loop: Op, after: Value, before: Value) -> Iterator[Hit]:
    """Finds a carry ``c = c * x`` of more slices x of an array than half_sums lets a product have.

    Other factors may be constants that were chosen, or be bounded by what computes them.
    """
    op = next((op for op in program.makers(after, SAME) if op.name in rules.PRODUCTS), None)
    ways = [program.is_from(v, before) for v in op.ins] if op else []
    dtype, turns = dtype_of(before), _turns(program, loop)
    if op is None or sum(ways) != 1 or not limit_of(dtype, False) < turns < math.inf:
        return
    factor = op.ins[1 - ways.index(True)]
    inside = loop.subs[-1]
    slices = {*inside.program.invars[inside.consts + len(inside.carry) :]}
    if turns <= most_factors(program, factor) or slices.isdisjoint(program.back(factor, anything)):
        return
    if factor not in program.forward(before, anything):
        yield Hit(
            f"A loop of {turns:g} iterations carries a product in {shown(before)}. Each iteration "
            f"rounds it to {digits(dtype)} binary digits.",
            op,
        )


def _turns(program: Program, loop: Op) -> float:
    """Returns how often a loop turns: at most, by its condition; inf if that is unknown."""
    if loop.inside.kind == SCAN:
        return turns_of(loop.eqn)
    condition, body = loop.subs
    tests = program.makers(condition.program.outvars[0], {"and"})
    limits = [_limit(program, loop, condition, body, op) for op in tests]
    return min(limits, default=math.inf)


def _limit(program: Program, loop: Op, condition: Any, body: Any, test: Op) -> float:
    """Returns how often a comparison of a counter and a constant holds at most."""
    for counter, end in (test.ins, test.ins[::-1]) if test.name in rules.ORDERS else ():
        last, places = program.number(end), condition.program.invars
        if last is None or counter not in places[condition.consts :]:
            continue
        place = places.index(counter)
        first = program.number(loop.ins[condition.ins[place]])
        before = body.program.invars[body.consts + place - condition.consts]
        op = program.maker(body.program.outvars[place - condition.consts])
        if (
            first is None
            or op is None
            or op.name not in (rules.ADD, rules.SUB)
            or before not in op.ins
        ):
            continue
        step = next((program.number(v) for v in op.ins if v is not before), None)
        if step:
            return abs(last - first) // abs(step) + 1
    return math.inf


def carries(program: Program) -> Iterator[tuple[Op, Value, Value]]:
    """Yields the loops with each value that they carry, as it comes in and as it goes out."""
    for loop in program.ops:
        for inside in loop.subs if loop.inside.loops else ():
            body = inside.program
            yield from ((loop, body.invars[a], body.outvars[r]) for r, a in inside.carry)


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
        step, dtype = 1 - share.factor, dtype_of(before)
        if (before, after) in possible and abs(share.rest - step) > step / 2:
            continue  # not an average: its weights do not sum to 1
        if stops(share, dtype):
            yield Hit(
                f"An average in {shown(before)} moves by {step:.3g} of its distance to the new "
                f"value. In {short_name(dtype)} it does not move where that distance is less than "
                f"{2.0 ** -digits(dtype) / step:.0%} of the average.",
                last_sum(program, after),
            )


# ---- what a state becomes ------------------------------------------------------------------------

# The largest relative distance from its input at which an average may stop changing.
STUCK = 1 / 8

# Operations that a `Share` is followed through.
FOLLOWED = ADDED | rules.PRODUCTS
# How many values are followed from a state to its next value; few are enough for averages.
FURTHEST = 300


class Share(NamedTuple):
    """The next value of a state as ``factor * state + rest * something``."""

    factor: float = 0.0  # the factor of the state
    rest: float = 0.0  # the factor of the added terms; 0 if there are none
    terms: frozenset[Value] = frozenset()  # the added terms


def last_sum(program: Program, after: Value) -> Op | None:
    """Returns the addition that produces a value, or what computes it if there is none."""
    sums = (op for op in program.makers(after, CHOSEN) if op.name in ADDED - CHOSEN)
    return next(sums, program.maker(after))


def stops(share: Share, dtype: Any) -> bool:
    """Returns whether an average may stop changing in a dtype."""
    # A factor of 1 is a plain sum, which `half_accumulators` judges.
    return 0 < 1 - share.factor <= 2.0 ** -digits(dtype) / STUCK


def share_of(program: Program, after: Value, before: Value, products: bool = True) -> Share | None:
    """Returns the `Share` of a state in its next value, or None if it is not linear or unknown.

    Without ``products``, only sums are followed: whatever else is computed of the state is a term.
    """
    moved = _moved(program, after, before)
    share = _Reader(program, before, moved, products).read(after) if after in moved else None
    if not (products and share and share.rest and 0 < share.factor < 1):
        return share
    # An average. What is added may be computed of the state in a way that no share follows.
    return None if _depends(program, share, before) else share


def _moved(program: Program, after: Value, before: Value) -> set[Value]:
    """Returns what is computed of a state on the ways to its next value that a `Share` follows."""
    near = {*itertools.islice(walked([after], _followed(program.before)), FURTHEST)}
    ahead = _followed(program.after)
    return {*walked([before], lambda v: (each for each in ahead(v) if each in near))}


def _followed(step: Callable[..., Iterator[Value]]) -> Callable[[Value], Iterator[Value]]:
    return lambda value: step(value, lambda op: op.name in FOLLOWED)


def _depends(program: Program, share: Share, before: Value, loop: Op | None = None) -> bool:
    """Returns whether a term is computed from the state, in the turns of a loop if there is one."""
    outside = {*loop.outs} if loop else set[Value]()

    def ahead(value: Value) -> Iterator[Value]:
        return (v for v in program.after(value, anything) if v not in outside)

    return any(v in share.terms for v in walked([before], ahead))


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
        op, term = self.program.maker(value), Share(rest=1.0, terms=frozenset([value]))
        if value is self.state:
            return Share(1.0)
        if value not in self.moved:
            # What is added: its factor is a number in (1 - d) * x, and 1 where none is seen.
            return (op and op.name in rules.PRODUCTS and self._product(op)) or term
        if op is not None and moves_one(op):
            return self.read(op.ins[0])
        if op is not None and op.name in rules.SUMS_OF_TWO:
            a, b = self.read(op.ins[0]), self.read(op.ins[1])
            sign = -1 if op.name == rules.SUB else 1
            if a is None or b is None:
                return None
            return Share(a.factor + sign * b.factor, a.rest + sign * b.rest, a.terms | b.terms)
        if op is not None and op.name in rules.SCATTERS:
            a, b = self.read(op.ins[0]), Share(rest=1.0, terms=frozenset([op.ins[2]]))
            return a and Share(a.factor, a.rest + b.rest, a.terms | b.terms)
        if not self.products:
            return self._kept(value, op) or term
        if op is None:
            # Several sources are the branches of a conditional, or the start of a carry and its
            # last iteration: one factor does not describe them.
            sources = self.program.sources(value)
            return self.read(sources[0]) if len(sources) == 1 else None
        if op.name in rules.PRODUCTS:
            return self._product(op)
        # A gate keeps the state in one branch: the one that adds counts.
        shares = [self.read(v) for v in cases(op)]
        return next((each for each in shares if each is None or each.rest), None)

    def _kept(self, value: Value, op: Op | None) -> Share | None:
        """Reads the value that a gate, a branch or a loop has in place of the state."""
        ways = self.program.sources(value) if op is None else cases(op)
        new = [v for v in ways if not self.program.is_from(v, self.state)]
        if len(ways) == 1:
            return self.read(ways[0])
        if len(new) != 1:
            return None
        # A loop starts at the state: what is being read is what its turns add to it.
        turns = self.known.get(new[0], Share()) is None
        return Share(1.0) if turns else self.read(new[0])

    def _product(self, op: Op) -> Share | None:
        # The state itself may begin as a constant.
        fixed = [None if v in self.moved else v for v in op.ins]
        numbers = [v and self.program.number(v) for v in fixed]
        place = 1 if numbers[1] is not None else 0
        by = numbers[place]
        if by is None and op.name == rules.MUL:
            # Discounted sums are multiplied by a mask such as 1 - done, whose largest number
            # counts: where nothing is masked.
            masks = [v and bounds_of(self.program, v) for v in fixed]
            parts = [(i, b.high) for i, b in enumerate(masks) if b and b.low == 0 < b.high <= 1]
            place, by = parts[0] if parts else (0, None)
        if not by or (op.name == rules.DIV and place == 0):
            return None
        inner = self.read(op.ins[1 - place])
        times = 1 / by if op.name == rules.DIV else by
        return inner and Share(inner.factor * times, inner.rest * times, inner.terms)
