"""Float32 islands that the backward pass recomputes from their half inputs.

The inside of a gelu or a layer norm is float32, and its derivative wants the insides. Saved, they
take several times the room of the half input that they were computed from. So the ops of a block
are grouped into islands, each run under `jax.checkpoint`: their inputs and the results of their
reductions are kept, the rest is computed again.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpjax._src import rules
from mpjax._src.autocast.facts import EXPONENTIALS
from mpjax._src.autocast.graph import Block, Op, Value
from mpjax._src.autocast.lattices import BEYOND
from mpjax._src.dtypes import FLOAT16, FLOAT32, HALVES


@dataclasses.dataclass(eq=False)
class Island:
    """Ops that run together, and that the backward pass runs again."""

    ops: list[Op] = dataclasses.field(default_factory=list)
    after: int = 0  # which islands must run before it, as a bit mask
    free: list[Op] = dataclasses.field(default_factory=list)  # run before, at no cost
    inputs: list[Value] = dataclasses.field(default_factory=list)
    rounded: set[Value] = dataclasses.field(default_factory=set)  # inputs kept in half
    sums: list[Value] = dataclasses.field(default_factory=list)  # results of reductions, kept
    half: Any = None
    sloped: bool = False  # elementwise: its slope is kept in place of its operand
    barrier: bool = False  # XLA would rather save the insides than compute them again
    axes: tuple[int, ...] = ()  # of a softmax: what it sums over
    matmul: Op | None = None  # of a softmax: the one that sums values by it
    weights: list[Op] = dataclasses.field(default_factory=list)  # from there to that: a dropout
    in_half: set[Value] = dataclasses.field(default_factory=set)  # results read in half alone
    results: list[Value] = dataclasses.field(default_factory=list)


def schedule(block: Block, kind: str = "all") -> "list[Op | Island]":
    """Returns the steps that run a block: its ops in order, islands gathered.

    An island is convex: nothing outside of it is needed between two of its ops.

    Args:
        block: The block.
        kind: "all" islands, "softmaxes" where the user recomputes the rest, or "none".
    """
    if kind == "none":
        return [*block.ops]
    if block.steps is None:
        islands = _islands(block) if kind == "all" else _softmaxes_by_op(block)
        block.steps = _in_order(block, islands) or [*block.ops]
    return block.steps


def _islands(block: Block) -> "dict[Op, Island]":
    """Groups the ops of a block into islands, and drops the ones that save no memory."""
    groups: list[Island] = []
    group_of: dict[Op, int] = {}
    merged: list[int] = []  # union-find over groups
    after: dict[Op, int] = {}  # which groups an op depends on, as a bit mask
    producer = {v: op for op in block.ops for v in op.outs}

    def root(i: int) -> int:
        while merged[i] != i:
            i = merged[i]
        return i

    def closure(mask: int) -> int:
        """Adds what the groups of a mask depend on themselves."""
        seen, todo = 0, mask
        while todo:
            low = todo & -todo
            todo ^= low
            i = root(low.bit_length() - 1)
            bit = 1 << i
            if not seen & bit:
                seen |= bit
                todo |= groups[i].after & ~seen
        return seen

    softmaxes = _softmaxes_by_op(block)
    for op in block.ops:
        sources = [producer[v] for v in op.ins if v in producer]
        mask = 0
        for source in sources:
            mask |= after[source]
            if source in group_of:
                mask |= 1 << root(group_of[source])
        after[op] = mask
        if op in softmaxes or not _recomputable(op):
            continue
        joined = -1
        for i in dict.fromkeys(root(group_of[s]) for s in sources if s in group_of):
            i = root(i)
            if i == joined:
                continue
            # Joining group i: no operand may depend on it through something outside.
            through = 0
            for source in sources:
                if source not in group_of or root(group_of[source]) != i:
                    through |= after[source]
                    if source in group_of:
                        through |= 1 << root(group_of[source])
            if joined >= 0:
                through &= ~(1 << joined)
                through |= groups[joined].after
            through = closure(through)
            if through >> i & 1:
                continue
            if joined >= 0:
                if closure(groups[i].after) >> joined & 1:
                    continue
                groups[i].ops += groups[joined].ops
                groups[i].after |= groups[joined].after
                merged[joined] = i
            joined = i
        if joined < 0:
            if not _starts(op):
                continue
            joined = len(groups)
            groups.append(Island())
            merged.append(joined)
        groups[joined].ops.append(op)
        groups[joined].after |= mask & ~(1 << joined)
        group_of[op] = joined
    found = dict(softmaxes)
    for i, group in enumerate(groups):
        if merged[i] == i:
            _gather(group, block)
            halves = _halves_inside(group, block, producer)
            if halves:
                group.ops += halves
                _gather(group, block)
            group.barrier = any(_is_dear(op) for op in group.ops)
            # Outside of loops, XLA fuses arithmetic into its readers without being told to.
            worthwhile = group.barrier or block.in_loop
            if worthwhile and _from_half(group, block) and _saves_memory(group):
                group.sloped = group.barrier and _is_sloped(group, block)
                found |= dict.fromkeys(group.ops, group)
    return found


def _softmaxes_by_op(block: Block) -> "dict[Op, Island]":
    return {op: island for island in _softmaxes(block) for op in island.ops}


def _softmaxes(block: Block) -> list[Island]:
    """Finds ``e / sum(e)`` with ``e = exp(z)``: its derivative takes its result alone.

    Its result is mostly stored in half already, for the matmul that reads it.
    """
    readers = _readers(block)
    producer = {v: op for op in block.ops for v in op.outs}
    found: list[Island] = []
    taken: set[Op] = set()  # two softmaxes may weigh the same values
    for op in block.ops:
        if op.name != "exp" or op.compute != FLOAT32 or op.half is None:
            continue
        reading = readers.get(op.outs[0], [])
        if None in reading or op.outs[0].size == 1:
            continue
        around = {r.name: r for r in reading if r is not None}
        if around.keys() != {"reduce_sum", "div"} or len(reading) != 2:
            continue
        total, chain = around["reduce_sum"], []
        value = total.outs[0]
        while len(readers.get(value, ())) == 1:
            (reader,) = readers[value]
            if reader is None or reader.name not in ("broadcast_in_dim", "reshape"):
                break
            chain.append(reader)
            value = reader.outs[0]
        quotient = around["div"]
        if quotient.ins != [op.outs[0], value] or readers.get(value) != [quotient]:
            continue
        members = [op, total, *chain, quotient]
        if all(m.compute == FLOAT32 and m.forced != "full" for m in members):
            island = Island(members, axes=tuple(total.params["axes"]))
            weights = _weights(quotient, readers)
            weighed = weights[-1].outs[0] if weights else quotient.outs[0]
            matmul = _sums_values(readers.get(weighed, []), weighed, island.axes)
            first = [op.ins[0], *(v for v in matmul.ins if v is not weighed)] if matmul else []
            again = any(v in first for w in weights for v in w.ins)
            if matmul and matmul not in taken and not again:
                taken |= {*weights, matmul}
                island.matmul, island.weights = matmul, weights
                island.ops += [*weights, matmul]
            _set_boundary(island, block)
            island.half, island.sums = op.half, quotient.outs
            if island.matmul:
                island.inputs = [*first, *(v for v in island.inputs if v not in first)]
            if island.results == (island.matmul or quotient).outs:
                found.append(island)
                _steady_maximum(op, island.axes, producer, readers)
    return found


def _steady_maximum(
    exp: Op,
    axes: tuple[int, ...],
    producer: dict[Value, Op],
    readers: "dict[Value, list[Op | None]]",
) -> None:
    """Marks the maximum that a softmax subtracts: its derivative is zero, and would keep scores."""
    shift = producer.get(exp.ins[0])
    if shift is None or shift.name != "sub" or readers[exp.ins[0]] != [exp]:
        return
    value, reader = shift.ins[1], shift
    while value in producer and readers[value] == [reader]:
        reader = producer[value]
        if reader.name == "reduce_max":
            whole = reader.ins[0] is shift.ins[0]
            reader.steady = whole and tuple(reader.params["axes"]) == axes
            return
        varying = [v for v in reader.ins if v.const is None]
        if reader.name not in SPREADS or len(varying) != 1:
            return
        value = varying[0]


# From a maximum to what is subtracted.
SPREADS = frozenset(["broadcast_in_dim", "max", "reshape", "squeeze", "stop_gradient"])


def _weights(softmax: Op, readers: "dict[Value, list[Op | None]]") -> list[Op]:
    """Returns what a softmax goes through that is linear in it, entry by entry: a dropout."""
    found: list[Op] = []
    value = softmax.outs[0]
    while len(readers.get(value, ())) == 1:
        (op,) = readers[value]
        if op is None or op.forced or op.compute != FLOAT32 or op.outs[0].aval != value.aval:
            break
        place, zero = op.ins.index(value), [v.const for v in op.ins[1:] if v is not value]
        linear = (
            (op.name == "mul" and op.ins[1 - place] is not value)
            or (op.name == "div" and place == 0)
            or (op.name == "select_n" and place > 0 and len(zero) == 1 and _is_zero(zero[0]))
        )
        if not linear:
            break
        found.append(op)
        value = op.outs[0]
    return found


def _is_zero(const: Any) -> bool:
    return const is not None and not np.any(np.asarray(const, np.float32))


def _sums_values(readers: "list[Op | None]", result: Value, axes: tuple[int, ...]) -> Op | None:
    """Returns the matmul that alone reads a softmax, and contracts what it sums over."""
    matmul = readers[0] if len(readers) == 1 else None
    if matmul is None or matmul.name != "dot_general" or (matmul.forced or matmul.rule) != "half":
        return None
    place = matmul.ins.index(result)
    contracting, _ = matmul.params["dimension_numbers"]
    fits = (
        matmul.ins[1 - place] is not result
        and matmul.outs[0].is_f32
        and set(contracting[place]) == set(axes)
        and matmul.params.get("out_sharding") is None
    )
    return matmul if fits else None


def _recomputable(op: Op) -> bool:
    if is_free(op):
        return False
    cheap = op.spec.cost != rules.NEVER and op.rule in (
        "full",
        "follow",
        "layout",
        "neutral",
        "cast",
    )
    floats = any(v.is_f32 for v in op.ins)
    return cheap and floats and op.compute in (FLOAT32, None) and not op.eqn.effects


def _starts(op: Op) -> bool:
    """Tells whether an island may begin here: not with constants or parameters alone."""
    return any(v.is_f32 and not v.raw and v.const is None for v in op.ins)


def _gather(group: Island, block: Block) -> None:
    group.ops.sort(key=lambda op: op.index)
    _set_boundary(group, block)


def _set_boundary(group: Island, block: Block) -> None:
    members = set(group.ops)
    group.free = _free_producers(group.ops, block)
    inside = {v for op in (*group.free, *group.ops) for v in op.outs}
    read = (v for op in (*group.free, *group.ops) for v in op.ins)
    group.inputs = [*dict.fromkeys(v for v in read if v not in inside and not is_literal(v))]
    group.half = next((op.half for op in group.ops if op.half is not None), None)
    group.sums = [
        v for op in group.ops if rules.REDUCES in op.spec.traits for v in op.outs if v.is_f32
    ]
    readers = _readers(block)
    outside = {
        v: [r for r in readers.get(v, ()) if r not in members] for op in group.ops for v in op.outs
    }
    group.results = [v for v, found in outside.items() if found]
    group.in_half = {
        v
        for v in group.results
        if v.is_f32 and all(op is not None and op.compute in HALVES for op in outside[v])
    }


def _halves_inside(group: Island, block: Block, producer: dict[Value, Op]) -> list[Op]:
    """Returns half ops that an island alone reads, of what it reads anyway: ``x / 2`` beside x."""
    members, readers = set(group.ops), _readers(block)
    found = []
    for value in group.inputs:
        op = producer.get(value)
        if op is None or op.compute not in HALVES or op.spec.need != rules.FOLLOW or op.forced:
            continue
        varying = [v for v in op.ins if v.const is None]
        if all(v in group.inputs for v in varying) and members.issuperset(readers[value]):
            found.append(op)
    return found


def _readers(block: Block) -> "dict[Value, list[Op | None]]":
    """Returns the ops that read each value; None stands for the block's results."""
    if block.readers is None:
        block.readers = {v: [None] for v in block.outvars}
        for op in block.ops:
            for v in dict.fromkeys(op.ins):
                block.readers.setdefault(v, []).append(op)
    return block.readers


def _free_producers(members: list[Op], block: Block) -> list[Op]:
    """Returns the ops that make constants, and floats of booleans: an island makes its own."""
    if block.free is None:
        block.free = {op.outs[0]: op for op in block.ops if is_free(op)}
    found: dict[Op, None] = {}
    todo = [v for op in members for v in op.ins]
    while todo:
        value = todo.pop()
        op = block.free.get(value)
        if op is not None and op not in found and op not in members:
            found[op] = None
            todo += op.ins
    return sorted(found, key=lambda op: op.index)


def is_free(op: Op) -> bool:
    """Tells whether an op makes a constant, or a float of a boolean: made where it is read."""
    if not op.outs or not op.outs[0].is_f32:
        return False
    if op.name == "broadcast_in_dim":
        return op.outs[0].const is not None
    return op.rule == "cast" and getattr(op.ins[0].aval, "dtype", None) == np.bool_


def is_literal(value: Value) -> bool:
    return value.literal


def _from_half(group: Island, block: Block) -> bool:
    """Sees to it that the large inputs of an island can be kept in half.

    Where one is float32 (a matmul's float32 result, as attention scores are), linear operations
    that lead from it are left out of the island: they save nothing, and what they lead to is better
    rounded (``x - max(x)`` before an ``exp``: the entries that matter are close to 0).
    """
    if not _large_float32(group):
        return True
    if any(op.forced == "full" for op in group.ops):  # the user wants no rounding here
        return False
    inside: set[Value] = {v for op in group.ops for v in op.outs}
    kept = []
    for op in group.ops:
        if _is_linear(op) and not any(v in inside for v in op.ins):
            inside.difference_update(op.outs)
        else:
            kept.append(op)
    group.ops = kept
    _set_boundary(group, block)
    group.rounded = _large_float32(group)
    return group.half is not None and _stand_rounding(group)


def _stand_rounding(group: Island) -> bool:
    """Tells whether the derivatives of an island may be computed from its rounded inputs."""
    beyond = any(v.fact.span == BEYOND for v in group.rounded) and group.half == FLOAT16
    if beyond or any(v.unrounded for v in group.rounded):
        return False
    touched = set(group.rounded)
    for op in group.ops:
        reads = [v for v in op.ins if v in touched]
        if not all(_stands_rounding(op, v) for v in reads):
            return False
        if reads:
            touched.update(v for v in op.outs if v not in group.sums)  # sums are kept as they are
    return True


def _stands_rounding(op: Op, value: Value) -> bool:
    """Tells whether the derivative of an op may be computed from a rounded operand."""
    bounded = value.fact.negative and op.name in EXPONENTIALS
    dividend = op.name == "div" and value is not op.ins[1]
    return op.spec.steady_of(op.params) or _is_linear(op) or bounded or dividend


def _large_float32(group: Island) -> set[Value]:
    return {
        v
        for v in group.inputs
        if v.is_f32 and v.dtype == FLOAT32 and not (v.raw or v.small or v.const is not None)
    }


def _is_sloped(group: Island, block: Block) -> bool:
    """Tells whether an island is one half array in, one out, and its slope fits into half."""
    if len(group.inputs) != 1 or len(group.results) != 1:
        return False
    (operand,), (result,) = group.inputs, group.results
    members = set(group.ops)
    return (
        operand.dtype == group.half
        and result in group.in_half
        and operand.aval.shape == result.aval.shape
        and not group.sums
        and not any(op.forced == "full" for op in group.ops)
        and all(reader in members for reader in _readers(block)[operand])
        and all(
            op.spec.steady_of(op.params) or _is_linear(op) or _is_scaling(op) for op in group.ops
        )
    )


def _is_linear(op: Op) -> bool:
    """Tells whether an op is linear in each operand alone: its derivative then reads no operand."""
    return op.spec.saves == rules.NOTHING and op.spec.cost == rules.FUSED


def _is_scaling(op: Op) -> bool:
    return op.name == "div" and op.ins[1].const is not None


def _is_dear(op: Op) -> bool:
    large = any(v.is_f32 and not v.small for v in op.outs)
    inner = [o for sub in op.subs for o in sub.block.walk() if o.reason != "no float32"]
    inner = [o for o in inner if not o.subs] if op.subs else [op]
    return large and any(o.spec.cost != rules.FUSED for o in inner)


def _saves_memory(group: Island) -> bool:
    """Compares what derivatives would save with what the island keeps instead."""
    saved: set[Value] = set()
    for op in group.ops:
        varying = [v for v in op.ins if v.is_f32 and v.const is None]
        if _is_linear(op):
            continue
        if op.spec.saves == rules.OTHERS:
            saved.update(varying if len(varying) > 1 else ())
        else:
            saved.update((*varying, *op.outs))
    kept = _bytes(v for v in group.inputs if not v.raw) - _bytes(group.rounded) // 2
    halves = any(v.dtype in HALVES and not v.small for v in group.inputs if v.is_f32)
    if group.rounded:  # a loss: its backward pass comes at once
        halves = any(v.is_f32 and not v.small and v.size > 1 for v in group.results)
    return halves and kept < _bytes(saved)


def _bytes(values: Iterable[Value]) -> int:
    return sum(
        v.size * (v.dtype.itemsize if v.dtype is not None else v.aval.dtype.itemsize)
        for v in values
        if v.const is None and v.is_f32 and not v.small
    )


def _in_order(block: Block, islands: "dict[Op, Island]") -> "list[Op | Island]":
    """Sorts ops and islands so that each runs after what it reads; effects keep their order.

    Returns nothing if two of them wait for each other: better no islands than no program.
    """
    producer: dict[Value, Op | Island] = {}
    for op in block.ops:
        for v in op.outs:
            producer[v] = islands.get(op, op)
    steps: list[Op | Island] = []
    done: set[int] = set()
    begun: set[int] = set()

    def emit(step: "Op | Island") -> bool:
        stack: list[tuple[Op | Island, bool]] = [(step, False)]
        while stack:
            current, ready = stack.pop()
            if id(current) in done:
                continue
            if ready:
                done.add(id(current))
                steps.append(current)
                continue
            begun.add(id(current))
            stack.append((current, True))
            needs = current.inputs if isinstance(current, Island) else current.ins
            for v in reversed(needs):
                if v in producer and id(producer[v]) not in done:
                    if id(producer[v]) in begun:
                        return False
                    stack.append((producer[v], False))
        return True

    for op in block.ops:
        complete = op not in islands or op is islands[op].ops[-1]
        if complete and not emit(islands.get(op, op)):
            return []
    return steps
