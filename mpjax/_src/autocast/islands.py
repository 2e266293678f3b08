"""Islands: float32 operations that run together, and that the backward pass recomputes.

The operations of a gelu or a layer norm are float32, and its derivative reads the values in
between. Stored, they take several times the memory of the half input. An island keeps its inputs
and the results of its reductions, and recomputes the rest.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.autocast.graph import Block, Op, Value
from mpjax._src.autocast.lattices import Analysis
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT16, FLOAT32, HALVES


@dataclasses.dataclass(eq=False)
class Flow:
    """The data flow of a block.

    Attributes:
        block: The block.
        analysis: What is known about its values.
        producer: For each value, the op that computes it.
        readers: For each value, the ops that read it; None stands for the block's results.
        free: The ops that make constants or cast booleans to floats, by their results.
        fuse: Whether attention runs in the fused kernel of the device.
        ops: The ops that run, in order: those of the block, but for some that `replace` replaces.
    """

    block: Block
    analysis: Analysis
    producer: dict[Value, Op]
    readers: "dict[Value, list[Op | None]]"
    free: dict[Value, Op]
    fuse: bool = False

    def __post_init__(self) -> None:
        tables = self.analysis
        self.rulings, self.choices, self.stored = tables.rulings, tables.choices, tables.stored
        self.marks, self.ops = tables.marks, [*self.block.ops]

    @functools.cached_property
    def constants(self) -> dict[Value, Any]:
        """The arrays that the block closes over."""
        return {v: x for v, x in self.block.consts if not isinstance(x, jax.core.Tracer)}

    def replace(self, op: Op, ins: Sequence[Value], outs: Sequence[Value]) -> Op:
        """Returns an op that runs in place of another, and reads or computes other values."""
        new = dataclasses.replace(op, ins=tuple(ins), outs=tuple(outs))
        self.ops[op.index] = new
        marks = self.marks
        marks.stands_for[new] = marks.stands_for.get(op, op)
        tables: tuple[dict[Op, Any], ...] = (self.rulings, self.choices, marks.centred)
        for table in (*tables, marks.repeats, marks.online, marks.attention):
            if op in table:
                table[new] = table[op]
        if op in marks.steady:
            marks.steady.add(new)
        self.producer |= dict.fromkeys(outs, new)
        for v in dict.fromkeys((*op.ins, *ins)):
            readers = [r for r in self.readers.get(v, []) if r is not op or v in ins]
            readers = [new if r is op else r for r in readers]
            self.readers[v] = readers if v not in ins or new in readers else [*readers, new]
        return new


def flow_of(block: Block, analysis: Analysis, fuse: bool = False) -> Flow:
    """Returns the data flow of a block; ``fuse`` is the attribute of `Flow`."""
    readers: dict[Value, list[Op | None]] = {v: [None] for v in block.outvars}
    for op in block.ops:
        for v in dict.fromkeys(op.ins):
            readers.setdefault(v, []).append(op)
    producer = {v: op for op in block.ops for v in op.outs}
    free = {op.outs[0]: op for op in block.ops if is_free(analysis, op)}
    return Flow(block, analysis, producer, readers, free, fuse)


@dataclasses.dataclass(eq=False)
class Island:
    """Ops that run together, and that the backward pass recomputes."""

    ops: list[Op] = dataclasses.field(default_factory=list)
    free: list[Op] = dataclasses.field(default_factory=list)  # run before the others, at no cost
    views: list[Op] = dataclasses.field(default_factory=list)  # views of inputs, made inside
    inputs: list[Value] = dataclasses.field(default_factory=list)
    rounded: set[Value] = dataclasses.field(default_factory=set)  # inputs kept in half
    wide: set[Value] = dataclasses.field(default_factory=set)  # half inputs of float32 cotangents
    sums: list[Value] = dataclasses.field(default_factory=list)  # results of reductions, kept
    half: Any = None
    again: list[Op] = dataclasses.field(default_factory=list)  # compute inputs that are not kept
    tail: list[Op] = dataclasses.field(default_factory=list)  # the activation after a norm
    sloped: bool = False  # elementwise, and its slope is kept instead of its operand
    barrier: bool = False  # needed to keep XLA from saving the values inside
    axes: tuple[int, ...] = ()  # of a softmax: the axes of its sum, as the matmul sees them
    rate: float = 1.0  # of a softmax: the logarithm of the base of its exponential
    whole: bool = True  # of a softmax: its rows sum to 1
    moving: int = 0  # of a softmax: the number of differentiated inputs, which come first
    matmul: Op | None = None  # of a softmax: its matmul with values
    weights: list[Op] = dataclasses.field(default_factory=list)  # dropouts and reshapes before it
    fusion: Any = None  # of attention in a fused kernel: how it runs (`fusion`)
    in_half: set[Value] = dataclasses.field(default_factory=set)  # results read only in half
    results: list[Value] = dataclasses.field(default_factory=list)

    @property
    def given(self) -> list[Value]:
        """The inputs that it does not recompute itself."""
        made = {v for op in self.again for v in op.outs}
        return [v for v in self.inputs if v not in made]


def bound(group: Island, flow: Flow) -> None:
    """Finds the values that flow into and out of an island."""
    group.ops.sort(key=lambda op: op.index)
    members = set(group.ops)
    group.free = free_producers(group.ops, flow)
    run = (*group.free, *group.views, *group.ops)
    inside = {v for op in run for v in op.outs}
    read = (v for op in run for v in op.ins)
    group.inputs = [*dict.fromkeys(v for v in read if v not in inside and not v.literal)]
    halves = (flow.rulings[op].half for op in group.ops)
    group.half = next((half for half in halves if half is not None), None)
    group.sums = [
        v for op in group.ops if rules.REDUCES in op.spec.traits for v in op.outs if v.is_f32
    ]
    outside = {
        v: [r for r in flow.readers.get(v, ()) if r not in members]
        for op in group.ops
        for v in op.outs
    }
    group.results = [v for v, found in outside.items() if found]
    group.in_half = {
        v
        for v in group.results
        if v.is_f32
        and all(op is not None and flow.choices[op].compute in HALVES for op in outside[v])
    }


def large_float32(group: Island, flow: Flow) -> set[Value]:
    """Returns the float32 inputs of an island that it would be costly to keep.

    An argument came in float32, and its range is not known. Where it is only moved or broadcast, or
    a product with it may leave the range of float16 (`facts`), it is not rounded. Neither are rows
    that were looked up in one: a table may hold data as well as what was learned.
    """
    floats = (v for v in group.inputs if v.is_f32 and flow.stored[v].dtype == FLOAT32)
    large = {
        v
        for v in floats
        if not (
            flow.analysis.is_raw(v) or (v in flow.analysis.small) or v.is_one or v.const is not None
        )
    }
    return large - {v for op in group.ops for v in op.ins if _is_of_unknown_range(v, op, flow)}


def _is_of_unknown_range(value: Value, op: Op, flow: Flow) -> bool:
    fact = flow.analysis.facts[value]
    rows = fact.data and not fact.given
    moved = value.given or fact.spread
    beyond = moved or any(flow.analysis.is_beyond(out, FLOAT16) for out in op.outs)
    return flow.rulings[op].half == FLOAT16 and (rows or (fact.given and beyond))


def make_again(island: Island, makers: dict[Op, Island], flow: Flow) -> None:
    """Lets an island recompute inputs that elementwise operations of another island computed.

    An example is squeeze and excitation: the activation ``y`` in ``y * gate(mean(y))``, where a
    matmul lies between the two uses. The operands of ``y`` are kept anyway and are not larger.
    Reading them moves no more bytes, and ``y`` itself is neither written nor kept.
    """
    for value in [*island.inputs]:
        maker = makers.get(flow.producer[value]) if value in flow.producer else None
        if maker is None or maker is island or maker.sloped or maker.axes:
            continue
        ops, sources = _cone(value, maker, flow)
        read = {*flow.readers[value]} <= {*maker.ops, *island.ops}
        if not read or sum(v.size for v in sources if v.size >= value.size) > value.size:
            continue
        maker.results += [v for v in sources if v not in (*maker.inputs, *maker.results)]
        island.inputs += [v for v in sources if v not in island.inputs]
        island.again = [*dict.fromkeys([*island.again, *ops])]


def _cone(value: Value, island: Island, flow: Flow) -> "tuple[list[Op], list[Value]]":
    """Returns the ops of an island that compute a value from no smaller ones, and their inputs."""
    ops: set[Op] = set()
    read: dict[Value, None] = {}
    todo = [value]
    for v in todo:  # grows
        op = flow.producer.get(v)
        if op in island.ops and v.size == value.size:
            todo += op.ins if op not in ops else []
            ops.add(op)
        elif v in flow.free:
            todo += flow.free[v].ins
            ops.add(flow.free[v])
        elif not v.literal:
            read[v] = None
    return sorted(ops, key=lambda op: op.index), [*read]


def free_producers(members: list[Op], flow: Flow) -> list[Op]:
    """Returns the ops that make constants or cast booleans to floats; islands repeat them."""
    found: dict[Op, None] = {}
    todo = [v for op in members for v in op.ins]
    while todo:
        value = todo.pop()
        op = flow.free.get(value)
        if op is not None and op not in found and op not in members:
            found[op] = None
            todo += op.ins
    return sorted(found, key=lambda op: op.index)


def is_free(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op makes a constant or casts a boolean to a float, where it is read."""
    if not op.outs or not op.outs[0].is_f32:
        return False
    if op.name == "broadcast_in_dim":
        return op.outs[0].const is not None
    return (
        analysis.rulings[op].in_force == "cast"
        and getattr(op.ins[0].aval, "dtype", None) == np.bool_
    )


def tail_operand(island: Island) -> Value:
    """Returns the operand of the activation at the end of an island."""
    inside = {v for op in (*island.free, *island.tail) for v in op.outs}
    (operand,) = {v for op in island.tail for v in op.ins if not v.literal and v not in inside}
    return operand
