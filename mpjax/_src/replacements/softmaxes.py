"""Finds softmaxes in any spelling, by the normal form of `forms`.

A softmax is ``p = e / s`` with ``e = m exp(r z)``, ``s = sum(e)``, a mask ``m`` and a rate ``r``
(ln 2 for an exp2). The pattern to find is ``log p = log e - log s``.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.views import Axes, before, is_view, own_axes
from mpjax._src.replacements.flow import Flow
from mpjax._src.replacements.forms import (
    CONSTANT,
    EXPONENT,
    FACTOR,
    MASK,
    SUM,
    Form,
    Reading,
    guards_of,
    is_constant_along,
    numbered_values,
    same,
)

# The largest number of operations between a sum and the quotient.
REACH = 64

# The operations of a softmax, and those that it may end in.
FACTORS = frozenset(["div", "mul", "select_n", "square"])
ENDS = FACTORS | {"exp", "exp2"}


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


class Spelling(NamedTuple):
    """A possible softmax: how it was read, where it ends, and what was read."""

    reading: Reading
    quotient: Op
    axes: tuple[int, ...]
    form: Form
    guards: "list[tuple[str, float]]"

    @property
    def scores(self) -> "tuple[list[Value], float]":
        """The values of its scores, which are equal, and their factor."""
        ((term, rate),) = ((t, n) for t, n in self.form.items() if t[1] == self.reading.end)
        return self.reading.values[term], rate

    @property
    def is_whole(self) -> bool:
        """Whether its rows sum to one."""
        small = all(abs(t) <= SMALL for name, t in self.guards if name == "add")
        return not self.guards or (small and reaches_one(self.reading, self.form, self.axes))

    def members(self, flow: Flow) -> set[Op] | None:
        """Returns what computes it; None if something else reads what is inside."""
        inside = {*self.reading.ops} - {self.quotient}
        members = {*self.reading.ops}
        # Some spellings leave operations without readers.
        members |= {r for op in inside for r in _readers(op, flow) if r and not _readers(r, flow)}
        apart = all(members.issuperset(_readers(op, flow)) for op in inside)
        return members if apart else None


def softmaxes(flow: Flow) -> list[Softmax]:
    """Returns the softmaxes of a block. No op is part of two: two may share one sum."""
    found: list[Softmax] = []
    taken: set[Op] = set()
    for candidates in spelled(flow):
        for spelling in candidates:
            members = spelling.members(flow)
            if members is None or not members.isdisjoint(taken):
                continue
            inside = {v for op in members for v in op.outs}
            read = (v for op in members for v in op.ins if v not in inside)
            masked = any(v.aval.dtype == np.bool_ for v in read)
            (values, rate), weights = spelling.scores, spelling.quotient.outs[0]
            places = {v: flow.producer[v].index if v in flow.producer else -1 for v in values}
            scores = min(values, key=places.__getitem__)
            options = spelling.axes, rate, spelling.is_whole, masked
            found.append(Softmax(frozenset(members), scores, weights, *options))
            taken |= members
            break
    return found


def spelled(flow: Flow) -> Iterator[Iterator[Spelling]]:
    """Yields for each sum of exponentials the possible softmaxes, the likeliest first."""
    sums = [op for op in flow.ops if op.name == "reduce_sum" and sums_exponentials(op, flow)]
    numbers = numbered_values(flow) if sums else {}
    for total in sums:
        pairs = (_softmax(total, quotient, flow, numbers) for quotient in _quotients(total, flow))
        yield (found for found in pairs if found is not None)


def _readers(op: Op, flow: Flow) -> "set[Op | None]":
    return {reader for v in op.outs for reader in flow.readers.get(v, ())}


def sums_exponentials(op: Op, flow: Flow) -> bool:
    if not flow.is_plain(op) or flow.rulings[op].half is None or op.ins[0].size <= op.outs[0].size:
        return False
    todo = [op.ins[0]]
    for value in todo:  # grows
        maker = flow.producer.get(value)
        if maker is None or len(todo) > REACH:
            continue
        if maker.name in ("exp", "exp2"):
            return True
        if is_view(maker) or maker.name in FACTORS:
            todo += maker.ins
    return False


def _quotients(total: Op, flow: Flow) -> Iterator[Op]:
    """Yields the operations that may divide by a sum, in the order of the program."""
    size = total.ins[0].size
    seen: dict[Op, None] = {}
    todo = [total.outs[0]]
    # Breadth first: the quotient is near the sum.
    while todo and len(seen) < REACH:
        value = todo.pop(0)
        for op in flow.readers.get(value, ()):
            if op is None or op in seen or flow.in_half(op):
                continue
            if len(op.outs) == 1 and not op.subs and op.outs[0].is_f32:
                seen[op] = None
                if op.outs[0].size <= size:
                    todo += op.outs
    for op in sorted(seen, key=lambda op: op.index):
        if op.name in ENDS and op.outs[0].size == size:
            yield op


def _softmax(total: Op, quotient: Op, flow: Flow, numbers: dict[Value, int]) -> Spelling | None:
    """Returns a softmax that ends in a quotient, or None if it is not a softmax."""
    (result,) = quotient.outs
    own = own_axes(result.aval.shape)
    exponents = Reading(flow, numbers)
    exponents.logarithm(total.ins[0], own_axes(total.ins[0].aval.shape))
    over = tuple(map(int, total.params["axes"]))
    varying = [
        values[0]
        for (kind, _, axes), values in exponents.values.items()
        if kind == EXPONENT and not is_constant_along(axes, over)
    ]
    ends, seen = varying if len(varying) == 1 else [], 0
    while seen < len(ends):
        end, seen = ends[seen], seen + 1
        reading = Reading(flow, numbers, numbers[end])
        match = _matches(reading, total, result, own)
        if match is None:
            deeper = shifted_by(end, flow)
            ends += [deeper[0]] if deeper and seen < REACH else []
            continue
        return Spelling(reading, quotient, *match)
    return None


def _matches(
    reading: Reading, total: Op, result: Value, own: Axes
) -> "tuple[tuple[int, ...], Form, list[tuple[str, float]]] | None":
    """Returns the axes, the log of the sum and the guards of a softmax; None for other results."""
    whole = reading.logarithm(result, own)
    divisors = [(t, n) for t, n in whole.items() if t[0] == SUM]
    # log p = log e - log s has the sum once, with the factor -1.
    if len(divisors) != 1 or abs(divisors[0][1] + 1) > 1e-6:
        return None
    ((term, _),) = divisors
    guards, number = guards_of(term)
    if number != reading.numbers[total.outs[0]]:
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
    if op is None or op.name not in ("add", "sub") or not flow.is_plain(op):
        return None
    first, second = (unspread(v, flow).size for v in op.ins)
    if first > second:
        return op.ins[0], op.ins[1]
    return (op.ins[1], op.ins[0]) if second > first and op.name == "add" else None


def unspread(value: Value, flow: Flow) -> Value:
    while (op := flow.producer.get(value)) is not None and is_view(op):
        value = op.ins[0]
    return value


def reaches_one(reading: Reading, form: Form, axes: tuple[int, ...]) -> bool:
    """Returns whether exponentials are shifted by their maximum, so that they sum to at least 1.

    They sum to 0 if all are masked.
    """
    flow, numbers = reading.flow, reading.numbers
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
    op, where = largest_of(shifted[1], own, flow, ("max", "stop_gradient"))
    if op is None or where != tuple(axis for d, axis in enumerate(own) if d not in axes):
        return False
    whole = {numbers.get(op.ins[0])}
    masks = [t[1] for t in form if t[0] == MASK]
    chosen = flow.producer.get(op.ins[0])
    if masks and chosen is not None and chosen.name == "select_n":
        whole = {numbers.get(chosen.ins[1 + kept]) for which, kept in masks
                 if which == numbers.get(chosen.ins[0])}  # fmt: skip
    elif masks:
        return False
    return numbers.get(shifted[0]) in whole and tuple(map(int, op.params["axes"])) == axes


def largest_of(
    value: Value, where: Axes | None, flow: Flow, through: tuple[str, ...]
) -> "tuple[Op | None, Axes | None]":
    """Returns the maximum that a value is computed from, and its axes, given those of the value.

    Changes of layout are skipped, and so are operations of the given names with one operand that is
    not constant.
    """
    while (op := flow.producer.get(value)) is not None and op.name != "reduce_max":
        varying = [v for v in op.ins if v.const is None and v.is_f32]
        if len(varying) != 1 or not (is_view(op) or op.name in through):
            return None, None
        value, where = varying[0], before(op, where) if is_view(op) and where else where
    return op, where
