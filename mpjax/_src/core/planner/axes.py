"""Which axes of which values are the same axis, as far as operations tell.

A mean that is taken off along the features of one array is taken off along the features of all that
is computed from it, entry by entry: in another layout, after a sum over the tokens, in a row of a
table. The axes of all values are divided into classes; what an operation does to axes that is not
known puts them into one class. Matmuls separate: their results are other axes.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mpjax._src.core.base._jax.rounded import ROUNDED
from mpjax._src.core.base.rules import DEAR, FUSED
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.kinds import LAYOUT, SUMMED, axes_of_view, kind_of, without_axes
from mpjax._src.core.planner.rounding import is_half_matmul

Axis = tuple[Value, int]
Pairs = Iterable[Sequence[Axis]]

# Operations whose results have the axes of their operands, in the same places.
IN_PLACE = {
    *("slice", "pad", "rev", "split", "concatenate", "dynamic_slice", "dynamic_update_slice"),
    *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "copy", "reduce_precision"),
    *("reduce_window_sum", "reduce_window_max", ROUNDED),
    "select_and_scatter_add",
}


class Axes:
    """The classes of the axes of some equations' values."""

    def __init__(self, equations: Iterable[Equation]) -> None:
        self._above: dict[Axis, Axis] = {}
        for e in equations:
            if not is_half_matmul(e) and e.outs:
                for same in _same_axes(e):
                    self._join(same)

    def of(self, v: Value, axes: Iterable[int]) -> frozenset[Axis]:
        """Returns the classes of some axes of a value; an axis of length one has none."""
        # Along an axis of length one, an array is spread over axes that have nothing in common.
        return frozenset(self._find((v, d)) for d in axes if v.shape[d] != 1)

    def _find(self, axis: Axis) -> Axis:
        while (above := self._above.get(axis)) is not None:
            # Each search halves the path to the root, so all of them together are almost linear.
            self._above[axis] = further = self._above.get(above, above)
            axis = further
        return axis

    def _join(self, axes: Sequence[Axis]) -> None:
        classes = [self._find((v, d)) for v, d in axes if v.shape[d] != 1]
        for other in classes[1:]:
            # Joining an earlier one may have joined this one, too.
            if (other := self._find(other)) != classes[0]:
                self._above[other] = classes[0]


def summed(e: Equation) -> tuple[Value, Iterable[int]]:
    """Returns the value that an equation sums entries of, and over which axes."""
    if e.name.startswith("scatter"):
        # The axes of a window say where entries go; along the others, updates of a place add up.
        v, window = e.ins[-1], e.params["dimension_numbers"].update_window_dims
        return v, [d for d in range(len(v.shape)) if d not in window]
    v = e.ins[0]
    if e.name == "cumsum":
        return v, [e.params["axis"]]
    # Other sums, as over windows or devices, count as sums over all axes: that refuses more.
    return v, e.params["axes"] if kind_of(e) == SUMMED else range(len(v.shape))


def _same_axes(e: Equation) -> Pairs:
    """Returns lists of axes of an equation's operands and results that are the same."""
    ins, out = [v for v in e.ins if v.const is None], e.outs[0]
    if not ins:
        return []
    if e.is_barrier:
        pairs = zip(e.ins, e.outs, strict=True)
        return [same for v, x in pairs for same in _by_place([v], [x])]
    if kind_of(e) == LAYOUT:
        return _placed(ins[0], out, axes_of_view(e))
    if e.name.startswith("scatter"):
        return _of_scatter(e)
    if e.name.startswith("reduce_") and "axes" in e.params:
        return _placed(ins[0], out, without_axes(ins[0], e.params["axes"]))
    aligned = all(v.shape == () or _fits(v.shape, out.shape) for v in ins)
    if e.name in IN_PLACE or (e.rule.cost in (FUSED, DEAR) and aligned):
        return _by_place(ins, e.outs)
    # Too few classes refuse a rounding (`cotangents`); too many would allow one that cancels.
    return [[(v, d) for v in (*ins, *e.outs) for d in range(len(v.shape))]]


def _placed(v: Value, out: Value, places: Mapping[int, Iterable[int]]) -> Pairs:
    return [[(v, a), *((out, d) for d in at)] for a, at in places.items()]


def _fits(shape: Sequence[Any], whole: Sequence[Any]) -> bool:
    return len(shape) == len(whole) and all(a in (1, b) for a, b in zip(shape, whole, strict=True))


def _by_place(ins: Iterable[Value], outs: Sequence[Value]) -> Pairs:
    return [
        [(v, d), (out, d)]
        for out in outs
        for v in ins
        if len(v.shape) == len(out.shape)
        for d in range(len(out.shape))
    ]


def _of_scatter(e: Equation) -> Pairs:
    """The window of an update is the operand's; all else is one class."""
    numbers, (operand, _, update), out = e.params["dimension_numbers"], e.ins, e.outs[0]
    window = numbers.update_window_dims
    inserted = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    kept = [d for d in range(len(out.shape)) if d not in inserted]
    rest = [(update, d) for d in range(len(update.shape)) if d not in window]
    rest += [(out, d) for d in range(len(out.shape)) if d not in kept]
    pairs = zip(window, kept, strict=True)
    return [*([(update, a), (out, b)] for a, b in pairs), rest, *_by_place([operand], [out])]
