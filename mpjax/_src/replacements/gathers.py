"""Gathers of one entry per row, such as the labels' logits in a cross entropy."""

from typing import Any

from mpjax._src.core.base._jax import size_of


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
