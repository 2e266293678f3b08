"""The order of the steps of a block, and the flow of values between them.

A step is an op, or a step of `steps`: each reads ``ins`` and computes ``outs``.
"""

import dataclasses
import graphlib
import heapq
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

from mpjax._src.autocast.flow import is_free
from mpjax._src.autocast.pools import keeps_positions
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax, rules
from mpjax._src.program.graph import Op, Value

Step = Any  # of `steps`, or an op


def connected(pairs: Iterable[tuple[int, int]]) -> Iterable[list[int]]:
    """Returns the groups of numbers that pairs connect, in order."""
    up: dict[int, int] = {}  # towards the number that represents the group, which has itself

    def group(i: int) -> int:
        while up[i] != i:
            up[i] = i = up[up[i]]  # halves the path
        return i

    for one, other in pairs:
        up.setdefault(one, one)
        up.setdefault(other, other)
        up[group(one)] = group(other)
    groups: dict[int, list[int]] = {}
    for i in sorted(up):
        groups.setdefault(group(i), []).append(i)
    return groups.values()


def ops_of(step: Any) -> Sequence[Op]:
    return [step] if isinstance(step, Op) else step.ops


def made_where_read(analysis: Analysis, step: Any) -> bool:
    """Returns whether an op computes its result separately in each dtype that is read."""
    if not isinstance(step, Op):
        return False
    ruling, from_float = analysis.rulings[step], bool(step.ins) and step.ins[0].is_f32
    if not step.outs or not step.outs[0].is_f32:
        return False
    widened = ruling.in_force == "cast" and from_float
    # Devices exchange a parameter in the dtype in which it is read.
    sent = ruling.rule == "layout" and step.outs[0].moved
    return widened or sent or is_free(analysis, step)


@dataclasses.dataclass(eq=False)
class StepFlow:
    """The flow of values between steps, except values that are computed where they are read."""

    steps: Sequence[Any]
    names: list[Any]
    made: dict[Value, Op]
    producer: dict[Value, int]
    last: dict[Value, int]  # the last step that reads a value


def flow_of(
    analysis: Analysis, steps: Sequence[Any], results: Sequence[Value], copied: Collection[Op] = ()
) -> StepFlow:
    """Returns the flow of values between steps, for some results.

    Ops in ``copied`` run wherever their results are read.
    """
    names = [_jax.common_stack([op.stack for op in ops_of(step)]) for step in steps]
    flow = StepFlow(steps, names, {}, {}, {})
    for i, step in enumerate(steps):
        if isinstance(step, Op) and (made_where_read(analysis, step) or step in copied):
            flow.made[step.outs[0]] = step
        else:
            flow.producer |= dict.fromkeys(step.outs, i)
    for i, step in enumerate(steps):
        flow.last |= dict.fromkeys(sources(flow, step.ins), i)
    flow.last |= dict.fromkeys(sources(flow, results), len(steps))
    return flow


def sources(flow: StepFlow, values: Iterable[Value]) -> Iterator[Value]:
    """Yields values, or the operands of those that are computed where they are read."""
    for value in values:
        if value in flow.made:
            yield from sources(flow, flow.made[value].ins)
        elif not value.literal:
            yield value


def _makers(flow: StepFlow, values: Iterable[Value]) -> Iterator[Op]:
    """Yields the ops that compute values where they are read, in order."""
    for value in values:
        if value in flow.made:
            yield from _makers(flow, flow.made[value].ins)
            yield flow.made[value]


def together(flow: StepFlow, a: int, b: int) -> tuple[list[Any], list[Value], list[Value]]:
    """Returns the steps from a to b as a separate program.

    Returns:
        The steps, after the operations from elsewhere that compute operands where they are read;
        the values that flow in; and the values that flow out.
    """
    inside = flow.steps[a:b]
    read = [v for step in inside for v in step.ins]
    # An operation from inside runs at its own place: its operand may be computed inside too.
    own = {*inside}
    steps = [*(op for op in dict.fromkeys(_makers(flow, read)) if op not in own), *inside]
    local = [v for step in inside for v in step.outs if a <= flow.producer.get(v, -1) < b]
    computed = set(local)
    inputs = [v for v in dict.fromkeys(sources(flow, read)) if v not in computed]
    return steps, inputs, [v for v in local if flow.last.get(v, -1) >= b]


def in_order(steps: Sequence[Any], groups: Sequence[Sequence[Any]]) -> list[Sequence[Any]] | None:
    """Sorts steps by their dependencies, with the steps of a group together and effects in order.

    Returns:
        The groups, and each other step alone; None if groups depend on each other in a cycle.
    """
    unit_of: dict[Any, Sequence[Any]] = {step: [step] for step in steps}
    unit_of |= {step: group for group in groups for step in group}
    producer = {v: step for step in steps for v in step.outs}
    # A unit is known by the place of its first step, since lists cannot be keys.
    first = {id(unit_of[step]): i for i, step in reversed([*enumerate(steps)])}
    waits: dict[int, set[int]] = {i: set() for i in first.values()}
    effect: Any = None
    for step in steps:
        before = [producer[v] for v in step.ins if v in producer]
        # Effects stay in the order of the program: each waits for the one before.
        if isinstance(step, Op) and step.eqn.effects:
            before += [] if effect is None else [effect]
            effect = step
        place = first[id(unit_of[step])]
        waits[place] |= {first[id(unit_of[b])] for b in before} - {place}
    sorter = graphlib.TopologicalSorter(waits)
    try:
        sorter.prepare()
    except graphlib.CycleError:
        return None
    ready: list[int] = []
    units = []
    while sorter.is_active():
        # Of the units that may run, the one that came first in the program.
        for place in sorter.get_ready():
            heapq.heappush(ready, place)
        place = heapq.heappop(ready)
        units.append(unit_of[steps[place]])
        sorter.done(place)
    return units


# ---- what derivatives read ----------------------------------------------------------------------


def needs(analysis: Analysis, step: Any) -> Iterator[Value]:
    """Yields the values that a step's derivative reads."""
    yield from _needs_of(step, analysis) if isinstance(step, Op) else step.needs


def _needs_of(op: Op, analysis: Analysis) -> Iterator[Value]:
    """Yields what the derivative of an op reads: masks, indices, and the values of its row."""
    # What a program's own backward pass reads is not known here: all of its operands, at most.
    if analysis.rulings[op].rule == "program":
        yield from (v for v in op.ins if not v.literal)
        return
    floats = [v for v in op.ins if v.is_f32 and v.const is None]
    if not floats or not any(v.is_f32 for v in op.outs) or analysis.marks.is_steady(op):
        return
    if rules.SCATTERS_BACK in op.spec.traits:
        yield from () if keeps_positions(op.eqn) else floats
        return
    saves, kinked = op.spec.saves, rules.KINKED in op.spec.traits
    yield from (v for v in op.ins if not v.is_f32 and not v.literal)
    # A kink compares its operand with its result again.
    if kinked or saves == rules.OPERANDS or (saves == rules.OTHERS and len(floats) > 1):
        yield from floats
    if kinked or saves == rules.RESULT or op.name == "div":
        yield from op.outs


def runs_once(analysis: Analysis, step: Any) -> bool:
    """Returns whether a step may not run again to find its derivative at codes.

    That of a matmul, a reduction or a pool does not need its result; other operations that are not
    computed twice might, and so do programs and kernels.
    """
    if not isinstance(step, Op):
        return bool(step.once)
    if step.spec.runs_again:
        return False
    reads_operands = step.spec.need == rules.HALF or not step.spec.traits.isdisjoint(
        (rules.REDUCES, rules.SCATTERS_BACK)
    )
    return not (reads_operands or step.spec.linear) or analysis.rulings[step].rule == "program"
