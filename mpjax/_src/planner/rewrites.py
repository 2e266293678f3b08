"""What the backward part computes otherwise than JAX wrote it, from less that is kept.

The results are the same numbers, or as accurate.
"""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from mpjax._src.planner import rounding
from mpjax._src.planner.cotangents import rounded_once
from mpjax._src.planner.equations import (
    Equation,
    Value,
    dependents,
    needed,
)
from mpjax._src.planner.softmax import softmaxes, takes_half

Parts = tuple[list[Equation], list[Equation]]


def rewritten(
    early: Sequence[Equation],
    late: Sequence[Equation],
    outs: Sequence[Value],
    results: Collection[Value],
    half: np.dtype,
) -> Parts:
    """Returns the forward and the backward part, changed where that moves or keeps less.

    Args:
        early: The equations of the forward part, with what prepares the backward part.
        late: The equations of the backward part.
        outs: What the forward part returns.
        results: What the backward part returns.
        half: The 16-bit dtype.
    """
    first, weights, rest = weights_of_softmax([*early], [*late], outs, half)
    second = [*weights, *rest]
    exact = {v for e in weights for v in e.outs}
    shared = [v for v in rounded_once([*first, *second], second, results) if v not in exact]
    return first, rounding.with_rounded(second, shared, half)


def weights_of_softmax(
    early: list[Equation], late: list[Equation], outs: Sequence[Value], half: np.dtype
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
    first: list[Equation] = []
    early = rounding.with_rounded(early, found, half, lambda e: takes_half(e, low))
    written = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    instead: dict[Value, Value] = {}
    for weights, softmax in found.items():
        instead |= softmax.again(written[weights], first)
    ahead = {*map(id, needed(early, outs))}
    prepared = [e for e in early if id(e) not in ahead]
    moved = dependents(prepared, instead)
    later = [e for e in prepared if not moved.isdisjoint(e.outs)]
    behind = [*(dataclasses.replace(e, again=True) for e in later), *late]
    low = rounding.wanted(behind, (), ())
    changed = []
    for e in behind:
        pick = instead | written if takes_half(e, low) else instead
        changed.append(e.on(pick.get(v, v) for v in e.ins))
    gone = {*map(id, later)}
    read = {v for e in changed for v in e.ins}
    return [e for e in early if id(e) not in gone], needed(first, read), changed
