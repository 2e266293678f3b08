"""Gathers that take one entry along one axis, as a cross entropy picks its labels' logits."""

from typing import Any

import jax.numpy as jnp
from jax import lax

from mpjax._src._jax import size_of


def picks_one_per_row(eqn: Any) -> bool:
    """Tells whether a gather takes one entry along one axis for every index of the other axes."""
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


def select_one_per_row(eqn: Any, x: Any, indices: Any) -> Any:
    """As the gather of an equation for which `picks_one_per_row`, written as a masked sum."""
    (axis,) = eqn.params["dimension_numbers"].start_index_map
    size = x.shape[axis]
    indices = indices.reshape([1 if d == axis else n for d, n in enumerate(x.shape)])
    if "clip" in str(eqn.params["mode"]).lower():
        indices = jnp.clip(indices, 0, size - 1)
    positions = lax.broadcasted_iota(indices.dtype, x.shape, axis)
    zero = jnp.zeros((), x.dtype)
    picked = jnp.where(positions == indices, x, zero).sum(axis)
    return picked.reshape(eqn.outvars[0].aval.shape)
