"""What the backward part computes otherwise than JAX wrote it, from less that is kept.

The results are the same numbers, or as accurate.
"""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.base.dtypes import FLOAT32
from mpjax._src.base.rules import MOVE, REDUCES
from mpjax._src.planner import rounding
from mpjax._src.planner.equations import (
    BARRIER,
    Equation,
    Value,
    dependents,
    in_order,
    needed,
    opened,
    readers_of,
)
from mpjax._src.planner.maxima import masks, with_positions
from mpjax._src.planner.picks import compared

Parts = tuple[list[Equation], list[Equation]]
EXPONENTIALS = ("exp", "exp2")


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
    first, second = weights_of_softmax(*with_positions(early, late), outs, half)
    # A checkpoint's softmax has weights of its own.
    second = compared(needed(_weights_again(second, cotangents, half), results))
    first, second = masks(first, second, outs)
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
    copy = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    return early, [e.on(copy[v] if v in values else v for v in e.ins) for e in late]


def weights_of_softmax(
    early: list[Equation], late: list[Equation], outs: Sequence[Value], half: np.dtype
) -> Parts:
    """The backward part reads the 16-bit weights of a softmax that matmuls alone read, normalized.

    The rounded weights divided by their sums are exactly a softmax, of scores that have moved by at
    most a rounding unit: their rows sum to one, and the difference between a confident row's weight
    and one has a small relative error. Rounded weights alone have neither. So neither the scores
    nor float32 weights are kept.

    The derivative of ``e / sum(e)`` is the same for multiples of ``e``. So it may read the weights
    in place of the exponentials, and one in place of their sums.
    """
    forward = needed(early, outs)
    maker, readers = {out: e for e in forward for out in e.outs}, readers_of(forward)
    low = rounding.wanted(forward, outs, ())
    read = {v for v in rounding.fed(forward) if v in low and rounding.is_large(v)}
    found = [s for e in forward if (s := Softmax.at(e, maker)) and s.weights in read]
    if not found:
        return early, late
    first: list[Equation] = []
    weights = {s.weights for s in found}
    early = rounding.with_rounded(early, weights, half, lambda e: _takes_half(e, low))
    written = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    instead = {}
    for s in found:
        y = instead[s.weights] = s.normalized(written[s.weights], first)
        if s.is_alone(readers, outs):
            instead[s.exponentials] = y
            instead.update((v, _ones(v, s.division, first)) for v in s.sums)
    forward = needed(early, outs)
    ahead = {*map(id, forward)}
    prepared = [e for e in early if id(e) not in ahead]
    moved = dependents(prepared, instead)
    later = [e for e in prepared if not moved.isdisjoint(e.outs)]
    behind = [*(dataclasses.replace(e, again=True) for e in later), *late]
    low = rounding.wanted(behind, (), ())
    changed = []
    for e in behind:
        pick = instead | written if _takes_half(e, low) else instead
        changed.append(e.on(pick.get(v, v) for v in e.ins))
    gone = {*map(id, later)}
    return [e for e in early if id(e) not in gone], [*first, *changed]


def _weights_again(
    late: Sequence[Equation], cotangents: Collection[Value], half: np.dtype
) -> list[Equation]:
    """Changes the softmaxes that a checkpoint computes again; its matmuls are what it computes."""
    waiting = dependents(late, cotangents)
    again: list[Equation] = []
    rest: list[Equation] = []
    for e in late:  # a barrier holds cotangents too
        (again if e.name == BARRIER or waiting.isdisjoint(e.outs) else rest).append(e)
    matmuls = [v for e in again if rounding.is_half_matmul(e) for v in e.outs]
    first, second = weights_of_softmax(again, rest, matmuls, half)
    return in_order([*(dataclasses.replace(e, again=True) for e in first), *second])


class Softmax(NamedTuple):
    """A quotient of exponentials and their sums."""

    division: Equation
    chain: Sequence[Equation]  # the sum, then what broadcasts it

    @property
    def weights(self) -> Value:
        """Its result."""
        return self.division.outs[0]

    @property
    def exponentials(self) -> Value:
        """What is summed."""
        return self.division.ins[0]

    @property
    def sums(self) -> list[Value]:
        """The sums, in all their layouts."""
        return [e.outs[0] for e in self.chain]

    @classmethod
    def at(cls, e: Equation, maker: Mapping[Value, Equation]) -> "Softmax | None":
        """Returns the softmax that an equation ends, if it does."""
        if e.name != "div" or e.ins[0] not in maker or maker[e.ins[0]].name not in EXPONENTIALS:
            return None
        chain, v = [], e.ins[1]
        while v in maker and _broadcasts(maker[v]):
            chain.append(maker[v])
            v = maker[v].ins[0]
        if v not in maker or maker[v].name != "reduce_sum" or maker[v].ins[0] is not e.ins[0]:
            return None
        return cls(e, [maker[v], *reversed(chain)])

    def is_alone(
        self, readers: Mapping[Value, Sequence[Equation]], outs: Collection[Value]
    ) -> bool:
        """Returns whether nothing else reads the exponentials and their sums."""
        own = {*map(id, self.chain), id(self.division)}
        inner = [self.exponentials, *self.sums]
        return all(id(r) in own for v in inner for r in readers[v]) and {*outs}.isdisjoint(inner)

    def normalized(self, rounded: Value, late: list[Equation]) -> Value:
        """Appends the quotients of the rounded weights and their sums to the backward part."""
        v = rounded
        for link in self.chain:
            out = Value(link.outs[0].aval)
            late.append(link.on([v, *link.ins[1:]], outs=[out], again=True))
            v = out
        y = Value(self.weights.aval)
        late.append(self.division.on([rounded, v], outs=[y], again=True))
        return y


def _takes_half(e: Equation, low: set[Value]) -> bool:
    return rounding.is_half_matmul(e) or (rounding.is_view(e) and low.issuperset(e.outs))


def _broadcasts(e: Equation) -> bool:
    rule = e.rule
    return rule.need == MOVE and REDUCES not in rule.traits and len(e.outs) == 1


def _ones(v: Value, like: Equation, into: list[Equation]) -> Value:
    """Appends an array of ones."""
    trace = _jax.trace(lambda: [jax.numpy.ones(v.aval.shape, v.aval.dtype)], [], "ones")
    (out,) = opened(trace, [], into, again=True, stack=like.stack)
    return out
