"""Finds softmaxes in any spelling, by the normal form of `forms`.

A softmax is ``p = e / s`` with ``e = m exp(r z)``, ``s = sum(e)``, a mask ``m`` and a rate ``r``
(ln 2 for an exp2). The pattern to find is ``log p = log e - log s``.
"""

import itertools
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base.rules import EXPONENTIALS, PRODUCTS, SELECT, SUMS_OF_TWO
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.views import Axes, before, behind, is_view, own_axes
from mpjax._src.replacements.flow import Flow
from mpjax._src.replacements.forms import (
    CONSTANT,
    EXPONENT,
    FACTOR,
    MASK,
    SUM,
    Form,
    Reading,
    is_constant_along,
    same,
)

# The largest number of operations between a sum and the quotient.
REACH = 64

# The operations of a softmax, and those that it may end in.
FACTORS = PRODUCTS | {SELECT, "square"}
ENDS = FACTORS | EXPONENTIALS


# Added to a sum that is at least 1, this changes nothing in 16 bits.
SMALL = 2.0**-13


class Softmax(NamedTuple):
    """A softmax, as it is found."""

    ops: frozenset[Op]  # what computes it
    scores: Value  # what it is a function of
    weights: Value  # its result
    axes: tuple[int, ...]  # what it sums over, as axes of its result
    rate: float  # the factor of the scores
    whole: bool  # whether its rows sum to one
    masked: bool  # whether a mask is inside of it


def softmaxes(flow: Flow) -> list[Softmax]:
    """Returns the softmaxes of a block. No op is part of two: two may share one sum."""
    sums = [op for op in flow.ops if op.name == "reduce_sum" and sums_exponentials(op, flow)]
    found: list[Softmax] = []
    taken: set[Op] = set()
    for total in sums:
        for quotient in _quotients(total, flow):
            softmax = _softmax(total, quotient, flow)
            if softmax is not None and softmax.ops.isdisjoint(taken):
                found.append(softmax)
                taken |= softmax.ops
                break
    return found


def sums_exponentials(op: Op, flow: Flow) -> bool:
    if not flow.is_plain(op) or flow.rulings[op].half is None or op.ins[0].size <= op.outs[0].size:
        return False
    makers = flow.before(op.ins, lambda op: is_view(op) or op.name in FACTORS)
    return any(maker.name in EXPONENTIALS for maker in itertools.islice(makers, REACH))


def _quotients(total: Op, flow: Flow) -> list[Op]:
    """Returns the operations that may divide by a sum, in the order of the program."""
    size = total.ins[0].size

    def fits(op):
        return not flow.in_half(op) and len(op.outs) == 1 and not op.subs and op.outs[0].is_f32

    # Breadth first: the quotient is near the sum.
    after = flow.after(total.outs[0], lambda op, v: fits(op) and op.outs[0].size <= size)
    ends = [op for op in itertools.islice(after, REACH) if fits(op) and op.name in ENDS]
    return sorted((op for op in ends if op.outs[0].size == size), key=lambda op: op.index)


def _softmax(total: Op, quotient: Op, flow: Flow) -> Softmax | None:
    """Returns a softmax that ends in a quotient, or None if it is not a softmax."""
    exponents = Reading(flow)
    exponents.logarithm(total.ins[0], own_axes(total.ins[0].aval.shape))
    over = tuple(map(int, total.params["axes"]))
    varying = [
        values[0]
        for (kind, _, axes), values in exponents.values.items()
        if kind == EXPONENT and not is_constant_along(axes, over)
    ]
    # What is shifted may be the scores, or what the shift is subtracted from.
    ends = varying if len(varying) == 1 else []
    for end in ends:  # grows
        reading = Reading(flow, flow.numbers[end])
        if (match := _matches(reading, total, quotient.outs[0])) is not None:
            return _made(reading, quotient, *match)
        deeper = shifted_by(end, flow)
        ends += [deeper[0]] if deeper and len(ends) <= REACH else []
    return None


def _made(
    reading: Reading, quotient: Op, axes: tuple[int, ...], form: Form, guards: Any
) -> Softmax | None:
    """Returns what was read as a softmax; None if something else reads what is inside."""
    flow, inside = reading.flow, {*reading.ops} - {quotient}
    # Some spellings leave operations without readers.
    unread = {r for op in inside for r in flow.readers_of(op) if r and not flow.readers_of(r)}
    members = frozenset([*reading.ops, *unread])
    if not all(members.issuperset(flow.readers_of(op)) for op in inside):
        return None
    made = {v for op in members for v in op.outs}
    masked = any(v.aval.dtype == np.bool_ for op in members for v in op.ins if v not in made)
    ((term, rate),) = ((t, n) for t, n in form.items() if t[1] == reading.end)
    places = {v: flow.producer[v].index if v in flow.producer else -1 for v in reading.values[term]}
    scores = min(places, key=places.__getitem__)  # they are equal
    small = all(abs(constant) <= SMALL for name, constant in guards if name == "add")
    whole = not guards or (small and reaches_one(reading, form, axes))
    return Softmax(members, scores, quotient.outs[0], axes, rate, whole, masked)


def _matches(
    reading: Reading, total: Op, result: Value
) -> tuple[tuple[int, ...], Form, Any] | None:
    """Returns the axes, the log of the sum and the guards of a softmax; None for other results."""
    own = own_axes(result.aval.shape)
    whole = reading.logarithm(result, own)
    divisors = [(t, n) for t, n in whole.items() if t[0] == SUM]
    # log p = log e - log s has the sum once, with the factor -1.
    if len(divisors) != 1 or abs(divisors[0][1] + 1) > 1e-6:
        return None
    ((term, _),) = divisors
    number, guards = term[1]
    if number != reading.flow.numbers[total.outs[0]]:
        return None
    # The sum runs over those axes of the result along which it is the same.
    rows = {place for axis in term[2] for place, *_ in axis}
    axes = tuple(d for d, axis in enumerate(own) if axis and d not in rows)
    summed = iter(axes)
    kept = iter(term[2])
    along: list[Any] = []
    over = {int(d) for d in total.params["axes"]}
    # Where the axes of what is summed are in the result, so that both logs name the same axes.
    for d, n in enumerate(total.ins[0].aval.shape):
        axis = next(kept) if d not in over else () if n == 1 else own[next(summed, -1)]
        along.append(axis)
    if next(summed, None) is not None:
        return None
    form = reading.logarithm(total.ins[0], tuple(along))
    rest = {t: n for t, n in whole.items() if t is not term}
    exponents = [t for t in form if t[0] == EXPONENT]
    fits = (
        same(form, rest)
        and not any(t[0] in (FACTOR, SUM) for t in form)
        and all(
            t[2] == own if t[1] == reading.end else is_constant_along(t[2], axes) for t in exponents
        )
        and any(t[1] == reading.end for t in exponents)
    )
    # With a guard, rows do not sum to one, so a shift would not cancel.
    if not fits or (guards and len(exponents) > 1):
        return None
    largest = [t for name, t in guards if name == "max"]
    if largest and not (max(largest) < 1 and reaches_one(reading, form, axes)):
        return None
    return axes, form, guards


# ---- the shifts of exponentials, usually the maximum of the row ----------------------------------


def shifted_by(value: Value, flow: Flow) -> "tuple[Value, Value] | None":
    """Returns the operand and its shift if a value is such a sum or difference."""
    op = flow.producer.get(value)
    if op is None or op.name not in SUMS_OF_TWO or not flow.is_plain(op):
        return None
    first, second = (behind(v, own_axes(v.aval.shape), flow.producer)[0].size for v in op.ins)
    if first > second:
        return op.ins[0], op.ins[1]
    return (op.ins[1], op.ins[0]) if second > first and op.name == "add" else None


def reaches_one(reading: Reading, form: Form, axes: tuple[int, ...]) -> bool:
    """Returns whether exponentials are shifted by their maximum, so that they sum to at least 1.

    They sum to 0 if all are masked.
    """
    flow, numbers = reading.flow, reading.flow.numbers
    (scores,) = (t for t in form if t[0] == EXPONENT)
    value = reading.values[scores][0]
    op = flow.producer.get(value)
    if op is not None and op.name == "mul":  # the other factor does not matter: 0 stays 0
        value = next((v for v in op.ins if v.const is None), value)
    shifted = shifted_by(value, flow)
    scaled = any(t[0] == CONSTANT for t in form)
    if shifted is None or flow.producer[value].name != "sub" or scaled:
        return False
    own = own_axes(value.aval.shape)
    op, where = largest_of(shifted[1], before(flow.producer[value], own, 1), flow)
    if op is None or where != tuple(axis for d, axis in enumerate(own) if d not in axes):
        return False
    whole = {numbers.get(op.ins[0])}
    masks = [t[1] for t in form if t[0] == MASK]
    chosen = flow.producer.get(op.ins[0])
    if masks and chosen is not None and chosen.name == SELECT:
        whole = {numbers.get(chosen.ins[1 + kept]) for which, kept in masks
                 if which == numbers.get(chosen.ins[0])}  # fmt: skip
    elif masks:
        return False
    return numbers.get(shifted[0]) in whole and tuple(map(int, op.params["axes"])) == axes


def largest_of(value: Value, where: Axes | None, flow: Flow) -> "tuple[Op | None, Axes | None]":
    """Returns the maximum that a value is computed from, and its axes, given those of the value.

    Changes of layout are skipped, and so are a lower bound and a stopped gradient.
    """
    while (op := flow.producer.get(value)) is not None and op.name != "reduce_max":
        varying = [v for v in op.ins if v.const is None and v.is_f32]
        if len(varying) != 1 or not (is_view(op) or op.name in ("max", "stop_gradient")):
            return None, None
        value, where = varying[0], before(op, where, op.ins.index(varying[0]))
    return op, where
