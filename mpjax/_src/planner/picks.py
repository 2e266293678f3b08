"""Cotangents of entries that are picked one a row, as the logits of labels are in a cross entropy.

JAX adds them to zeros at their places: two arrays of float32, written for one number a row. A
comparison of places with an index is the same, and fuses into whatever reads it.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src.base import _jax
from mpjax._src.planner.equations import Equation, Value, opened
from mpjax._src.planner.rounding import is_zero


def compared(equations: Iterable[Equation]) -> list[Equation]:
    """Returns equations in which what is added to zeros, one entry a row, is compared instead."""
    left: list[Equation] = []
    zeros: set[Value] = set()
    for e in equations:
        zeros.update(e.outs if e.name == "broadcast_in_dim" and is_zero(e.ins[0]) else ())
        axis = _axis(e) if e.name == "scatter-add" and e.ins[0] in zeros else None
        if axis is None:
            left.append(e)
            continue
        shape = e.outs[0].aval.shape
        clips = e.params["mode"] == lax.GatherScatterMode.CLIP

        def run(indices, updates, axis=axis, shape=shape, clips=clips):
            row = [1 if d == axis else n for d, n in enumerate(shape)]
            indices, updates = lax.reshape(indices, row), lax.reshape(updates, row)
            small = indices.dtype.itemsize < np.dtype(np.int32).itemsize
            indices = indices.astype(np.int32) if small else indices
            indices = jnp.clip(indices, 0, shape[axis] - 1) if clips else indices
            places = lax.broadcasted_iota(indices.dtype, shape, axis)
            return [jnp.where(places == indices, updates, 0)]

        program = _jax.trace(run, [v.aval for v in e.ins[1:]], "compared")
        options = {"again": e.again, "stack": e.stack, "region": e.region}
        (out,) = opened(program, e.ins[1:], left, **options)
        left[-1].outs = [e.outs[0] if v is out else v for v in left[-1].outs]
    return left


def _axis(e: Equation) -> int | None:
    """Returns the axis of which one entry a row is added to, if that is all."""
    (operand, indices, updates), numbers = e.ins, e.params["dimension_numbers"]
    shape, axes = operand.aval.shape, numbers.scatter_dims_to_operand_dims
    rest = tuple(d for d in range(len(shape)) if d not in axes)
    places = numbers.scatter_indices_batching_dims
    in_order = numbers.operand_batching_dims == rest and sorted(places) == [*places]
    sharded = any(_jax.is_sharded_along(operand.aval, d) for d in range(len(shape)))
    if len(axes) != 1 or not in_order or sharded:
        return None
    sizes = {_jax.size_of(v.aval.shape) for v in (indices, updates)}
    return axes[0] if sizes == {_jax.size_of([shape[d] for d in rest])} else None
