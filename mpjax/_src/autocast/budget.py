"""A number as storage: how much is kept, between the fewest bytes that are possible and `lean`.

Below `lean`, matmuls, reductions and islands run again too, each at the price of a roofline: the
bytes that it moves, or those moved in the time of its FLOPs, if they are more. The minimum cut then
weighs bytes kept against bytes moved, at some rate of exchange. Each rate gives a candidate; so
does each split of the groups that run again, as long as a group would keep much at once. Of the
candidates whose largest memory (`timeline`) is within the budget, the one that moves the fewest
bytes again is chosen. Groups keep their values instead as far as the budget allows.

The budget is that of PyTorch's ``activation_memory_budget``, whose 1 is what `lean` does.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpjax._src.autocast.choice import Chosen, Part, choose, copies, keeping, work_of
from mpjax._src.autocast.schedule import flow_of, ops_of
from mpjax._src.autocast.sizes import stored_bytes, total_kept
from mpjax._src.autocast.steps import Step, WholeCheckpoint, unwrapped
from mpjax._src.autocast.tables import Analysis
from mpjax._src.autocast.timeline import Moment, Order, Prices, moments, peak, relaxed
from mpjax._src.base import _jax, rules
from mpjax._src.planner.budget import COMMUNICATES, FLOPS_PER_BYTE
from mpjax._src.program.graph import Block, Op, Value

# The rates of exchange, in bytes kept for a byte moved: from no matmul again to almost all.
RATES = [2.0**-i for i in range(11)]


class Kept(NamedTuple):
    """What the blocks of a program keep, and how they run."""

    chosen: Mapping[Block, Chosen]
    steps: Mapping[Block, Sequence[Step]]


def within(
    analysis: Analysis,
    block: Block,
    parts: Mapping[Block, Part],
    number: float,
    run: Callable[[Analysis, Part, Chosen], Sequence[Step]],
) -> Kept:
    """Returns what a program keeps within a budget.

    The budget is 0 for the fewest bytes that are possible, 1 for those of `lean`. ``run`` returns
    the steps of a part for what was chosen.
    """
    prices = {b: dict(_prices(analysis, part.steps)) for b, part in parts.items()}
    found: list[tuple[Kept, Sequence[Moment]]] = []
    tried = set()
    for rate in (None, *RATES) if any(prices.values()) else (None,):
        chosen = {b: choose(analysis, p, costs=_at(rate, prices[b])) for b, p in parts.items()}
        while (key := tuple(one.kept for one in chosen.values())) not in tried:
            tried.add(key)
            steps = {b: run(analysis, p, chosen[b]) for b, p in parts.items()}
            kept = Kept(chosen, steps)
            found.append((kept, [*moments(analysis, block, orders(kept, prices))]))
            chosen = _split(analysis, parts, kept)
    peaks = [peak(timeline) for _, timeline in found]  # of lean first
    budget = min(peaks) + number * (peaks[0] - min(peaks))
    fitting = [(k, now, relaxed(now, budget)) for k, now in found]
    fitting = [one for one in fitting if peak(one[2]) <= budget]
    kept, before, after = min(fitting, key=lambda one: (sum(m.moved for m in one[2]), peak(one[2])))
    groups = {m.group for m in before} - {m.group for m in after}
    if not groups:
        return kept
    # Keeps the values of these groups instead.
    part, now = parts[block], kept.chosen[block]
    more = [group.passing for group in groups if group]
    now = keeping(analysis, part, now.kept.union(*more), now.priced)
    again = {**kept.steps, block: run(analysis, part, now)}
    return Kept({**kept.chosen, block: now}, again)


def orders(kept: Kept, prices: Mapping[Block, Prices]) -> dict[Block, Order]:
    """Returns what each block keeps, and its steps in order."""
    return {
        block: Order(kept.chosen[block].kept, [*_in_groups(steps)], prices[block])
        for block, steps in kept.steps.items()
    }


def _in_groups(steps: Sequence[Step]) -> Iterator[tuple[Step, WholeCheckpoint | None]]:
    for step in steps:
        group = step if isinstance(step, WholeCheckpoint) else None
        yield from ((inside, group) for inside in unwrapped([step]))


# ---- prices --------------------------------------------------------------------------------------


def _at(rate: float | None, prices: Prices) -> Prices:
    if rate is None:
        return {}
    return {step: {v: int(p * rate) for v, p in each.items()} for step, each in prices.items()}


def _prices(analysis: Analysis, steps: Sequence[Step]) -> Iterator[tuple[Step, dict[Value, int]]]:
    """Yields the steps that may run again at a price, and the price of each of their results."""
    for step in steps:
        free = isinstance(step, Op) and step.spec.runs_again
        if not free and all(map(_may_run_again, ops_of(step))):
            yield step, {v: _price(analysis, step, v) for v in step.outs}


def _price(analysis: Analysis, step: Step, result: Value) -> int:
    """Returns the bytes moved to compute a result, or in the time of its FLOPs if they are more."""
    work = work_of(step, result)
    arrays = {result, *(work.reads & {*step.ins, *step.outs})}
    moved = sum(stored_bytes(analysis, v) for v in arrays if _jax.is_array(v.aval))
    return max(moved, sum(_jax.flops_of(op.eqn) for op in work.ops) // FLOPS_PER_BYTE)


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
        step: (b, total_kept(analysis, step.passing))
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
        before += total_kept(analysis, group.passing.intersection(step.outs))
        crossing.update(v for v in step.outs if v in group.again and v in flow.producer)
        crossing = {v for v in crossing if flow.last.get(v, -1) > i}
        kept = total_kept(analysis, crossing) + max(before, size - before)
        if kept < least:
            least, waist = kept, frozenset(crossing)
    return waist
