"""Rules of one real step: updates that are rounded away, and loss scales that overflow."""

from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import is_half, shown
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import Carried, carried

# The share of entries that may stay unchanged. Updates of one ulp now and then still move weights.
SHARE = 0.5


def stalled_updates(program, op, ins, outs) -> Iterator[Hit]:
    """Finds 16-bit weights of which most entries do not change although their update is not zero.

    Such an update is less than half an ulp: 1/512 of the weight in bfloat16, 1/4096 in float16. A
    float32 sum that is rounded to the weight's dtype loses it too. Entries whose update is zero are
    not counted. Sums with compensation (Kahan), and those that are rounded by their bits
    (stochastically), are not found.
    """
    weights = _weights(program).get(op)
    if weights is None or ins[0].shape != ins[1].shape:
        return
    place, each = weights
    old, update = np.asarray(ins[place], np.float32), np.asarray(ins[1 - place], np.float32)
    new = jnp.asarray(outs[0]).astype(each.before.aval.dtype)
    moves = update != 0
    still = moves & (old == np.asarray(new, np.float32))
    if moves.any() and still.sum() > SHARE * moves.sum():
        yield Hit(
            f"{still.sum() / moves.sum():.0%} of the updates of {each.name}, "
            f"{shown(each.before)}, are rounded away in this step: they are less than half an ulp.",
            op,
        )


def _weights(program: Program) -> dict[Op, tuple[int, Carried]]:
    """Returns the additions that update 16-bit states, with their operand index and the state."""
    if "weights" not in program.notes:
        weights: dict[Op, tuple[int, Carried]] = {}
        for each in carried(program):
            if not (is_half(each.before) and is_half(each.after)):
                continue
            for op in program.makers(each.after, MOVES | CASTS | {"select_n"}):
                if op.name not in ("add", "sub"):
                    continue
                # One operand has to be the old weight, so that the other one is its update.
                ways = [each.before in program.back(v, MOVES | CASTS) for v in op.ins]
                if sum(ways) != 1 or _is_rounded_by_bits(program, op, each.after):
                    continue
                if not _is_compensated(program, op, each.before):
                    weights[op] = ways.index(True), each
        program.notes["weights"] = weights
    return program.notes["weights"]


def _is_compensated(program: Program, op: Op, before: Value) -> bool:
    """Returns whether the old value is subtracted from a sum again, which keeps its error."""
    reads = [each for each in program.readers(op.outs[0]) if each.name == "sub"]
    casts = [v for each in program.readers(op.outs[0]) if each.name in CASTS for v in each.outs]
    reads += [each for v in casts for each in program.readers(v) if each.name == "sub"]
    return any(before in program.back(v, MOVES | CASTS) for each in reads for v in each.ins)


def _is_rounded_by_bits(program: Program, op: Op, after: Value) -> bool:
    """Returns whether the new state depends on the bits of a sum, and the cast for large ones."""
    return any(
        reader.name == "bitcast_convert_type"
        and after in program.forward(reader.outs[0], lambda op: True)
        for value in program.forward(op.outs[0], MOVES)
        for reader in program.readers(value)
    )


# Smaller constants are not loss scales.
LEAST = 2.0


def overflowing_scales(program, op, ins, outs) -> Iterator[Hit]:
    """Finds the first Inf in 16 bits in the backward pass, under a static loss scale.

    A dynamic loss scale is a changing argument, and is lowered by the step that overflows.
    """
    # One finding is enough: what runs after it reads the same Inf.
    if program.notes.get("overflowed") or not program.is_backward(op):
        return
    half = [x for x in outs if is_half(x)]
    if not half or all(bool(jnp.isfinite(x).all()) for x in half):
        return
    # An operation that reads Inf only passes it on.
    if not all(bool(jnp.isfinite(x).all()) for x in ins if _is_number(x)):
        return
    scale = static_scale(program)
    if scale:
        program.notes["overflowed"] = True
        yield Hit(
            f"{op.name} in the backward pass produces Inf in {shown(op.outs[0])} at a loss scale "
            f"of {scale}, which nothing lowers.",
            op,
        )


def static_scale(program: Program) -> str:
    """Returns as text the constant that multiplies the cotangent of a scalar, or ""."""
    if "scale" not in program.notes:
        program.notes["scale"] = _scale(program)
    return program.notes["scale"]


def _scale(program: Program) -> str:
    # A scale that the step returns as it came is as static as a constant.
    kept = {each.before: each.name for each in carried(program) if each.before is each.after}
    for v in _factors(program):
        constant = program.constant(v)
        if constant is not None and constant.size == 1 and float(constant) >= LEAST:
            return f"{float(constant):g}"
        if v in kept:
            given = program.call.arrays[program.block.invars.index(v)]
            return f"{float(given):g} ({kept[v]})"
    return ""


def _factors(program: Program) -> Iterator[Value]:
    """Yields what the backward pass multiplies scalars by, and where that comes from."""
    for op in program.named("mul"):
        if op.outs[0].is_one and program.is_backward(op):
            for value in op.ins:
                yield from program.back(value, MOVES | CASTS)


def is_adjusted(program: Program) -> bool:
    """Returns whether the cotangent of a scalar is multiplied by a state that the step changes."""
    changed = {each.before for each in carried(program) if each.before is not each.after}
    return any(v in changed for v in _factors(program))


def _is_number(x: Any) -> bool:
    return bool(jnp.issubdtype(getattr(x, "dtype", np.bool_), jnp.inexact))
