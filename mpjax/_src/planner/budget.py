"""A number as storage: how much is kept, between the fewest bytes that are possible and `lean`.

Below `lean`, matmuls and reductions run again too, each at the price of a roofline: the bytes that
it moves, or those moved in the time of its FLOPs, if they are more. The minimum cut then weighs
bytes kept against bytes moved, at some rate of exchange. Each rate gives a candidate. So does each
split of what it computes again at once, as long as that is much: the cut does not count it. Of the
candidates whose largest memory (`timeline`) is within the budget, the one that moves the fewest
bytes again is chosen. The backward pass begins with the last layers, when all else is kept anyway:
these keep what `lean` keeps, as far as the budget allows.

The budget is that of PyTorch's ``activation_memory_budget``, whose 1 is what `lean` does.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence

from mpjax._src.base import _jax
from mpjax._src.base.rules import FOLLOW, FULL, HALF, MOVE, RANKS
from mpjax._src.planner.equations import Equation, Value, between
from mpjax._src.planner.partition import Handed, lightest, runs_again
from mpjax._src.planner.rounding import Price, returns_half
from mpjax._src.planner.timeline import Again, Timeline
from mpjax._src.program.graph import EXCHANGES

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
    if e.acts or runs_again(e) or e.row.kind or e.name in COMMUNICATES:
        return False
    return e.rule.need in (HALF, FULL, FOLLOW, MOVE) and RANKS not in e.rule.traits


def _price(e: Equation, price: Price) -> int:
    half = price.half if returns_half(e) else None
    moved = sum(map(price, e.ins)) + sum(_jax.bytes_of(v.aval, half) for v in e.outs)
    return max(moved, _jax.flops_of(e.like) // FLOPS_PER_BYTE)


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """What is kept, and what is computed again from it.

    Attributes:
        kept: What is kept.
        before: What computes more of what `lean` keeps from that.
        equations: What computes the rest from both.
        again: When that is, and which memory it takes.
        moved: The bytes that it moves, with FLOPs in bytes.
    """

    kept: frozenset[Value]
    before: Sequence[Equation]
    equations: Sequence[Equation]
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
        pinned: What a user's checkpoint keeps.
        given: Arguments of the forward part that have to be kept as well.
        turns: How often all of it runs.
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
        self.early, self.crossing, self.lean = early, crossing, lean
        self.free, self.timeline = free, timeline
        self._choice = early, lean, timeline.price, given
        self.pinned, self.given, self.turns = {*pinned} & {*lean}, given, turns
        price = timeline.exact
        self._costs = {e: turns * _price(e, price) for e in early if _may_run_again(e)}

    def within(self, number: float) -> tuple[Handed, list[Equation]]:
        """Returns what is handed over, and what computes more from it before the rest.

        The number is 0 for the fewest bytes that are possible, 1 for those of `lean`.
        """
        lean = self._plan(self.lean)
        plans = {lean.kept: lean}
        for kept in self._cuts():
            plan = self._plan(kept)
            while plan.kept not in plans:
                plans[plan.kept] = plan
                plan = self._plan([*plan.kept, *self._waists(plan)])
        least = min(plan.again.peak for plan in plans.values())
        budget = least + number * (lean.again.peak - least)
        fitting = [p for p in plans.values() if p.again.peak <= budget]
        either = min(fitting, key=lambda p: p.moved), min(fitting, key=lambda p: p.again.peak)
        relaxed = [self._relaxed(plan, lean, budget) for plan in dict.fromkeys(either)]
        best = min(relaxed, key=lambda p: (p.moved, p.again.peak))
        made = (v for e in self.early for v in e.outs)
        saved = [v for v in (*self.given, *made) if v in best.kept]
        before = _on_own(best.before, self.lean)
        return Handed(saved, best.equations), before

    def _cuts(self) -> Iterator[list[Value]]:
        """Yields what is kept at rates, from the last one on, as long as that differs."""
        before: list[Value] = []
        for rate in RATES:
            prices = {e: int(cost * rate) for e, cost in self._costs.items()}
            kept = lightest(*self._choice, dear=prices)
            if kept != before:
                yield kept
            before = kept

    def _plan(self, kept: Collection[Value]) -> Plan:
        kept = {*kept, *self.pinned}
        equations = between(self.early, self.crossing, {*kept, *self.lean, *self.free})
        read = {*self.crossing, *(v for e in equations for v in e.ins)}
        remade = [v for v in self.lean if v in read]
        before = between(self.early, remade, {*kept, *self.free})
        read.update(v for e in before for v in e.ins)
        saved = frozenset(kept & read)
        again = self.timeline.again(saved, before, equations)
        moved = sum(self._costs.get(e, 0) for e in before)
        return Plan(saved, before, equations, again, moved)

    def _relaxed(self, plan: Plan, lean: Plan, budget: float) -> Plan:
        """Returns a plan that keeps what is needed first as `lean` does, as far as it may."""
        starts = plan.again.starts
        times = sorted({starts[v] for v in lean.kept if v in starts})
        times = times[:: -(-len(times) // STEPS) or 1]
        first, last = 0, len(times)
        while first < last:
            middle = (first + last + 1) // 2
            ends = times[middle - 1]
            more = (v for v in lean.kept if v in starts and starts[v] <= ends)
            new = self._plan([*plan.kept, *more])
            if new.again.peak <= budget:
                plan, first = new, middle
            else:
                last = middle - 1
        return plan

    def _waists(self, plan: Plan) -> list[Value]:
        """Returns values that split the largest of what runs again at once, so that few are kept.

        The groups of what is read at the same time stand in the order of the forward part.
        """
        starts, size = plan.again.starts, self.timeline.size
        dear = set[Value]()  # what cannot be computed anew in each part for little
        groups: dict[int, list[Equation]] = {}
        for e in plan.before:
            if e in self._costs or any(v in dear or v in plan.kept for v in e.ins):
                dear.update(e.outs)
                groups.setdefault(min(starts[v] for v in e.outs if v in starts), []).append(e)
        worst = max(plan.again.memory, key=lambda time: plan.again.memory[time])
        sizes = {
            at: sum(size(v) for e in es for v in e.outs) for at, es in groups.items() if at <= worst
        }
        largest, found = max(sizes.values(), default=0), list[Value]()
        for at, total in sizes.items():
            found += _waist(groups[at], size, self.timeline.price) if 2 * total > largest else ()
        return found


def _on_own(equations: Sequence[Equation], values: Collection[Value]) -> list[Equation]:
    """Returns equations whose results are values of their own, but for some.

    What else the backward part reads of them, it computes once more where it does.
    """
    same, own, found = {*values}, dict[Value, Value](), list[Equation]()
    for e in equations:
        own.update((v, Value(v.aval)) for v in e.outs if v not in same)
        found.append(e.on((own.get(v, v) for v in e.ins), outs=[own.get(v, v) for v in e.outs]))
    return found


def _waist(
    es: Sequence[Equation], size: Callable[[Value], int], price: Callable[[Value], int]
) -> Collection[Value]:
    """Returns the values that split equations in two so that the least is kept, or nothing."""
    last = {v: i for i, e in enumerate(es) for v in e.ins}
    alive: dict[Value, int] = {}
    total = least = sum(size(v) for e in es for v in e.outs)
    before, waist = 0, list[Value]()
    for i, e in enumerate(es):
        before += sum(map(size, e.outs))
        alive |= {v: last[v] for v in e.outs if last.get(v, i) > i}
        alive = {v: end for v, end in alive.items() if end > i}
        kept = sum(map(price, alive)) + max(before, total - before)
        if kept < least:
            least, waist = kept, [*alive]
    return waist
