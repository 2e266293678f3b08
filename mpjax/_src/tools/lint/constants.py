"""Rules of numbers that 16 bits cannot represent: constants, counts, angles, masks."""

import collections
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import dtype_of, is_float, is_half, short_name, shown, stalls_at
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.bounds import Bounds, bounds_of
from mpjax._src.tools.lint.guards import asks_infinite
from mpjax._src.tools.lint.probabilities import shares
from mpjax._src.tools.lint.program import CASTS, CHOSEN, SAME, Program, cases, moves_one, noted
from mpjax._src.tools.lint.rule import Hit


def lost_constants(program: Program) -> Iterator[Hit]:
    """Finds constants that become 0, 1, -1 or Inf in 16 bits, so that all their digits are lost.

    Other roundings are accepted, because the dtype was chosen for them. An infinite mask that a
    library selects in place of entries works as well as a finite one; it is found only if
    arithmetic reads it, which may give NaN. What replaces infinities of a bounded value is never
    read.
    """
    for op in program.named(*CASTS):
        if not (is_half(op.outs[0]) and is_float(op.ins[0])):
            continue
        dtype = dtype_of(op.outs[0])
        for v in program.back(op.ins[0], CHOSEN - CASTS):
            value = program.constant(v)
            if value is None or np.size(value) != 1 or v in _never_chosen(program):
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


@noted
def _never_chosen(program: Program) -> set[Value]:
    """Returns the constants in place of infinities, as by `jnp.nan_to_num`, of bounded values."""
    found: set[Value] = set()
    for op in program.named("select_n"):
        for value in cases(op):
            same, tests = {*program.back(value, SAME)}, program.makers(op.ins[0])
            asks = any(asks_infinite(program, test, same) for test in tests)
            if asks and _is_bounded(program, value):
                found |= {v for case in cases(op) if case is not value for v in program.back(case)}
    return found


def _is_bounded(program: Program, value: Value) -> bool:
    """Returns whether the entries of a value are within bounds or NaN."""
    if bounds_of(program, value) is not None:
        return True
    op = program.maker(value)
    if op is None or op in shares(program):
        return op is not None
    sources = cases(op) or (op.ins[:1] if op.name in SAME else ())
    return bool(sources) and all(_is_bounded(program, v) for v in sources)


def _is_librarys_mask(program: Program, op: Op) -> bool:
    masks = all(reader.name == "select_n" for reader in program.final_readers(op.outs[0]))
    return masks and bool(op.lines[1])


def half_counts(program: Program) -> Iterator[Hit]:
    """Finds 16-bit integers that may exceed 256 in bfloat16, or 2048 in float16.

    These are positions, indices and counters: from an iota, a loop, a sort, a search or a random
    choice, and what is cast back to an integer to read one of more than 256 (2048) places along an
    axis. Single constants are the choice of the user, and are not found.
    """
    for op in program.named(rules.IOTA, *CASTS):
        if not is_half(op.outs[0]):
            continue
        # A cast reads integers in their own dtype; an iota makes them in 16 bits.
        value = op.outs[0] if op.name == rules.IOTA else op.ins[0]
        bounds, limit = bounds_of(program, value), stalls_at(dtype_of(op.outs[0]))
        varies = bounds and bounds.whole and bounds.low < bounds.high
        if bounds and varies and bounds.largest > limit and _is_count(program, value):
            yield Hit(
                f"Integers from {bounds.low:g} to {bounds.high:g} are stored in "
                f"{shown(op.outs[0])}, which cannot represent every integer beyond {limit}.",
                op,
            )
    for op in program.ops:
        for value, length in _places(program, op) if op.ins else ():
            half = _half_integer(program, value)
            limit = stalls_at(dtype_of(half)) if half else length
            if half and length - 1 > limit:
                yield Hit(
                    f"One of {length} places along an axis is chosen by {shown(half)}, which "
                    f"cannot represent every integer beyond {limit}.",
                    # Where it was rounded, unless the caller did that.
                    program.maker(half) or op,
                )


# Operations that make counts from counts, and what counts, ranks, or chooses a number.
COUNTED = SAME | rules.SUMS_OF_TWO | rules.CLAMPS | {rules.MUL, "neg", rules.JOIN, "cumsum"}
COUNTS = rules.having(rules.RANKS) | {rules.IOTA, "cumsum", "rem"}


def _is_count(program: Program, value: Value) -> bool:
    """Returns whether a value is a count or a sum of one, and not a selected constant."""
    made = any(op.name in COUNTS for op in program.makers(value, COUNTED))
    return made or any(map(program.counts, program.back(value, COUNTED)))


def _places(program: Program, op: Op) -> Iterator[tuple[Value, int]]:
    """Yields what chooses places along an axis, and how many there are."""
    numbers = op.params.get("dimension_numbers")
    axes = getattr(numbers, "start_index_map", None)
    axes = getattr(numbers, "scatter_dims_to_operand_dims", axes)
    if axes:
        # An index of several coordinates is judged by the shortest of their axes.
        yield op.ins[1], min(op.ins[0].aval.shape[axis] for axis in axes)
    elif op.name.startswith("dynamic_") and (shape := op.ins[0].aval.shape):
        yield from zip(op.ins[-len(shape) :], shape, strict=True)
    elif op.name in rules.EQUALITIES:
        for value, other in (op.ins, op.ins[::-1]):
            counts = [m for m in program.makers(other, SAME) if m.name == rules.IOTA]
            yield from ((value, m.outs[0].aval.shape[m.params["dimension"]]) for m in counts)


# Operations from an integer to the place that it chooses: it is wrapped if negative, and bounded.
WRAPPED = CHOSEN | rules.SUMS_OF_TWO | rules.CLAMPS | rules.having(rules.JUMPS)


def _leads_to_place(op: Op) -> bool:
    """Returns whether an operation keeps an integer, or joins the coordinates of a place."""
    return op.name in WRAPPED or (op.name == rules.JOIN and _is_integer(op.outs[0]))


def _half_integer(program: Program, value: Value) -> Value | None:
    """Returns the 16-bit argument, or integer in 16 bits, that a place is a cast of, or None."""
    arguments = {*program.block.invars}
    on_the_way = program.back(value, _leads_to_place)
    for v in filter(is_half, on_the_way):
        behind, limit = program.back(v, moves_one), stalls_at(dtype_of(v))
        # The cast of an integer of known bounds is a fault itself.
        integer = any(map(_is_integer, behind)) and bounds_of(program, v) is None
        if not integer and arguments.isdisjoint(behind):
            continue
        known = ((u, bounds_of(program, u)) for u in on_the_way)
        few = (u for u, bounds in known if bounds and bounds.largest <= limit)
        if not any(v in program.back(u, _leads_to_place) for u in few):
            return v
    return None


def _is_integer(value: Value) -> bool:
    return bool(jnp.issubdtype(dtype_of(value), jnp.integer))


def rounded_integers(program, op, ins, outs) -> Iterator[Hit]:
    """Finds integers that a step casts to 16 bits, or adds there, and that this changes.

    Integers may be float32 before the cast: those that were integers, or become integers again. A
    cast that changes no integer of this step is not found.
    """
    if op not in _integer_steps(program) or not np.size(ins[0]):
        return
    # Compared as float64, which has every 16-bit number and every integer below 2**53.
    before, *more = (np.asarray(x).astype(np.float64) for x in ins)
    for other in more:
        before = before - other if op.name == rules.SUB else before + other
    after = np.asarray(outs[0]).astype(np.float64)
    with np.errstate(invalid="ignore"):
        changed = (before != after) & (before == np.rint(before)) & np.isfinite(before)
    if changed.any():
        first = int(np.argmax(changed))
        yield Hit(
            f"{changed.mean():.0%} of the integers in {shown(op.ins[0])} change when they are "
            f"{'added in' if more else 'cast to'} {short_name(dtype_of(op.outs[0]))}: "
            f"{before.flat[first]:.0f} becomes {after.flat[first]:g}.",
            op,
        )


# Operations that hold integers as floats.
HELD = CHOSEN | rules.SUMS_OF_TWO | rules.CLAMPS | {rules.JOIN}


@noted
def _integer_steps(program: Program) -> frozenset[Op]:
    """Returns the casts to 16 bits and the sums there that must not change an integer."""
    casts = [*program.named(*CASTS)]
    floats = [op.outs[0] for op in casts if _is_integer(op.ins[0])]
    floats += [op.outs[0] for op in program.named(rules.IOTA) if is_float(op.outs[0])]
    ends = [op.ins[0] for op in casts if _is_integer(op.outs[0]) and is_float(op.ins[0])]
    were = {v for value in floats for v in program.forward(value, HELD)}
    become = {v for value in ends for v in program.back(value, HELD | rules.having(rules.JUMPS))}

    def must(op: Op) -> bool:
        if op.name in CASTS:
            narrows = is_float(op.ins[0]) and not is_half(op.ins[0])
            return _is_integer(op.ins[0]) or (narrows and not {*op.ins, *op.outs}.isdisjoint(both))
        return op.outs[0] in become and were.issuperset(op.ins)

    both = were | become
    steps = (op for op in (*casts, *program.named(*rules.SUMS_OF_TWO)) if is_half(op.outs[0]))
    return frozenset(filter(must, steps))


def overflowing_masks(program: Program) -> Iterator[Hit]:
    """Finds sums of masks whose least numbers add up to less than the dtype's lowest number.

    The masks may be added one after the other, with logits in between, which are assumed to be
    small relative to a mask. Sums with a mask of -Inf are intended, and are not found.
    """
    for op in program.named(rules.ADD, rules.SUB):
        if not is_float(op.outs[0]) or program.is_backward(op):
            continue
        most = float(jnp.finfo(dtype_of(op.outs[0])).max)
        masks = _masks(program)
        parts = [[each.low for each in masks[value]] for value in op.ins]
        if op.name == rules.SUB:
            # A mask that is subtracted lowers the difference most by its largest number.
            parts[1] = [-each.high for each in masks[op.ins[1]]]
        least = [number for part in parts for number in part]
        # A part that overflows alone is the fault of an addition in it, which is found there.
        if -sum(least) > most and all(-sum(part) <= most for part in parts):
            numbers = " and ".join(f"{number:.3g}" for number in least)
            yield Hit(
                f"Masks are added in {shown(op.outs[0])}: {numbers} add up to {sum(least):.3g}, "
                f"and the lowest number of the dtype is {-most:.3g}.",
                op,
            )


SUMMED = SAME | {rules.ADD}
# A thousandth of float16's range: what is less in magnitude is an offset, and no mask.
LEAST = 64


@noted
def _masks(program: Program) -> dict[Value, list[Bounds]]:
    """Returns the masks in each sum: terms with known, varying bounds."""
    masks: dict[Value, list[Bounds]] = collections.defaultdict(list)

    def is_unknown(op):
        return op.name in SUMMED and bounds_of(program, op.outs[0]) is None

    # A mask is followed through sums with logits, whose bounds are unknown, to whole masks.
    for value in dict.fromkeys(v for op in program.ops for v in op.ins if not program.sources(v)):
        bounds = bounds_of(program, value)
        if bounds and bounds.low != bounds.high and bounds.largest > LEAST:
            for each in program.forward(value, is_unknown):
                masks[each].append(bounds)
    return masks
