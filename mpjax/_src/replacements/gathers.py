"""Gathers that can be written as simpler operations, so that their transpose is not a scatter.

There are two kinds: gathers of one entry per row, such as the labels' logits in a cross entropy,
and gathers that repeat all entries of an axis in order, such as nearest-neighbor upsampling.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax import lax

from mpjax._src.base import _jax, rules
from mpjax._src.base._jax import size_of
from mpjax._src.program.graph import CONSTANT_LIMIT, Op, Value


def picks_one_per_row(eqn: Any) -> bool:
    """Returns whether a gather takes one entry along one axis for every index of the other axes."""
    numbers, operand = eqn.params["dimension_numbers"], eqn.invars[0].aval
    axes = tuple(numbers.start_index_map)
    return (
        len(axes) == 1
        and all(size == 1 for size in eqn.params["slice_sizes"])
        and size_of([operand.shape[axes[0]]]) > 1
        and len(numbers.operand_batching_dims) == operand.ndim - 1
        and tuple(numbers.start_indices_batching_dims) == tuple(range(operand.ndim - 1))
        and tuple(numbers.operand_batching_dims)
        == tuple(d for d in range(operand.ndim) if d != axes[0])
        and size_of((*eqn.outvars[0].aval.shape, operand.shape[axes[0]])) == size_of(operand.shape)
    )


def repetition_of(op: Op, makers: Mapping[Value, Op], consts: Mapping[Value, Any]) -> Any:
    """Returns (axis, count) if a gather repeats all entries of an axis in order, else None."""
    numbers, (operand, indices) = op.params["dimension_numbers"], (v.aval for v in op.ins)
    shape, result = operand.shape, op.outs[0].aval.shape
    axes = numbers.start_index_map
    along = len(axes) == 1 and numbers.collapsed_slice_dims == axes and len(result) == len(shape)
    if not along or size_of(indices.shape) > CONSTANT_LIMIT:
        return None
    (axis,) = axes
    others = tuple(d for d in range(len(shape)) if d != axis)
    whole = all(op.params["slice_sizes"][d] == shape[d] for d in others)
    sizes = shape[axis], result[axis]
    if not whole or numbers.offset_dims != others or not all(type(n) is int and n for n in sizes):
        return None  # or a size is symbolic
    if any(_jax.is_sharded_along(operand, d) for d in range(len(shape))):
        return None
    times, rest = divmod(result[axis], shape[axis])
    if rest or times < 2 or (array := known_array(op.ins[1], makers, dict(consts))) is None:
        return None
    in_order = np.array_equal(np.ravel(array), np.arange(result[axis]) // times)
    return (axis, times) if in_order else None


def known_array(value: Value, makers: Mapping[Value, Op], arrays: dict[Value, Any]) -> Any:
    """Returns the array of a value that does not depend on arguments; None for other values.

    The result, and those of the values that it is computed from, are added to ``arrays``.
    """
    if value not in arrays:
        op = makers.get(value)
        unknown = op is None or op.subs or op.eqn.effects or op.spec is rules.UNKNOWN
        arrays[value] = value.const if value.literal else None
        if op is not None and not unknown and value.size <= CONSTANT_LIMIT:
            args = [known_array(v, makers, arrays) for v in op.ins]
            if all(arg is not None for arg in args):
                with jax.ensure_compile_time_eval():
                    arrays[value] = _jax.bind(op.eqn, args)[op.outs.index(value)]
    return arrays[value]


def repeat(x: Any, axis: int, times: int) -> Any:
    """Repeats each entry along an axis. The transpose is a sum that reads and writes once."""
    shape = (*x.shape[: axis + 1], times, *x.shape[axis + 1 :])
    spread = lax.broadcast_in_dim(x, shape, [d for d in range(len(shape)) if d != axis + 1])
    return lax.reshape(spread, (*x.shape[:axis], times * x.shape[axis], *x.shape[axis + 1 :]))
