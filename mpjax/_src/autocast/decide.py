"""The last sweep of a plan: compute dtypes of operations and storage dtypes of values."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpjax._src.autocast.demand import all_in_full, wide_inside
from mpjax._src.autocast.tables import Analysis, Choice, Choices, Reason, Storage, Stored, Why, why
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT32, HALVES
from mpjax._src.base.higher_order import SCAN
from mpjax._src.program.graph import Block, Op, Value, is_float


def decide(analysis: Analysis, block: Block, in_dtypes: Sequence[Any]) -> Analysis:
    """Picks each op's compute dtype and each value's kind and storage dtype.

    Args:
        analysis: What the sweeps before found out.
        block: The program.
        in_dtypes: The dtype in which each float32 argument arrives.
    """
    decided = dataclasses.replace(
        analysis, small={*analysis.small}, choices=Choices(), stored=Storage()
    )
    for value, dtype in zip(block.invars, in_dtypes, strict=True):
        _set(decided, value, "half" if dtype in HALVES else "flexible", dtype)
    _block(decided, block)
    return decided


def _block(analysis: Analysis, block: Block) -> None:
    for value, _ in block.consts:
        _set(analysis, value, "flexible", FLOAT32)
    for op in block.ops:
        for value in op.ins:
            if not analysis.stored[value].kind:
                _set(analysis, value, "flexible", FLOAT32)
        DECIDE[analysis.rulings[op].in_force](analysis, op)
        if _may_be_sent_in_half(analysis, op):
            analysis.choices[op] = analysis.choices[op]._replace(sent_half=True)
    for value in block.outvars:
        if not analysis.stored[value].kind:
            _set(analysis, value, "flexible", FLOAT32)


def _may_be_sent_in_half(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op looks up a parameter and its result may be rounded.

    Then the parameter may be rounded as well.
    """
    if rules.LOOKS_UP not in op.spec.traits or not _rounds(analysis, op):
        return False
    table, out = op.ins[0], op.outs[0]
    parameter = table.is_f32 and table.given
    return parameter and not analysis.wants[out].full and analysis.may_be_rounded(out)


def _rounds(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op's results may be rounded, as far as the user says."""
    ruling = analysis.rulings[op]
    return ruling.half is not None and ruling.forced != "full"


def _choose(analysis: Analysis, op: Op, compute: Any, why: Why | None = None) -> None:
    analysis.choices[op] = Choice(compute, why)


def _set(
    analysis: Analysis, value: Value, kind: str, dtype: Any, wide: bool = False, lost: bool = False
) -> None:
    """Decides how a value is stored."""
    kind, dtype = (kind, np.dtype(dtype)) if value.is_f32 else ("", None)
    analysis.stored[value] = Stored(kind, dtype, wide, lost)


def _give(analysis: Analysis, op: Op, kind: str, dtype: Any, wide: bool = False) -> None:
    """Sets the kind and dtype of an op's results, and rounds them for storage if they may be."""
    half = analysis.rulings[op].half
    for out in op.outs:
        if not out.is_f32:
            continue
        lost = _is_lost(analysis, op, out)
        _set(analysis, out, kind, dtype, wide, lost)
        if kind != "half" and _rounds(analysis, op) and _is_rounded(analysis, out):
            analysis.stored[out] = Stored("half", np.dtype(half), wide, lost, rounded=True)


def _is_rounded(analysis: Analysis, value: Value) -> bool:
    """Returns whether a float32 result is stored in 16 bits.

    It is if it has several readers, one of them outside of its island, or if a relu or a similar
    function reads it, which saves its operand for the derivative. Values computed from arguments
    alone are treated like arguments: each reader rounds them, and the cotangents are summed in
    float32.
    """
    want = analysis.wants[value]
    several = len(want.readers) > 1 and want.outside and not want.full
    computed = not analysis.facts[value].given
    return (several or want.kink) and computed and analysis.may_be_rounded(value)


def _is_lost(analysis: Analysis, op: Op, out: Value) -> bool:
    """Returns whether 16 bits would lose information of an op's result, or its range."""
    return analysis.facts[out].exact or analysis.is_beyond(out, analysis.rulings[op].half)


# With operands this many times as large as its result, a matmul returns float32 for free: two more
# bytes for each entry written and read, beside two for each entry of the operands, are an eighth of
# the latter for 16, a sixteenth for 32.
FAR_LARGER = 32


def _decide_half(analysis: Analysis, op: Op) -> None:
    ruling, out = analysis.rulings[op], op.outs[0]
    half, want = ruling.half, analysis.wants[out]
    _choose(analysis, op, half)
    if op.spec.need != rules.HALF:  # the user's choice
        _give(analysis, op, "half", half)
    elif not out.is_f32:
        return
    elif any(analysis.facts[v].linear for v in op.ins):
        # Its transpose, a matmul too, must get a 16-bit cotangent.
        _give(analysis, op, "half", half)
    elif ruling.forced == "half":
        _give(analysis, op, "half", half)  # a list or region asks for 16 bits, also for the result
    elif rules.HAS_WIDE_FORM in op.spec.traits and (
        want.amplified
        or want.unrounded
        or (want.full and want.needed)
        or (want.whole and out.size * FAR_LARGER <= sum(v.size for v in op.ins))
    ):
        _choose(analysis, op, half, why(Reason.WIDE_RESULT))
        _set(analysis, out, "full", FLOAT32)
    elif all(v.aval.dtype in HALVES for v in op.ins if is_float(v)):
        _set(
            analysis, out, "full", FLOAT32
        )  # the program asked for a float32 result of 16-bit operands
    else:
        _give(analysis, op, "half", half)


def _decide_full(analysis: Analysis, op: Op) -> None:
    _choose(analysis, op, FLOAT32)
    _give(analysis, op, "full", FLOAT32, op.spec.need != rules.FULL and _is_of_wide(analysis, op))


def _is_of_wide(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op's operands contain a constant that 16 bits cannot represent.

    Normalized results are excepted: they are of ordinary size, whatever the divisor and epsilon.
    """
    normalized = any(analysis.facts[v].norm == "unit" for v in op.outs)
    made_here = normalized and all(analysis.facts[v].norm != "unit" for v in op.ins)
    return not made_here and any(analysis.stored[v].wide for v in op.ins)


def _decide_follow(analysis: Analysis, op: Op) -> None:
    half = analysis.rulings[op].half
    kinds = {analysis.stored[v].kind for v in op.ins if v.is_f32}
    if not kinds:  # computed from integers or booleans: it has no float operand to follow
        return _decide_leave(analysis, op)
    wide, flexible = _is_of_wide(analysis, op), kinds <= {"flexible"}
    critical = _critical_constant(op, half, flexible) if half is not None else None
    wide = wide or critical is not None
    if flexible:
        _choose(analysis, op, FLOAT32)
        _give(analysis, op, "flexible", FLOAT32, wide)
    elif (reason := _in_float32(analysis, op, "full" in kinds, critical)) is not None:
        _choose(analysis, op, FLOAT32, reason)
        _give(analysis, op, "full", FLOAT32, wide)
    else:
        _choose(analysis, op, half, why(Reason.HALF_OPERAND))
        _give(analysis, op, "half", half)


def _in_float32(analysis: Analysis, op: Op, full: bool, critical: float | None) -> Why | None:
    """Returns the reason to compute an elementwise op in float32, or None.

    Args:
        analysis: The tables.
        op: The op.
        full: Whether an operand is float32.
        critical: A constant operand that 16 bits cannot represent.
    """
    half = analysis.rulings[op].half
    if critical is not None:
        return why(Reason.CONSTANT, critical, half.name)
    if all_in_full(analysis, op):
        return why(Reason.FULL_READERS)
    if any(_is_lost(analysis, op, out) for out in op.outs):
        return why(Reason.LOST)
    if any(analysis.wants[v].held for v in op.outs):
        return why(Reason.AMPLIFIED)
    if _is_masked(analysis, op):
        return why(Reason.OF_CONSTANTS, half.name)
    return wide_inside(analysis, op) or (why(Reason.FULL_OPERAND) if full else None)


def _is_masked(analysis: Analysis, op: Op) -> bool:
    """Returns whether an operand is computed from constants that 16 bits cannot represent."""
    reads = (analysis.stored[v] for v in op.ins)
    return any(stored.wide and stored.kind == "flexible" for stored in reads)


def _critical_constant(op: Op, half_dtype: Any, may_be_one: bool = False) -> float | None:
    """Returns a constant operand that rounding to 16 bits turns into 0, infinity or 1."""
    for value in op.ins:
        if value.entries is None or not value.is_f32:
            continue
        exact = np.asarray(value.entries, np.float32)
        with np.errstate(over="ignore", under="ignore"):
            half = exact.astype(half_dtype).astype(np.float32)
        lost = np.isinf(half) & np.isfinite(exact)
        vanished = (half == 0) & (exact != 0)
        if exact.size > 1:  # some entries of an array may underflow, but not all of them
            vanished &= not np.any(half)
        near_one = (half == 1) & (exact != 1) & (exact.size == 1) & (not may_be_one)
        critical = exact[lost | vanished | near_one]
        if critical.size:
            return float(critical.flat[0])
    return None


def _decide_layout(analysis: Analysis, op: Op) -> None:
    half = analysis.rulings[op].half
    reads = [analysis.stored[v] for v in op.ins]
    kinds = {stored.kind for v, stored in zip(op.ins, reads, strict=True) if v.is_f32}
    wide = any(stored.wide for stored in reads)
    fresh = rules.FRESH in op.spec.traits
    # One full operand makes the result full: rounding it would lose what the others have.
    for kind in ("full", "half", "flexible"):
        if kind not in kinds:
            continue
        mixed = kind == "half" and len(kinds) > 1
        if mixed and (_is_masked(analysis, op) or _keeps_float32(analysis, op)):
            kind = "full"
        if kind == "half":
            halves = {stored.dtype for stored in reads if stored.kind == "half"}
            compute = halves.pop() if len(halves) == 1 else half
            _choose(analysis, op, compute)
            return _give(analysis, op, "half", compute)
        lost = any(_is_lost(analysis, op, out) for out in op.outs)
        # Only 16-bit ops read it: moved in 16 bits, it is rounded before, and moves half the bytes.
        keeps = wide or lost or rules.RANKS in op.spec.traits
        if kind == "full" and not keeps and all(_only_for_half(analysis, v) for v in op.outs):
            _choose(analysis, op, half)
            return _give(analysis, op, "half", half)
        _choose(analysis, op, FLOAT32)
        for out in op.outs:
            _set(analysis, out, kind, FLOAT32, wide, lost)
        return _give(analysis, op, kind, FLOAT32, wide) if fresh else None
    return _decide_leave(analysis, op)


def _only_for_half(analysis: Analysis, out: Value) -> bool:
    want = analysis.wants[out]
    return out.is_f32 and want.half and len(want.readers) > 0 and out not in analysis.small


def _keeps_float32(analysis: Analysis, op: Op) -> bool:
    """Returns whether 16-bit operands are cast to float32, and not float32 operands to 16 bits.

    This is so if the result is returned: a buffer that is partly updated keeps its other values.
    """
    want = analysis.wants[op.outs[0]]
    critical = _critical_constant(op, analysis.rulings[op].half)
    return want.returned or want.full or critical is not None


def _decide_neutral(analysis: Analysis, op: Op) -> None:
    reads = [(v, analysis.stored[v]) for v in op.ins]
    kinds = {stored.kind for v, stored in reads if v.is_f32}
    compute = FLOAT32
    if kinds == {"half"} or ("half" in kinds and "full" not in kinds):
        half = next(stored.dtype for _, stored in reads if stored.kind == "half")
        if all(_is_exact(v, half) for v, stored in reads if stored.kind == "flexible"):
            compute = half
    _choose(analysis, op, compute)


def _is_exact(value: Value, dtype: Any) -> bool:
    if value.entries is None:
        return False
    exact = np.asarray(value.entries, np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return bool(np.all(exact.astype(dtype).astype(np.float32) == exact))


def _decide_cast(analysis: Analysis, op: Op) -> None:
    value, out = op.ins[0], op.outs[0]
    half, dtype = analysis.rulings[op].half, value.aval.dtype
    if not out.is_f32:
        return
    if value.is_f32:
        stored = analysis.stored[value]
        _set(analysis, out, stored.kind, stored.dtype, stored.wide)
    elif dtype in HALVES and half == dtype:
        _set(analysis, out, "half", half)  # it is 16-bit; it is cast where a float32 op reads it
    elif dtype == np.bool_ or dtype in HALVES or out.entries is not None:
        _set(analysis, out, "flexible", FLOAT32)  # exact in 16 bits, or an ordinary constant
    elif np.issubdtype(dtype, np.integer):
        _choose(analysis, op, None, why(Reason.INTEGERS))
        _set(analysis, out, "full", FLOAT32, wide=True)
    else:
        kind = "full" if np.issubdtype(dtype, np.complexfloating) else "flexible"
        _set(analysis, out, kind, FLOAT32)


def _decide_leave(analysis: Analysis, op: Op) -> None:
    _choose(analysis, op, FLOAT32)
    _give(analysis, op, "full", FLOAT32, wide=rules.FROM_BITS in op.spec.traits)


def _decide_written(analysis: Analysis, op: Op) -> None:
    _choose(analysis, op, FLOAT32)
    _give(analysis, op, "full", FLOAT32)


def _decide_program(analysis: Analysis, op: Op) -> None:
    results: dict[int, list[Value]] = {}
    # The condition of a while loop reads what the body carries, by its operand, not what came in.
    carries = {
        sub.ins[position]: analysis.half_of(sub.program)
        if analysis.carries[sub.program][position]
        else FLOAT32
        for sub in op.subs
        for _, position in sub.carry
    }
    for sub in op.subs:
        block = sub.program
        pinned, scans = op.inside.pinned, op.inside.kind == SCAN
        for position, (value, index) in enumerate(zip(block.invars, sub.ins, strict=True)):
            source = analysis.stored[op.ins[index]]
            if not value.is_f32:
                continue
            # A carry has one dtype in all iterations, whatever comes in.
            if index in carries:
                dtype = carries[index]
                _set(analysis, value, "flexible" if dtype == FLOAT32 else "half", dtype)
            elif pinned or (scans and position < sub.consts) or _donated(op, index):
                # Constants of a loop stay float32: their cotangents are summed over iterations.
                kind = "flexible" if source.kind != "full" else "full"
                _set(analysis, value, kind, FLOAT32, source.wide)
            else:
                _set(analysis, value, source.kind, source.dtype, source.wide)
        _block(analysis, block)
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
    rows = [analysis.stored[v] for v in inner]
    if all(v in analysis.small for v in inner):
        analysis.small.add(out)
    wide, lost = any(row.wide for row in rows), any(row.lost for row in rows)
    _set(analysis, out, "full", FLOAT32, wide, lost)
    half = _half_of_result(analysis, op, out, index, rows)
    if half == FLOAT32:
        _set(analysis, out, "flexible", FLOAT32, wide, lost)
    elif half is not None:
        _set(analysis, out, "half", half, wide, lost)


def _half_of_result(
    analysis: Analysis, op: Op, out: Value, index: int, rows: Sequence[Stored]
) -> Any:
    """Returns the dtype of a result that is not full: a 16-bit dtype or, if flexible, float32."""
    kinds, want = {row.kind for row in rows}, analysis.wants[out]
    halves = {row.dtype for row in rows if row.kind == "half"}
    for sub in op.subs:
        carried = dict(sub.carry)
        if index in carried:
            in_half = analysis.carries[sub.program][carried[index]]
            return analysis.half_of(sub.program) if in_half else None
    half = analysis.rulings[op].half
    half = half if half is not None else next(iter(halves), None)
    if op.inside.pinned or half is None:
        return None
    if "full" in kinds:
        outside = want.outside and not (want.full or want.returned)
        return half if outside and analysis.may_be_rounded(out) else None
    if "half" not in kinds:
        return FLOAT32
    if "flexible" in kinds and want.full:  # one branch does not round
        return None
    return halves.pop() if len(halves) == 1 else half


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
