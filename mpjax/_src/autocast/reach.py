"""Where half comes from, and where it flows: the second sweep of a plan.

Marks what comes from a half operation through elementwise ones, and decides which loop carries may
be half.
"""

import dataclasses
import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpjax._src.autocast.graph import Block, Op, Sub, is_float

# A carry that is added to in every iteration is stored in half for at most this many iterations.
MAX_HALF_ADDITIONS = 64

# A step this small, relative to what it is scaled from, would be lost in a half sum.
SMALL_STEP = 0.1


@dataclasses.dataclass(slots=True)
class Reach:
    """Which arguments of a block reach a value, as bit masks.

    Attributes:
        any: By any way.
        direct: Through elementwise and layout operations alone.
        matmul: Through a half operation.
        stepped: As ``matmul``, and scaled by a small or unknown scalar since.
        half: Whether it comes from a half operation through elementwise ones.
    """

    any: int = 0
    direct: int = 0
    matmul: int = 0
    stepped: int = 0
    half: bool = False


def trace_half(block: Block) -> None:
    """Marks what comes from half operations, and which loop carries are stored in half."""
    for op in block.ops:
        for sub in op.subs if op.rule == "program" else ():
            for value, index in zip(sub.block.invars, sub.ins, strict=True):
                value.from_half, value.counts = op.ins[index].from_half, op.ins[index].counts
            if sub.carry:
                _choose_carries(op, sub)
            trace_half(sub.block)
            for value, place in zip(sub.block.outvars, sub.outs, strict=True):
                if place is not None:
                    op.outs[place].from_half |= value.from_half
        if op.subs and op.rule == "program":
            continue
        from_half, counts = _gives_half(op), _gives_counts(op)
        for out in op.outs:
            out.from_half, out.counts = from_half, counts


def _gives_half(op: Op) -> bool:
    if op.forced:
        return op.forced == "half"
    if op.rule == "cast":
        return op.ins[0].from_half or (op.outs[0].is_f32 and op.ins[0].aval.dtype == op.half)
    return op.rule == "half" or (
        op.rule in ("follow", "layout") and any(v.from_half for v in op.ins)
    )


def _gives_counts(op: Op) -> bool:
    if op.rule != "cast":
        return op.rule == "layout" and any(v.counts for v in op.ins)
    dtype = getattr(op.ins[0].aval, "dtype", None)
    made = dtype is not None and np.issubdtype(dtype, np.integer) and dtype.itemsize > 1
    return op.ins[0].counts or made


def _choose_carries(op: Op, sub: Sub) -> None:
    """Decides which carries of a loop's body are stored in half.

    A carry may be half where a half operation makes it. One that is only added to (a running sum,
    an LSTM's cell, parameters under training) stays float32; a residual stream is added to as
    well, but by what is computed from itself, once per layer.
    """
    body = sub.block
    masks = reach(body, [1 << i for i in range(len(body.invars))])
    direct = _over_iterations({a: masks[body.outvars[r]].direct for r, a in sub.carry})
    few = op.params.get("length", MAX_HALF_ADDITIONS + 1) <= MAX_HALF_ADDITIONS
    half = [False] * len(body.invars)
    for result, argument in sub.carry:
        out, bit = masks[body.outvars[result]], 1 << argument
        added_to = bool(direct[argument] & bit)
        stream = few and bool(out.matmul & bit) and not out.stepped & bit
        half[argument] = (
            body.invars[argument].is_f32
            and out.half
            and op.rule == "program"
            and half_of(body) is not None
            and (not added_to or stream)
        )
        body.invars[argument].from_half = half[argument]
    body.carries = tuple(half)


def _over_iterations(direct: dict[int, int]) -> dict[int, int]:
    """Returns which carries reach each carry over any number of iterations: some swap or rotate."""
    while True:
        further = {
            carry: functools.reduce(
                operator.or_, (direct[other] for other in direct if mask >> other & 1), mask
            )
            for carry, mask in direct.items()
        }
        if further == direct:
            return direct
        direct = further


def half_of(block: Block) -> Any:
    return next((op.half for op in block.walk() if op.half is not None), None)


def reach(block: Block, seeds: Sequence[int]) -> "_Masks":
    """Returns the `Reach` of every value of a block (not of its sub-programs)."""
    masks = _Masks()
    for value, seed in zip(block.invars, seeds, strict=True):
        masks[value] = Reach(seed, seed, 0, 0, False)
    _flow(block, masks)
    return masks


class _Masks(dict):
    def __missing__(self, value):
        return Reach(half=value.from_half)


def _flow(block: Block, masks: "_Masks") -> None:
    for op in block.ops:
        ins = [masks[v] for v in op.ins]
        if op.subs and op.rule == "program":
            for sub in op.subs:
                for value, index in zip(sub.block.invars, sub.ins, strict=True):
                    masks[value] = ins[index]
                _flow(sub.block, masks)
                for result, argument in sub.carry:  # once around a nested loop is enough
                    before = masks[sub.block.invars[argument]]
                    masks[sub.block.invars[argument]] = _join(
                        [before, masks[sub.block.outvars[result]]]
                    )
                if sub.carry:
                    _flow(sub.block, masks)
                for value, place in zip(sub.block.outvars, sub.outs, strict=True):
                    if place is not None:
                        out = op.outs[place]
                        masks[out] = _join([masks.get(out, Reach()), masks[value]])
            continue
        made = _join(ins)
        if op.rule == "half":
            made = Reach(made.any, 0, made.any, 0, True)
        elif op.rule not in ("follow", "layout", "cast", "half"):
            made = Reach(made.any, 0, made.matmul, made.stepped, False)
        elif op.name in ("mul", "div") and _is_step(op, ins):
            made.stepped |= made.matmul
        if op.forced == "full":
            made.half = False
        for out in op.outs:
            masks[out] = dataclasses.replace(made) if is_float(out) else Reach(made.any)


def _is_step(op: Op, ins: Sequence[Reach]) -> bool:
    """Tells whether an op scales a matmul's result by a scalar that is small or not known."""
    for this, other in ((0, 1), (1, 0)):
        scale = op.ins[other]
        if not ins[this].matmul or ins[other].matmul:
            continue
        if scale.const is not None and np.ndim(scale.const) == 0:
            factor = abs(float(scale.const))
            if op.name == "div":
                factor = 1 / factor if factor else np.inf
            return factor <= SMALL_STEP
        if scale.size == 1 and op.ins[this].size > 1:
            return True
    return False


def _join(reaches: Iterable[Reach]) -> Reach:
    joined = Reach()
    for r in reaches:
        joined.any |= r.any
        joined.direct |= r.direct
        joined.matmul |= r.matmul
        joined.stepped |= r.stepped
        joined.half |= r.half
    return joined


def mark_linear(block: Block) -> None:
    """Marks what depends on tangents."""
    for op in block.ops:
        for sub in op.subs:
            for value, index in zip(sub.block.invars, sub.ins, strict=True):
                value.linear = op.ins[index].linear
            for result, argument in sub.carry:
                sub.block.invars[argument].linear |= any(v.linear for v in op.ins)
                del result
            mark_linear(sub.block)
        for out in op.outs:
            out.linear = any(v.linear for v in op.ins)
