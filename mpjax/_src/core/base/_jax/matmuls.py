"""The mark of matmuls and convolutions that autocast makes; their lowering depends on it.

What a marked operation means does not change, only the form in which a compiler gets it
(`cpu_matmuls`, `gpu_matmuls`). Unmarked ones are lowered by JAX.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from mpjax._src.core.base._jax import internals

BFLOAT16 = np.dtype(jnp.bfloat16)
HALVES = (BFLOAT16, np.dtype(np.float16))
MARK, STORED = "mpjax_matmul", "mpjax_stored"


def marked() -> Any:
    """Returns a context in which matmuls are marked as made by autocast.

    The mark is metadata that no compiler reads. Unlike the name of a scope, it is on the operations
    of the transposed program too.
    """
    internals.ready(needed=False)  # their lowering
    return set_xla_metadata(**{MARK: 1})


def unmarked() -> Any:
    """Returns a context in which matmuls are not marked."""
    return set_xla_metadata(**{MARK: None})


def storing() -> Any:
    """Returns a context for code whose results a checkpoint may keep, stored as they are."""
    return set_xla_metadata(**{STORED: 1})


def is_marked(ctx: Any, mark: str = MARK) -> bool:
    """Returns whether autocast made the operation that is lowered, or gave it another mark."""
    metadata = ctx.jaxpr_eqn_ctx and ctx.jaxpr_eqn_ctx.xla_metadata
    return bool(metadata) and mark in metadata


def is_local(ctx: Any) -> bool:
    """Returns whether arrays are on one device, as in shard_map or without a mesh."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is None:
        return axes.num_devices == 1
    # In a shard_map over all axes, a device computes with its own part alone.
    return mesh.size == 1 or axes.manual_axes == {*mesh.axis_names}


def is_algorithm(precision: Any) -> bool:
    """Returns whether the precision of a matmul asks for one way to compute it."""
    return precision is not None and not isinstance(precision, tuple)


def free_axes(x: Any, summed: Any, batch: Any) -> list[int]:
    """Returns the axes of an operand that are neither summed over nor those of a batch."""
    return [d for d in range(x.ndim) if d not in (*summed, *batch)]


def sizes(x: Any, y: Any, dimension_numbers: Any) -> tuple[Any, Any, Any]:
    """Returns the numbers of rows, of columns, and of products in a sum; some may be symbolic."""
    (summed, right_summed), (batch, right_batch) = dimension_numbers
    rows = math.prod(x.shape[d] for d in free_axes(x, summed, batch))
    columns = math.prod(y.shape[d] for d in free_axes(y, right_summed, right_batch))
    return rows, columns, math.prod(x.shape[d] for d in summed)
