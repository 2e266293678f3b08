"""Recognizes linear recurrences that `jax.lax.associative_scan` computes, as in state space models.

JAX writes an associative scan out: slices, products and sums at each level, which derivatives keep
and XLA fuses into each other, so that the kernel of a level reads all levels. The operations that
compute one value are compared with those that JAX writes for a linear recurrence of its shape, in
the version of JAX that is used. Their derivative is then that of `_jax.recurrence`.
"""

import dataclasses
import functools
from collections.abc import Collection, Iterator
from typing import Any

import jax
import numpy as np

from mpjax._src.autocast.flow import Flow
from mpjax._src.autocast.steps import Recurrence, body_of
from mpjax._src.base import _jax
from mpjax._src.base.dtypes import FLOAT32
from mpjax._src.program.graph import Block, Op, Value, build


def recurrences(flow: Flow) -> Iterator[Recurrence]:
    """Yields the linear recurrences in float32 of which only the result is read."""
    taken: set[Op] = set()
    for op in reversed(flow.ops):
        if op.name not in SUMS or op in taken or (axis := _interleaved(op, flow)) is None:
            continue
        found = _recurrence(op, axis, flow)
        if found is not None:
            taken.update(found.ops)
            yield found


def _interleaved(op: Op, flow: Flow) -> int | None:
    """Returns the axis along which an op puts the entries of two arrays in turns, as scans do."""
    makers = [flow.producer.get(v) for v in op.ins]
    pads = [maker.params["padding_config"] for maker in makers if maker and maker.name == "pad"]
    if len(pads) < 2 or not op.outs[0].is_f32:
        return None
    gaps = [axis for axis, (*_, inner) in enumerate(pads[0]) if inner == 1]
    return gaps[0] if len(gaps) == 1 else None


SUMS = ("add", "add_any")


def _recurrence(op: Op, axis: int, flow: Flow) -> Recurrence | None:
    """Returns the recurrence whose result an op computes, or None if it does something else."""
    (result,) = op.outs
    written = _written(result.aval.shape, axis)
    bound: dict[Value, Value] = {}
    makers = {v: o for o in written.ops for v in o.outs}
    if not _is_same(written.outvars[0], result, makers, flow, bound):
        return None
    a, b = (bound[v] for v in written.invars)
    inside = {flow.producer[v] for ours, v in bound.items() if ours in makers}
    # What only 16-bit operations read is put together in 16 bits.
    full = all(flow.choices[o].compute == FLOAT32 for o in inside if o.name == "mul")
    full &= flow.stored[a].dtype == FLOAT32
    ops = inside | _unread(inside, flow)
    others = (v for o in ops for v in o.outs if v is not result)
    alone = all(reader in ops for v in others for reader in flow.readers.get(v, ()))
    moves = any(flow.analysis.facts[v].linear for v in (a, b))
    if not (full and alone) or moves or a.aval != b.aval:
        return None
    body = dataclasses.replace(body_of(ops, flow), ins=(a, b), outs=(result,), sums=())
    return Recurrence(body, axis)


@functools.lru_cache(maxsize=64)
def _written(shape: tuple[int, ...], axis: int) -> Block:
    """Returns a linear recurrence of a shape as JAX writes it."""
    x = jax.ShapeDtypeStruct(shape, FLOAT32)
    program = jax.make_jaxpr(functools.partial(_jax.scanned, axis=axis))(x, x)
    return build(*_jax.open_jaxpr(program))


def _is_same(
    ours: Value, theirs: Value, makers: dict[Value, Op], flow: Flow, bound: dict[Value, Value]
) -> bool:
    """Returns whether a value is computed as ours is, and notes which values correspond."""
    if ours.literal or ours in bound:
        same = ours.literal and theirs.literal and np.array_equal(ours.const, theirs.const)
        return same or bound.get(ours) is theirs
    bound[ours] = theirs
    op, other = makers.get(ours), flow.producer.get(theirs)
    if op is None:  # an argument
        return theirs.is_f32
    if other is None or _kind(op) != _kind(other):
        return False
    ins = other.ins
    if op.name in COMMUTE and not _begins_alike(op.ins[0], ins[0], makers, flow):
        ins = ins[::-1]
    return all(_is_same(x, y, makers, flow, bound) for x, y in zip(op.ins, ins, strict=True))


COMMUTE = ("add", "add_any", "mul")


def _begins_alike(ours: Value, theirs: Value, makers: dict[Value, Op], flow: Flow) -> bool:
    one, other = makers.get(ours), flow.producer.get(theirs)
    return one is None or (other is not None and _kind(one) == _kind(other))


def _kind(op: Op) -> tuple[Any, ...]:
    """Returns what two ops that compute the same have in common, but for their operands."""
    return "add" if op.name in SUMS else op.name, op.outs[0].aval.shape, str(op.params)


def _unread(inside: Collection[Op], flow: Flow) -> set[Op]:
    """Returns the ops that read results of others and that nothing needs.

    The products of all factors before an element are computed too, but the last of them, which
    nobody reads.
    """
    needed, unread = {*flow.block.outvars}, set()
    for op in reversed(flow.ops):
        if op.eqn.effects or not needed.isdisjoint(op.outs):
            needed.update(op.ins)
        else:
            unread.add(op)
    reached = {v for op in inside for v in op.outs}
    for op in (op for op in flow.ops if op in unread and not reached.isdisjoint(op.ins)):
        reached.update(op.outs)
    return {op for op in unread if not reached.isdisjoint(op.outs)}
