"""The memory of a program and its derivative over time, as far as a plan decides it.

Equations run in order; what runs again does when it is first read. An array exists from the kernel
that writes it to the last one that reads it. Compilers fuse what is cheap into the kernels that
read it: then these read its operands. So arrays are what a matmul, reduction or loop makes, what a
matmul reads, and what several kernels would compute from more than one array. A gradient goes as
soon as it is made: an optimizer reads it at once.

Many plans are looked at, so values have numbers here.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.rules import FRESH
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import BARRIER, Equation, Value, dependents, parts
from mpjax._src.core.planner.partition import Pricing, runs_again
from mpjax._src.core.planner.prices import of_several, read_by_several

# Less than the time between two equations.
SOON = 1e-6
# The number of a value that nothing reads.
UNREAD = -1
INF = math.inf


class Step(NamedTuple):
    """An equation on the numbers of values.

    Attributes:
        ins: What it reads.
        outs: What it makes.
        fused: What it makes, if that is one value that is no array; else `UNREAD`.
        cost: Its price if it runs again.
    """

    ins: frozenset[int]
    outs: Sequence[int]
    fused: int
    cost: int = 0


class Spans(NamedTuple):
    """When values are read first and last, by their numbers."""

    first: list[float]
    last: list[float]


# When the rest is read, and the memory that it takes: times, and bytes from then on.
Rest = tuple[Spans, np.ndarray]


class Again(NamedTuple):
    """What runs again in the backward part.

    Attributes:
        starts: When each step runs again.
        peak: The most bytes that exist at any time.
        worst: When they exist first.
    """

    starts: Sequence[int]
    peak: float
    worst: float


class Timeline:
    """The memory over time of a forward and a backward part, whatever is kept.

    Attributes:
        exact: The bytes of a value that is kept.
        price: The same, of all turns of a loop.
        values: The values.
        number: Their numbers.
        early: The equations of the forward part.
        prices: What it costs to keep each value that may be.
        sizes: The bytes of each value that is computed again, if it is an array.
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
        made, wanted = rounding.made(both, low, half), rounding.wanted(both, results, ())
        size, written = rounding.Price(made, wanted, half), _written(both, results)
        self.exact = exact
        self.price = price = price or exact
        each = (v for e in both for values in (e.ins, e.outs) for v in values)
        self.values = [*dict.fromkeys([*given, *results, *each])]
        self.number = {v: i for i, v in enumerate(self.values)}
        self.sizes = [*(size(v) if v in written else 0 for v in self.values), 0]
        again = {v for e in both if runs_again(e) for v in e.outs}
        kept = (*given, *(v for e in early for v in e.outs))
        self.prices = {self.number[v]: price(v) for v in kept}
        # What is read last when a step begins is gone when it needs memory.
        self._after = [*(2 * SOON * (v in again) for v in self.values), 0]
        waiting, events = dependents(late, cotangents), list[float]()
        rest = [e for e in late if not waiting.isdisjoint(e.outs)]
        # Without cotangents, as in a user's checkpoint, they run when they are first read.
        ready = [e for e in late if waiting.isdisjoint(e.outs)]
        spans, first, self.early = self._unread(), self._unread(), self.steps(early)
        self._run(self.steps(rest), spans, events, range(len(early), len(early) + len(rest)))
        self._run(self.steps(ready), spans, events)
        self._run(self.early, first, events, range(len(early)))
        for at, e in enumerate([*early, *rest]):
            # The body of a loop has memory of its own while it runs.
            inner = [_peak(*parts(p, region=e.region)[1:], half) for p in _bodies(e)]
            events += _exists(at, at, max(inner, default=0))
        for v in given:  # the 16-bit copies of parameters
            i = self.number[v]
            start, end = min(first.first[i], spans.first[i]), max(first.last[i], spans.last[i])
            if v.is_float32 and v not in low and v in written and start < INF:
                events += _exists(start, end, _jax.bytes_of(v.aval, half))
        self._late = spans, np.array(events)
        made_at = {v: at for at, step in enumerate(self.early) for v in step.outs}
        # When a value of the forward part would go.
        self._ends = {v: max(first.last[v], at) for v, at in made_at.items()}

    def steps(self, equations: Iterable[Equation]) -> list[Step]:
        """Returns equations on the numbers of values."""
        number, found = self.number, list[Step]()
        for e in equations:
            ins = frozenset([number[v] for v in e.ins if not v.literal])
            outs = [number[v] for v in e.outs]
            fused = outs[0] if len(outs) == 1 and not self.sizes[outs[0]] else UNREAD
            found.append(Step(ins, outs, fused))
        return found

    def rest(self, steps: Sequence[Step]) -> Rest:
        """Returns when values are read, and the memory, if steps run again where it is needed."""
        (first, last), before = self._late
        spans, events = Spans([*first], [*last]), list[float]()
        self._run(steps, spans, events)
        for v in (v for step in steps for v in step.outs):
            spans.first[v], spans.last[v] = INF, -INF
        return spans, np.concatenate([before, events])

    def again(self, kept: Iterable[int], before: Sequence[Step], rest: Rest) -> Again:
        """Returns when steps run again, before the ``rest``, and the most bytes that exist then."""
        (first, last), others = rest
        spans, events = Spans([*first], [*last]), list[float]()
        starts = [*map(math.ceil, self._run(before, spans, events))]
        for v in kept:
            if spans.last[v] > -INF:
                # Until then it exists anyway, for the forward part reads it.
                start = self._ends.get(v, 0) + 2 * SOON
                events += _exists(start, spans.last[v], self.prices[v])
        nothing = [0, 0]  # so that there is a time
        times, sizes = np.concatenate([others, events, nothing]).reshape(-1, 2).T
        order = np.argsort(times, kind="stable")
        totals = np.cumsum(sizes[order])
        worst = np.argmax(totals)
        return Again(starts, totals[worst].item(), math.ceil(times[order[worst]]))

    def _unread(self) -> Spans:
        return Spans([INF] * len(self.sizes), [-INF] * len(self.sizes))

    def _run(
        self,
        steps: Sequence[Step],
        spans: Spans,
        events: list[float],
        times: Sequence[int] | None = None,
    ) -> list[float]:
        """Finds when steps read their operands: at a time, or in the kernels that read them.

        Returns:
            When each step runs: at ``times``, or before what reads it.
        """
        (first, last), sizes, starts = spans, self.sizes, list[float]()
        for ins, outs, fused, _ in reversed(steps):
            # What is fused reads its operands whenever a kernel reads its result.
            start, end, at = first[fused], last[fused], len(steps) - len(starts) - 1
            starts.append(start)
            if start == INF:  # several values, an array, or unread
                starts[-1] = min([first[v] for v in outs if first[v] < INF], default=0)
                # Steps that run before the same reader are kept in their order by a fraction.
                turn = (at + 1) / (len(steps) + 1)  # before what reads it
                now = math.ceil(starts[-1]) - 1 + turn if times is None else times[at]
                read = [v for v in outs if last[v] > -INF]
                for v in read if times is None else outs:
                    events += _exists(now + self._after[v], last[v], sizes[v])
                # A kernel runs at a time of its own, unless all results are fused into readers.
                fused_outs = [v for v in read if not sizes[v]]
                own_time = [] if fused_outs and len(fused_outs) == len(outs) else [now]
                start = min([*own_time, *(first[v] for v in fused_outs)])
                end = max([*own_time, *(last[v] for v in fused_outs)])
            for v in ins:
                if start < first[v]:
                    first[v] = start
                if end > last[v]:
                    last[v] = end
        return starts[::-1]


def _exists(start: float, end: float, size: int) -> Sequence[float]:
    """Returns when memory is taken and given back."""
    return (start, size, max(start, end) + SOON, -size) if size else ()


def _written(equations: Sequence[Equation], results: Collection[Value]) -> set[Value]:
    found = rounding.fed(equations)
    found |= {*of_several(equations, read_by_several(equations, results))}
    for e in equations:
        view = rounding.is_view(e) or e.name == BARRIER
        if view and FRESH not in e.rule.traits:
            found.difference_update(e.outs)
        elif not runs_again(e):
            found.update(e.outs)
    return found


def _bodies(e: Equation) -> Sequence[object]:
    return rounding.programs(e) if e.row.kind else ()


def _peak(equations: Sequence[Equation], outs: Sequence[Value], half: Any) -> int:
    """Returns the most bytes that exist at any time in a program, beside its operands."""
    timeline = Timeline(equations, [], outs, (), (), (), rounding.Price((), (), half))
    return int(timeline.again((), (), timeline.rest(())).peak)
