"""What the backward part computes otherwise than JAX wrote it, from less that is kept.

The results are the same numbers, or as accurate.
"""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from mpjax._src.base.dtypes import FLOAT32
from mpjax._src.planner import rounding
from mpjax._src.planner.equations import (
    BARRIER,
    Equation,
    Value,
    dependents,
    in_order,
    needed,
    waiting,
)
from mpjax._src.planner.maxima import masks, with_positions
from mpjax._src.planner.picks import compared
from mpjax._src.planner.softmax import Late, softmaxes, takes_half
from mpjax._src.planner.sums import joined_sums

Parts = tuple[list[Equation], list[Equation]]


def rewritten(
    early: Sequence[Equation],
    late: Sequence[Equation],
    outs: Sequence[Value],
    results: Collection[Value],
    cotangents: Collection[Value],
    half: np.dtype,
) -> Parts:
    """Returns the forward and the backward part, changed where that keeps less.

    Args:
        early: The equations of the forward part, with what prepares the backward part.
        late: The equations of the backward part.
        outs: What the forward part returns.
        results: What the backward part returns.
        cotangents: The arguments of the backward part alone.
        half: The 16-bit dtype.
    """
    first, weights, rest = weights_of_softmax(*with_positions(early, late), outs, results, half)
    second = [*weights, *rest]
    # A checkpoint's softmax has weights of its own.
    second = compared(needed(_weights_again(second, cotangents, results, half), results), first)
    first, second = masks(first, joined_sums(second), outs)
    return copies(first, second, results, half)


def copies(
    early: list[Equation], late: list[Equation], results: Collection[Value], half: np.dtype
) -> Parts:
    """What the backward part reads in 16 bits alone is a value of its own: a 16-bit copy.

    So it may be kept without the float32 value, and that be computed again for other readers.
    """
    low = rounding.wanted(late, results, ()) - rounding.made(early, (), half) - {*results}
    values = low.intersection(out for e in early for out in e.outs)
    if not values or half == FLOAT32:
        return early, late
    early = rounding.with_rounded(early, values, half, lambda e: False)
    made = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    copy = {v: made[v] for v in values}
    return early, [e.reading(copy) for e in late]


def weights_of_softmax(
    early: list[Equation],
    late: list[Equation],
    outs: Sequence[Value],
    results: Collection[Value],
    half: np.dtype,
) -> tuple[list[Equation], list[Equation], list[Equation]]:
    """The backward part reads the 16-bit weights of softmaxes that matmuls read (`softmax`).

    Returns:
        The forward part, what computes exponentials from the weights, and the backward part.
    """
    forward = needed(early, outs)
    low = rounding.wanted(forward, outs, ())
    read = {v for v in rounding.fed(forward) if rounding.is_large(v)}
    found = softmaxes(forward, read, low)
    if not found:
        return early, [], late
    values = [v for softmax in found.values() for v in softmax.values]
    backward = Late([*waiting(early, outs, values)[1], *late], results)
    found = {weights: backward.allowed(softmax) for weights, softmax in found.items()}
    first: list[Equation] = []
    early = rounding.with_rounded(early, found, half, lambda e: takes_half(e, low))
    written = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    instead: dict[Value, Value] = {}
    for weights, softmax in found.items():
        instead |= softmax.again(written[weights], first)
    early, later = waiting(early, outs, instead)
    behind = [*later, *late]
    low, either = rounding.wanted(behind, (), ()), instead | written
    changed = [e.reading(either if takes_half(e, low) else instead) for e in behind]
    read = {v for e in changed for v in e.ins}
    return early, needed(first, read), changed


def _weights_again(
    late: Sequence[Equation],
    cotangents: Collection[Value],
    results: Collection[Value],
    half: np.dtype,
) -> list[Equation]:
    """Changes the softmaxes that a checkpoint computes again; its matmuls are what it computes."""
    waiting = dependents(late, cotangents)
    again: list[Equation] = []
    rest: list[Equation] = []
    for e in late:  # a barrier holds cotangents too
        (again if e.name == BARRIER or waiting.isdisjoint(e.outs) else rest).append(e)
    matmuls = [v for e in again if rounding.is_half_matmul(e) for v in e.outs]
    first, weights, second = weights_of_softmax(again, rest, matmuls, results, half)
    if second is rest:
        return [*late]
    return in_order([*(dataclasses.replace(e, again=True) for e in first), *weights, *second])
