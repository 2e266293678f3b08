"""The shifts of exponentials before they are summed, usually the maximum of the row."""

from collections.abc import Collection

from mpjax._src.autocast.flow import Flow
from mpjax._src.autocast.tables import Stored
from mpjax._src.base.dtypes import FLOAT32
from mpjax._src.program.graph import Op, Value
from mpjax._src.program.views import own_axes
from mpjax._src.replacements.forms import (
    behind_views,
    is_number,
    is_same_along,
    narrowed,
    numbered_values,
)
from mpjax._src.replacements.softmaxes import largest_of, shifted_by


def steady_shift(scores: Value, members: set[Op], axes: tuple[int, ...], flow: Flow) -> None:
    """Marks the shifts of scores before a softmax that is their only reader."""
    op = flow.producer.get(scores)
    if op is None or not members.issuperset(flow.readers[scores]):
        return
    if op.name == "mul" or (op.name == "div" and is_number(op.ins[1])):  # by a number
        scaled = [v for v in op.ins if not is_number(v)]
        return steady_shift(scaled[0], {op}, axes, flow) if len(scaled) == 1 else None
    shifted = shifted_by(scores, flow)
    if shifted is None:
        return
    if is_same_along(shifted[1], own_axes(scores.aval.shape), axes, flow):
        mark_steady([shifted[1]], {flow.producer[scores]}, flow)
        steady_shift(shifted[0], {flow.producer[scores]}, axes, flow)


def mark_steady(shifts: list[Value], members: set[Op], flow: Flow) -> None:
    """Marks the ops that compute shifts of softmaxes and nothing else.

    Their derivative is zero, and that of a maximum would keep the scores.
    """
    cone: set[Op | None] = set()
    todo = {flow.producer[v] for v in shifts if v in flow.producer}
    while todo:
        op = max(todo, key=lambda op: op.index)
        todo.remove(op)
        for v in op.outs:
            allowed = cone | members if v in shifts else cone
            if not allowed.issuperset(flow.readers.get(v, ())):
                break
        else:
            flow.marks.steady.add(op)
            cone.add(op)
            todo |= {flow.producer[v] for v in op.ins if v in flow.producer}


# ---- sums of exponentials in one pass ------------------------------------------------------------

# In shorter rows a pass costs less than the additional operations that would save it.
LONG = 1024

# Operations that may follow the maximum: jax.nn.logsumexp guards rows without finite entries.
GUARDS = ("max", "min", "select_n", "stop_gradient")


def sum_at_once(flow: Flow, taken: Collection[Op]) -> None:
    """Finds sums of exponentials that are shifted by their row's maximum, as in a logsumexp.

    As written, one pass over the row computes the maximum and a second one the sum. But any part of
    a row has a maximum and a sum relative to it, ``(m, s)`` with ``s = sum(exp(x - m))``, and two
    parts can be combined: ``m = max(m1, m2)`` and ``s = s1 exp(m1 - m) + s2 exp(m2 - m)`` (Milakov
    and Gimelshein, 2018, arXiv:1805.02867). So the maximum returns both in one pass, and for any
    shift ``t`` the sum is ``s exp(m - t)``. On a GPU this saves one read of the logits; elsewhere
    two passes are as fast.

    Exponentials that are also read elsewhere, as in a softmax, are left as they are: they need the
    second pass.
    """
    online = flow.marks.online
    sums = [op for op in flow.ops if op.name == "reduce_sum" and op not in taken]
    pairs = [(op, parts) for op in sums if (parts := _exponentials(op, flow)) is not None]
    if not pairs:
        return
    numbers = numbered_values(flow)
    for total, (exponential, scores, shift) in pairs:
        match = _maximum_of(total, scores, shift, flow, numbers)
        if match is None or match[0] in taken:
            continue
        largest, shift = match
        if online.get(largest, exponential.name) != exponential.name:
            continue
        if largest not in online:
            extra = _like(total.outs[0], flow)
            largest = flow.replace(largest, largest.ins, [*largest.outs, extra])
            online[largest] = exponential.name
        total = flow.replace(total, [*total.ins, *largest.outs, shift], total.outs)
        online[total] = exponential.name


def _exponentials(total: Op, flow: Flow) -> "tuple[Op, Value, Value] | None":
    """Returns the exponential that only a sum reads, its operand and its shift."""
    exponential = flow.producer.get(total.ins[0])
    if exponential is None or exponential.name not in ("exp", "exp2"):
        return None
    shifted = flow.producer.get(exponential.ins[0])
    if shifted is None or shifted.name != "sub":
        return None
    scores, shift = shifted.ins
    rows = max(1, total.outs[0].size)
    fits = (
        all(map(flow.is_plain, (total, exponential, shifted)))
        and flow.readers[exponential.outs[0]] == [total]
        and scores.aval.shape == total.ins[0].aval.shape
        and total.ins[0].size >= LONG * rows
    )
    return (exponential, scores, shift) if fits else None


def _maximum_of(
    total: Op, scores: Value, shift: Value, flow: Flow, numbers: dict[Value, int]
) -> "tuple[Op, Value] | None":
    """Returns the maximum that shifts exponentials, and the shift before it is broadcast.

    The maximum must be over the same axes as the sum.
    """
    own = own_axes(scores.aval.shape)
    rows = [axis for d, axis in enumerate(own) if axis and d not in total.params["axes"]]
    shift, where = behind_views(shift, narrowed(shift, own), flow)
    largest, place = largest_of(shift, where, flow, GUARDS)
    fits = (
        largest is not None
        and (largest in flow.marks.online or flow.is_plain(largest))
        and largest.params["axes"] == total.params["axes"]
        and numbers.get(largest.ins[0]) == numbers.get(scores)
        and all(
            axes is not None and [axis for axis in axes if axis] == rows for axes in (where, place)
        )
    )
    return (largest, shift) if largest is not None and fits else None


def _like(value: Value, flow: Flow) -> Value:
    """Returns a float32 value of the shape of another."""
    sums = Value(value.aval)
    flow.stored[sums] = Stored("full", FLOAT32)
    flow.analysis.small.add(sums)
    return sums
