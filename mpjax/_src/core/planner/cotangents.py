"""Cotangents that are rounded once, for all their readers.

A cotangent that a matmul reads is rounded for it. Where others read it too, it would be written in
float32 and in 16 bits. One that several kernels read is written in float32 anyway. They are rounded
for all of them where that adds no error of another kind:

1. It carries the rounding of a matmul already, as large as its own entries (`noise_of`): another
   one makes the error larger by a factor.
2. No other float32 copy of what it is made of meets it again in a sum, where common parts could
   cancel and leave the rounding; nor does it meet itself, moved or scaled, if entries share errors
   (`Roundable`). Independent errors do not cancel there either.
3. It is not added to the result of another matmul that sums an operand of those that it is made of
   along the same axes: equal terms, as of ``|x|^2 + |y|^2 - 2 x y``, cancel with their roundings.
4. It is not summed over all axes over which a mean was subtracted from it: such a sum is zero, and
   that of its roundings is not.
"""

import functools
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import is_half
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.axes import Axes, Axis, summed
from mpjax._src.core.planner.dependence import Ahead, Order, dependents
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.maxima import POOLED
from mpjax._src.core.planner.partition import Parts
from mpjax._src.core.planner.prices import of_several, read_by_several
from mpjax._src.core.planner.rounding import is_half_matmul

# How large the rounding errors are that a value is known to carry: none; those of some of its
# terms; one of its own size in each entry; such ones that are independent of each other. Zeros
# carry whatever is beside them.
EXACT, AVERAGED, WHOLE, EACH, ZERO = range(5)
WRITES = ("dynamic_update_slice", "scatter")  # entries of one array into another
# Moves that put an entry in several places, or may do so.
COPIES = {*rules.having(rules.SUMS_BACK), *WRITES, "concatenate", "stack"}


def noise_of(
    equations: Iterable[Equation], given: Mapping[Value, int] | None = None
) -> dict[Value, int]:
    """Returns how large the rounding errors are that values carry; `EXACT` where it has none."""
    noise = {**(given or {})}
    sources: dict[Value, int] = {}  # a bit for each matmul that its errors come from
    roots: dict[Value, tuple[Value, ...]] = {}  # of which values it is a multiple, by entries
    for i, e in enumerate(equations):
        if rounding.programs(e):
            # Nothing follows the sources of errors inside: results of a loop may share them.
            noise.update((v, min(k, WHOLE)) for v, k in _inside(e, noise).items())
            continue
        for v in e.ins:
            if rounding.is_zero(v):
                noise[v] = ZERO
        # Several masks may read one array of zeros, which is no copy of anything.
        moves = rounding.is_view(e) or e.name == rules.CAST
        if moves and all(noise.get(v) == ZERO for v in e.ins):
            noise.update(dict.fromkeys(e.outs, ZERO))
            continue
        ins = e.ins[:1] if e.name == POOLED else e.ins  # the other one says where each entry goes
        floats = [noise.get(v, EXACT) for v in ins if v.is_float32 or is_half(v)]
        level = _noise(e, [k for k in floats if k != ZERO])
        of = _roots(e, roots, noise) if level == EACH else ()
        shared = level == EACH and not of and _adds(e) and _shares(e, noise, sources)
        # Two entries with one error are not independent, and condition 2 tells these apart.
        if level == EACH and (e.name in COPIES or shared):
            level = WHOLE
        bits = 1 << i if _rounds(e) else 0
        for v in () if bits else e.ins:
            bits |= sources.get(v, 0)
        for out in e.outs:
            roots[out], noise[out], sources[out] = of or (out,), level, bits
    return noise


def _shares(e: Equation, noise: Mapping[Value, int], sources: Mapping[Value, int]) -> bool:
    """Returns whether terms have errors that come from the same matmul."""
    each = [sources.get(v, 0) for v in e.ins if noise.get(v) == EACH]
    return any(a & b for a, b in itertools.combinations(each, 2))


# Of so many values at most it is known that another one is a multiple.
ROOTS = 8


def _roots(
    e: Equation, roots: Mapping[Value, tuple[Value, ...]], noise: Mapping[Value, int]
) -> tuple[Value, ...]:
    """Returns the values with errors of which the result is a multiple, by entries.

    A sum of multiples of one value has its relative errors, however much cancels.
    """
    noisy = [v for v in e.ins if noise.get(v) == EACH and v.aval.shape == e.outs[0].aval.shape]
    each = [roots.get(v, (v,)) for v in noisy]
    if e.rule.multiplies:
        # A quotient is a multiple of its numerator alone.
        each = each[: e.ins[0] in noisy] if e.inverts else each
        found = [*itertools.chain(*each)]
        return tuple(v for v in found if found.count(v) == 1)[:ROOTS]  # a square is no multiple
    # Where an exact term cancels the rest, the error is larger than the sum: no multiple.
    others = [v for v in e.ins if v.is_float32 and v not in noisy and noise.get(v) != ZERO]
    if others or not each or not (_adds(e) or e.name in ("neg", "copy", rules.SELECT)):
        return ()
    return tuple(v for v in each[0] if all(v in more for more in each[1:]))


def _rounds(e: Equation) -> bool:
    return is_half_matmul(e) or rounding.is_rounding(e)


def _adds(e: Equation) -> bool:
    rule = e.rule
    return rule.need == rules.FOLLOW and rule.gain == rules.SUM


def _noise(e: Equation, floats: Sequence[int]) -> int:
    rule = e.rule
    # What whoever wrote the program made in 16 bits, as for a kernel, was rounded entry by entry.
    if _rounds(e) or (any(map(is_half, e.outs)) and not rounding.is_view(e)):
        return EACH
    if not floats:
        return EXACT
    if rule.multiplies:
        return max(floats)
    if _adds(e):
        # An exact term may be far larger than the others, whose errors are small beside the sum.
        return max(floats) if min(floats) else EXACT
    if e.name == POOLED:
        return floats[0]
    if is_sum(e):
        return min(AVERAGED, *floats)
    moves = rule.need == rules.MOVE or rounding.is_view(e) or e.name == rules.CAST
    computes = rule.need in (rules.FOLLOW, rules.FULL) and rule.span != rules.BOUNDED
    keeps = moves or (computes and rule.gain_of(e.params) == rules.ONE)
    return min(floats) if keeps else EXACT


def is_sum(e: Equation) -> bool:
    """Returns whether an equation sums entries of an array."""
    rule = e.rule
    return rule.need == rules.FULL and rule.gain == rules.SUM and rule.saves == rules.NOTHING


def _inside(e: Equation, noise: Mapping[Value, int]) -> dict[Value, int]:
    """Returns the noise of the results of a loop, branch or map."""
    first, start, end = rounding.places(e)
    given = [ZERO if rounding.is_zero(v) else noise.get(v, EXACT) for v in e.ins[first:]]
    while True:
        each = rounding.inside(e, _of_results, tuple(given))
        found = [min(levels) for levels in zip(*each, strict=True)]
        # The first turn gets what the loop gets, later ones what a turn returns. Levels only fall,
        # so this ends.
        carried = [min(a, b) for a, b in zip(given[start:end], found, strict=False)]
        if carried == given[start:end]:
            return dict(zip(e.outs, found, strict=True))
        given[start:end] = carried


def _of_results(ins: Any, equations: Any, outs: Any, given: Any) -> list[int]:
    noise = noise_of(equations, dict(zip(ins, given, strict=True)))
    return [noise.get(v, EXACT) for v in outs]


def rounded_once(both: Parts) -> list[Value]:
    """Returns the cotangents that may be rounded once for all their readers."""
    written = _written(both)
    if not written:
        return []
    late, noise = both.late, noise_of([*both.early, *both.late])
    # What runs again must be the number of the forward pass, and what is returned is a float32
    # result.
    written = written.intersection(dependents(late, both.cotangents)).difference(both.results)
    shared = [v for e in late for v in e.outs if v in written and noise.get(v) in (WHOLE, EACH)]
    return Roundable(late, noise).of(shared) if shared else []


def _written(both: Parts) -> set[Value]:
    """Returns the large values that the backward part would write in float32."""
    late, results = both.late, both.results
    made = rounding.made(late, (), both.half)
    own = (e.outs for e in late if not rounding.is_full(e))
    large = {v for outs in own for v in outs if rounding.is_large(v) and v not in made}
    if not large:
        return set()
    # Compilers write the operand of a view, and each reader lays it out.
    moved = {v for e in late if rounding.is_view(e) for v in e.outs}
    many = (large - moved) & read_by_several(late, results)
    # Read by a matmul and by others: it would be written in both dtypes.
    read = rounding.fed(late) - rounding.wanted(late, results, ())
    return (large & read) | {*of_several([*both.early, *late], many)}


# A walk over more equations is given up, so that planning grows with the program.
LONGEST = 1000
Summed = frozenset[tuple[Axis, int]]  # axes, each in two halves
NO_AXES: Summed = frozenset()
NO_SUMS: frozenset[Summed] = frozenset()


class Demands(NamedTuple):
    """What the readers of a value ask of it.

    Attributes:
        apart: The arrays of which it must not be made, as bits.
        sums: The sets of axes over which it is summed.
        each: Whether its errors are independent of each other.
    """

    apart: int = 0
    sums: frozenset[Summed] = NO_SUMS
    each: bool = False

    def also(self, other: "Demands | None") -> "Demands | None":
        """Returns what this and others ask; None is more than any value can be."""
        if other is None:
            return None
        each = self.each or other.each
        return Demands(self.apart | other.apart, self.sums | other.sums, each)

    def summed(self, axes: Summed) -> "Demands":
        """Returns what is asked of a value if all this is asked of its sum over some axes."""
        return self._replace(sums=frozenset(s | axes for s in self.sums)) if axes else self


class Roundable:
    """Finds the cotangents that may be rounded once for all their readers."""

    def __init__(self, late: Sequence[Equation], noise: Mapping[Value, int]) -> None:
        self.late, self.axes, self.noise = late, Axes(late), noise
        self.maker = {out: e for e in late for out in e.outs}
        self.order = Order([e for e in late if not is_half_matmul(e)])
        self.operands, self.means = self._operands(), self._means()
        self.demanded: dict[Value, Demands | None] = {}

    def _operands(self) -> dict[Value, int]:
        """Returns a bit for each array that the matmuls sum along some axes of which it is made."""
        bits: dict[Value, int] = {}
        places: dict[Any, int] = {}
        for e in self.late:
            made = 0
            for i, v in enumerate(e.ins[:2]) if is_half_matmul(e) else ():
                axes = self.axes.of(v, _contracted(e)[i])
                # In another layout it is the same operand, and `Axes` knows which axis is which.
                while v in self.maker and rounding.is_view(self.maker[v]):
                    v = self.maker[v].ins[0]
                made |= 1 << places.setdefault((v, axes), len(places))
            for v in () if is_half_matmul(e) else e.ins:
                made |= bits.get(v, 0)
            bits.update(dict.fromkeys(e.outs, made))
        return bits

    def _over(self, e: Equation) -> Summed:
        """Returns the axes over which an equation sums.

        Segments are parts of an axis: what has zero for its sum may have large sums of them. So
        they fill one half of it, and a sum over all of it fills both.
        """
        halves = range(1 if e.name.startswith("scatter") else 2)
        return frozenset((axis, half) for axis in self.axes.of(*summed(e)) for half in halves)

    def _means(self) -> dict[Value, frozenset[Summed]]:
        """Returns over which axes sums were taken that a value is made of, beside its entries.

        They are those of all its sums together, as of a mean over the pixels and some channels.
        """
        means: dict[Value, frozenset[Summed]] = {}
        sums: dict[Value, frozenset[Summed]] = {}  # of values that are made of sums alone
        for e in self.late:
            mine = [v for v in e.ins if v in self.maker] if not is_half_matmul(e) else []
            found = NO_SUMS.union(*(means.get(v, NO_SUMS) for v in mine))
            made = NO_SUMS.union(*(sums.get(v, NO_SUMS) for v in mine))
            # Here sums meet entries, as where a mean is taken off.
            if not all(map(sums.get, mine)):
                found, made = found | made, NO_SUMS
            over = self._over(e) if mine and is_sum(e) else NO_AXES
            if over:
                made = frozenset(s | over for s in made) or frozenset([over])
            means.update(dict.fromkeys(e.outs, found))
            sums.update(dict.fromkeys(e.outs, made))
        return means

    def of(self, values: Sequence[Value]) -> list[Value]:
        """Returns those of the values, in the order in which they are computed, that are alone."""
        alone: set[Value] = set()
        for v in values:
            if self._meets_demands(v):
                # A value that is rounded already has no float32 copy, so the walks end there.
                before = self._before(v, alone)
                if len(before) < LONGEST and not self._meets_a_copy(v, before):
                    alone.add(v)
        return [v for v in values if v in alone]

    def _before(self, v: Value, alone: Collection[Value]) -> set[Value]:
        """Returns what a value is made of, up to matmuls and to values that are alone."""
        before: set[Value] = set()
        ahead = [v]
        while ahead and len(before) < LONGEST:
            e = self.maker.get(ahead.pop())
            if e is None or is_half_matmul(e):
                continue
            for x in e.ins:
                if x in self.maker and x not in before and self.noise.get(x) != ZERO:
                    before.add(x)
                    if x not in alone:
                        ahead.append(x)
        return before - {v}

    def _meets_a_copy(self, v: Value, other: set[Value]) -> bool:
        """Returns whether something reads what is made of a value beside what others make."""
        own, readers = {v}, self.order.readers
        theirs, ahead = {e for x in other for e in readers[x]}, Ahead(self.order, [v, *other])
        for e in ahead:
            # Without readers of the others ahead, nothing meets. A walk that is too long counts as
            # a meeting.
            if not theirs or len(ahead) > LONGEST:
                return bool(theirs)
            theirs.discard(e)
            if v in e.outs:
                continue
            mine = not own.isdisjoint(e.ins)
            if mine and not other.isdisjoint(e.ins):
                return True
            (own if mine else other).update(e.outs)
            theirs.update(() if mine else (r for x in e.outs for r in readers[x]))
            ahead.add(e.outs)
        return False

    def _meets_demands(self, v: Value) -> bool:
        """Returns whether a value fulfills all demands of its readers."""
        asked = self._demands(v)
        if asked is None or asked.apart & self.operands[v]:
            return False
        if any(mean <= axes for mean in self.means[v] for axes in asked.sums):
            return False
        return not asked.each or self.noise[v] == EACH

    def _demands(self, v: Value) -> Demands | None:
        """Returns what the readers of a value ask of it, and of what they make of it.

        All that follows often goes through one value: it is gone through once.
        """
        parts: list[tuple[Value, Demands | None, Summed]] = []
        then: Value | None = v
        # To walk to the end from each value would be quadratic in the depth of a model.
        while then is not None and then not in self.demanded:
            asked, after, axes = self._part(then)
            parts.append((then, asked, axes))
            then = after
        asked = self.demanded[then] if then is not None else Demands()
        for x, own, axes in reversed(parts):
            self.demanded[x] = asked = own and own.also(asked and asked.summed(axes))
        return asked

    def _part(self, v: Value) -> tuple[Demands | None, Value | None, Summed]:
        """Returns what is asked of a value up to a waist: a value that all that follows reads.

        Returns:
            The demands; the waist, if there is one; and the axes over which it is a sum.
        """
        own = {v: v}  # what is made of it, and the value of which it is a multiple, by entries
        over = {v: NO_AXES}  # the axes over which it is summed
        asked = Demands()
        ahead = Ahead(self.order, [v])
        for e in ahead:
            mine = [x for x in e.ins if x in own]
            scales = _scales(e, mine) and len({own[x] for x in mine}) == 1
            axes = NO_AXES.union(*(over[x] for x in mine))
            asks = self._demands_of(e, mine)
            # A multiple keeps the relative error of each entry, so whoever makes it asks nothing.
            both = asked if scales else asked.also(asks and asks.summed(axes))
            if both is None or len(ahead) > LONGEST:
                return None, None, NO_AXES
            asked = both
            axes |= self._over(e) if is_sum(e) else NO_AXES
            # No other reader waits: all that follows reads this result.
            if not ahead.queue and len(e.outs) == 1:
                return asked, e.outs[0], axes
            own.update((x, own[mine[0]] if scales else x) for x in e.outs)
            over.update(dict.fromkeys(e.outs, axes))
            ahead.add(e.outs)
        return asked, None, NO_AXES

    def _demands_of(self, e: Equation, mine: Sequence[Value]) -> Demands | None:
        """Returns what an equation asks of a value, if it reads others that are made of it."""
        # A loop or a kernel may do anything with the value.
        if rounding.programs(e) or e.rule.need == rules.PROGRAM:
            return Demands() if e.name == rules.CAST else None
        adds, sums = _adds(e), is_sum(e)
        beside = [self.operands.get(x, 0) for x in e.ins if x not in mine]
        mixes = adds or sums or e.name in WRITES
        return Demands(
            functools.reduce(operator.or_, beside, 0) if adds and len(mine) == 1 else 0,
            frozenset([self._over(e)]) if sums else NO_SUMS,
            mixes and len(mine) > 1,
        )


def _contracted(e: Equation) -> Sequence[Sequence[int]]:
    """Returns the axes of both operands that a matmul sums along, if it says so."""
    return e.params["dimension_numbers"][0] if e.name == rules.DOT else ((), ())


def _scales(e: Equation, mine: Sequence[Value]) -> bool:
    """Returns whether results are multiples, by entries, of what some operands are multiples of.

    Then a rounding of that stays as small beside each entry.
    """
    if not mine or any(v.aval.shape != e.outs[0].aval.shape for v in mine):
        return False
    rule = e.rule
    if rule.multiplies:
        return len(mine) == 1 and (not e.inverts or mine[0] is e.ins[0])
    return len(mine) == len(e.ins) if _adds(e) else e.name in ("neg", "copy")
