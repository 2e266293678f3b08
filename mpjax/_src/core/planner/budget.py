"""A number as storage: how much is stored, between the fewest bytes that are possible and `lean`.

Below `lean`, matmuls and reductions run again too, each at the price of a roofline: the bytes that
it moves, or those moved in the time of its FLOPs, if they are more. The minimum cut then weighs
bytes kept against bytes moved, at some rate of exchange. Each rate gives a candidate. So does each
split of what it computes again at once, as long as that is much: the cut does not count it. Of the
candidates whose largest memory is within the budget, the one that moves the fewest bytes again is
chosen. The backward pass begins with the last layers, when all else is kept anyway: these keep what
`lean` keeps, as far as the budget allows.

The budget is that of PyTorch's ``activation_memory_budget``, whose 1 is what `lean` does.

The memory over time (`Timeline`) is estimated: equations run in order; what runs again does when it
is first read. An array exists from the kernel that writes it to the last one that reads it.
Compilers fuse what is cheap into the kernels that read it: then these read its operands. So arrays
are what a matmul, reduction or loop makes, what a matmul reads, and what several kernels would
compute from more than one array. A gradient goes as soon as it is made: an optimizer reads it at
once.
"""

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.rules import ALL_SUMS, FOLLOW, FRESH, FULL, HALF, MOVE, RANKS
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import dependents, recomputation
from mpjax._src.core.planner.equations import Equation, Value, parts
from mpjax._src.core.planner.partition import Handed, Parts, Pricing, lightest_of, runs_again
from mpjax._src.core.planner.prices import of_several, read_by_several
from mpjax._src.core.planner.rounding import Price, returns_half
from mpjax._src.core.program.graph import EXCHANGES

# Less than the time between two equations.
SOON = 1e-6
INF = math.inf


class Spans(NamedTuple):
    """When values are read first and last, if at all."""

    first: dict[Value, float]
    last: dict[Value, float]


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
        prices: What it costs to keep each value that may be.
        sizes: The bytes of each value that is computed again, if it is an array.
    """

    def __init__(
        self,
        parts_of: Parts,
        given: Collection[Value],
        low: Collection[Value],
        exact: Price,
        price: Pricing | None = None,
    ) -> None:
        early, late, _, results, cotangents, half = parts_of
        both = [*early, *late]
        made, wanted = rounding.made(both, low, half), rounding.wanted(both, results, ())
        size, written = Price(made, wanted, half), _written(both, results)
        self.exact, self.price = exact, price or exact
        self.sizes = {v: size(v) for v in written}
        self.prices = {v: self.price(v) for v in (*given, *(v for e in early for v in e.outs))}
        self._again = {v for e in both if runs_again(e) for v in e.outs}
        waiting, events = dependents(late, cotangents), list[float]()
        rest = [e for e in late if not waiting.isdisjoint(e.outs)]
        # Without cotangents, as in a user's checkpoint, they run when they are first read.
        ready = [e for e in late if waiting.isdisjoint(e.outs)]
        spans, first = Spans({}, {}), Spans({}, {})
        self._run(rest, spans, events, range(len(early), len(early) + len(rest)))
        self._run(ready, spans, events)
        self._run(early, first, events, range(len(early)))
        for at, e in enumerate([*early, *rest]):
            # The body of a loop has memory of its own while it runs.
            inner = [_peak(*parts(p, region=e.region)[1:], half) for p in _bodies(e)]
            events += _exists(at, at, max(inner, default=0))
        for v in given:  # the 16-bit copies of parameters
            start = min(first.first.get(v, INF), spans.first.get(v, INF))
            end = max(first.last.get(v, -INF), spans.last.get(v, -INF))
            if v.is_float32 and v not in low and v in written and start < INF:
                events += _exists(start, end, _jax.bytes_of(v.aval, half))
        self._late = spans, np.array(events)
        # When a value of the forward part would go.
        places = ((at, v) for at, e in enumerate(early) for v in e.outs)
        self._ends = {v: max(first.last.get(v, at), at) for at, v in places}

    def rest(self, steps: Sequence[Equation]) -> Rest:
        """Returns when values are read, and the memory, if steps run again where it is needed."""
        (first, last), before = self._late
        spans, events = Spans({**first}, {**last}), list[float]()
        self._run(steps, spans, events)
        for v in (v for e in steps for v in e.outs):
            spans.first.pop(v, None)
            spans.last.pop(v, None)
        return spans, np.concatenate([before, events])

    def again(self, kept: Collection[Value], before: Sequence[Equation], rest: Rest) -> Again:
        """Returns when steps run again, before the ``rest``, and the most bytes that exist then."""
        (first, last), others = rest
        spans, events = Spans({**first}, {**last}), list[float]()
        starts = [*map(math.ceil, self._run(before, spans, events))]
        # In the order in which they are made, so that a plan is the same in every process.
        for v in (v for v in self.prices if v in kept and v in spans.last):
            # Until then it exists anyway, for the forward part reads it.
            start = self._ends.get(v, 0) + 2 * SOON
            events += _exists(start, spans.last[v], self.prices[v])
        nothing = [0, 0]  # so that there is a time
        times, sizes = np.concatenate([others, events, nothing]).reshape(-1, 2).T
        order = np.argsort(times, kind="stable")
        totals = np.cumsum(sizes[order])
        worst = np.argmax(totals)
        return Again(starts, totals[worst].item(), math.ceil(times[order[worst]]))

    def _run(
        self,
        steps: Sequence[Equation],
        spans: Spans,
        events: list[float],
        times: Sequence[int] | None = None,
    ) -> list[float]:
        """Finds when steps read their operands: at a time, or in the kernels that read them.

        Returns:
            When each step runs: at ``times``, or before what reads it.
        """
        (first, last), sizes, starts = spans, self.sizes, list[float]()
        for at, e in reversed([*enumerate(steps)]):
            read = [v for v in e.outs if v in last]
            starts.append(min([first[v] for v in read], default=0))
            # Steps that run before the same reader are kept in their order by a fraction.
            turn = (at + 1) / (len(steps) + 1)
            now = math.ceil(starts[-1]) - 1 + turn if times is None else times[at]
            for v in read if times is None else e.outs:
                # What is read last when a step begins is gone when it needs memory.
                start = now + 2 * SOON * (v in self._again)
                events += _exists(start, last.get(v, -INF), sizes.get(v, 0))
            # What is fused reads its operands whenever a kernel reads its result. A kernel runs at
            # a time of its own, unless all results are fused into readers.
            fused = [v for v in read if not sizes.get(v)]
            own = [] if fused and len(fused) == len(e.outs) else [now]
            start = min([*own, *(first[v] for v in fused)])
            end = max([*own, *(last[v] for v in fused)])
            for v in e.ins:
                first[v] = min(start, first.get(v, INF))
                last[v] = max(end, last.get(v, -INF))
        return starts[::-1]


def _exists(start: float, end: float, size: int) -> Sequence[float]:
    """Returns when memory is taken and given back."""
    return (start, size, max(start, end) + SOON, -size) if size else ()


def _written(equations: Sequence[Equation], results: Collection[Value]) -> set[Value]:
    found = rounding.fed(equations)
    found |= {*of_several(equations, read_by_several(equations, results))}
    for e in equations:
        view = rounding.is_view(e) or e.is_barrier
        if view and FRESH not in e.rule.traits:
            found.difference_update(e.outs)
        elif not runs_again(e):
            found.update(e.outs)
    return found


def _bodies(e: Equation) -> Sequence[object]:
    return rounding.programs(e) if e.row.kind else ()


def _peak(equations: Sequence[Equation], outs: Sequence[Value], half: Any) -> int:
    """Returns the most bytes that exist at any time in a program, beside its operands."""
    both = Parts([*equations], [], (), outs, (), half)
    timeline = Timeline(both, (), (), Price((), (), half))
    return int(timeline.again((), (), timeline.rest(())).peak)


# The FLOPs in the time of one byte: 156 on an A100, 295 on an H100, 240 on a TPU v5e.
FLOPS_PER_BYTE = 256
# The rates of exchange, in bytes kept for a byte moved: from few matmuls again to almost all.
RATES = (1, 2**-4, 2**-10)
# So many points in time are looked at, up to which all is kept as `lean` does.
STEPS = 15
# Of these, each device would wait for the others once more.
COMMUNICATES = {
    *(*EXCHANGES, *ALL_SUMS, "all_gather_reduced", "all_to_all"),
    *("ppermute", "pbroadcast", "pmax", "pmin"),
}


def _may_run_again(e: Equation) -> bool:
    """Returns whether an equation may run again, although that is not free.

    The order of entries may be another one where a compiler computes them otherwise.
    """
    # What `runs_again` allows costs the cut nothing, so it needs no price.
    if e.acts or runs_again(e) or e.row.kind or e.name in COMMUNICATES:
        return False
    return e.rule.need in (HALF, FULL, FOLLOW, MOVE) and RANKS not in e.rule.traits


def _price(e: Equation, price: Price) -> int:
    half = price.half if returns_half(e) else None
    moved = sum(map(price, e.ins)) + sum(_jax.bytes_of(v.aval, half) for v in e.outs)
    return max(moved, _jax.flops_of(e.like) // FLOPS_PER_BYTE)


class Plan(NamedTuple):
    """What is stored, and what is recomputed from it.

    Attributes:
        kept: What is stored.
        before: The steps that recompute, from that, what else `lean` stores.
        again: When they run, and which memory they take.
        moved: The bytes that they move, with FLOPs in bytes.
    """

    kept: frozenset[Value]
    before: Sequence[Equation]
    again: Again
    moved: int


@dataclasses.dataclass
class Budget:
    """A choice of what a forward part hands to a backward part, within a number.

    Attributes:
        early: The equations of the forward part.
        crossing: What the backward part reads of it.
        lean: What `lean` keeps.
        free: What the backward part has anyway.
        timeline: The memory over time.
        pinned: What a user's checkpoint keeps.
        given: Arguments of the forward part that have to be stored as well.
        turns: How often all of it runs.
    """

    early: Sequence[Equation]
    crossing: Sequence[Value]
    lean: Sequence[Value]
    free: Collection[Value]
    timeline: Timeline
    pinned: Collection[Value] = ()
    given: Collection[Value] = ()
    turns: int = 1

    def __post_init__(self) -> None:
        early, lean, exact = self.early, {*self.lean}, self.timeline.exact
        self._pinned, self._lean, self._free = {*self.pinned} & lean, lean, {*self.free}
        self._costs = {e: self.turns * _price(e, exact) for e in early if _may_run_again(e)}
        # An equation that gets other results keeps those that something reads.
        self._cost_of = {v: cost for e, cost in self._costs.items() for v in e.outs}
        each = (_value_by_value(e) if e.is_barrier else [e] for e in early)
        self._steps = [*itertools.chain(*each)]
        self._rests: dict[frozenset[Value], tuple[set[Value], Rest]] = {}
        self._plans: dict[frozenset[Value], Plan] = {}

    def _cost(self, e: Equation) -> int:
        return max((self._cost_of.get(v, 0) for v in e.outs), default=0)

    def within(self, number: float) -> tuple[Handed, list[Equation]]:
        """Returns what is handed over, and what computes more from it before the rest.

        The number is 0 for the fewest bytes that are possible, 1 for those of `lean`.
        """
        lean = self._plan(self._lean)
        plans = {lean.kept: lean}
        choice = self.early, self.lean, self.timeline.price, self.given
        # Rates that keep the same are looked at once.
        for kept, _ in itertools.groupby(lightest_of(*choice, self._costs, RATES)):
            plan = self._plan(kept)
            # What runs again at once may be most of the memory. Each round splits the largest of
            # it, until nothing new is kept.
            while plan.kept not in plans:
                plans[plan.kept] = plan
                plan = self._plan(plan.kept | self._waists(plan))
        least = min(plan.again.peak for plan in plans.values())
        budget = least + number * (lean.again.peak - least)
        fitting = [p for p in plans.values() if p.again.peak <= budget]
        # The one that takes the least memory leaves the most for what `_relaxed` keeps.
        either = min(fitting, key=lambda p: p.moved), min(fitting, key=lambda p: p.again.peak)
        relaxed = [self._relaxed(plans[kept], lean, budget) for kept in {p.kept: 0 for p in either}]
        best = min(relaxed, key=lambda p: (p.moved, p.again.peak))
        return self._handed(best.kept)

    def _handed(self, kept: Collection[Value]) -> tuple[Handed, list[Equation]]:
        # The rest is computed as under `lean`, whose values come from ``before``.
        again = recomputation(self.early, self.crossing, {*kept, *self.lean, *self.free})
        read = {*self.crossing, *(v for e in again for v in e.ins)}
        lean = [v for v in self.lean if v in read]
        before = recomputation(self.early, lean, {*kept, *self.free})
        # In the order in which they are made, so that a plan is the same in every process.
        made = (v for e in self.early for v in e.outs)
        saved = [v for v in (*self.given, *made) if v in kept]
        return Handed(saved, again), _with_own_results(before, self.lean)

    def _plan(self, kept: Collection[Value]) -> Plan:
        kept = {*kept, *self._pinned}
        # The rest depends only on what is kept besides what `lean` keeps, so many plans share its
        # memory.
        others = frozenset(kept - self._lean)
        if others not in self._rests:
            steps = recomputation(self._steps, self.crossing, kept | self._lean | self._free)
            read = {*self.crossing, *(v for e in steps for v in e.ins)}
            self._rests[others] = read, self.timeline.rest(steps)
        read, rest = self._rests[others]
        before = recomputation(self._steps, self._lean & read, kept | self._free)
        saved = frozenset(kept & read.union(*(e.ins for e in before)))
        if saved not in self._plans:
            again = self.timeline.again(saved, before, rest)
            self._plans[saved] = Plan(saved, before, again, sum(map(self._cost, before)))
        return self._plans[saved]

    def _relaxed(self, plan: Plan, lean: Plan, budget: float) -> Plan:
        """Returns a plan that keeps what is needed first as `lean` does, as far as it may."""
        pairs = zip(plan.before, plan.again.starts, strict=True)
        starts = {v: at for e, at in pairs for v in e.outs if v in lean.kept}
        times = sorted({*starts.values()})
        # A bisection, as if memory grew with each value that is kept. Whatever it returns fits.
        times = times[:: -(-len(times) // STEPS) or 1]
        first, last = 0, len(times)
        while first < last:
            middle = (first + last + 1) // 2
            ends = times[middle - 1]
            new = self._plan(plan.kept.union(v for v, at in starts.items() if at <= ends))
            if new.again.peak <= budget:
                plan, first = new, middle
            else:
                last = middle - 1
        return plan

    def _waists(self, plan: Plan) -> set[Value]:
        """Returns values that split the largest of what runs again at once, so that few are kept.

        The groups of what is read at the same time stand in the order of the forward part.
        """
        dear = {*plan.kept}  # what each part cannot compute for little
        groups: dict[int, list[Equation]] = {}
        for e, at in zip(plan.before, plan.again.starts, strict=True):
            if self._cost(e) or not dear.isdisjoint(e.ins):
                dear.update(e.outs)
                groups.setdefault(at, []).append(e)
        # What runs again after the peak takes no memory at the peak.
        sizes = {at: self._size(es) for at, es in groups.items() if at <= plan.again.worst}
        largest, found = max(sizes.values(), default=0), set[Value]()
        for at, total in sizes.items():
            # Groups of nearly the same size would be the next peak: they are split at once.
            found |= self._waist(groups[at]) if 2 * total > largest else set()
        return found

    def _size(self, steps: Sequence[Equation]) -> int:
        return sum(self.timeline.sizes.get(v, 0) for e in steps for v in e.outs)

    def _waist(self, steps: Sequence[Equation]) -> set[Value]:
        """Returns the values that split steps in two so that the least is kept, or nothing."""
        price = self.timeline.prices
        last = {v: i for i, e in enumerate(steps) for v in e.ins}
        before, behind = 0, self._size(steps)
        alive, kept, least, waist = set[Value](), 0, behind, set[Value]()
        for i, e in enumerate(steps):
            before, behind = before + self._size([e]), behind - self._size([e])
            # A later step reads them: to split here means to keep them.
            new = {v for v in e.outs if last.get(v, i) > i}
            gone = {v for v in e.ins if last[v] == i} & alive
            kept += sum(price[v] for v in new) - sum(price[v] for v in gone)
            alive |= new
            alive -= gone
            if kept + max(before, behind) < least:
                least, waist = kept + max(before, behind), {*alive}
        return waist


def _value_by_value(e: Equation) -> Iterator[Equation]:
    """Yields a barrier for each value: none needs the others."""
    return (e.on([v], outs=[out]) for v, out in zip(e.ins, e.outs, strict=True))


def _with_own_results(equations: Sequence[Equation], values: Collection[Value]) -> list[Equation]:
    """Returns equations whose results are values of their own, but for some.

    What else the backward part reads of them, it computes once more where it does.
    """
    same, own, found = {*values}, dict[Value, Value](), list[Equation]()
    for e in equations:
        # The same equations may stand in the list that runs later, and each value has one maker.
        own.update((v, Value(v.aval)) for v in e.outs if v not in same)
        found.append(e.on((own.get(v, v) for v in e.ins), outs=[own.get(v, v) for v in e.outs]))
    return found
