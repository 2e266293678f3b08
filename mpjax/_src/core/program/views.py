"""Changes of layout alone: how the axes of one array correspond to those of another."""

from collections.abc import Mapping
from typing import Any

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.rules import CAST, RESHAPES, VIEWS
from mpjax._src.core.program.graph import Op, Value

# The correspondence of an axis: digits (axis, stride, size) of the axes of the value that is read,
# the most significant first. None for an axis of size 1.
Digit = tuple[int, Any, Any]
Axis = tuple[Digit, ...]
Axes = tuple[Axis, ...]


def own_axes(shape: Any) -> Axes:
    """Returns the axes of the value that is read, in terms of themselves."""
    return tuple(() if n == 1 else ((d, 1, n),) for d, n in enumerate(shape))


def reshaped(axes: Axes, shape: Any) -> Axes | None:
    """Returns the axes after a reshape; None if it mixes digits of several axes."""
    digits = [digit for axis in axes for digit in axis]
    new_axes: list[Axis] = []
    for size in shape:
        taken = _taken(digits, size)
        if taken is None:
            return None
        new_axes.append(_merged(taken))
    return tuple(new_axes) if not digits else None


def _taken(digits: list[Digit], size: Any) -> list[Digit] | None:
    """Takes from the first digits those of an axis of some size; None if they make no such axis."""
    axis: list[Digit] = []
    while size != 1:
        if not digits:
            return None
        place, stride, count = digits.pop(0)
        if count == size:
            axis.append((place, stride, count))
            break
        # Sizes may be symbols, of which only equality is known.
        if not (isinstance(size, int) and isinstance(count, int)):
            return None
        if size % count == 0:
            axis.append((place, stride, count))
            size //= count
        elif count % size == 0:  # the axis ends within a digit, whose rest the next axis has
            rest = count // size
            axis.append((place, stride * rest, size))
            digits.insert(0, (place, stride, rest))
            break
        else:
            return None
    return axis


def _merged(axis: list[Digit]) -> Axis:
    merged: list[Digit] = []
    for place, stride, size in axis:
        if merged and merged[-1][:2] == (place, stride * size):
            size *= merged.pop()[2]
        merged.append((place, stride, size))
    return tuple(merged)


def before(op: Op, axes: Axes | None, place: int = 0) -> Axes | None:
    """Returns the axes of an operand, given those of the result; None if they are not known.

    The op changes the layout alone, or computes each entry by itself.
    """
    shape = op.ins[place].aval.shape
    if axes is None:
        return None
    if op.name in RESHAPES:
        return reshaped(axes, shape)
    if op.name == "transpose":
        return tuple(axes[list(op.params["permutation"]).index(d)] for d in range(len(shape)))
    if op.name == "broadcast_in_dim":
        axes = tuple(axes[d] for d in op.params["broadcast_dimensions"])
    # An operand of size 1 is the same along the axis, and so is a scalar along all.
    return tuple(() if n == 1 else axis for axis, n in zip(axes, shape, strict=bool(shape)))


def behind(value: Value, axes: Axes, makers: Mapping[Value, Op]) -> tuple[Value, Axes]:
    """Returns the value before changes of layout, and its axes, as far back as they are known."""
    while (op := makers.get(value)) is not None and is_view(op):
        further = before(op, axes)
        if further is None:
            break
        value, axes = op.ins[0], further
    return value, axes


def after(op: Op, axes: Axes) -> Axes | None:
    """Returns the axes of the result of a change of layout; None if it repeats entries."""
    shape = op.outs[0].aval.shape
    if op.name in RESHAPES:
        return reshaped(axes, shape)
    if op.outs[0].size != op.ins[0].size:
        return None
    new_axes: list[Axis] = [()] * len(shape)
    for axis, new in zip(axes, before(op, own_axes(shape)) or (), strict=True):
        for place, *_ in new:
            new_axes[place] = axis
    return tuple(new_axes)


def is_view(op: Op) -> bool:
    """Returns whether an op changes the layout alone, or is a cast without effect."""
    if op.name == CAST:
        return {v.aval.dtype for v in (op.ins[0], op.outs[0])} == {FLOAT32}
    in_order = op.name != "reshape" or op.params.get("dimensions") is None
    return op.name in VIEWS and in_order
