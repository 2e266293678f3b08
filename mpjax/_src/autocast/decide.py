"""The last sweep of a plan: compute dtypes of operations and storage dtypes of values."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpjax._src.autocast.demand import all_in_full, wide_inside
from mpjax._src.autocast.graph import Block, Op, Value, half_of, is_float
from mpjax._src.autocast.lattices import Analysis
from mpjax._src.autocast.why import Reason, why
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.higher_order import SCAN


def decide(analysis: Analysis, block: Block) -> None:
    """Picks each op's compute dtype and each value's kind and storage dtype."""
    for value, _ in block.consts:
        _set(value, "flexible", FLOAT32)
    for op in block.ops:
        for value in op.ins:
            if not value.kind:
                _set(value, "flexible", FLOAT32)
        DECIDE[op.in_force](analysis, op)
        op.sent_half = _may_be_sent_in_half(analysis, op)
    for value in block.outvars:
        if not value.kind:
            _set(value, "flexible", FLOAT32)


def _may_be_sent_in_half(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op looks up a parameter and its result may be rounded.

    Then the parameter may be rounded as well.
    """
    if rules.LOOKS_UP not in op.spec.traits or op.half is None or op.forced == "full":
        return False
    table, out = op.ins[0], op.outs[0]
    parameter = table.is_f32 and table.given
    return parameter and not analysis.wants[out].full and may_be_rounded(analysis, out)


def _set(value: Value, kind: str, dtype: Any) -> None:
    if value.is_f32:
        value.kind, value.dtype = kind, np.dtype(dtype)


def _give(analysis: Analysis, op: Op, kind: str, dtype: Any, wide: bool = False) -> None:
    """Sets the kind and dtype of an op's results, and rounds them for storage if they may be."""
    for out in op.outs:
        if not out.is_f32:
            continue
        out.wide, out.lost = wide, _is_lost(analysis, op, out)
        _set(out, kind, dtype)
        rounds = op.half is not None and op.forced != "full"
        if kind != "half" and rounds and _is_rounded(analysis, out):
            out.rounded = True
            _set(out, "half", op.half)


def _is_rounded(analysis: Analysis, value: Value) -> bool:
    """Returns whether a float32 result is stored in half.

    It is if it has several readers, one of them outside of its island, or if a relu or a similar
    function reads it, which saves its operand for the derivative. Values computed from arguments
    alone are treated like arguments: each reader rounds them, and the cotangents are summed in
    float32.
    """
    want = analysis.wants[value]
    several = len(want.readers) > 1 and want.outside and not want.full
    computed = not analysis.facts[value].given
    return (several or want.kink) and computed and may_be_rounded(analysis, value)


def may_be_rounded(analysis: Analysis, value: Value) -> bool:
    """Returns whether a value may be rounded to half without harm."""
    held = analysis.wants[value].held
    return not (value.wide or value.lost or held or value.small or value.is_one)


def _is_lost(analysis: Analysis, op: Op, out: Value) -> bool:
    """Returns whether half would lose information of an op's result, or its range."""
    return analysis.facts[out].exact or analysis.is_beyond(out, op.half)


# With operands this many times as large as its result, a matmul returns float32 for free: two more
# bytes for each entry written and read, beside two for each entry of the operands, are an eighth of
# the latter for 16, a sixteenth for 32.
FAR_LARGER = 32


def _decide_half(analysis: Analysis, op: Op) -> None:
    op.compute = op.half
    out = op.outs[0]
    want = analysis.wants[out]
    if op.spec.need != rules.HALF:  # the user's choice
        _give(analysis, op, "half", op.half)
    elif not out.is_f32:
        return
    elif any(analysis.facts[v].linear for v in op.ins):
        # Its transpose, a matmul too, must get a half cotangent.
        _give(analysis, op, "half", op.half)
    elif op.forced == "half":
        _give(analysis, op, "half", op.half)  # a list or region sets half, also for the result
    elif rules.HAS_WIDE_FORM in op.spec.traits and (
        want.amplified
        or want.unrounded
        or (want.full and want.needed)
        or (want.whole and out.size * FAR_LARGER <= sum(v.size for v in op.ins))
    ):
        op.why = why(Reason.WIDE_RESULT)
        _set(out, "full", FLOAT32)
    elif all(v.aval.dtype in HALVES for v in op.ins if is_float(v)):
        _set(out, "full", FLOAT32)  # the program asked for a float32 result of half operands
    else:
        _give(analysis, op, "half", op.half)


def _decide_full(analysis: Analysis, op: Op) -> None:
    op.compute = FLOAT32
    _give(analysis, op, "full", FLOAT32, op.spec.need != rules.FULL and _is_of_wide(analysis, op))


def _is_of_wide(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op's operands contain a constant that half cannot hold.

    Normalized results are excepted: they are of ordinary size, whatever the divisor and epsilon.
    """
    normalized = any(analysis.facts[v].norm == "unit" for v in op.outs)
    made_here = normalized and all(analysis.facts[v].norm != "unit" for v in op.ins)
    return not made_here and any(v.wide for v in op.ins)


def _decide_follow(analysis: Analysis, op: Op) -> None:
    kinds = {v.kind for v in op.ins if v.is_f32}
    wide = _is_of_wide(analysis, op)
    if not kinds:  # made from integers or booleans: it has no float operand to follow
        return _decide_leave(analysis, op)
    flexible = kinds <= {"flexible"}
    critical = _critical_constant(op, flexible) if op.half is not None else None
    masked = any(v.wide and v.kind == "flexible" for v in op.ins)
    lost = any(_is_lost(analysis, op, out) for out in op.outs)
    held = lost or any(analysis.wants[v].held for v in op.outs)
    read_in_full, wide_in = all_in_full(analysis, op), wide_inside(analysis, op)
    if flexible:
        op.compute = FLOAT32
        _give(analysis, op, "flexible", FLOAT32, wide or critical is not None)
    elif read_in_full or "full" in kinds or critical is not None or masked or held or wide_in:
        op.compute = FLOAT32
        if critical is not None:
            op.why, wide = why(Reason.CONSTANT, critical, op.half.name), True
        elif read_in_full:
            op.why = why(Reason.FULL_READERS)
        elif held:
            op.why = why(Reason.LOST if lost else Reason.AMPLIFIED)
        elif masked:
            op.why = why(Reason.OF_CONSTANTS, op.half.name)
        elif wide_in:
            op.why = wide_in
        else:
            op.why = why(Reason.FULL_OPERAND)
        _give(analysis, op, "full", FLOAT32, wide)
    else:
        op.compute, op.why = op.half, why(Reason.HALF_OPERAND)
        _give(analysis, op, "half", op.half)


def _critical_constant(op: Op, may_be_one: bool = False) -> float | None:
    """Returns a constant operand that rounding to half turns into 0, infinity or 1."""
    for value in op.ins:
        if value.entries is None or not value.is_f32:
            continue
        exact = np.asarray(value.entries, np.float32)
        with np.errstate(over="ignore", under="ignore"):
            half = exact.astype(op.half).astype(np.float32)
        lost = np.isinf(half) & np.isfinite(exact)
        vanished = (half == 0) & (exact != 0)
        if exact.size > 1:  # some entries of an array may underflow, but not all of them
            vanished &= not np.any(half)
        near_one = (half == 1) & (exact != 1) & (exact.size == 1) & (not may_be_one)
        found = exact[lost | vanished | near_one]
        if found.size:
            return float(found.flat[0])
    return None


def _decide_layout(analysis: Analysis, op: Op) -> None:
    kinds = {v.kind for v in op.ins if v.is_f32}
    wide = any(v.wide for v in op.ins)
    fresh = rules.FRESH in op.spec.traits
    for kind in ("full", "half", "flexible"):
        if kind not in kinds:
            continue
        masked = any(v.wide and v.kind == "flexible" for v in op.ins)
        if kind == "half" and len(kinds) > 1 and (masked or _keeps_float32(analysis, op)):
            kind = "full"
        if kind == "half":
            halves = {v.dtype for v in op.ins if v.kind == "half"}
            op.compute = halves.pop() if len(halves) == 1 else op.half
            return _give(analysis, op, "half", op.compute)
        lost = any(_is_lost(analysis, op, out) for out in op.outs)
        keeps = wide or lost or rules.RANKS in op.spec.traits
        if kind == "full" and not keeps and all(_only_for_half(analysis, v) for v in op.outs):
            op.compute = op.half
            return _give(analysis, op, "half", op.half)
        op.compute = FLOAT32
        for out in op.outs:
            out.wide, out.lost = wide, lost
            _set(out, kind, FLOAT32)
        return _give(analysis, op, kind, FLOAT32, wide) if fresh else None
    return _decide_leave(analysis, op)


def _only_for_half(analysis: Analysis, out: Value) -> bool:
    want = analysis.wants[out]
    return out.is_f32 and want.half and len(want.readers) > 0 and not out.small


def _keeps_float32(analysis: Analysis, op: Op) -> bool:
    """Returns whether half operands are cast to float32, and not float32 operands to half.

    This is so if the result is returned: a buffer that is partly updated keeps its other values.
    """
    want = analysis.wants[op.outs[0]]
    return want.returned or want.full or _critical_constant(op) is not None


def _decide_neutral(analysis: Analysis, op: Op) -> None:
    kinds = {v.kind for v in op.ins if v.is_f32}
    if kinds == {"half"} or ("half" in kinds and "full" not in kinds):
        half = next(v.dtype for v in op.ins if v.kind == "half")
        exact = all(_is_exact(v, half) for v in op.ins if v.kind == "flexible")
        op.compute = half if exact else FLOAT32
    else:
        op.compute = FLOAT32


def _is_exact(value: Value, dtype: Any) -> bool:
    if value.entries is None:
        return False
    exact = np.asarray(value.entries, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.all(exact.astype(dtype).astype(np.float32) == exact))


def _decide_cast(analysis: Analysis, op: Op) -> None:
    value, out = op.ins[0], op.outs[0]
    if not out.is_f32:
        op.compute = None
    elif value.is_f32:
        out.wide = value.wide
        _set(out, value.kind, value.dtype)
    elif value.aval.dtype in HALVES and op.half == value.aval.dtype:
        _set(out, "half", op.half)  # it is half; it is cast where a float32 operation reads it
    elif value.aval.dtype == np.bool_ or value.aval.dtype in HALVES or out.entries is not None:
        _set(out, "flexible", FLOAT32)  # exact in half, or an ordinary constant
    elif np.issubdtype(value.aval.dtype, np.integer):
        op.why = why(Reason.INTEGERS)
        out.wide = True
        _set(out, "full", FLOAT32)
    else:
        _set(
            out,
            "full" if np.issubdtype(value.aval.dtype, np.complexfloating) else "flexible",
            FLOAT32,
        )


def _decide_leave(analysis: Analysis, op: Op) -> None:
    op.compute = FLOAT32
    _give(analysis, op, "full", FLOAT32, wide=rules.FROM_BITS in op.spec.traits)


def _decide_written(analysis: Analysis, op: Op) -> None:
    op.compute = FLOAT32
    _give(analysis, op, "full", FLOAT32)


def _decide_program(analysis: Analysis, op: Op) -> None:
    results: dict[int, list[Value]] = {}
    # The condition of a while loop reads what the body carries, by its operand, not what came in.
    carries = {
        sub.ins[position]: half_of(sub.program)
        if analysis.carries[sub.program][position]
        else FLOAT32
        for sub in op.subs
        for _, position in sub.carry
    }
    for sub in op.subs:
        block = sub.program
        pinned, scans = op.inside.pinned, op.inside.kind == SCAN
        for position, (value, index) in enumerate(zip(block.invars, sub.ins, strict=True)):
            source = op.ins[index]
            if not value.is_f32:
                continue
            if index in carries:
                dtype = carries[index]
                _set(value, "flexible" if dtype == FLOAT32 else "half", dtype)
            elif pinned or (scans and position < sub.consts) or _donated(op, index):
                # Constants of a loop stay float32: their cotangents are summed over iterations.
                _set(value, "flexible" if source.kind != "full" else "full", FLOAT32)
                value.wide = source.wide
            else:
                value.wide = source.wide
                _set(value, source.kind, source.dtype)
        decide(analysis, block)
        for value, place in zip(block.outvars, sub.outs, strict=True):
            if place is not None:
                results.setdefault(place, []).append(value)
    for index, out in enumerate(op.outs):
        _decide_result(analysis, op, out, index, results.get(index, []))


def _donated(op: Op, index: int) -> bool:
    return op.params.get("donated_invars", {index: False})[index]


def _decide_result(
    analysis: Analysis, op: Op, out: Value, index: int, inner: Sequence[Value]
) -> None:
    """Picks the storage dtype of a sub-program's result, the same for all branches."""
    if not out.is_f32:
        return
    kinds, want = {v.kind for v in inner}, analysis.wants[out]
    out.wide, out.lost = any(v.wide for v in inner), any(v.lost for v in inner)
    out.small = all(v.small for v in inner)
    halves = {v.dtype for v in inner if v.kind == "half"}
    for sub in op.subs:
        carried = dict(sub.carry)
        if index in carried:
            if analysis.carries[sub.program][carried[index]]:
                return _set(out, "half", half_of(sub.program))
            return _set(out, "full", FLOAT32)
    half = op.half if op.half is not None else next(iter(halves), None)
    if op.inside.pinned or half is None:
        _set(out, "full", FLOAT32)
    elif "full" in kinds:
        outside = want.outside and not (want.full or want.returned)
        rounded = outside and may_be_rounded(analysis, out)
        _set(out, "half" if rounded else "full", half if rounded else FLOAT32)
    elif "half" not in kinds:
        _set(out, "flexible", FLOAT32)
    elif "flexible" in kinds and want.full:  # one branch does not round
        _set(out, "full", FLOAT32)
    else:
        _set(out, "half", halves.pop() if len(halves) == 1 else half)


DECIDE: dict[str, Callable[[Analysis, Op], None]] = {
    "half": _decide_half,
    "full": _decide_full,
    "follow": _decide_follow,
    "layout": _decide_layout,
    "neutral": _decide_neutral,
    "cast": _decide_cast,
    "program": _decide_program,
    "leave": _decide_leave,
    "written": _decide_written,
}
