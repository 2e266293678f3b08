"""The memory of a program and its derivative over time, as far as a plan decides it.

Equations run in order; what runs again does when it is first read. An array exists from the kernel
that writes it to the last one that reads it. Compilers fuse what is cheap into the kernels that
read it: then these read its operands. So arrays are what a matmul, reduction or loop makes, what a
matmul reads, and what several kernels would compute from more than one array. A gradient goes as
soon as it is made: an optimizer reads it at once.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from mpjax._src.base import _jax
from mpjax._src.base.rules import FRESH
from mpjax._src.planner import rounding
from mpjax._src.planner.equations import BARRIER, Equation, Value, dependents, parts
from mpjax._src.planner.partition import Pricing, runs_again
from mpjax._src.planner.prices import kernels_of, of_several

Spans = dict[Value, tuple[float, float]]  # when values are read first and last


@dataclasses.dataclass(frozen=True)
class Again:
    """What runs again in the backward part.

    Attributes:
        starts: When each value is computed again.
        memory: The most bytes that exist from then until what reads them has run.
    """

    starts: Mapping[Value, int]
    memory: Mapping[float, float]

    @property
    def peak(self) -> float:
        """The most bytes that exist at any time."""
        return max(self.memory.values(), default=0)


class Timeline:
    """The memory over time of a forward and a backward part, whatever is kept.

    Attributes:
        exact: The bytes of a value that is kept.
        price: The same, of all turns of a loop.
    """

    def __init__(
        self,
        early: Sequence[Equation],
        late: Sequence[Equation],
        results: Collection[Value],
        cotangents: Collection[Value],
        given: Collection[Value],
        low: Collection[Value],
        exact: rounding.Price,
        price: Pricing | None = None,
    ) -> None:
        both, half = [*early, *late], exact.half
        made = rounding.made(both, low, half)
        self._price = rounding.Price(made, rounding.wanted(both, results, ()), half)
        self.exact, self.price = exact, price or exact
        self._written = _written(both, results)
        self._ends: dict[Value, float] = {}  # when a value of the forward part would go
        events: list[tuple[float, int]] = []
        first: Spans = {}
        self._spans: Spans = {}
        waiting = dependents(late, cotangents)
        rest = [e for e in late if not waiting.isdisjoint(e.outs)]
        self._scan(rest, len(early), self._spans, events)
        ready = [e for e in late if waiting.isdisjoint(e.outs)]
        self._again(ready, self._spans, events)
        self._scan(early, 0, first, events)
        for v in given:  # the 16-bit copies of parameters
            read = [spans[v] for spans in (first, self._spans) if v in spans]
            if v.is_float32 and v not in low and v in self._written and read:
                size = _jax.bytes_of(v.aval, half)
                events += _exists(read[0][0], read[-1][1], size)
        self._events = np.array(events, float).reshape(-1, 2)

    def size(self, v: Value) -> int:
        """Returns the bytes of a value that is computed again, if it is an array."""
        return self._price(v) if v in self._written else 0

    def again(
        self, kept: Collection[Value], before: Sequence[Equation], equations: Sequence[Equation]
    ) -> Again:
        """Returns when equations run again, ``before`` others, and the most bytes then."""
        spans, events = {**self._spans}, list[tuple[float, int]]()
        self._again(equations, spans, events)
        made = {v for e in equations for v in e.outs}
        spans = {v: span for v, span in spans.items() if v not in made}
        starts = self._again(before, spans, events)
        for v in kept:
            if v in spans:
                events += _exists(self._ends.get(v, 0), spans[v][1], self.price(v), True)
        pairs = np.concatenate([self._events, np.array(events).reshape(-1, 2)])
        pairs = pairs[np.argsort(pairs[:, 0], kind="stable")]
        slots, firsts = np.unique(np.ceil(pairs[:, 0]), return_index=True)
        totals = np.maximum.reduceat(np.cumsum(pairs[:, 1]), firsts) if firsts.size else firsts
        return Again(starts, dict(zip(slots.tolist(), totals.tolist(), strict=True)))

    def _again(
        self, equations: Sequence[Equation], spans: Spans, events: list[tuple[float, int]]
    ) -> dict[Value, int]:
        starts: dict[Value, int] = {}
        for i, e in reversed([*enumerate(equations)]):
            at = math.ceil(min((spans[v][0] for v in e.outs if v in spans), default=0))
            now = at - 1 + (i + 1) / (len(equations) + 1)  # in turn, before what reads it
            self._read(e, now, spans)
            starts.update((v, at) for v in e.outs)
            for v in e.outs:
                if v in self._written and v in spans:
                    events += _exists(now, spans[v][1], self._price(v), runs_again(e))
        return starts

    def _scan(
        self,
        equations: Sequence[Equation],
        start: int,
        spans: Spans,
        events: list[tuple[float, int]],
    ) -> None:
        """Finds when the values of a part are read, and its memory if nothing else is kept."""
        for at, e in reversed([*enumerate(equations, start)]):
            self._read(e, at, spans)
            for v in e.outs:
                self._ends[v] = spans[v][1] if v in spans else at
                if v in self._written:
                    events += _exists(at, self._ends[v], self._price(v), runs_again(e))
            inner = [_peak(*parts(p, region=e.region), self._price.half) for p in _bodies(e)]
            events += _exists(at, at, max(inner, default=0))

    def _read(self, e: Equation, at: float, spans: Spans) -> None:
        """Notes that an equation reads its operands: at a time, or in the kernels that read it."""
        fused = [spans[v] for v in e.outs if v not in self._written and v in spans]
        here = [(at, at)] if len(fused) < len(e.outs) or not e.outs else []
        each = [*fused, *here]
        first, last = min(f for f, _ in each), max(n for _, n in each)
        for v in e.ins:
            if not v.literal:
                f, n = spans.get(v, (first, last))
                spans[v] = min(f, first), max(n, last)


# Less than the time between two equations.
SOON = 1e-6


def _exists(start: float, end: float, size: int, over: bool = False) -> list[tuple[float, int]]:
    """Returns when memory is taken and given back; ``over`` what is read last at the start."""
    start += 2 * SOON * over
    return [(start, size), (max(start, end) + SOON, -size)] if size else []


def _written(equations: Sequence[Equation], results: Collection[Value]) -> set[Value]:
    found = rounding.fed(equations)
    kernels = kernels_of(equations, results)
    several = {v for v, read in kernels.items() if len(read) > 1}
    found |= {*of_several(equations, several)}
    for e in equations:
        view = rounding.is_view(e) or e.name == BARRIER
        if view and FRESH not in e.rule.traits:
            found.difference_update(e.outs)
        elif not runs_again(e):
            found.update(e.outs)
    return found


def _bodies(e: Equation) -> Sequence[object]:
    return rounding.programs(e) if e.row.kind else ()


def _peak(
    ins: Sequence[Value], equations: Sequence[Equation], outs: Sequence[Value], half: Any
) -> int:
    """Returns the most bytes that exist at any time in a program, beside its operands."""
    price = rounding.Price((), (), half)
    return int(Timeline(equations, [], outs, (), (), (), price).again((), (), ()).peak)
