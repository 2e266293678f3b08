"""Peepholes: patterns with a cheaper derivative than the one that JAX derives.

Each peephole is a function that finds islands of a block, extends them, or marks operations. Its
docstring derives the formula that `derivatives` then runs. They match the normal form of `forms`,
so the spelling in the program does not matter.
"""

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from mpjax._src.autocast.derivatives import Softmax
from mpjax._src.autocast.flow import Flow, free_producers
from mpjax._src.autocast.shifts import mark_steady, steady_shift
from mpjax._src.autocast.steps import Attention, Body, Island, SoftmaxIsland, body_of
from mpjax._src.base import rules
from mpjax._src.base.dtypes import FLOAT16, FLOAT32, HALVES
from mpjax._src.program.graph import Op, Place, Value
from mpjax._src.program.respellings import repetition_of
from mpjax._src.program.views import Axes, after, before, is_view, own_axes
from mpjax._src.replacements.forms import (
    EXPONENT,
    MASKED,
    is_linear,
    is_number,
    is_same_along,
)
from mpjax._src.replacements.softmaxes import Spelling, spelled


def softmaxes(flow: Flow) -> list[SoftmaxIsland]:
    """Finds softmaxes.

    A softmax is ``p = e / s`` with ``e = m exp(r z)``, ``s = sum(e)``, a mask ``m`` and a rate
    ``r`` (ln 2 for an exp2). The pattern to find is ``log p = log e - log s``. Then

        dp = p (r dz - ds / s)  and  ds / s = sum(r e dz) / s = r sum(p dz),
        dp = r p (dz - sum(p dz)),

    which needs only ``dz`` and ``p``, and ``p`` is usually stored in 16 bits for the matmul that
    reads it. Masked entries have ``p = 0`` and do not contribute.

    *Rounding.* If one entry of ``p`` is close to 1, ``dz - sum(p dz)`` is close to 0, and a rounded
    ``p`` does not sum to exactly 1. With ``sum(p dz) / sum(p)`` instead, ``dp`` consists of
    differences ``dz_i - dz_j``, each with a weight that is rounded once. If rows of ``p`` do not
    sum to 1 by definition (a guard), ``p`` is kept as its readers see it.

    *Shifts.* With ``z = x - c``, where ``c`` is the same for a whole row, ``dc`` cancels because
    ``sum(p) = 1``. Nothing is kept for the derivative of a maximum that is subtracted.

    *Guards.* With ``p = e / (s + t)`` and a constant ``t``, ``ds / (s + t)`` is still
    ``r sum(p dz)``. But ``sum(p) = s / (s + t)``, so ``-p t / (s + t)`` remains of ``dc``. This is
    negligible if ``t`` is small and ``s`` is at least 1, as it is after subtracting the maximum. In
    that case ``max(s, t)`` equals ``s``, unless everything is masked and ``p = 0``; a guard that
    replaces ``s = 0`` by 1 is then correct too.
    """
    islands: list[SoftmaxIsland] = []
    taken: set[Op] = set()  # two softmaxes may share one sum

    for candidates in spelled(flow):
        islands_of = (_island(spelling, flow, taken) for spelling in candidates)
        for island in itertools.islice(filter(None, islands_of), 1):
            islands.append(island)
            taken |= {*island.ops}
    return islands


def attentions(flow: Flow, islands: Sequence[Island]) -> list[Island]:
    """Finds the matmul of a softmax with values, perhaps after a dropout and reshapes.

    With ``o = (w p) v``, ``w`` a dropout, and cotangents ``g = w (do v')`` of ``p``, that of ``z``
    is ``r p (g - sum(p g))``, and

        sum(p g) = sum(w p (do v')) = sum(do ((w p) v)) = sum(do o),

    a sum over far smaller arrays, which is known before ``g``. Reshapes and transpositions in
    between change nothing if each axis of the matmul's operand runs over summed axes or over rows.

    *Rounding.* ``o`` is known only rounded to 16 bits. Each row sum therefore has some error ``e``,
    and the cotangent of ``z`` has the error ``-r e p`` along the row. With ``z = q k``, the
    cotangent of ``q`` has the error ``r e p k``: a multiple of the mean of the keys, which does not
    contribute to the exact sum. Subtracting a ``c`` that is the same for the whole row changes
    nothing, ``dz (k - c) = dz k``, because the entries of ``dz`` sum to 0. So the mean of the keys
    is subtracted where ``dz`` is multiplied by them. The cotangents of the keys, ``dk = q dz``,
    have the sum 0 for the same reason. Theirs is ``-r q e p`` in sum, which tokens that share a
    mean pass on to the weights that produced the keys; so the mean of ``dk`` is subtracted from it.
    This is possible if only shifts, scales of rows and masks are in between, and no guard changes
    the sums of rows. (Exact sums over rows would take another pass over ``p`` and ``g``, which are
    far larger than the keys.)

    If one entry of every row is close to 1, ``g - sum(p g)`` is as small as ``e``. The same is true
    for rows that select among given values (bins, atoms, a codebook). There ``g`` is used, and also
    where ``o`` is not smaller than ``p`` (a router's gates), because then it costs no bytes.
    """
    whole = {i for i in islands if isinstance(i, SoftmaxIsland) and i.form.whole}
    moved = _moved(flow) if whole else set()
    taken: set[Op] = set()  # two softmaxes may be multiplied with the same values
    return [
        _weigh(island, flow, taken, moved) if island in whole else island  # type: ignore[arg-type]
        for island in islands
    ]


def repetitions(flow: Flow) -> None:
    """Marks gathers that repeat the entries of an axis in order, each ``k`` times.

    With ``y[k i + j] = x[i]``, ``dx[i] = sum_j dy[k i + j]``. This is a sum over an axis of a
    reshaped ``dy`` instead of a scatter into zeros. It adds in float32 for operands of any dtype.
    """
    for op in flow.ops:
        if op.name == "gather" and op.outs[0].is_f32:
            repeated = repetition_of(op, flow.producer, flow.constants)
            if repeated is not None:
                flow.marks.repeats[op] = repeated


def _island(spelling: Spelling, flow: Flow, taken: set[Op]) -> SoftmaxIsland | None:
    members, quotient = spelling.members(flow), spelling.quotient
    if members is None or members & taken:
        return None
    reading, form, axes = spelling.reading, spelling.form, spelling.axes
    values, rate = spelling.scores
    others = (t for t in form if t[0] == EXPONENT and t[1] != reading.end)
    shifts = [v for t in others for v in reading.values[t]]
    first, instead = _read_once(values, members, flow)
    members, quotient = {instead.get(op, op) for op in members}, instead.get(quotient, quotient)
    whole = spelling.is_whole
    if whole:
        mark_steady(shifts, members, flow)
        steady_shift(first, members, axes, flow)
    softmax = Softmax(axes, rate, whole, None, 0)
    island = SoftmaxIsland(*_bound(members, softmax, [first], quotient, flow))
    return island if island.outs == quotient.outs else None


def _bound(
    ops: Collection[Op], form: Softmax, moving: list[Value], quotient: Op, flow: Flow
) -> tuple[Body, Softmax]:
    """Returns the body of a softmax, whose differentiated inputs come first, and its properties."""
    body = body_of(ops, flow)
    # Its storage dtype: weights are at most 1, but their cotangents are not, near a pole.
    half = flow.rulings[quotient].half
    steep = half == FLOAT16 and flow.analysis.wants[quotient.outs[0]].steep
    unknown = not (form.whole or body.in_half)  # its distance from 1 matters
    half = FLOAT32 if steep or unknown else half
    ins = (*moving, *(v for v in body.ins if v not in moving))
    body = dataclasses.replace(body, ins=ins, sums=quotient.outs, half=half)
    return body, form._replace(half=half, moving=len(moving))


def _readers(op: Op, flow: Flow) -> "set[Op | None]":
    return {reader for v in op.outs for reader in flow.readers.get(v, ())}


def _read_once(values: list[Value], members: set[Op], flow: Flow) -> tuple[Value, dict[Op, Op]]:
    """Lets an island read only the first of several equal values.

    Returns:
        The first value, and the ops that run in place of members.
    """
    indices = {v: flow.producer[v].index if v in flow.producer else -1 for v in values}
    first = min(values, key=indices.__getitem__)
    instead: dict[Op, Op] = {}
    for op in members:
        if any(v in indices and v is not first for v in op.ins):
            ins = [first if v in indices else v for v in op.ins]
            instead[op] = flow.replace(op, ins, op.outs)
    return first, instead


# ---- what a softmax weighs ----------------------------------------------------------------------


def _weigh(
    island: SoftmaxIsland, flow: Flow, taken: set[Op], moved: "set[Op | None]"
) -> SoftmaxIsland:
    """Returns the island of a softmax with its matmul with values, and the ops before that."""
    scores, quotient = island.ins[0], flow.producer[island.body.sums[0]]
    weights, axes = _weights(quotient, flow, island.form.axes)
    weighed = (weights[-1] if weights else quotient).outs[0]
    matmul = _sums_values(flow.readers.get(weighed, []), weighed, axes, flow)
    if matmul is None or matmul in taken or not _readers(matmul, flow):
        return island
    if matmul.outs[0].size >= weighed.size:  # the sums over the weights cost less
        return island
    moving = [scores, *(v for v in matmul.ins if v is not weighed)]
    if _chooses(flow, *moving) or any(v in moving for op in weights for v in op.ins):
        return island
    sources = _sources(island, flow, moved)
    if sources is None:
        return island
    flow.marks.centered.update(sources)
    taken.add(matmul)
    applied = [*free_producers(weights, flow), *weights]
    results = {v for op in (quotient, *applied) for v in op.outs}
    read = dict.fromkeys(v for op in applied for v in op.ins)
    moving += [v for v in read if v not in results and not v.literal]
    ops = [*island.ops, *weights, matmul]
    body, form = _bound(ops, island.form._replace(axes=axes), moving, quotient, flow)
    return Attention(body, form, matmul, tuple(weights))


def _chooses(flow: Flow, scores: Value, values: Value) -> bool:
    """Returns whether the weights select among given values, which attention does not."""
    facts = flow.analysis.facts
    several = facts[scores].made & (facts[scores].made - 1)  # computed by more than one matmul
    return facts[values].given and (values.entries is not None or bool(several))


def _weights(softmax: Op, flow: Flow, axes: tuple[int, ...]) -> "tuple[list[Op], tuple[int, ...]]":
    """Returns the operations between a softmax and a matmul, and the positions of its axes there.

    They are elementwise and linear in it, such as a dropout, or change only its layout.
    """
    ops: list[Op] = []
    value = softmax.outs[0]
    where: Axes | None = own_axes(value.aval.shape)
    there = axes
    while len(flow.readers.get(value, ())) == 1:
        (op,) = flow.readers[value]
        if op is None or flow.rulings[op].forced or op.eqn.effects:
            break
        if flow.choices[op].compute not in (FLOAT32, *HALVES, None):
            break
        if is_view(op):
            where = None if where is None else after(op, where)
            there = () if where is None else _summed(where, axes) or ()
            if not there:
                break
        elif not is_linear(op, value):
            break
        ops.append(op)
        value = op.outs[0]
    return ops, there


def _summed(where: Axes, axes: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the axes that run over summed axes alone; None if some run over others too."""
    over = [{place in axes for place, *_ in axis} for axis in where]
    if any(len(kinds) > 1 for kinds in over):
        return None
    return tuple(d for d, kinds in enumerate(over) if kinds == {True})


def _sums_values(
    readers: "list[Op | None]", result: Value, axes: tuple[int, ...], flow: Flow
) -> Op | None:
    """Returns the only reader of a softmax if it is a matmul that contracts its summed axes."""
    matmul = readers[0] if len(readers) == 1 else None
    if matmul is None or matmul.name != "dot_general" or flow.rulings[matmul].in_force != "half":
        return None
    place = matmul.ins.index(result)
    contracting, _ = matmul.params["dimension_numbers"]
    fits = (
        matmul.ins[1 - place] is not result
        and matmul.outs[0].is_f32
        and set(contracting[place]) == set(axes)
        and matmul.params.get("out_sharding") is None
    )
    return matmul if fits else None


# ---- what scores are made by --------------------------------------------------------------------


def _sources(
    island: SoftmaxIsland, flow: Flow, moved: "set[Op | None]"
) -> "dict[Op, Place] | None":
    """Returns the matmuls of scores, with the operand and axes whose mean to subtract.

    None if adding a constant to all entries of a row would change one of their results.
    """
    scores = island.ins[0]
    places: dict[Op, Place] = {}
    todo: list[tuple[Value, Axes | None]] = [(scores, own_axes(scores.aval.shape))]
    seen: dict[tuple[Value, Axes | None], Op] = {}
    while todo:
        value, where = todo.pop()
        op = flow.producer.get(value)
        if (
            op is None
            or flow.marks.is_steady(op)
            or flow.analysis.is_raw(value)
            or (value, where) in seen
        ):
            continue
        seen[value, where] = op
        if op.spec.need == rules.HALF or flow.rulings[op].rule == "program":
            place = _place_of(op, where, island.form.axes, flow)
            if place is None or places.setdefault(op, place) != place:
                return None
        else:
            varying = [v for v in op.ins if v.is_f32 and v.const is None]
            todo += [(v, _where(op, v, where, island.form.axes, flow)) for v in varying]
    # A matmul whose rows the shift does not reach needs nothing.
    places = {op: (i, dims) for op, (i, dims) in places.items() if dims}
    through = {*seen.values(), *island.ops}
    readers = {op for v, _ in seen for op in flow.readers[v] if op in moved}
    return places if not places or readers <= through else None


def _moved(flow: Flow) -> "set[Op | None]":
    """Returns the ops through which results are differentiated; some ops have no readers."""
    moved: set[Op | None] = {None}
    for op in reversed(flow.ops):
        if not flow.marks.is_steady(op) and (
            op.eqn.effects or not moved.isdisjoint(_readers(op, flow))
        ):
            moved.add(op)
    return moved


def _where(op: Op, value: Value, where: Axes | None, axes: Any, flow: Flow) -> Axes | None:
    """Returns the axes of an operand, seen from the scores; None if a shift does not pass it."""
    if where is None or flow.rulings[op].forced or value.const is not None:
        return None
    if is_view(op):
        return before(op, where)
    others = [v for v in op.ins if v is not value]
    # A sum hands a shift on as it is, and a product with numbers of rows by their factor.
    if op.name in ("add", "sub", "add_any", "neg") and value.aval.shape == op.outs[0].aval.shape:
        return where
    if op.name == "mul" or (op.name == "div" and value is op.ins[0]):
        same = all(is_number(v) or is_same_along(v, where, axes, flow) for v in others)
        return where if same else None
    if op.name == "select_n" and value is not op.ins[0]:
        # A mask hands it on if the masked entries stay masked.
        consts = [v.const for v in others[1:]]
        return where if all(c is not None and np.max(c) < MASKED for c in consts) else None
    return None


def _place_of(op: Op, where: Axes | None, axes: tuple[int, ...], flow: Flow) -> Place | None:
    """Returns the operand of a matmul that runs along the axes of a row, and its axes."""
    if op.name != "dot_general":
        return None
    (left, right), (batch, others) = op.params["dimension_numbers"]
    shapes = [v.aval.shape for v in op.ins]
    free = [
        [d for d in range(len(shape)) if d not in (*used, *shared)]
        for shape, used, shared in zip(shapes, (left, right), (batch, others), strict=True)
    ]
    if any(flow.analysis.facts[v].mask for v in op.ins):  # ones and zeros: their mean is not large
        return 0, ()
    if where is None or flow.rulings[op].in_force not in ("half", "full"):
        return None
    rows: list[tuple[int, int] | None] = [None] * len(batch)
    rows += [(i, d) for i in (0, 1) for d in free[i]]
    summed = _summed(where, axes)
    if summed is None:
        return None
    places = [place for d in summed if (place := rows[d]) is not None]
    operands = {operand for operand, _ in places}
    if len(places) < len(summed) or len(operands) > 1:
        return None
    return max(operands, default=0), tuple(d for _, d in places)
