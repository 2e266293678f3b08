"""Rules of sums and products in 16 bits: over an array, in a scan, over devices, and of rows."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, short_name, shown, stalls_at
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import CHOSEN, SAME, Program
from mpjax._src.tools.lint.rule import Hit

# Reductions with a program of their own, which may compute anything.
GENERAL = ("reduce", "reduce_window")
SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "reduce_window_sum", *GENERAL)
ADDS, MULTIPLIES = "adds", "multiplies"


def half_sums(program: Program) -> Iterator[Hit]:
    """Finds sums of more terms than 16 bits can count, and products of as many factors.

    A running sum of n equal terms stops growing at n = 2**digits: 256 in bfloat16, 2048 in float16.
    A product of n factors is rounded n - 1 times, in any order, each time by up to half an ulp: at
    the same n, no digit is certain. `most_factors` has those of which fewer, or any number, may be
    multiplied. Scans that `jax.lax.associative_scan` writes out count as well. Sums that JAX
    derives for a broadcast (the gradient of a bias) are not written by the user, and compilers
    compute them in at least two levels, so their limit is the square of that.
    """
    for op in program.named(*SUMS, *rules.PRODUCTS_OF_MANY):
        value, by = op.ins[0], _joins(op)
        if not (is_half(value) and is_half(op.outs[0]) and by):
            continue
        yield from _joined(program, op, op.name, by, _terms(op), value)
    for source, by, count, op in _scans(program):
        yield from _joined(program, op, "A scan", by, count, source)


def _joined(
    program: Program, op: Op, what: str, by: str, count: int, value: Value
) -> Iterator[Hit]:
    """Finds a sum or product of more entries of a value than it may have."""
    dtype, most = short_name(dtype_of(value)), stalls_at(dtype_of(value))
    limit = most if by == ADDS else most_factors(program, value)
    if count <= (max(limit, most**2) if program.is_backward(op) else limit):
        return
    if by == ADDS:
        words = f"terms of {shown(value)} in {dtype}, where a running sum of equal terms stops "
        words += f"growing after {most}."
    elif limit < most:
        words = f"factors 1 - x of {shown(value)}, each rounded next to 1: what x has below an ulp "
        words += f"of 1 is lost in every factor, and {limit:.0f} of them leave half of the digits."
    else:
        words = f"factors of {shown(value)} in {dtype}, where {most} roundings leave no digit."
    yield Hit(f"{what} {by} {count} {words}", op)


def _joins(op: Op) -> str:
    """Returns whether a reduction ADDS or MULTIPLIES, or "" if it does something else."""
    if op.name in rules.PRODUCTS_OF_MANY:
        return MULTIPLIES
    program = op.params.get("jaxpr")
    if op.name not in GENERAL or program is None:
        return ADDS
    eqns = getattr(program, "jaxpr", program).eqns
    name = eqns[0].primitive.name if len(eqns) == 1 else ""
    return ADDS if name in rules.ADDITIONS else MULTIPLIES if name == rules.MUL else ""


# What is done to a complement on its way to a product, such as with an epsilon or a first factor.
COMPLEMENTED = CHOSEN | rules.ADDITIONS | {rules.JOIN}


def most_factors(program: Program, value: Value) -> float:
    """Returns how many entries of a value may be multiplied in its dtype.

    The roundings of a product's factors differ, and most cancel. Those of survival probabilities,
    ``1 - x``, do not: a small x is rounded to the same ulp of 1 again and again, so n factors have
    n times that error, and half of the digits are lost as early as in sums. A verdict x is exact.
    """
    number = program.number(value)
    power = number is not None and math.frexp(number)[0] in (0, 0.5, -0.5)
    if power or _are_verdicts(program, value):
        return math.inf
    subs = (op for op in program.makers(value, COMPLEMENTED) if op.name == rules.SUB)
    near = (op.ins[1] for op in subs if program.number(op.ins[0]) == 1)
    return limit_of(dtype_of(value), all(_are_verdicts(program, x) for x in near))


def _are_verdicts(program: Program, value: Value) -> bool:
    """Returns whether a value is 0, 1 or -1: by its bounds, or as an argument in this call."""
    bounds = bounds_of(program, value)
    if bounds is not None:
        return bounds.whole and bounds.largest <= 1
    arrays = dict(zip(program.block.invars, program.call.arrays, strict=True))
    given = [arrays[v] for v in program.back(value, SAME) if v in arrays]
    known = bool(given) and not program.is_abstract
    return known and all(np.isin(np.asarray(x, np.float32), (-1, 0, 1)).all() for x in given)


def _terms(op: Op) -> int:
    """Returns the number of entries that are joined to one."""
    if op.name.startswith("cum"):
        return int(op.ins[0].aval.shape[op.params["axis"]])
    if "window_dimensions" in op.params:
        return math.prod(map(int, op.params["window_dimensions"]))
    before, after = (_jax.size_of(v.aval.shape) for v in (op.ins[0], op.outs[0]))
    return before // max(1, after)


# ---- scans that are written out ------------------------------------------------------------------


class Fold(NamedTuple):
    """How many entries of an array each entry of a value joins, at most."""

    source: Value
    name: str = ""  # the primitive that joins two
    entries: int = 1
    length: int = 1  # of the axis that is sliced


def _scans(program: Program) -> Iterator[tuple[Value, str, int, Op]]:
    """Yields the arrays whose slices are joined to running sums or products, and the largest one.

    The sums of a scan overlap: together they join more entries than there are. The halves that a
    pairwise sum adds do not, and its error grows with the logarithm of their number alone. That of
    a product grows with their number in any case. A linear recurrence does not return its longest
    products, but has them in its results.
    """
    folds: dict[Value, Fold] = {}
    largest: dict[tuple[Value, str], tuple[int, Op]] = {}
    for op in program.ops:
        if len(op.outs) != 1 or not is_half(op.outs[0]) or program.is_backward(op):
            continue
        fold = _fold(program, op, folds)
        if fold is None:
            continue
        folds[op.outs[0]] = fold
        overlaps = fold.entries * op.outs[0].size > fold.source.size
        if op.name == fold.name and (overlaps or fold.name == rules.MUL):
            most, last = largest.get((fold.source, fold.name), (0, op))
            larger = fold.entries > most and op in program.live
            largest[fold.source, fold.name] = max(most, fold.entries), op if larger else last
    for (source, name), (count, op) in largest.items():
        yield source, MULTIPLIES if name == rules.MUL else ADDS, count, op


def _fold(program: Program, op: Op, folds: dict[Value, Fold]) -> Fold | None:
    """Returns what a result joins, or None if it is an array of its own."""
    # A pad also reads its padding value, and a lookup its indices.
    entries = op.ins[:1] if op.name in SAME else op.ins
    values = [v for v in entries if v.size and is_half(v) and program.number(v) is None]
    ins = [folds.get(v, Fold(v)) for v in values]
    names = {each.name for each in ins} - {""}
    if not op.outs[0].size or not ins or len({each.source for each in ins}) > 1 or len(names) > 1:
        return None
    most = max(ins, key=lambda each: each.entries)
    if op.name in SAME:
        # What is repeated is no part of a scan, whose slices are put in place by padding.
        if op.outs[0].size > op.ins[0].size and not _pads(op):
            return None
        before, after = op.ins[0].aval.shape, op.outs[0].aval.shape
        sliced = [a for a, b in zip(before, after, strict=False) if a != b]
        # The first slice says along which axis the source is joined.
        return most if most.length > 1 or not sliced else most._replace(length=max(sliced))
    # Halves are put together as a sum of both, each padded where the other one has its entries.
    makers = [program.maker(v) for v in op.ins]
    if op.name == rules.JOIN or all(m and _pads(m) for m in makers):
        return most
    different = len(ins) == 2 and op.ins[0] is not op.ins[1]
    if not different or op.name not in {rules.ADD, rules.MUL} or not names <= {op.name}:
        return None
    length = max(each.length for each in ins)
    return Fold(most.source, op.name, min(sum(each.entries for each in ins), length), length)


def _pads(op: Op) -> bool:
    return "padding_config" in op.params


# ---- over devices, and to rows -------------------------------------------------------------------


def limit_of(dtype: Any, grows: bool) -> float:
    """Returns how many terms may be added: until a sum stops growing, or half of its digits go."""
    return stalls_at(dtype) if grows else 2 ** (digits(dtype) / 2)


def half_collectives(program: Program) -> Iterator[Hit]:
    """Finds sums over devices in 16 bits, where each device rounds its partial sum.

    The usual case is gradients: an average over replicas is small relative to its terms if they
    cancel.
    """
    for op in program.named(*rules.ALL_SUMS):
        value = op.ins[0]
        if is_half(value):
            axes = op.params.get("axes", op.params.get("axis_name", ()))
            names = ", ".join(map(repr, axes if isinstance(axes, tuple) else (axes,)))
            yield Hit(
                f"{op.name} over {names} sums {shown(value)} over devices in "
                f"{short_name(value.aval.dtype)}.",
                op,
            )


def half_scatters(program: Program) -> Iterator[Hit]:
    """Finds scatter-adds that add to a 16-bit row more often than 16 bits can count.

    If n updates go to m rows, some row gets at least n / m of them, whatever the indices are. In a
    scatter that the user wrote, half of the significant bits may be lost, as for accumulators (16
    updates in bfloat16, 46 in float16). In the gradient of a lookup, which JAX derives, the limit
    is 2**digits, where a row stops growing.
    """
    for op in program.named(*rules.SCATTERS):
        value = op.ins[0]
        if not is_half(value):
            continue
        # The last axis of JAX's scatter indices has the coordinates of one update.
        updates = math.prod(op.ins[1].aval.shape[:-1])
        # Along axes that the indices do not choose, an update adds to all entries.
        chosen = op.params["dimension_numbers"].scatter_dims_to_operand_dims
        rows = math.prod(value.aval.shape[axis] for axis in chosen)
        terms = updates / max(1, rows)
        if terms > limit_of(dtype_of(value), program.is_backward(op)):
            yield Hit(
                f"{op.name} adds {updates} updates to {rows} rows of {shown(value)}: at least "
                f"{terms:.0f} of them to one row, in 16 bits.",
                op,
            )
