"""Islands: float32 operations that run together, so that fewer bytes are kept or moved."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable, Sequence

from mpjax._src.autocast.facts import EXPONENTIALS
from mpjax._src.autocast.flow import (
    FAR_SMALLER,
    Flow,
    is_free,
    is_spread,
    kept_bytes,
    large_float32,
    not_far_smaller,
)
from mpjax._src.autocast.schedule import connected
from mpjax._src.autocast.steps import Body, Elementwise, Island, Recomputed, Sloped, body_of
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.program.graph import Op, Value, is_steady
from mpjax._src.program.views import is_view


def islands(flow: Flow, special: Sequence[Island], links: Collection[Op]) -> list[Island]:
    """Returns the islands of a block that save memory.

    Args:
        flow: The flow of the block.
        special: Those that have their own derivative, which come first.
        links: The 16-bit ops that islands take in.
    """
    taken = {op for island in special for op in island.ops}
    chosen: list[Island] = [*special]
    for ops in groups(flow, taken, functools.partial(_recomputable, flow)):
        island = _island(ops, flow, links)
        if island is not None:
            chosen.append(island)
    inside = {*links, *(op for island in chosen for op in island.ops)}
    chosen = [_behind_views(i, flow, inside) if isinstance(i, Recomputed) else i for i in chosen]
    return _made_again(chosen, flow)


def _island(ops: Sequence[Op], flow: Flow, links: Collection[Op]) -> Elementwise | None:
    """Returns the island of a group of ops if it saves memory."""
    body = body_of(ops, flow)
    while halves := _halves_inside(body, flow, links):
        body = body_of([*body.ops, *halves], flow)
    barrier = any(_is_dear(op, flow) for op in body.ops)
    # Outside of loops, XLA fuses arithmetic into its readers by itself.
    if not (barrier or flow.block.in_loop):
        return None
    island = _from_half(Recomputed(body, barrier), flow)
    if island is None:
        return None
    if barrier and _is_sloped(island.body, flow):
        sloped = Sloped(island.body, barrier, island.wide)
        return sloped if _saves_memory(island, flow) else None
    if not _saves_memory(_behind_views(island, flow), flow):
        return None
    return dataclasses.replace(island, tail=_tail(island.body, flow))


def groups(flow: Flow, special: Collection[Op], fits: Callable[[Op], bool]) -> Iterable[list[Op]]:
    """Returns groups of connected ops that fit, such that no two groups depend on each other.

    The depth of an op is the number of ungrouped ops before it on the longest path. If all of its
    readers are deeper, it gets their depth. Connected ops of the same depth form a group: a path
    that leaves a group passes an ungrouped op, and everything after it is deeper.
    """
    sources = {op: [flow.producer[v] for v in op.ins if v in flow.producer] for op in flow.ops}
    inside: set[Op] = set()
    depth: dict[Op, int] = {}
    for op, before in sources.items():
        depth[op] = max([depth[s] + (s not in inside) for s in before], default=0)
        begun = _starts(op, flow) or not inside.isdisjoint(before)
        if begun and op not in special and fits(op):
            inside.add(op)
    # Backwards, so that an op moves down with its readers.
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


def _made_again(islands: Sequence[Island], flow: Flow) -> list[Island]:
    """Lets islands recompute inputs that elementwise operations of other islands computed.

    An example is squeeze and excitation: the activation ``y`` in ``y * gate(mean(y))``, where a
    matmul is between the two uses. The operands of ``y`` are kept anyway and are not larger.
    Reading them moves no more bytes, and ``y`` itself is neither written nor kept.
    """
    now = [*islands]
    place = {op: i for i, island in enumerate(islands) for op in island.ops}
    for i, island in enumerate(islands):
        for value in island.ins if isinstance(island, Recomputed) else ():
            j = place.get(flow.producer[value], i) if value in flow.producer else i
            maker, reader = now[j], now[i]
            if j == i or not isinstance(maker, Recomputed) or not isinstance(reader, Recomputed):
                continue
            ops, sources = _cone(value, maker.body, flow)
            # Another reader would need the value kept or written anyway.
            read = {*flow.readers[value]} <= {*maker.ops, *island.ops}
            if not read or sum(v.size for v in sources if v.size >= value.size) > value.size:
                continue
            handed = [v for v in sources if v not in (*maker.ins, *maker.outs)]
            more = [v for v in sources if v not in reader.ins]
            body = dataclasses.replace(maker.body, outs=(*maker.outs, *handed))
            now[j] = dataclasses.replace(maker, body=body)
            body = dataclasses.replace(reader.body, ins=(*reader.ins, *more))
            again = tuple(dict.fromkeys((*reader.again, *ops)))
            now[i] = dataclasses.replace(reader, body=body, again=again)
    return now


def _cone(value: Value, body: Body, flow: Flow) -> tuple[list[Op], list[Value]]:
    """Returns the ops of an island that compute a value from no smaller ones, and their inputs."""
    ops: set[Op] = set()
    read: dict[Value, None] = {}
    todo = [value]
    for v in todo:  # grows
        op = flow.producer.get(v)
        if op in body.ops and v.size == value.size:
            todo += op.ins if op not in ops else []
            ops.add(op)
        elif v in flow.free:
            todo += flow.free[v].ins
            ops.add(flow.free[v])
        elif not v.literal:
            read[v] = None
    return sorted(ops, key=lambda op: op.index), [*read]


# ---- what an island keeps --------------------------------------------------------------------


def _recomputable(flow: Flow, op: Op) -> bool:
    if is_free(flow.analysis, op):
        return False
    cheap = op.spec.cost != rules.NEVER and flow.rulings[op].rule in CHEAP
    floats = any(v.is_f32 for v in op.ins)
    return cheap and floats and flow.choices[op].compute in (FLOAT32, None)


CHEAP = ("full", "follow", "layout", "neutral", "cast")


def _starts(op: Op, flow: Flow) -> bool:
    """Returns whether an island may begin here: not at constants or parameters alone."""
    return any(v.is_f32 and not flow.analysis.is_raw(v) and v.const is None for v in op.ins)


def _halves_inside(body: Body, flow: Flow, links: Collection[Op]) -> list[Op]:
    """Returns 16-bit ops whose result an island alone reads, if it then keeps no more bytes.

    They compute in float32 there: ``h * scale`` before a gelu is neither rounded nor out of range.
    """
    members, halves, analysis = {*body.ops}, [], flow.analysis
    for value in body.ins:
        op = flow.producer.get(value)
        if op is None or flow.choices[op].compute not in HALVES or flow.rulings[op].forced:
            continue
        if op.spec.need != rules.FOLLOW:
            continue
        # Either the island reads all operands already, or they are no more bytes than the result.
        varying = [v for v in op.ins if v.const is None]
        beside = all(v in body.ins for v in varying)
        more = [v for v in not_far_smaller(varying, value.size) if v not in body.ins]
        instead = op in links and kept_bytes(analysis, more) <= kept_bytes(analysis, [value])
        if (beside or instead) and members.issuperset(flow.readers[value]):
            halves.append(op)
    return halves


def _from_half(island: Recomputed, flow: Flow) -> Recomputed | None:
    """Returns an island whose large inputs can be kept in 16 bits, or None.

    If one is float32 (a matmul's float32 result, such as attention scores), the linear operations
    that follow it, and scalings, are left out of the island. They save nothing, and their results
    are better rounded than their operands (``x - max(x)`` before an ``exp``: large weights are
    close to 0).
    """
    body = island.body
    large = {*large_float32(body.ops, body.ins, flow)}
    if not large:
        return island
    if any(flow.rulings[op].forced == "full" for op in body.ops):  # the user asked for float32
        return None
    inside: set[Value] = {v for op in body.ops for v in op.outs}
    stay, left = [], []
    for op in body.ops:
        of_large = not large.isdisjoint(op.ins)
        linear = op.spec.linear or (of_large and _scales(op))
        if linear and not any(v in inside for v in op.ins):
            inside.difference_update(op.outs)
            large.update(op.outs if of_large else ())
            left.append(op)
        else:
            stay.append(op)
    body = body_of(stay, flow)
    beside = (v for op in left for v in op.ins if v in body.ins)
    wide = frozenset(v for v in beside if flow.stored[v].dtype in HALVES)
    rounded = large_float32(body.ops, body.ins, flow)
    rounded -= _enlarged(body, rounded, flow)
    if body.half is None or not _stands_rounding(body, rounded, flow):
        return None
    return dataclasses.replace(island, body=body, wide=wide, rounded=rounded)


def leave_small(island: Recomputed, flow: Flow) -> Recomputed:
    """Leaves parameters in float32 that are far smaller than the arrays inside, such as a bias.

    A mean that the island keeps contains them unrounded, so what it recomputes has to as well.
    """
    least = max((v.size for op in island.ops for v in op.outs), default=0) // FAR_SMALLER
    facts = flow.analysis.facts
    small = {v for v in island.rounded if facts[v].given and v.size <= least}
    return dataclasses.replace(island, rounded=island.rounded - small)


def _scales(op: Op) -> bool:
    """Returns whether an op multiplies an array by a constant or a single number.

    The derivative of a number that is no constant reads the array. That costs less than an error
    that the number multiplies.
    """
    by = op.ins[1:] if op.name == "div" else op.ins if op.spec.multiplies else []
    return any(v.entries is not None or v.is_one for v in by)


def _behind_views(island: Recomputed, flow: Flow, inside: Collection[Op] = ()) -> Recomputed:
    """Moves views of inputs into an island, so that it keeps the arrays that they are views of.

    But not views ``inside`` of islands, which may not hand out what they are views of.

    Repeating a view costs nothing, but keeping one takes memory in its own layout. A TPU pads the
    last axis of ``(batch, height, width, groups, 4)``, from a group norm, to 128 entries.
    """
    views, rounded, values = [], island.rounded, [*island.ins]
    for value in values:  # grows
        op = flow.producer.get(value)
        if op is not None and is_view(op) and op not in inside:
            views.append(op)
            values += op.ins
            if value in rounded:
                rounded = rounded.union(op.ins) - {value}
    return dataclasses.replace(island, body=body_of(island.ops, flow, views), rounded=rounded)


def _enlarged(body: Body, rounded: Collection[Value], flow: Flow) -> set[Value]:
    """Returns inputs of an island whose rounding errors it would enlarge.

    A log probability after many steps is a large number. An exponential of its difference from
    another one, or a comparison of the two, would not survive its rounding. What a matmul has made
    was rounded like that before, and ``exp(x)`` stands the rounding of its own operand.
    """
    made_of = {v: {v} for v in rounded if not _is_of_matmul(v, flow)}
    summed: set[Value] = set()
    found: set[Value] = set()
    for op in body.ops:
        reads = [v for v in op.ins if v in made_of]
        varying = sum(v.is_f32 and v.const is None for v in op.ins)
        chooses = op.spec.need == rules.COMPARE or not op.spec.traits.isdisjoint(CHOOSING)
        chooses &= varying > 1 or rules.REDUCES in op.spec.traits or rules.RANKS in op.spec.traits
        chooses &= not flow.marks.is_steady(op)
        for value in reads:
            if chooses or (op.name in EXPONENTIALS and value in summed):
                found |= made_of[value]
        for out in (v for v in op.outs if reads and v not in body.sums):  # sums are kept unrounded
            made_of[out] = set().union(*(made_of[v] for v in reads))
            adds = op.spec.gain_of(op.params) == rules.SUM and varying > 1
            summed.update([out] if adds or not summed.isdisjoint(reads) else ())
    return found


CHOOSING = {rules.KINKED, rules.RANKS}


def _is_of_matmul(value: Value, flow: Flow) -> bool:
    """Returns whether a value is the result of a matmul, perhaps moved or scaled."""
    while (op := flow.producer.get(value)) is not None and (
        _scales(op) or (op.spec.need == rules.MOVE and rules.REDUCES not in op.spec.traits)
    ):
        value = max(op.ins, key=lambda v: v.size if v.is_f32 else 0)
    return op is not None and op.spec.need == rules.HALF


def _stands_rounding(body: Body, rounded: Collection[Value], flow: Flow) -> bool:
    """Returns whether the derivatives of an island may be computed from its rounded inputs."""
    analysis = flow.analysis
    if any(analysis.wants[v].unrounded or analysis.is_beyond(v, body.half) for v in rounded):
        return False
    if any(analysis.facts[v].linear for v in body.ins):  # else results would wait for tangents
        return False
    touched = {*rounded}
    for op in body.ops:
        reads = [v for v in op.ins if v in touched]
        bounded = op.name in EXPONENTIALS
        if not all(is_steady(op, v) or (bounded and analysis.facts[v].negative) for v in reads):
            return False
        if reads:
            touched.update(v for v in op.outs if v not in body.sums)  # sums are kept unrounded
    return True


def _is_sloped(body: Body, flow: Flow) -> bool:
    """Returns whether an island has one 16-bit input, one output and a slope that fits 16 bits."""
    if len(body.ins) != 1 or len(body.outs) != 1:
        return False
    (operand,), (result,) = body.ins, body.outs
    return (
        flow.stored[operand].dtype == body.half
        and result in body.in_half
        and operand.aval.shape == result.aval.shape
        and not body.sums
        and not any(flow.rulings[op].forced == "full" for op in body.ops)
        and all(reader in body.ops for reader in flow.readers[operand])
        and all(
            op.spec.steady_of(op.params) or op.spec.linear or _is_scaling(op) for op in body.ops
        )
    )


def _tail(body: Body, flow: Flow) -> tuple[Op, ...]:
    """Returns the activation after a norm: elementwise operations on its result alone.

    The cotangent of the norm's result is expensive, because it contains the activation's slope, and
    it is read twice: by the sums of the norm's gradient, and elementwise. XLA therefore writes it
    to memory, best in 16 bits, as with casts placed by hand.
    """
    for op in reversed(body.ops):
        normed = op.outs[0]
        if op.spec.need == rules.FOLLOW and any(is_spread(v, normed, flow) for v in op.ins):
            tail = _activation(_scaled(normed, body, flow), body, flow)
            dear = any(o.spec.cost == rules.DEAR for o in tail)
            if body.half is None or flow.analysis.facts[normed].linear:
                return ()
            return tail if dear and flow.analysis.may_be_rounded(normed) else ()
    return ()


def _scaled(value: Value, body: Body, flow: Flow) -> Value:
    """Returns what a chain of scalings alone makes of a value.

    A slope in 16 bits that contained their factors might be too small for float16.
    """
    readers = flow.readers.get(value, ())
    op = readers[0] if len(readers) == 1 else None
    if op is not None and op in body.ops and _scales(op):
        return _scaled(op.outs[0], body, flow)
    return value


def _activation(operand: Value, body: Body, flow: Flow) -> tuple[Op, ...]:
    """Returns the elementwise operations of an island on one value, if one result is read."""
    values, constants = {operand}, {v for op in body.free for v in op.outs if v.const is not None}
    tail: list[Op] = []
    for op in body.ops:
        alone = all(v in values or v in constants or v.literal for v in op.ins)
        alike = len(op.outs) == 1 and op.outs[0].aval.shape == operand.aval.shape
        if alone and alike and op.spec.need in (rules.FOLLOW, rules.FULL) and values & {*op.ins}:
            tail.append(op)
            values.update(op.outs)
    # The slope is multiplied once: at the one result that others read.
    ends = [op for op in tail if not {*flow.readers.get(op.outs[0], ())} <= {*tail}]
    returned = any(flow.analysis.wants[v].returned for op in ends for v in op.outs)
    return tuple(tail) if ends == tail[-1:] and not returned else ()


def _is_scaling(op: Op) -> bool:
    return op.name == "div" and op.ins[1].const is not None


def _is_dear(op: Op, flow: Flow) -> bool:
    large = any(v.is_f32 and v not in flow.analysis.small for v in op.outs)
    inner = [o for sub in op.subs for o in sub.program.walk() if o.has_float32]
    inner = [o for o in inner if not o.subs] if op.subs else [op]
    return large and any(o.spec.cost != rules.FUSED for o in inner)


def _saves_memory(island: Recomputed, flow: Flow) -> bool:
    """Compares the bytes that derivatives would save with those that the island keeps."""
    analysis = flow.analysis
    saved: set[Value] = set()
    for op in (op for op in island.ops if not op.spec.linear):
        varying = [v for v in op.ins if v.is_f32 and v.const is None]
        # A product saves each factor for the other; a product with a constant saves nothing.
        if op.spec.saves == rules.OTHERS:
            saved.update(varying if len(varying) > 1 else ())
        else:
            saved.update((*varying, *op.outs))
    inputs = [v for v in island.ins if v.is_f32]
    kept = _bytes((v for v in inputs if not analysis.is_raw(v)), flow)
    # Rounded to 16 bits, these take half of their four bytes.
    kept -= _bytes(island.rounded, flow) // 2
    halves = any(flow.stored[v].dtype in HALVES and v not in analysis.small for v in inputs)
    if island.rounded:  # a loss: its backward pass follows at once
        large = (v for v in island.outs if v.is_f32 and v.size > 1)
        halves = any(v not in analysis.small for v in large)
    return halves and kept < _bytes(saved, flow)


def _bytes(values: Iterable[Value], flow: Flow) -> int:
    large = (v for v in values if v.const is None and v.is_f32 and v not in flow.analysis.small)
    return sum(v.size * (flow.stored[v].dtype or v.aval.dtype).itemsize for v in large)
