"""A number as storage: how much is kept, between what the default keeps and the least.

Below `lean`, matmuls, reductions and islands run again too, each at a price: the bytes that it
moves, and its FLOPs in bytes. The minimum cut of `lean` then weighs bytes kept against bytes moved,
at some rate of exchange, and each rate gives a candidate. Of those whose largest memory, as
estimated here, is within the budget, the one that moves the fewest bytes again is chosen.

The budget is that of PyTorch's ``activation_memory_budget``; the prices are those of a roofline.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from mpjax._src.autocast.lean import Chosen, Part, checkpoints, choose, kept_bytes
from mpjax._src.autocast.schedule import ops_of
from mpjax._src.autocast.steps import (
    Attention,
    Checkpoint,
    ChunkedLoss,
    Recomputed,
    Step,
    WholeCheckpoint,
    needs,
)
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax, rules
from mpjax._src.base.higher_order import turns_of
from mpjax._src.program.graph import EXCHANGES, Block, Op, Value

# The FLOPs in the time of one byte: 156 on an A100, 295 on an H100, 240 on a TPU v5e.
FLOPS_PER_BYTE = 256

# The rates of exchange, in bytes kept for a byte moved: from no matmul again to almost all.
RATES = [2.0**-i for i in range(-1, 11)]

# Of these, each device would wait for the others once more.
COMMUNICATES = EXCHANGES | {
    *("psum", "psum_invariant", "unreduced_psum", "reduce_scatter", "all_gather_reduced"),
    *("all_to_all", "ppermute", "pbroadcast", "pmax", "pmin"),
}


class Kept(NamedTuple):
    """What the blocks of a program keep, and how they run."""

    chosen: Mapping[Block, Chosen]
    steps: Mapping[Block, Sequence[Step]]


class Estimate(NamedTuple):
    """The estimated cost of what is kept.

    Attributes:
        kept: The bytes that the forward pass keeps.
        peak: The most bytes that the backward pass keeps at any time.
        moved: The bytes that it moves to compute values again, with FLOPs in bytes.
    """

    kept: int = 0
    peak: int = 0
    moved: int = 0


def within(
    analysis: Analysis, block: Block, parts: Mapping[Block, Part], number: float, most: int
) -> Kept | None:
    """Returns what a program keeps within a budget, or None if the default is within it.

    Args:
        analysis: What is known about its values.
        block: The program.
        parts: The steps of each of its blocks for which this is chosen.
        number: The budget: 0 for the fewest bytes that are possible, 1 for ``most``.
        most: The bytes that the default keeps.
    """
    prices = {b: dict(_prices(analysis, part.steps)) for b, part in parts.items()}
    found: dict[tuple[frozenset[Value], ...], tuple[Kept, Estimate]] = {}
    for rate in (None, *RATES):
        chosen = {b: choose(analysis, p, costs=_at(rate, prices[b])) for b, p in parts.items()}
        key = tuple(one.kept for one in chosen.values())
        if key not in found:
            kept = _run(analysis, block, parts, chosen)
            found[key] = kept, _estimate(analysis, block, kept, prices)
    least = min(estimate.peak for _, estimate in found.values())
    budget = least + number * (most - least)
    if most <= budget:
        return None
    fitting = [one for one in found.values() if one[1].peak <= budget]
    return min(fitting, key=lambda one: (one[1].moved, one[1].peak))[0]


def most(analysis: Analysis, block: Block, parts: Collection[Block]) -> int:
    """Returns the bytes that a program with a plan keeps, of the given blocks."""
    kept: dict[Value, int] = {}
    for step in analysis.steps.get(block, ()):
        weights = step.body.sums if isinstance(step, Attention) else ()
        kept |= {v: kept_bytes(analysis, v) for v in (*needs(analysis, step), *weights)}
        if isinstance(step, Recomputed):
            kept |= {v: _jax.size_of(v.aval.shape) * 2 for v in step.rounded if v not in kept}
    inside = (
        turns_of(op.eqn) * most(analysis, sub.program, parts) for op in block.ops for sub in op.subs
    )
    return (sum(kept.values()) if block in parts else 0) + sum(inside)


# ---- prices --------------------------------------------------------------------------------------


def _at(rate: float | None, prices: Mapping[Step, int]) -> dict[Step, int]:
    return {} if rate is None else {step: int(price * rate) for step, price in prices.items()}


def _prices(analysis: Analysis, steps: Sequence[Step]) -> Iterator[tuple[Step, int]]:
    """Yields the steps that may run again at a price, and the price of each in bytes moved."""
    for step in steps:
        if not isinstance(step, ChunkedLoss) and all(map(_may_run_again, ops_of(step))):
            if isinstance(step, Op) and step.spec.runs_again:
                continue
            moved = sum(map(_size, {v for v in (*step.ins, *step.outs) if not v.literal}))
            yield step, moved + sum(_jax.flops_of(op.eqn) for op in ops_of(step)) // FLOPS_PER_BYTE


def _may_run_again(op: Op) -> bool:
    if op.eqn.effects or op.name in COMMUNICATES or op.subs:
        return False
    return op.spec.runs_again or not (op.subs or op.spec.need in (rules.PROGRAM, rules.LEFT))


def _size(value: Value) -> int:
    return _jax.bytes_of(value.aval) if _jax.is_array(value.aval) else 0


# ---- candidates ----------------------------------------------------------------------------------


def _run(
    analysis: Analysis,
    block: Block,
    parts: Mapping[Block, Part],
    chosen: dict[Block, Chosen],
) -> Kept:
    """Returns how the blocks run for what was chosen to be kept."""
    steps = {b: [*checkpoints(analysis, p, chosen[b])] for b, p in parts.items()}
    last = _last(steps.get(block, ()), parts)
    if last is not None:
        # The backward pass begins with its values: it may as well keep them.
        steps[block] = [
            s for step in steps[block] for s in (last.steps if step is last else [step])
        ]
        chosen[block] = chosen[block]._replace(kept=chosen[block].kept | last.passing)
    return Kept(chosen, steps)


def _last(steps: Sequence[Step], parts: Collection[Block]) -> WholeCheckpoint | None:
    """Returns the last step that repeats matmuls, or None if a program inside comes after it."""
    for step in reversed(steps):
        if isinstance(step, WholeCheckpoint):
            return step
        if isinstance(step, Op) and any(sub.program in parts for sub in step.subs):
            return None
    return None


def _estimate(
    analysis: Analysis,
    block: Block,
    kept: Kept,
    prices: Mapping[Block, Mapping[Step, int]],
) -> Estimate:
    total = peak = moved = 0
    mine = kept.chosen[block].kept if block in kept.chosen else ()
    for step in kept.steps.get(block, block.ops):
        if isinstance(step, WholeCheckpoint):
            inside = [*_inside(step)]
            total += sum(kept_bytes(analysis, v) for s in inside for v in s.outs if v in mine)
            peak = max(peak, total + sum(kept_bytes(analysis, v) for v in step.passing))
            repeats = (s for s in inside if kept.chosen[block].repeats(s))
            moved += sum(prices[block][s] for s in repeats)
            continue
        for s in _inside(step):
            total += sum(kept_bytes(analysis, v) for v in s.outs if v in mine)
        if not isinstance(step, Op):
            continue
        for sub in step.subs:
            turns = turns_of(step.eqn)
            one = _estimate(analysis, sub.program, kept, prices)
            peak = max(peak, total + one.kept * (turns - 1) + one.peak)
            total, moved = total + one.kept * turns, moved + one.moved * turns
    return Estimate(total, max(peak, total), moved)


def _inside(step: Step) -> Iterator[Step]:
    """Yields the steps of a checkpoint, or a step alone."""
    if isinstance(step, Checkpoint):
        for one in step.steps:
            yield from _inside(one)
    else:
        yield step
