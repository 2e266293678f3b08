"""What is kept for the backward pass: the cheapest values from which it computes the others.

They are a minimum cut (`mincut`) between the values that may not be computed again and those that
derivatives read.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from mpjax._src.autocast.schedule import Step, needs, ops_of, runs_once
from mpjax._src.autocast.sizes import kept_bytes
from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import rules
from mpjax._src.planner.mincut import cheapest_cut
from mpjax._src.program.graph import Op, Value


class Part(NamedTuple):
    """The steps of a block, for which the kept values are chosen."""

    steps: Sequence[Step]  # the steps on which results or effects depend
    results: Sequence[Value]  # the results of the block
    alive: Collection[Value]  # the arguments that are in memory anyway
    in_loop: bool  # whether the block is the body of a loop, or inside one


def live(steps: Sequence[Step], results: Sequence[Value]) -> Sequence[Step]:
    """Returns the steps on which results or effects depend.

    A checkpoint has cotangents for all that it computes, and would run matmuls with those zeros.
    """
    needed = {*results}
    live: list[Step] = []
    for step in reversed(steps):
        acts = isinstance(step, Op) and bool(step.eqn.effects)
        if acts or not needed.isdisjoint(step.outs):
            live.append(step)
            needed.update(step.ins)
    return live[::-1]


class Chosen(NamedTuple):
    """What is kept of some steps, and what is computed again."""

    again: frozenset[Value]  # the values to compute again
    kept: frozenset[Value]  # the values to keep
    priced: Collection[Step] = ()  # the steps that may run again although that is not free

    def repeats(self, step: Step) -> bool:
        """Returns whether a step runs again although that is not free."""
        return step in self.priced and not self.again.isdisjoint(step.outs)


def choose(
    analysis: Analysis,
    part: Part,
    kinds: Mapping[Value, str] = MappingProxyType({}),
    costs: Mapping[Step, Mapping[Value, int]] = MappingProxyType({}),
    there: Collection[Value] = (),
) -> Chosen:
    """Chooses what is kept of some steps: what costs the least, in bytes.

    ``kinds`` has the kind of code in which values would be kept, ``costs`` the cost of each result
    of the steps that may run again although that is not free, and ``there`` further values in
    memory.
    """
    steps = part.steps
    again_too = {step for step in steps if step in costs or runs_again(analysis, step)}
    producer = {v: step for step in steps for v in step.outs}
    number = {v: i for i, v in enumerate(dict.fromkeys([*_read(steps), *producer]))}
    # To compute a result again, each operand is kept or computed again: an edge from each.
    edges = [
        (number[v], number[out])
        for step in steps
        if step in again_too
        for out in step.outs
        for v in (*step.ins, *_siblings(step, out))
        if v in number
    ]
    # Arguments, and what must not run twice, are there without being computed again.
    fixed = [
        number[v]
        for v in number
        if v not in producer or v in analysis.once or producer[v] not in again_too
    ]
    needed = {v for step in steps for v in needs(analysis, step) if v in number}
    weights = [
        0 if v in part.alive or v in there else kept_bytes(analysis, v, kinds.get(v))
        for v in number
    ]
    prices = {number[v]: price for each in costs.values() for v, price in each.items()}
    # Of sets with as many bytes, that of the fewest arrays, above all of those no matmul reads:
    # a matmul's operand is written anyway.
    operands = {v for s in steps for op in ops_of(s) if op.spec.need == rules.HALF for v in op.ins}
    ties = {i: 1 if v in operands else 4 for v, i in number.items()}
    cut = cheapest_cut(weights, edges, fixed, [number[v] for v in needed], prices, ties)
    later = _crosses(analysis, steps, kinds, again_too)
    chosen = [v for v in producer if number[v] in cut or v in later]
    kept = frozenset(v for v in chosen if weights[number[v]] > 0 or v in there)
    return keeping(analysis, part, kept, costs.keys())


def keeping(
    analysis: Analysis, part: Part, kept: frozenset[Value], priced: Collection[Step]
) -> Chosen:
    """Returns what is computed again if some values are kept: what needed ones are made of."""
    producer = {v: step for step in part.steps for v in step.outs}
    again: set[Value] = set()
    todo = [v for step in part.steps for v in needs(analysis, step)]
    while todo:
        value = todo.pop()
        if value in producer and value not in kept and value not in (analysis.once | again):
            again.add(value)
            step = producer[value]
            todo += step.ins if step in priced or runs_again(analysis, step) else ()
    return Chosen(frozenset(again), kept, priced)


def _siblings(step: Step, result: Value) -> Collection[Value]:
    """Returns the results of a step of which it computes another one."""
    return work_of(step, result).reads.intersection(step.outs) if len(step.outs) > 1 else ()


class Work(NamedTuple):
    """What computes one result of a step, from its operands and its other results."""

    ops: frozenset[Op]  # the operations
    reads: frozenset[Value]  # what they read


def work_of(step: Step, result: Value) -> Work:
    """Returns what computes one result of a step."""
    producer = {v: op for op in ops_of(step) for v in op.outs}
    ops: set[Op] = set()
    reads: set[Value] = set()
    todo = [result]
    while todo:
        value = todo.pop()
        op = producer.get(value)
        if op is None or (value in step.outs and value is not result):
            reads.add(value)
        elif op not in ops:
            ops.add(op)
            todo += [v for v in op.ins if not v.literal]
    return Work(frozenset(ops), frozenset(reads))


def _read(steps: Sequence[Step]) -> Iterator[Value]:
    return (v for step in steps for v in step.ins if not v.literal)


def _crosses(
    analysis: Analysis,
    steps: Sequence[Step],
    kinds: Mapping[Value, str],
    again_too: Collection[Step],
) -> set[Value]:
    """Returns the values that are computed before a nested program and used after it.

    A program inside a checkpoint would run twice, and effects are not possible there.
    """
    level: dict[Value, int] = {}
    crossing: set[Value] = set()
    for step in steps:
        here = max((level.get(v, 0) for v in step.ins), default=0)
        used = {*needs(analysis, step), *(step.ins if step in again_too else ())}
        crossing |= {v for v in used if level.get(v, here) < here}
        level |= dict.fromkeys(step.outs, here + stands_alone(analysis, step, kinds))
    return crossing


def stands_alone(
    analysis: Analysis, step: Step, kinds: Mapping[Value, str] = MappingProxyType({})
) -> bool:
    """Returns whether a step must run once: a nested program, or one with effects."""
    if kinds and runs_once(analysis, step):
        return True
    return isinstance(step, Op) and (
        analysis.rulings[step].rule == "program" or bool(step.eqn.effects)
    )


def runs_again(analysis: Analysis, step: Step) -> bool:
    """Returns whether a step is an op that costs nothing worth counting to run a second time."""
    if not isinstance(step, Op) or stands_alone(analysis, step):
        return False
    return step.spec.runs_again


def copies(analysis: Analysis, part: Part) -> set[Op]:
    """Returns the operations on constants and parameters alone, which each group repeats."""
    there = {*part.alive}
    copied: set[Op] = set()
    for step in part.steps:
        alone = all(v.literal or analysis.is_raw(v) or v in there for v in step.ins)
        if not analysis.once.isdisjoint(step.outs):
            continue
        if isinstance(step, Op) and alone and len(step.outs) == 1 and runs_again(analysis, step):
            copied.add(step)
            there.update(step.outs)
    return copied
