"""The storage sweep of a plan: the values kept for the backward pass, and those it recomputes."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

from mpjax._src.autocast import chains, peepholes
from mpjax._src.autocast.facts import EXPONENTIALS
from mpjax._src.autocast.graph import Block, Op, Value, is_steady
from mpjax._src.autocast.islands import (
    Flow,
    Island,
    bound,
    flow_of,
    is_free,
    large_float32,
    make_again,
)
from mpjax._src.autocast.lattices import Analysis, Choices, Marks, Rulings, Storage
from mpjax._src.autocast.lean import checkpoints
from mpjax._src.autocast.steps import connected, in_order
from mpjax._src.autocast.views import is_view
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.higher_order import NONE, THEIRS
from mpjax._src.policy.policy import CHOICES

# The goals of the choice: few bytes moved; few bytes kept; the peepholes alone, inside a checkpoint
# of the user's; nothing, if there is no backward pass or the program runs as it was traced.
FAST, LEAN, PEEPHOLES, WRITTEN = *CHOICES["storage"].values, "peepholes", "written"

# The goals inside primitives with programs, where they differ from those around them.
INSIDE = {THEIRS: PEEPHOLES, NONE: WRITTEN}


def store(block: Block, analysis: Analysis, by: str, fuse: bool) -> Analysis:
    """Picks the steps of a program, and the values that it keeps for the backward pass.

    Args:
        block: The program.
        analysis: What is known about its values.
        by: The goal.
        fuse: Whether attention runs in the fused kernel of the device.

    Returns:
        The tables: more is computed in float32, and there are marks, steps and kept values.
    """
    planned = dataclasses.replace(
        analysis,
        rulings=Rulings(analysis.rulings),
        small={*analysis.small},
        choices=Choices(analysis.choices),
        stored=Storage(analysis.stored),
        marks=Marks(),
        steps={},
        kept=set(),
    )
    _store(block, planned, by, {*block.invars}, fuse)
    return planned


def _store(block: Block, analysis: Analysis, by: str, alive: Collection[Value], fuse: bool) -> None:
    """Picks the steps of every block, and the values that it keeps for the backward pass.

    Args:
        block: The block.
        analysis: What is known about its values.
        by: The goal.
        alive: The arguments of the block that are in memory anyway.
        fuse: Whether attention runs in the fused kernel of the device.
    """
    for op in block.ops:
        if analysis.rulings[op].rule == "program":
            for sub in op.subs:
                changing = {place for _, place in sub.carry}
                inner = [
                    v
                    for i, (v, index) in enumerate(zip(sub.program.invars, sub.ins, strict=True))
                    if op.ins[index] in alive and i not in changing
                ]
                goal = by if by == WRITTEN else INSIDE.get(op.inside.storage, by)
                _store(sub.program, analysis, goal, {*inner}, fuse)
    flow = flow_of(block, analysis, fuse)
    linked = chains.links(flow)
    islands: Any = CHOOSE[by](flow, linked)
    chosen = [*dict.fromkeys(islands.values())]
    for island in chosen:
        _leave_small(island, flow)
    stands_for = flow.marks.stands_for
    links = [*_groups(flow, islands, lambda op: stands_for.get(op, op) in linked)]
    steps: Any = flow.ops
    for more in [chains.islands(links, flow), []] if by in (FAST, PEEPHOLES) else [[]]:
        # If islands depend on each other in a cycle, none is used.
        together = [*chosen, *more]
        units = in_order(flow.ops, [island.ops for island in together]) if together else None
        if units:
            islands = {op: island for island in together for op in island.ops}
            steps = [islands.get(unit[0], unit[0]) for unit in units]
            break
    for ops in links:
        chains.unrounded(ops, flow, by != WRITTEN and ops[0] not in islands)
    for step in steps:
        if isinstance(step, Island) and not step.axes:
            chains.unrounded(step.ops, flow, differentiated=False)
    if by == LEAN:
        steps, kept = checkpoints(analysis, steps, block.outvars, alive)
        analysis.kept.update(kept)
    analysis.steps[block] = tuple(steps)


def _islands(flow: Flow, links: Collection[Op]) -> "dict[Op, Island]":
    """Groups the ops of a block into islands, and drops islands that save no memory.

    Args:
        flow: The flow of the block.
        links: The half ops that islands take in.
    """
    special = peepholes.find(flow)
    found = dict(special)
    for ops in _groups(flow, special, functools.partial(_recomputable, flow.analysis)):
        group = Island(ops)
        bound(group, flow)
        while halves := _halves_inside(group, flow, links):
            group.ops += halves
            bound(group, flow)
        group.barrier = any(_is_dear(flow.analysis, op) for op in group.ops)
        # Outside of loops, XLA fuses arithmetic into its readers by itself.
        worthwhile = group.barrier or flow.block.in_loop
        if not (worthwhile and _from_half(group, flow)):
            continue
        group.sloped = group.barrier and _is_sloped(group, flow)
        if not group.sloped:
            _look_behind_views(group, flow)
        if _saves_memory(flow.analysis, group):
            group.tail = _tail(group, flow)
            found |= dict.fromkeys(group.ops, group)
    for group in dict.fromkeys(found.values()):
        if not (group.axes or group.sloped):
            make_again(group, found, flow)
    return found


def _groups(flow: Flow, special: Collection[Op], fits: Callable[[Op], bool]) -> Iterable[list[Op]]:
    """Returns groups of connected ops that fit, such that no two groups depend on each other.

    The depth of an op is the number of ungrouped ops before it on the longest path. If all of its
    readers are deeper, it gets their depth. Connected ops of the same depth form a group: a path
    that leaves a group passes an ungrouped op, and everything after it is deeper.
    """
    sources = {op: [flow.producer[v] for v in op.ins if v in flow.producer] for op in flow.ops}
    inside: set[Op] = set()
    depth: dict[Op, int] = {}
    for op, before in sources.items():
        depth[op] = max((depth[s] + (s not in inside) for s in before), default=0)
        begun = _starts(flow.analysis, op) or not inside.isdisjoint(before)
        if begun and op not in special and fits(op):
            inside.add(op)
    for op in reversed(flow.ops):
        after = [depth[r] for v in op.outs for r in flow.readers.get(v, ()) if r is not None]
        if op in inside and after:
            depth[op] = max(depth[op], min(after))
    ops = [op for op in flow.ops if op in inside]
    number = {op: i for i, op in enumerate(ops)}
    near = [
        (number[s], number[op])
        for op in ops
        for s in (op, *sources[op])
        if s in inside and depth[s] == depth[op]
    ]
    return ([ops[i] for i in group] for group in connected(near))


def _rounded_islands(flow: Flow) -> "dict[Op, Island]":
    """Returns the islands that keep fewer bytes than derivatives would, by rounding to half."""
    # Taking in half ops would move the cut to their operands.
    islands = _islands(flow, links=())
    found = {op: island for op, island in islands.items() if island.axes or island.rounded}
    for island in found.values():
        island.wide = set()  # a checkpoint around it would keep them in float32
    return found


CHOOSE: dict[str, Callable[[Flow, Collection[Op]], "dict[Op, Island]"]] = {
    FAST: _islands,
    LEAN: lambda flow, _: _rounded_islands(flow),
    PEEPHOLES: lambda flow, _: peepholes.find(flow),
    WRITTEN: lambda flow, _: {},
}


def _recomputable(analysis: Analysis, op: Op) -> bool:
    if is_free(analysis, op):
        return False
    cheap = op.spec.cost != rules.NEVER and analysis.rulings[op].rule in (
        "full",
        "follow",
        "layout",
        "neutral",
        "cast",
    )
    floats = any(v.is_f32 for v in op.ins)
    return cheap and floats and analysis.choices[op].compute in (FLOAT32, None)


def _starts(analysis: Analysis, op: Op) -> bool:
    """Returns whether an island may begin here: not at constants or parameters alone."""
    return any(v.is_f32 and not analysis.is_raw(v) and v.const is None for v in op.ins)


def _halves_inside(group: Island, flow: Flow, links: Collection[Op]) -> list[Op]:
    """Returns half ops whose result an island alone reads, if it then keeps no more bytes.

    They compute in float32 there: ``h * scale`` before a gelu is neither rounded nor out of range.
    """
    members, found = set(group.ops), []
    kept_bytes = functools.partial(chains.kept_bytes, flow.analysis)
    for value in group.inputs:
        op = flow.producer.get(value)
        if (
            op is None
            or flow.choices[op].compute not in HALVES
            or op.spec.need != rules.FOLLOW
            or flow.rulings[op].forced
        ):
            continue
        varying = [v for v in op.ins if v.const is None]
        beside = all(v in group.inputs for v in varying)
        more = [v for v in chains.not_far_smaller(varying, value.size) if v not in group.inputs]
        instead = op in links and kept_bytes(more) <= kept_bytes([value])
        if (beside or instead) and members.issuperset(flow.readers[value]):
            found.append(op)
    return found


def _from_half(group: Island, flow: Flow) -> bool:
    """Changes an island so that its large inputs can be kept in half.

    If one is float32 (a matmul's float32 result, such as attention scores), the linear operations
    that follow it, and scalings, are left out of the island. They save nothing, and their results
    are better rounded than their operands (``x - max(x)`` before an ``exp``: large weights are
    close to 0).
    """
    large = large_float32(group, flow)
    if not large:
        return True
    if any(flow.rulings[op].forced == "full" for op in group.ops):  # the user asked for float32
        return False
    inside: set[Value] = {v for op in group.ops for v in op.outs}
    kept, left = [], []
    for op in group.ops:
        of_large = not large.isdisjoint(op.ins)
        linear = op.spec.linear or (of_large and _scales(op))
        if linear and not any(v in inside for v in op.ins):
            inside.difference_update(op.outs)
            large.update(op.outs if of_large else ())
            left.append(op)
        else:
            kept.append(op)
    group.ops = kept
    bound(group, flow)
    group.wide = {
        v for op in left for v in op.ins if v in group.inputs and flow.stored[v].dtype in HALVES
    }
    group.rounded = large_float32(group, flow)
    return group.half is not None and _stand_rounding(group, flow)


def _leave_small(group: Island, flow: Flow) -> None:
    """Leaves parameters in float32 that are far smaller than the arrays inside, such as a bias.

    A mean that the island keeps contains them unrounded, so what it recomputes has to as well.
    """
    least = max((v.size for op in group.ops for v in op.outs), default=0) // chains.FAR_SMALLER
    group.rounded -= {v for v in group.rounded if flow.analysis.facts[v].given and v.size <= least}


def _scales(op: Op) -> bool:
    """Returns whether an op multiplies an array by a constant or a single number.

    The derivative of a number that is no constant reads the array. That costs less than an error
    that the number multiplies.
    """
    by = op.ins[1:] if op.name == "div" else op.ins if op.spec.multiplies else []
    return any(v.entries is not None or v.is_one for v in by)


def _look_behind_views(group: Island, flow: Flow) -> None:
    """Moves views of inputs into an island, so that it keeps the arrays that they are views of.

    Repeating a view costs nothing, but keeping one takes memory in its own layout. A TPU pads the
    last axis of ``(batch, height, width, groups, 4)``, from a group norm, to 128 entries.
    """
    values = [*group.inputs]
    for value in values:  # grows
        op = flow.producer.get(value)
        if op is not None and is_view(op):
            group.views.append(op)
            values += op.ins
            if value in group.rounded:
                group.rounded = {*group.rounded, *op.ins} - {value}
    group.views = sorted({*group.views}, key=lambda op: op.index)
    bound(group, flow)


def _stand_rounding(group: Island, flow: Flow) -> bool:
    """Returns whether the derivatives of an island may be computed from its rounded inputs."""
    known = flow.analysis
    if any(known.wants[v].unrounded or known.is_beyond(v, group.half) for v in group.rounded):
        return False
    if any(known.facts[v].linear for v in group.inputs):  # else results would wait for tangents
        return False
    touched = set(group.rounded)
    for op in group.ops:
        reads = [v for v in op.ins if v in touched]
        if not all(_stands_rounding(op, v, flow) for v in reads):
            return False
        if reads:
            touched.update(v for v in op.outs if v not in group.sums)  # sums are kept unrounded
    return True


def _stands_rounding(op: Op, value: Value, flow: Flow) -> bool:
    """Returns whether the derivative of an op may be computed from a rounded operand."""
    bounded = flow.analysis.facts[value].negative and op.name in EXPONENTIALS
    return is_steady(op, value) or bounded


def _is_sloped(group: Island, flow: Flow) -> bool:
    """Returns whether an island is one half array in, one out, and its slope fits into half."""
    if len(group.inputs) != 1 or len(group.results) != 1:
        return False
    (operand,), (result,) = group.inputs, group.results
    members = set(group.ops)
    return (
        flow.stored[operand].dtype == group.half
        and result in group.in_half
        and operand.aval.shape == result.aval.shape
        and not group.sums
        and not any(flow.rulings[op].forced == "full" for op in group.ops)
        and all(reader in members for reader in flow.readers[operand])
        and all(
            op.spec.steady_of(op.params) or op.spec.linear or _is_scaling(op) for op in group.ops
        )
    )


def _tail(group: Island, flow: Flow) -> list[Op]:
    """Returns the activation after a norm: elementwise operations on its result alone.

    The cotangent of the norm's result is expensive, because it contains the activation's slope, and
    it is read twice: by the sums of the norm's gradient, and elementwise. XLA therefore writes it
    to memory, best in half, as with casts placed by hand.
    """
    for op in reversed(group.ops):
        normed = op.outs[0]
        if op.spec.need == rules.FOLLOW and any(_spreads(v, normed, flow) for v in op.ins):
            tail = _activation(_scaled(normed, group, flow), group, flow)
            dear = any(o.spec.cost == rules.DEAR for o in tail)
            if group.half is None or flow.analysis.facts[normed].linear:
                return []
            return tail if dear and flow.analysis.may_be_rounded(normed) else []
    return []


def _scaled(value: Value, group: Island, flow: Flow) -> Value:
    """Returns what a chain of scalings alone makes of a value.

    A slope in half that contained their factors might be too small for float16.
    """
    readers = flow.readers.get(value, ())
    op = readers[0] if len(readers) == 1 else None
    if op is not None and op in group.ops and _scales(op):
        return _scaled(op.outs[0], group, flow)
    return value


def _activation(operand: Value, group: Island, flow: Flow) -> list[Op]:
    """Returns the elementwise operations of an island on one value, if one result is read."""
    made, known = {operand}, {v for op in group.free for v in op.outs if v.const is not None}
    tail: list[Op] = []
    for op in group.ops:
        alone = all(v in made or v in known or v.literal for v in op.ins)
        alike = len(op.outs) == 1 and op.outs[0].aval.shape == operand.aval.shape
        if alone and alike and op.spec.need in (rules.FOLLOW, rules.FULL) and made & {*op.ins}:
            tail.append(op)
            made.update(op.outs)
    ends = [op for op in tail if not {*flow.readers.get(op.outs[0], ())} <= {*tail}]
    returned = any(flow.analysis.wants[v].returned for op in ends for v in op.outs)
    return tail if ends == tail[-1:] and not returned else []


def _spreads(operand: Value, value: Value, flow: Flow) -> bool:
    """Returns whether an operand varies and was smaller than a result before it was broadcast."""
    op = flow.producer.get(operand)
    while op is not None and op.name == "broadcast_in_dim" and operand.const is None:
        operand = op.ins[0]
        op = flow.producer.get(operand)
    return operand.is_f32 and operand.const is None and operand.size < value.size


def _is_scaling(op: Op) -> bool:
    return op.name == "div" and op.ins[1].const is not None


def _is_dear(analysis: Analysis, op: Op) -> bool:
    large = any(v.is_f32 and v not in analysis.small for v in op.outs)
    inner = [o for sub in op.subs for o in sub.program.walk() if o.has_float32]
    inner = [o for o in inner if not o.subs] if op.subs else [op]
    return large and any(o.spec.cost != rules.FUSED for o in inner)


def _saves_memory(analysis: Analysis, group: Island) -> bool:
    """Compares the bytes that derivatives would save with those that the island keeps."""
    saved: set[Value] = set()
    for op in group.ops:
        varying = [v for v in op.ins if v.is_f32 and v.const is None]
        if op.spec.linear:
            continue
        if op.spec.saves == rules.OTHERS:
            saved.update(varying if len(varying) > 1 else ())
        else:
            saved.update((*varying, *op.outs))
    kept = (
        _bytes(analysis, (v for v in group.inputs if not analysis.is_raw(v)))
        - _bytes(analysis, group.rounded) // 2
    )
    halves = any(
        analysis.stored[v].dtype in HALVES and v not in analysis.small
        for v in group.inputs
        if v.is_f32
    )
    if group.rounded:  # a loss: its backward pass follows at once
        halves = any(v.is_f32 and v not in analysis.small and v.size > 1 for v in group.results)
    return halves and kept < _bytes(analysis, saved)


def _bytes(analysis: Analysis, values: Iterable[Value]) -> int:
    return sum(
        v.size
        * (
            analysis.stored[v].dtype.itemsize
            if analysis.stored[v].dtype is not None
            else v.aval.dtype.itemsize
        )
        for v in values
        if v.const is None and v.is_f32 and v not in analysis.small
    )
