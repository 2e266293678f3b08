"""Rules of numbers that 16 bits cannot represent: constants, counts, angles, masks."""

import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_float, is_half, short_name, shown
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import CASTS, CHOSEN, SAME, Program
from mpjax._src.tools.lint.rule import Hit


def lost_constants(program: Program) -> Iterator[Hit]:
    """Finds constants that become 0, 1, -1 or Inf in 16 bits, so that all their digits are lost.

    Other roundings are accepted, because the dtype was chosen for them. An infinite mask that a
    library selects in place of entries works as well as a finite one; it is found only if
    arithmetic reads it, which may give NaN.
    """
    for op in program.named(*CASTS):
        if not (is_half(op.outs[0]) and is_float(op.ins[0])):
            continue
        dtype = dtype_of(op.outs[0])
        for v in program.back(op.ins[0], CHOSEN - CASTS):
            value = program.constant(v)
            if value is None or np.size(value) != 1:
                continue
            number = float(np.reshape(value, ()))
            with np.errstate(over="ignore", under="ignore"):
                result = float(np.asarray(number).astype(dtype))
            infinite = math.isinf(result) and math.isfinite(number)
            if result == number or not (result in (0, 1, -1) or infinite):
                continue
            if not (infinite and _is_librarys_mask(program, op)):
                yield Hit(f"The constant {number:.6g} is {result:g} in {short_name(dtype)}.", op)
                break


def _is_librarys_mask(program: Program, op: Op) -> bool:
    masks = all(reader.name == "select_n" for reader in program.final_readers(op.outs[0]))
    return masks and bool(op.lines[1])


def half_counts(program: Program) -> Iterator[Hit]:
    """Finds 16-bit integers that may exceed 256 in bfloat16, or 2048 in float16.

    These are positions, indices and counters, from an iota or a loop. Single constants are the
    choice of the user, and are not found.
    """
    for op in program.named("iota", *CASTS):
        if not is_half(op.outs[0]):
            continue
        # A cast reads integers in their own dtype; an iota makes them in 16 bits.
        value = op.outs[0] if op.name == "iota" else op.ins[0]
        bounds = bounds_of(program, value) if _is_count(program, value) else None
        limit = 2 ** digits(dtype_of(op.outs[0]))
        if bounds and bounds.whole and bounds.low < bounds.high and bounds.largest > limit:
            yield Hit(
                f"Integers from {bounds.low:g} to {bounds.high:g} are stored in "
                f"{shown(op.outs[0])}, which cannot represent every integer beyond {limit}.",
                op,
            )


# Operations that make counts from counts.
COUNTED = SAME | rules.SUMS_OF_TWO | {"mul", "max", "min", "neg", "concatenate", "cumsum"}


def _is_count(program: Program, value: Value) -> bool:
    """Returns whether a value is a count or a sum of one, and not a selected constant."""
    made = any(op.name in ("iota", "cumsum") for op in program.makers(value, COUNTED))
    return made or any(map(program.counts, program.back(value, COUNTED)))


def rounded_integers(program, op, ins, outs) -> Iterator[Hit]:
    """Finds integers that a step casts to 16 bits, and that the cast changes.

    A cast that changes no integer of this step is not found.
    """
    counts = op.name in CASTS and jnp.issubdtype(ins[0].dtype, jnp.integer) and ins[0].size
    if not counts or not is_half(outs[0]):
        return
    before = np.asarray(ins[0]).astype(np.int64)
    after = np.asarray(outs[0]).astype(np.float64)
    # Compared as float64, which has every 16-bit number and every integer below 2**53.
    changed = before != after
    if changed.any():
        first = int(np.argmax(changed))
        yield Hit(
            f"{changed.mean():.0%} of the integers in {shown(op.ins[0])} change when they are cast "
            f"to {short_name(dtype_of(op.outs[0]))}: {before.flat[first]} becomes "
            f"{after.flat[first]:g}.",
            op,
        )


def overflowing_masks(program: Program) -> Iterator[Hit]:
    """Finds sums of masks whose least numbers add up to less than the dtype's lowest number.

    The masks may be added one after the other, with logits in between, which are assumed to be
    small relative to a mask. Sums with a mask of -Inf are intended, and are not found.
    """
    for op in program.named("add", "sub"):
        if not is_float(op.outs[0]) or program.is_backward(op):
            continue
        most = float(jnp.finfo(dtype_of(op.outs[0])).max)
        parts = [_least_of_masks(program, value) for value in op.ins]
        if op.name == "sub":
            # A mask that is subtracted lowers the difference most by its largest number.
            parts[1] = [-high for high in _least_of_masks(program, op.ins[1], max)]
        least = [number for part in parts for number in part]
        # A part that overflows alone is the fault of an addition in it, which is found there.
        if -sum(least) > most and all(-sum(part) <= most for part in parts):
            numbers = " and ".join(f"{number:.3g}" for number in least)
            yield Hit(
                f"Masks are added in {shown(op.outs[0])}: {numbers} add up to {sum(least):.3g}, "
                f"and the lowest number of the dtype is {-most:.3g}.",
                op,
            )


SUMMED = SAME | {"add"}


def _least_of_masks(program: Program, value: Value, end=min) -> list[float]:
    """Returns the least numbers of the masks in a sum: terms with known, varying bounds."""

    def is_unknown(op):
        return op.name in SUMMED and bounds_of(program, op.outs[0]) is None

    # The walk passes sums with logits, whose bounds are unknown, and stops at whole masks.
    bounds = [bounds_of(program, each) for each in program.back(value, is_unknown)]
    return [end(each.low, each.high) for each in bounds if each and each.low != each.high]
