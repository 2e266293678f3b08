"""Cotangents that are rounded once, for all their readers.

A cotangent that a matmul reads is rounded for it. Where others read it too, it would be written in
float32 and in 16 bits. One that several kernels read is written in float32 anyway. They are rounded
for all of them where that adds no error of another kind:

1. It carries the rounding of a matmul already, as large as its own entries (`noise_of`): another
   one makes the error larger by a factor.
2. No other float32 copy of what it is made of meets it again in a sum, where common parts could
   cancel and leave the rounding; nor does it meet itself, moved or scaled, if entries share errors
   (`Lone`). Independent errors do not cancel there either.
3. It is not added to the result of another matmul that reads an operand of those that it is made
   of: equal terms, as of ``|x|^2 + |y|^2 - 2 x y``, cancel with their roundings.
4. It is not summed over an axis along which something was subtracted from it: such a sum is small,
   and its roundings do not cancel.
"""

import functools
import heapq
import itertools
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np

from mpjax._src.base.rules import (
    BOUNDED,
    FOLLOW,
    FULL,
    MOVE,
    NOTHING,
    ONE,
    PROGRAM,
    SUM,
    SUMS_BACK,
    having,
)
from mpjax._src.planner import rounding
from mpjax._src.planner.axes import Axes, Axis, summed
from mpjax._src.planner.equations import Equation, Value, readers_of
from mpjax._src.planner.prices import kernels_of, of_several
from mpjax._src.planner.rounding import is_float32, is_half_matmul

# How large the rounding errors are that a value is known to carry: none; those of some of its
# terms; one of its own size in each entry; such ones that are independent of each other. Zeros
# carry whatever is beside them.
EXACT, AVERAGED, WHOLE, EACH, ZERO = range(5)
# Moves that put an entry in several places, or may do so.
COPIES = {*having(SUMS_BACK), "concatenate", "dynamic_update_slice", "scatter", "stack"}


def noise_of(
    equations: Iterable[Equation], given: Mapping[Value, int] | None = None
) -> dict[Value, int]:
    """Returns how large the rounding errors are that values carry; `EXACT` where it has none."""
    noise = {**(given or {})}
    sources: dict[Value, int] = {}  # a bit for each matmul that its errors come from
    for i, e in enumerate(equations):
        if rounding.programs(e):
            noise.update((v, min(k, WHOLE)) for v, k in _inside(e, noise).items())
            continue
        noise.update((v, ZERO) for v in e.ins if rounding.is_zero(v))
        moves = rounding.is_view(e) or e.name == "convert_element_type"
        if moves and all(noise.get(v) == ZERO for v in e.ins):
            noise.update(dict.fromkeys(e.outs, ZERO))
            continue
        floats = [noise.get(v, EXACT) for v in e.ins if is_float32(v)]
        level = _noise(e, [k for k in floats if k != ZERO])
        bits = [1 << i] if _rounds(e) else [sources.get(v, 0) for v in e.ins]
        each = [sources.get(v, 0) for v in e.ins if noise.get(v) == EACH]
        shared = any(a & b for a, b in itertools.combinations(each, 2))
        if level == EACH and (e.name in COPIES or (_adds(e) and shared)):
            level = WHOLE
        noise.update(dict.fromkeys(e.outs, level))
        sources.update(dict.fromkeys(e.outs, functools.reduce(operator.or_, bits, 0)))
    return noise


def _rounds(e: Equation) -> bool:
    return is_half_matmul(e) or rounding.is_rounding(e)


def _adds(e: Equation) -> bool:
    rule = e.rule
    return rule.need == FOLLOW and rule.gain == SUM


def _noise(e: Equation, floats: Sequence[int]) -> int:
    rule = e.rule
    if _rounds(e):
        return EACH
    if not floats:
        return EXACT
    if rule.multiplies:
        return max(floats)
    if _adds(e):
        return max(floats) if min(floats) else EXACT
    if is_sum(e):
        return min(AVERAGED, *floats)
    unary = rule.need in (FOLLOW, FULL) and rule.gain_of(e.params) == ONE and rule.span != BOUNDED
    keeps = unary or rule.need == MOVE or rounding.is_view(e) or e.name == "convert_element_type"
    return min(floats) if keeps else EXACT


def is_sum(e: Equation) -> bool:
    """Returns whether an equation sums entries of an array."""
    rule = e.rule
    return rule.need == FULL and rule.gain == SUM and rule.saves == NOTHING


def _inside(e: Equation, noise: Mapping[Value, int]) -> dict[Value, int]:
    """Returns the noise of the results of a loop, branch or map."""
    first, start, end = rounding.places(e)
    given = [ZERO if rounding.is_zero(v) else noise.get(v, EXACT) for v in e.ins[first:]]
    bodies = rounding.bodies(e)
    while True:
        each = []
        for ins, equations, outs in bodies:
            inner = noise_of(equations, dict(zip(ins, given, strict=True)))
            each.append([inner.get(v, EXACT) for v in outs])
        found = [min(levels) for levels in zip(*each, strict=True)]
        carried = [min(a, b) for a, b in zip(given[start:end], found, strict=False)]
        if carried == given[start:end]:
            return dict(zip(e.outs, found, strict=True))
        given[start:end] = carried


def rounded_once(
    equations: Sequence[Equation],
    late: Sequence[Equation],
    results: Collection[Value],
) -> list[Value]:
    """Returns the cotangents that may be rounded once for all their readers.

    Args:
        equations: The equations of the forward and the backward part.
        late: Those of the backward part.
        results: What the backward part returns.
    """
    made, noise = rounding.made(late, (), np.dtype(np.float16)), noise_of(equations)
    written = _written(equations, late, results, made)
    shared = [
        v
        for e in late
        for v in e.outs
        if v in written and noise.get(v, EXACT) in (WHOLE, EACH) and v not in results
    ]
    return Lone(late, noise).of(shared) if shared else []


def _written(
    equations: Sequence[Equation],
    late: Sequence[Equation],
    results: Collection[Value],
    made: Collection[Value],
) -> set[Value]:
    """Returns the large values that the backward part would write in float32."""
    large = {v for e in late for v in e.outs if rounding.is_large(v) and v not in made}
    kernels = kernels_of(late, results)
    moved = {v for e in late if rounding.is_view(e) for v in e.outs}
    many = {v for v in large - moved if len(kernels[v]) > 1}
    read = rounding.fed(late) - rounding.wanted(late, results, ())
    return (large & read) | {*of_several(equations, many)}


class Lone:
    """Which cotangents meet no other copy of what they are made of."""

    def __init__(self, late: Sequence[Equation], noise: Mapping[Value, int]) -> None:
        self.late, self.axes, self.noise = late, Axes(late), noise
        self.place = {id(e): i for i, e in enumerate(late)}
        self.readers, self.maker = readers_of(late), {out: e for e in late for out in e.outs}
        self.centered: dict[Value, frozenset[Axis]] = {}
        self.operands = self._operands()
        for e in late:
            found: frozenset[Axis] = frozenset()
            if not is_half_matmul(e):
                found = found.union(*(self.centered.get(v, frozenset()) for v in e.ins))
                if is_sum(e) and e.ins[0] in self.maker:
                    found |= self.axes.of(*summed(e))
            self.centered.update(dict.fromkeys(e.outs, found))

    def _operands(self) -> dict[Value, int]:
        """Returns a bit for each array that the matmuls read of which a value is made."""
        bits: dict[Value, int] = {}
        places: dict[Value, int] = {}
        for e in self.late:
            made = 0
            for v in e.ins[:2] if is_half_matmul(e) else ():
                while v in self.maker and rounding.is_view(self.maker[v]):
                    v = self.maker[v].ins[0]
                made |= 1 << places.setdefault(v, len(places))
            for v in () if is_half_matmul(e) else e.ins:
                made |= bits.get(v, 0)
            bits.update(dict.fromkeys(e.outs, made))
        return bits

    def of(self, values: Sequence[Value]) -> list[Value]:
        """Returns those of the values, in the order in which they are computed, that are alone."""
        alone: set[Value] = set()
        for v in values:
            if self._is_alone(v, self._before(v, alone)):
                alone.add(v)
        return [v for v in values if v in alone]

    def _before(self, v: Value, alone: Collection[Value]) -> set[Value]:
        """Returns what a value is made of, up to matmuls and to values that are alone."""
        before, ahead = set(), [v]
        while ahead:
            e = self.maker.get(ahead.pop())
            if e is None or is_half_matmul(e):
                continue
            for x in e.ins:
                if x in self.maker and x not in before:
                    before.add(x)
                    if x not in alone:
                        ahead.append(x)
        return before - {v}

    def _is_alone(self, v: Value, other: set[Value]) -> bool:
        own = {v: v}  # what is made of it, and the value of which it is a multiple, by entries
        ahead = [*{self.place[id(e)] for x in (v, *other) for e in self.readers[x]}]
        heapq.heapify(ahead)
        seen: set[int] = set()
        while ahead:
            place = heapq.heappop(ahead)
            e = self.late[place]
            if place in seen or is_half_matmul(e) or v in e.outs:
                continue
            seen.add(place)
            mine = [x for x in e.ins if x in own]
            theirs = [x for x in e.ins if x in other]
            scales = not theirs and _scales(e, mine) and len({own[x] for x in mine}) == 1
            if mine and not scales and not self._may_read(e, v, len(mine) + len(theirs)):
                return False
            if mine and theirs:
                return False
            for x in e.outs:
                if mine:
                    own[x] = own[mine[0]] if scales else x
                else:
                    other.add(x)
                for reader in self.readers[x]:
                    heapq.heappush(ahead, self.place[id(reader)])
        return True

    def _may_read(self, e: Equation, v: Value, copies: int) -> bool:
        """Returns whether an equation may read a value made of ``v``, beside further copies."""
        rule = e.rule
        if rounding.programs(e) or rule.need == PROGRAM:
            return e.name == "convert_element_type"
        beside = [x for x in e.ins if self.operands.get(x, 0) & self.operands[v]]
        if _adds(e) and copies == 1 and len(beside) > 1:
            return False
        mixes = _adds(e) or is_sum(e) or e.name in ("dynamic_update_slice", "scatter")
        if copies > 1 and mixes and self.noise[v] != EACH:
            return False
        return not is_sum(e) or self.axes.of(*summed(e)).isdisjoint(self.centered[v])


def _scales(e: Equation, mine: Sequence[Value]) -> bool:
    """Returns whether results are multiples, by entries, of what some operands are multiples of.

    Then a rounding of that stays as small beside each entry.
    """
    if not mine or any(v.aval.shape != e.outs[0].aval.shape for v in mine):
        return False
    rule = e.rule
    if rule.multiplies:
        return len(mine) == 1 and (e.name == "mul" or mine[0] is e.ins[0])
    return len(mine) == len(e.ins) if _adds(e) else e.name in ("neg", "copy")
