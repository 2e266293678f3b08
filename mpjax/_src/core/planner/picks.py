"""Cotangents of entries that are picked one a row, as the logits of labels are in a cross entropy.

JAX adds them to zeros at their places: two arrays of float32, written for one number a row. A
comparison of places with an index is the same, and fuses into whatever reads it.
"""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src.core.base import _jax
from mpjax._src.core.planner.equations import Equation, Makers, Value, appended
from mpjax._src.core.planner.rounding import is_zero

SPREAD = "broadcast_in_dim"


def compared(equations: Sequence[Equation], early: Sequence[Equation]) -> list[Equation]:
    """Returns equations in which what is added to zeros, one entry a row, is compared instead.

    They read values of ``early`` ones.
    """
    left: list[Equation] = []
    zeros: set[Value] = set()
    maker = {out: e for e in (*early, *equations) for out in e.outs}
    for e in equations:
        # The transpose of a gather adds to zeros that JAX spreads. Sums into other arrays stay.
        zeros.update(e.outs if e.name == SPREAD and is_zero(e.ins[0]) else ())
        adds = e.name == "scatter-add" and e.ins[0] in zeros
        found = (_axis(e) or _counted(e, maker)) if adds else None
        if found is None:
            left.append(e)
            continue
        axis, indices = found
        shape = e.outs[0].aval.shape
        clips = e.params["mode"] == lax.GatherScatterMode.CLIP

        def run(indices, updates, axis=axis, shape=shape, clips=clips):
            row = [1 if d == axis else n for d, n in enumerate(shape)]
            indices, updates = lax.reshape(indices, row), lax.reshape(updates, row)
            # In so few bits, the places beyond the largest number would start again.
            small = indices.dtype.itemsize < np.dtype(np.int32).itemsize
            indices = indices.astype(np.int32) if small else indices
            # An index that is out of bounds equals no place, so its update is dropped, as by JAX;
            # `clip` moves it inside.
            indices = jnp.clip(indices, 0, shape[axis] - 1) if clips else indices
            places = lax.broadcasted_iota(indices.dtype, shape, axis)
            return [jnp.where(places == indices, updates, 0)]

        appended(run, [indices, e.ins[2]], left, e, e.outs)
    return left


def _axis(e: Equation) -> tuple[int, Value] | None:
    """Returns the axis of which one entry a row is added to, and which, if that is all."""
    (operand, indices, updates), numbers = e.ins, e.params["dimension_numbers"]
    shape, axes = operand.aval.shape, numbers.scatter_dims_to_operand_dims
    rest = tuple(d for d in range(len(shape)) if d not in axes)
    places = numbers.scatter_indices_batching_dims
    # Indices and updates are reshaped, not transposed, so their rows have the operand's order.
    in_order = numbers.operand_batching_dims == rest and sorted(places) == [*places]
    if len(axes) != 1 or not in_order or is_sharded(operand):
        return None
    # As many indices and updates as rows: no windows, and no row with two entries to add.
    sizes = {_jax.size_of(v.aval.shape) for v in (indices, updates)}
    return (axes[0], indices) if sizes == {_jax.size_of([shape[d] for d in rest])} else None


def _counted(e: Equation, maker: Makers) -> tuple[int, Value] | None:
    """Returns the same where the rows are counted, as in ``x[jnp.arange(rows), labels]``."""
    (operand, indices, updates), numbers = e.ins, e.params["dimension_numbers"]
    shape, axes = operand.aval.shape, numbers.scatter_dims_to_operand_dims
    each = maker.get(indices)
    # Where an array indexes each axis, `jax.numpy` concatenates the indices into one array.
    if each is None or each.name != "concatenate" or numbers.update_window_dims:
        return None
    if axes != tuple(range(len(shape))) or is_sharded(operand):
        return None
    counts = [_counts(v, maker) for v in each.ins]
    picked = [axis for axis, count in enumerate(counts) if count is None]
    rows = [count for count in counts if count is not None]
    # Each count runs along its own axis of the index array, in the order of the operand's axes, and
    # one axis is left to be picked from.
    if len(each.ins) != len(shape) or len(picked) != 1 or rows != [*range(len(rows))]:
        return None
    left = [n for axis, n in enumerate(shape) if axis not in picked]
    # There is an index for every row: ``jnp.arange(3)`` may count some of them only.
    whole = left == [*updates.aval.shape] and [*each.ins[picked[0]].aval.shape] == [*left, 1]
    return (picked[0], each.ins[picked[0]]) if whole else None


def _counts(v: Value, maker: Makers) -> int | None:
    """Returns the axis along which an array counts from zero."""
    e = maker.get(v)
    if e is None:
        return None
    if e.name == "iota":
        return e.params["dimension"]
    if e.name == "select_n":  # negative ones count from the end
        test, v, _ = e.ins
        below = maker.get(test)
        if (
            below is None
            or below.name != "lt"
            or below.ins[0] is not v
            or not is_zero(below.ins[1])
        ):
            return None
        return _counts(v, maker)
    if e.name not in (SPREAD, "convert_element_type"):
        return None
    count = _counts(e.ins[0], maker)
    return count if count is None or e.name != SPREAD else e.params["broadcast_dimensions"][count]


def is_sharded(v: Value) -> bool:
    """Returns whether an array is divided among devices along an explicit axis."""
    return any(_jax.is_sharded_along(v.aval, d) for d in range(len(v.aval.shape)))
