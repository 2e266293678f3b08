"""A number as storage: how much is kept, between the fewest bytes that are possible and `lean`.

Below `lean`, matmuls, reductions and islands run again too, each at a price: the bytes that it
moves, and its FLOPs in bytes. The minimum cut then weighs bytes kept against bytes moved, at some
rate of exchange. Each rate gives a candidate; so does each split of the groups that run again, as
long as a group would keep much at once. Of the candidates whose largest memory, as estimated here,
is within the budget, the one that moves the fewest bytes again is chosen. Groups keep their values
instead as far as the budget allows.

The budget is that of PyTorch's ``activation_memory_budget``, whose 1 is what `lean` does; the
prices are those of a roofline.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpjax._src.autocast.choice import (
    Chosen,
    Part,
    choose,
    copies,
    keeping,
    kept_bytes,
    stored_bytes,
)
from mpjax._src.autocast.schedule import flow_of, ops_of
from mpjax._src.autocast.steps import Step, WholeCheckpoint, unwrapped
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax, rules
from mpjax._src.base.higher_order import turns_of
from mpjax._src.program.graph import EXCHANGES, Block, Op, Value

# The FLOPs in the time of one byte: 156 on an A100, 295 on an H100, 240 on a TPU v5e.
FLOPS_PER_BYTE = 256

# The rates of exchange, in bytes kept for a byte moved: from no matmul again to almost all.
RATES = [2.0**-i for i in range(11)]

# Of these, each device would wait for the others once more.
COMMUNICATES = EXCHANGES | {
    *("psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "all_gather_reduced"),
    *("all_to_all", "ppermute", "pbroadcast", "pmax", "pmin"),
}


class Kept(NamedTuple):
    """What the blocks of a program keep, and how they run."""

    chosen: Mapping[Block, Chosen]
    steps: Mapping[Block, Sequence[Step]]


class Moment(NamedTuple):
    """A step, or a program inside, in the order of the forward pass.

    Attributes:
        kept: The bytes that it keeps from the forward pass on.
        passing: The bytes that it keeps in addition while its backward pass runs.
        moved: The bytes that are moved to compute its values again, with FLOPs in bytes, or to keep
            them.
        group: The step, if it computes matmuls again.
    """

    kept: int
    passing: int = 0
    moved: int = 0
    group: WholeCheckpoint | None = None


def within(
    analysis: Analysis,
    block: Block,
    parts: Mapping[Block, Part],
    number: float,
    run: Callable[[Analysis, Part, Chosen], Sequence[Step]],
) -> Kept:
    """Returns what a program keeps within a budget.

    Args:
        analysis: What is known about its values.
        block: The program.
        parts: The steps of each of its blocks for which this is chosen.
        number: The budget: 0 for the fewest bytes that are possible, 1 for those of `lean`.
        run: Returns the steps of a part for what was chosen.
    """
    prices = {b: dict(_prices(analysis, part.steps)) for b, part in parts.items()}
    found: list[tuple[Kept, Sequence[Moment]]] = []
    tried = set()
    for rate in (None, *RATES):
        chosen = {b: choose(analysis, p, costs=_at(rate, prices[b])) for b, p in parts.items()}
        while (key := tuple(one.kept for one in chosen.values())) not in tried:
            tried.add(key)
            steps = {b: run(analysis, p, chosen[b]) for b, p in parts.items()}
            kept = Kept(chosen, steps)
            found.append((kept, [*_moments(analysis, block, kept, prices)]))
            chosen = _split(analysis, parts, kept)
    peaks = [_peak(moments) for _, moments in found]  # of lean first
    budget = min(peaks) + number * (peaks[0] - min(peaks))
    fitting = [(k, moments, _relaxed(moments, budget)) for k, moments in found]
    fitting = [one for one in fitting if _peak(one[2]) <= budget]
    kept, moments, relaxed = min(fitting, key=lambda one: sum(m.moved for m in one[2]))
    groups = {m.group for m in moments} - {m.group for m in relaxed}
    if not groups:
        return kept
    # Keeps the values of these groups instead.
    part, now = parts[block], kept.chosen[block]
    more = [group.passing for group in groups if group]
    now = keeping(analysis, part, now.kept.union(*more), now.priced)
    again = {**kept.steps, block: run(analysis, part, now)}
    return Kept({**kept.chosen, block: now}, again)


# ---- prices --------------------------------------------------------------------------------------


def _at(rate: float | None, prices: Mapping[Step, int]) -> dict[Step, int]:
    return {} if rate is None else {step: int(price * rate) for step, price in prices.items()}


def _prices(analysis: Analysis, steps: Sequence[Step]) -> Iterator[tuple[Step, int]]:
    """Yields the steps that may run again at a price, and the price of each in bytes moved."""
    for step in steps:
        free = isinstance(step, Op) and step.spec.runs_again
        if not free and all(map(_may_run_again, ops_of(step))):
            flops = sum(_jax.flops_of(op.eqn) for op in ops_of(step))
            arrays = {v for v in (*step.ins, *step.outs) if not v.literal and _jax.is_array(v.aval)}
            moved = sum(stored_bytes(analysis, v) for v in arrays)
            yield step, moved + flops // FLOPS_PER_BYTE


def _may_run_again(op: Op) -> bool:
    if op.eqn.effects or op.name in COMMUNICATES:
        return False
    return op.spec.runs_again or not (op.subs or op.spec.need in (rules.PROGRAM, rules.LEFT))


# ---- candidates ----------------------------------------------------------------------------------


def _split(analysis: Analysis, parts: Mapping[Block, Part], kept: Kept) -> dict[Block, Chosen]:
    """Returns a choice that keeps more values, which split the largest of what runs again at once.

    The minimum cut does not count what the backward pass keeps for a while, of each such group.
    """
    large = {
        step: (b, _bytes(analysis, step.passing))
        for b, steps in kept.steps.items()
        for step in steps
        if isinstance(step, WholeCheckpoint)
    }
    largest = max((size for _, size in large.values()), default=0)
    split = {**kept.chosen}
    for step, (b, size) in large.items():
        if 2 * size > largest:
            waist = _waist(analysis, step, size, copies(analysis, parts[b]))
            split[b] = keeping(analysis, parts[b], split[b].kept | waist, split[b].priced)
    return split


def _waist(
    analysis: Analysis, group: WholeCheckpoint, size: int, copied: Collection[Op]
) -> frozenset[Value]:
    """Returns the values that split a group in two so that the least is kept, or nothing."""
    inside = [*unwrapped([group])]
    flow = flow_of(analysis, inside, group.outs, copied)
    least, waist = size, frozenset[Value]()
    before, crossing = 0, set[Value]()
    for i, step in enumerate(inside):
        before += _bytes(analysis, group.passing.intersection(step.outs))
        crossing.update(v for v in step.outs if v in group.again and v in flow.producer)
        crossing = {v for v in crossing if flow.last.get(v, -1) > i}
        kept = _bytes(analysis, crossing) + max(before, size - before)
        if kept < least:
            least, waist = kept, frozenset(crossing)
    return waist


# ---- memory over time ----------------------------------------------------------------------------


def _moments(
    analysis: Analysis,
    block: Block,
    kept: Kept,
    prices: Mapping[Block, Mapping[Step, int]],
) -> Iterator[Moment]:
    """Yields what the steps of a block keep and move."""
    mine = kept.chosen[block].kept if block in kept.chosen else frozenset[Value]()
    for step in kept.steps.get(block, block.ops):
        inside = [*unwrapped([step])]
        size = _bytes(analysis, mine.intersection(v for s in inside for v in s.outs))
        if isinstance(step, WholeCheckpoint):
            repeats = (s for s in inside if not step.again.isdisjoint(s.outs))
            moved = sum(prices[block].get(s, 0) for s in repeats)
            yield Moment(size, _bytes(analysis, step.passing), moved, step)
        elif size:
            yield Moment(size)
        for op, sub in ((step, sub) for sub in step.subs) if isinstance(step, Op) else ():
            turns, within = turns_of(op.eqn), [*_moments(analysis, sub.program, kept, prices)]
            total, moved = sum(m.kept for m in within), sum(m.moved for m in within)
            # What a loop keeps is copied to a stack and back: matmuls read and write no slices.
            moved += 4 * total if op.inside.loop else 0
            if total or moved:
                yield Moment(total * turns, _peak(within) - total, moved * turns)


def _peak(moments: Sequence[Moment]) -> int:
    """Returns the most bytes that are kept at any time of the backward pass."""
    total = peak = 0
    for moment in moments:
        total += moment.kept
        peak = max(peak, total + moment.passing)
    return peak


def _relaxed(moments: Sequence[Moment], budget: float) -> Sequence[Moment]:
    """Returns moments of which groups keep their values instead, as many as the budget allows.

    The last ones first: the backward pass begins with them, and their values are the first to go.
    """
    for i, moment in reversed([*enumerate(moments)]):
        if moment.group is not None:
            keeps = [*moments[:i], Moment(moment.kept + moment.passing), *moments[i + 1 :]]
            moments = keeps if _peak(keeps) <= budget else moments
    return moments


def _bytes(analysis: Analysis, values: Iterable[Value]) -> int:
    return sum(kept_bytes(analysis, v) for v in values)
