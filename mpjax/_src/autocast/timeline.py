"""The memory of a training step over time, as far as the plan decides it.

While the backward pass of a step runs, memory contains what was kept up to there, what its group
has computed again, and cotangents. Compilers fuse elementwise operations and sums, so a cotangent
is written only where another operation, such as a matmul, reads or writes its value; a matmul
reads it in 16 bits. It exists between the first and the last reader of the value. That of a
parameter is its gradient: an optimizer reads it at once, unless the parameter is read elsewhere
too, as embeddings are that also compute the logits.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from mpjax._src.autocast.schedule import Step, needs, ops_of
from mpjax._src.autocast.sizes import stored_bytes, total_kept
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax, rules
from mpjax._src.base.higher_order import turns_of
from mpjax._src.program.graph import Block, Op, Value

# What compilers fuse with its neighbors: elementwise operations, moves, and sums. Not matmuls, nor
# programs inside and kernels.
FUSIBLE = {rules.FULL, rules.FOLLOW, rules.MOVE, rules.COMPARE}

# The price of computing each result of a step again, in bytes moved.
Prices = Mapping[Step, Mapping[Value, int]]


class Group(Protocol):
    """Steps that run again together: the values that they compute again, and store until then."""

    @property
    def again(self) -> frozenset[Value]: ...
    @property
    def passing(self) -> frozenset[Value]: ...


class Order(NamedTuple):
    """What a block keeps, and its steps in order, each with its group, if it runs again."""

    kept: frozenset[Value]  # the values that it keeps
    steps: Sequence[tuple[Step, Group | None]]
    prices: Prices  # the prices of those that may run again


class Moment(NamedTuple):
    """A step, or a program inside, in the order of the forward pass."""

    kept: int  # the bytes that it keeps from the forward pass on
    again: int = 0  # the bytes that it keeps once it has run again, until its backward pass
    beside: int = 0  # the bytes that exist in addition while it runs, forward or backward
    # The bytes that are moved to compute its values again, with FLOPs in bytes, or to keep them.
    moved: int = 0
    group: Group | None = None  # the steps with which it runs again, if they compute matmuls again


def moments(analysis: Analysis, block: Block, orders: Mapping[Block, Order]) -> Iterator[Moment]:
    """Yields what each step of a block keeps and moves, in order."""
    kept, steps, prices = orders.get(block) or Order(
        frozenset(), [(op, None) for op in block.ops], {}
    )
    made = {v for step, _ in steps for v in step.outs}
    # A step may stand twice: operations on constants are repeated in each group.
    fused = [(step, is_fused(step)) for step, _ in steps]
    cotangents = _cotangents(analysis, fused, made, block.outvars)
    for (step, group), (_, inside), back in zip(steps, fused, cotangents, strict=True):
        passing = group.passing if group else frozenset[Value]()
        size, again = (total_kept(analysis, s.intersection(step.outs)) for s in (kept, passing))
        repeated = group.again.intersection(step.outs) if group else ()
        moved = sum(price for v, price in prices.get(step, {}).items() if v in repeated)
        if not inside:
            # What it reads and writes, and what it reads again, exist as well.
            there = made & {*step.ins, *step.outs} - kept - passing
            read = made & {*needs(analysis, step)} - kept - passing
            back += sum(_narrow(analysis, v) for v in read)
            back = max(back, sum(stored_bytes(analysis, v) for v in there))
        yield Moment(size, again, back, moved, group)
        for op, sub in ((step, sub) for sub in step.subs) if isinstance(step, Op) else ():
            turns, within = turns_of(op.eqn), [*moments(analysis, sub.program, orders)]
            total, moved = sum(m.kept for m in within), sum(m.moved for m in within)
            # What a loop keeps is copied to a stack and back: matmuls read and write no slices.
            moved += 4 * total if op.inside.loop else 0
            if total or moved:
                yield Moment(total * turns, 0, back + peak(within) - total, moved * turns)


def peak(timeline: Iterable[Moment]) -> int:
    """Returns the most bytes that exist at any time, of those that the plan decides."""
    total = again = most = 0
    group = None
    for moment in timeline:
        again = moment.again + (again if moment.group is group else 0)
        group, total = moment.group, total + moment.kept
        most = max(most, total + again + moment.beside)
    return most


def relaxed(timeline: Sequence[Moment], budget: float) -> Sequence[Moment]:
    """Returns moments of which groups keep their values instead, as many as the budget allows.

    The last ones first: the backward pass begins with them, and their values are the first to go.
    """
    for group in reversed(dict.fromkeys(m.group for m in timeline if m.group)):
        keeps = [Moment(m.kept + m.again, 0, m.beside) if m.group is group else m for m in timeline]
        timeline = keeps if peak(keeps) <= budget else timeline
    return timeline


def is_fused(step: Step) -> bool:
    """Returns whether compilers fuse a step with its neighbors, so that little is written."""
    return all(
        all(is_fused(inner) for sub in op.subs for inner in sub.program.ops)
        if op.subs and not op.inside.loop
        else op.spec.need in FUSIBLE
        for op in ops_of(step)
    )


# ---- cotangents ----------------------------------------------------------------------------------


def _cotangents(
    analysis: Analysis,
    steps: Sequence[tuple[Step, bool]],
    made: set[Value],
    outs: Iterable[Value],
) -> Iterator[int]:
    """Yields the bytes of the cotangents that exist while the backward pass of each step runs.

    Each step comes with whether it is fused with its neighbors. ``made`` is what the steps compute,
    and ``outs`` what the block returns.
    """
    last = {v: i for i, (step, _) in enumerate(steps) for v in step.ins}
    last.update(dict.fromkeys(outs, len(steps)))
    written = {v for step, fused in steps if not fused for v in (*step.ins, *step.outs)}
    read = written.union(v for v in last if v not in made)
    floats = {v for v in read & {*last} if v.is_f32 and v.const is None and not v.literal}
    size = {v: _narrow(analysis, v) if v in made else stored_bytes(analysis, v) for v in floats}
    alive: set[Value] = set()
    for i, (step, fused) in enumerate(steps):
        ends = {v for v in step.ins if last[v] == i}
        now = alive | floats.intersection((*step.outs, *step.ins))
        # A fused operation writes the cotangents of its operands over those of its results.
        yield sum(size[v] for v in (now - ends if fused else now))
        alive = now - ends


def _narrow(analysis: Analysis, value: Value) -> int:
    """Returns the bytes of a value as a matmul reads it, on one device."""
    stored = stored_bytes(analysis, value)
    return min(stored, 2 * _jax.size_of(_jax.shard_shape(value.aval))) if value.is_f32 else stored
