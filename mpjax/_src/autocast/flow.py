"""The data flow of a block: which op computes each value, and which ops read it."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpjax._src.autocast.tables import Analysis
from mpjax._src.base import _jax
from mpjax._src.base.dtypes import FLOAT16, FLOAT32, HALVES
from mpjax._src.program.graph import Block, Op, Value
from mpjax._src.replacements import flow


@dataclasses.dataclass(eq=False)
class Flow(flow.Flow):
    """The data flow of a block.

    Attributes:
        block: The block.
        analysis: What is known about its values.
        producer: For each value, the op that computes it.
        readers: For each value, the ops that read it; None means the block's results.
        free: The ops that create constants or cast booleans to floats, by their results.
        ops: The ops that run, in order: those of the block, but for some that `replace` replaces.
    """

    block: Block
    analysis: Analysis
    producer: dict[Value, Op]
    readers: "dict[Value, list[Op | None]]"
    free: dict[Value, Op]

    def __post_init__(self) -> None:
        tables = self.analysis
        self.rulings, self.choices, self.stored = tables.rulings, tables.choices, tables.stored
        self.marks, self.ops = tables.marks, [*self.block.ops]

    def is_plain(self, op: Op) -> bool:
        """Returns whether an op runs in float32 without being forced to."""
        ruling, compute = self.rulings[op], self.choices[op].compute
        plain = compute == FLOAT32 or (ruling.rule in ("cast", "layout") and compute is None)
        return plain and not ruling.forced and not op.eqn.effects and len(op.outs) == 1

    def in_half(self, op: Op) -> bool:
        """Returns whether an op computes in 16 bits."""
        return self.rulings[op].forced == "half" or self.choices[op].compute in HALVES

    def is_fixed(self, op: Op) -> bool:
        """Returns whether something asks for the dtype of an op."""
        return bool(self.rulings[op].forced)

    def key(self, op: Op) -> Any:
        """Returns what equal ops on equal operands have in common."""
        dtypes = tuple([self.stored[v].dtype for v in op.outs])
        compute, forced = self.choices[op].compute, self.rulings[op].forced
        return _jax.equation_key(op.eqn)[:-1], compute, forced, dtypes

    def replace(self, op: Op, ins: Sequence[Value], outs: Sequence[Value]) -> Op:
        """Returns an op that runs in place of another, and reads or computes other values."""
        new = dataclasses.replace(op, ins=tuple(ins), outs=tuple(outs))
        self.ops[op.index] = new
        marks = self.marks
        marks.stands_for[new] = marks.stands_for.get(op, op)
        self.rulings[new], self.choices[new] = self.rulings[op], self.choices[op]
        if op in marks.steady:
            marks.steady.add(new)
        # In place of the old op, where that read; at the end, where only the new one reads.
        self.producer |= dict.fromkeys(outs, new)
        for v in dict.fromkeys((*op.ins, *ins)):
            readers = [r for r in self.readers.get(v, []) if r is not op or v in ins]
            readers = [new if r is op else r for r in readers]
            self.readers[v] = readers if v not in ins or new in readers else [*readers, new]
        return new


def flow_of(block: Block, analysis: Analysis) -> Flow:
    """Returns the data flow of a block."""
    readers: dict[Value, list[Op | None]] = {v: [None] for v in block.outvars}
    for op in block.ops:
        for v in dict.fromkeys(op.ins):
            readers.setdefault(v, []).append(op)
    producer = {v: op for op in block.ops for v in op.outs}
    free = {op.outs[0]: op for op in block.ops if is_free(analysis, op)}
    return Flow(block, analysis, producer, readers, free)


# ---- what costs nothing -------------------------------------------------------------------------


def free_producers(members: Sequence[Op], flow: Flow) -> list[Op]:
    """Returns the ops that create constants or cast booleans to floats; islands repeat them."""
    producers: dict[Op, None] = {}
    todo = [v for op in members for v in op.ins]
    while todo:
        value = todo.pop()
        op = flow.free.get(value)
        if op is not None and op not in producers and op not in members:
            producers[op] = None
            todo += op.ins
    return sorted(producers, key=lambda op: op.index)


def is_free(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op creates a constant or casts a boolean to a float, where it is read."""
    if not op.outs or not op.outs[0].is_f32:
        return False
    if op.name == "broadcast_in_dim":
        return op.outs[0].const is not None
    return (
        analysis.rulings[op].in_force == "cast"
        and getattr(op.ins[0].aval, "dtype", None) == np.bool_
    )


def is_spread(operand: Value, value: Value, flow: Flow) -> bool:
    """Returns whether an operand varies and was smaller than a result before it was broadcast."""
    op = flow.producer.get(operand)
    while op is not None and op.name == "broadcast_in_dim" and operand.const is None:
        operand = op.ins[0]
        op = flow.producer.get(operand)
    return operand.is_f32 and operand.const is None and operand.size < value.size


# ---- what costs memory ---------------------------------------------------------------------------


def counts(analysis: Analysis, value: Value) -> bool:
    """Returns whether keeping a value takes memory: it is no argument, constant or statistic."""
    leaf = value.literal or value.const is not None or analysis.is_raw(value)
    return not (leaf or value in analysis.small)


def not_far_smaller(values: Iterable[Value], size: int) -> list[Value]:
    """Returns the values whose bytes count next to an array of a size."""
    return [v for v in values if v.size * FAR_SMALLER > size]


# Two more bytes for one of so many entries are an eighth of two bytes for each.
FAR_SMALLER = 8


def kept_bytes(analysis: Analysis, values: Iterable[Value]) -> int:
    """Returns the bytes that values take if they are kept in 16 bits."""
    each = (
        v.size * (2 if v.is_f32 else v.aval.dtype.itemsize) for v in values if counts(analysis, v)
    )
    return sum(each)


def large_float32(ops: Sequence[Op], ins: Iterable[Value], flow: Flow) -> frozenset[Value]:
    """Returns the float32 values that flow into ops and would be costly to keep.

    An argument came in float32, and its range is not known. Where it is only moved or broadcast, or
    a product with it may leave the range of float16 (`facts`), it is not rounded. Neither are rows
    that were looked up in one: a table may contain data as well as what was learned.
    """
    floats = (v for v in ins if v.is_f32 and flow.stored[v].dtype == FLOAT32)
    large = {v for v in floats if not v.is_one and counts(flow.analysis, v)}
    unknown = {v for op in ops for v in op.ins if _is_of_unknown_range(v, op, flow)}
    return frozenset(large - unknown)


def _is_of_unknown_range(value: Value, op: Op, flow: Flow) -> bool:
    fact = flow.analysis.facts[value]
    rows = fact.data and not fact.given
    moved = value.given or fact.spread
    beyond = moved or any(flow.analysis.is_beyond(out, FLOAT16) for out in op.outs)
    return flow.rulings[op].half == FLOAT16 and (rows or (fact.given and beyond))
