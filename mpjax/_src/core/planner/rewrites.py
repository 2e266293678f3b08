"""What the backward part computes otherwise than JAX wrote it, from less that is kept.

The results are the same numbers, or as accurate.
"""

import dataclasses

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import (
    BARRIER,
    Equation,
    Order,
    Value,
    deferred,
    dependents,
    in_order,
    needed,
)
from mpjax._src.core.planner.maxima import masks, with_positions
from mpjax._src.core.planner.partition import Parts
from mpjax._src.core.planner.picks import compared
from mpjax._src.core.planner.softmax import allowed, softmaxes, takes_half
from mpjax._src.core.planner.sums import joined_sums


def rewritten(both: Parts) -> Parts:
    """Returns the forward and the backward part, changed where that keeps less."""
    both = weights_of_softmax(with_positions(both))
    # A checkpoint's softmax has weights of its own.
    late = compared(needed(_weights_again(both), both.results), both.early)
    # Copies are last: only then is it known what the backward part still reads, and in which dtype.
    return copies(masks(both._replace(late=joined_sums(late))))


def copies(both: Parts) -> Parts:
    """What the backward part reads in 16 bits alone is a value of its own: a 16-bit copy.

    So it may be kept without the float32 value, and that be computed again for other readers.
    """
    early, late, _, results, _, half = both
    low = rounding.wanted(late, results, ()) - rounding.made(early, (), half) - {*results}
    values = low.intersection(out for e in early for out in e.outs)
    if not values or half == FLOAT32:
        return both
    # In the forward part nobody reads the copy: its matmuls round the value to the same numbers.
    early = rounding.with_rounded(early, values, half, lambda e: False)
    made = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    copy = {v: made[v] for v in values}
    return both._replace(early=early, late=[e.reading(copy) for e in late])


def weights_of_softmax(both: Parts) -> Parts:
    """The backward part reads the 16-bit weights of softmaxes that matmuls read (`softmax`)."""
    early, late, outs, results, _, half = both
    forward = needed(early, outs)
    low = rounding.wanted(forward, outs, ())
    read = {v for v in rounding.fed(forward) if rounding.is_large(v)}
    found = softmaxes(forward, read, low)
    if not found:
        return both
    values = [v for softmax in found.values() for v in softmax.values]
    # JAX computes parts of the derivative, such as factors, in the forward part. They read the
    # softmax as well, so they move to the backward part.
    order, ends = Order([*deferred(early, outs, values)[1], *late]), {*results}
    found = {weights: allowed(softmax, order, ends) for weights, softmax in found.items()}
    first: list[Equation] = []
    early = rounding.with_rounded(early, found, half, lambda e: takes_half(e, low))
    written = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    instead: dict[Value, Value] = {}
    for weights, softmax in found.items():
        instead |= softmax.again(written[weights], first)
    early, later = deferred(early, outs, instead)
    behind = [*later, *late]
    # Matmuls read the weights as they were rounded: normalized, they would be rounded once more.
    low, either = rounding.wanted(behind, (), ()), instead | written
    changed = [e.reading(either if takes_half(e, low) else instead) for e in behind]
    read = {v for e in changed for v in e.ins}
    return both._replace(early=early, late=[*needed(first, read), *changed])


def _weights_again(both: Parts) -> list[Equation]:
    """Changes the softmaxes that a checkpoint computes again; its matmuls are what it computes."""
    waiting = dependents(both.late, both.cotangents)
    again: list[Equation] = []
    rest: list[Equation] = []
    for e in both.late:  # a barrier holds cotangents too
        (again if e.name == BARRIER or waiting.isdisjoint(e.outs) else rest).append(e)
    matmuls = [v for e in again if rounding.is_half_matmul(e) for v in e.outs]
    parts = both._replace(early=again, late=rest, outs=matmuls)
    first, second, *_ = changed = weights_of_softmax(parts)
    if changed is parts:
        return both.late
    return in_order([*(dataclasses.replace(e, again=True) for e in first), *second])
