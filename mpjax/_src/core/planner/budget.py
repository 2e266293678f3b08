"""A number as storage: how much is stored, between the fewest bytes that are possible and `lean`.

Below `lean`, matmuls and reductions run again too, each at the price of a roofline: the bytes that
it moves, or those moved in the time of its FLOPs, if they are more. The minimum cut then weighs
bytes kept against bytes moved, at some rate of exchange. Each rate gives a candidate. So does each
split of what it computes again at once, as long as that is much: the cut does not count it. Of the
candidates whose largest memory (`timeline`) is within the budget, the one that moves the fewest
bytes again is chosen. The backward pass begins with the last layers, when all else is kept anyway:
these keep what `lean` keeps, as far as the budget allows.

The budget is that of PyTorch's ``activation_memory_budget``, whose 1 is what `lean` does.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from typing import NamedTuple

from mpjax._src.core.base import _jax
from mpjax._src.core.base.rules import FOLLOW, FULL, HALF, MOVE, RANKS
from mpjax._src.core.planner.equations import BARRIER, Equation, Value, recomputation
from mpjax._src.core.planner.partition import Handed, lightest_of, runs_again
from mpjax._src.core.planner.rounding import Price, returns_half
from mpjax._src.core.planner.timeline import UNREAD, Again, Rest, Step, Timeline
from mpjax._src.core.program.graph import EXCHANGES

# The FLOPs in the time of one byte: 156 on an A100, 295 on an H100, 240 on a TPU v5e.
FLOPS_PER_BYTE = 256
# The rates of exchange, in bytes kept for a byte moved: from few matmuls again to almost all.
RATES = (1, 2**-4, 2**-10)
# So many points in time are looked at, up to which all is kept as `lean` does.
STEPS = 15
# Of these, each device would wait for the others once more.
COMMUNICATES = EXCHANGES | {
    *("psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "all_gather_reduced"),
    *("all_to_all", "ppermute", "pbroadcast", "pmax", "pmin"),
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

    kept: frozenset[int]
    before: Sequence[Step]
    again: Again
    moved: int


class Budget:
    """A choice of what a forward part hands to a backward part, within a number.

    Attributes:
        early: The equations of the forward part.
        crossing: What the backward part reads of it.
        lean: What `lean` keeps.
        free: What the backward part has anyway.
        timeline: The memory over time.
        given: Arguments of the forward part that have to be stored as well.
    """

    def __init__(
        self,
        early: Sequence[Equation],
        crossing: Sequence[Value],
        lean: Sequence[Value],
        free: Collection[Value],
        timeline: Timeline,
        pinned: Collection[Value] = (),
        given: Collection[Value] = (),
        turns: int = 1,
    ) -> None:
        """Gets what is chosen from; ``pinned`` is what a user's checkpoint keeps.

        All of it runs ``turns`` times.
        """
        self.early, self.crossing, self.lean = early, crossing, lean
        self.free, self.timeline, self.given = free, timeline, given
        price, self._sizes = timeline.exact, timeline.sizes
        self._costs = {e: turns * _price(e, price) for e in early if _may_run_again(e)}
        self._pinned = self._numbers({*pinned} & {*lean})
        self._lean, self._crossing = self._numbers(lean), self._numbers(crossing)
        self._free = self._numbers(free)
        self._steps: list[Step] = []
        for e, step in zip(early, timeline.early, strict=True):
            cost, alone = self._costs.get(e, 0), _value_by_value(e) if e.name == BARRIER else ()
            self._steps += [x._replace(cost=cost) for x in timeline.steps(alone) or [step]]
        self._rests: dict[frozenset[int], tuple[set[int], Rest]] = {}
        self._plans: dict[frozenset[int], Plan] = {}

    def _numbers(self, values: Iterable[Value]) -> set[int]:
        return {self.timeline.number[v] for v in values if v in self.timeline.number}

    def within(self, number: float) -> tuple[Handed, list[Equation]]:
        """Returns what is handed over, and what computes more from it before the rest.

        The number is 0 for the fewest bytes that are possible, 1 for those of `lean`.
        """
        lean = self._plan(self._lean)
        plans = {lean.kept: lean}
        for kept in self._cuts():
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
        return self._handed({self.timeline.values[v] for v in best.kept})

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

    def _cuts(self) -> Iterator[set[int]]:
        """Yields what is kept at rates, from the last one on, as long as that differs."""
        before: list[Value] = []
        choice = self.early, self.lean, self.timeline.price, self.given
        for kept in lightest_of(*choice, self._costs, RATES):
            if kept != before:
                yield self._numbers(kept)
            before = kept

    def _plan(self, kept: Collection[int]) -> Plan:
        kept = {*kept, *self._pinned}
        # The rest depends only on what is kept besides what `lean` keeps, so many plans share its
        # memory.
        others = frozenset(kept - self._lean)
        if others not in self._rests:
            known = kept | self._lean | self._free
            steps = _recomputed(self._steps, self._crossing, known)
            read = self._crossing.union(*(step.ins for step in steps))
            self._rests[others] = read, self.timeline.rest(steps)
        read, rest = self._rests[others]
        before = _recomputed(self._steps, self._lean & read, kept | self._free)
        saved = frozenset(kept & read.union(*(step.ins for step in before)))
        if saved not in self._plans:
            again = self.timeline.again(saved, before, rest)
            self._plans[saved] = Plan(saved, before, again, sum(step.cost for step in before))
        return self._plans[saved]

    def _relaxed(self, plan: Plan, lean: Plan, budget: float) -> Plan:
        """Returns a plan that keeps what is needed first as `lean` does, as far as it may."""
        pairs = zip(plan.before, plan.again.starts, strict=True)
        starts = {v: at for step, at in pairs for v in step.outs if v in lean.kept}
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

    def _waists(self, plan: Plan) -> set[int]:
        """Returns values that split the largest of what runs again at once, so that few are kept.

        The groups of what is read at the same time stand in the order of the forward part.
        """
        size, dear = self._sizes, {*plan.kept}  # what each part cannot compute for little
        groups: dict[int, list[Step]] = {}
        for step, at in zip(plan.before, plan.again.starts, strict=True):
            if step.cost or not dear.isdisjoint(step.ins):
                dear.update(step.outs)
                groups.setdefault(at, []).append(step)
        sizes = {
            at: sum(size[v] for step in steps for v in step.outs)
            for at, steps in groups.items()
            # What runs again after the peak takes no memory at the peak.
            if at <= plan.again.worst
        }
        largest, found = max(sizes.values(), default=0), set[int]()
        for at, total in sizes.items():
            # Groups of nearly the same size would be the next peak: they are split at once.
            found |= self._waist(groups[at]) if 2 * total > largest else set()
        return found

    def _waist(self, steps: Sequence[Step]) -> set[int]:
        """Returns the values that split steps in two so that the least is kept, or nothing."""
        size, price = self._sizes, self.timeline.prices
        last = {v: i for i, step in enumerate(steps) for v in step.ins}
        before, behind = 0, sum(size[v] for step in steps for v in step.outs)
        alive, kept, least, waist = set[int](), 0, behind, set[int]()
        for i, (ins, outs, *_) in enumerate(steps):
            for v in outs:
                before, behind = before + size[v], behind - size[v]
                # A later step reads it: to split here means to keep it.
                if last.get(v, i) > i:
                    alive.add(v)
                    kept += price[v]
            for v in ins:
                if last[v] == i and v in alive:
                    alive.remove(v)
                    kept -= price[v]
            if kept + max(before, behind) < least:
                least, waist = kept + max(before, behind), {*alive}
        return waist


def _value_by_value(e: Equation) -> Iterator[Equation]:
    """Yields a barrier for each value: none needs the others."""
    return (e.on([v], outs=[out]) for v, out in zip(e.ins, e.outs, strict=True))


def _recomputed(steps: Sequence[Step], wanted: Set[int], known: Set[int]) -> list[Step]:
    """Returns the steps that compute wanted values from known ones, as `recomputation` does."""
    missing, found = {*wanted} - known, []
    for step in reversed(steps):
        if not missing.isdisjoint(step.outs):
            if not known.isdisjoint(step.outs):
                step = step._replace(outs=[UNREAD if v in known else v for v in step.outs])
            found.append(step)
            missing |= step.ins - known
    return found[::-1]


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
