"""In which form XLA for NVIDIA's GPUs is asked for the 16-bit matmuls that autocast makes.

Tensor cores are fed 16 bytes at a time: eight 16-bit numbers of a row. If the length of a row is no
multiple of eight, as with a vocabulary of 50257 or with 197 tokens, its numbers are loaded one by
one. XLA pads the operands of matmuls that cuBLAS runs, but not of those that its own Triton kernels
may run, which are nearly all. So marked matmuls get operands that are padded with zeros, and their
results are sliced. That is exact. XLA fuses the padding into the kernels that compute the operands,
and the slice into those that read the result.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.interpreters import mlir

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.matmuls import HALVES, STORED, free_axes, is_local, is_marked, marked

dot_general_p = jax.lax.dot_general_p

ALIGNED = 8  # numbers of 16 bits that are loaded at once
# Long axes are padded to whole tiles of a kernel, or whole lines of the cache, if that adds less
# than one part in `NEGLIGIBLE`.
TILES, NEGLIGIBLE = (128, 64), 256
# Tensor cores multiply tiles of 16 x 16 numbers. Smaller matrices are bound by the memory.
SMALLEST = 16
# By the times of steps on an H100 (`hardware/targets.PACES`), a matmul takes 3.3 times its time at
# the peak if an axis is odd, else 1.4 times. So each FLOP saves 1.9 / 989e12 seconds, and each byte
# that the padding adds costs 1.1 / 3.35e12 seconds, as much as 170 FLOPs save; 200 leave a margin.
# 2**29 FLOPs save a microsecond.
FLOPS_PER_BYTE, LEAST_FLOPS = 200, 2**29
BYTES = 2
SYMBOLIC = 1024  # stands in for a size that is not known yet


def _lowering(own: Any) -> Any:
    """Returns the lowering rule of `dot_general` for "cuda", given JAX's own."""

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        x, y = ctx.avals_in
        is_ours = is_marked(ctx) and x.dtype == y.dtype and x.dtype in HALVES
        padding = _padding(ctx, params["dimension_numbers"]) if is_ours else {}
        if not padding:
            return own(ctx, *operands, **params)
        shape = ctx.avals_out[0].shape
        run = functools.partial(_multiply, padding=padding, shape=shape, **params)
        return mlir.lower_fun(run, multiple_results=False)(ctx, *operands)

    return lower


def _multiply(*operands: Any, padding: Any, shape: Any, **params: Any) -> Any:
    """Multiplies padded operands, and takes the padding off the result."""
    with marked():  # as the matmul that all of it stands for
        padded = (_padded(x, operand, padding) for operand, x in enumerate(operands))
        out = dot_general_p.bind(*padded, **params)
        for axis, size in enumerate(shape):
            if out.shape[axis] != size:
                out = jax.lax.slice_in_dim(out, 0, size, axis=axis)
        return out


def _padded(x: Any, operand: int, padding: Any) -> Any:
    edges = [(0, padding.get((operand, axis), 0), 0) for axis in range(x.ndim)]
    return jax.lax.pad(x, np.zeros((), x.dtype), edges) if any(map(any, edges)) else x


# ---- the rule -----------------------------------------------------------------------------------


def _padding(ctx: Any, dimension_numbers: Any) -> dict[tuple[int, int], int]:
    """Returns by how much axes of operands are padded, if it pays, as {(operand, axis): width}.

    The axes of rows, those of columns, and those of products in a sum are each one axis to the
    kernel; of several, the longest is padded.
    """
    (summed, right_summed), (batch, right_batch) = dimension_numbers
    x, y = ctx.avals_in
    groups = (
        [[(0, d)] for d in free_axes(x, summed, batch)],
        [[(1, d)] for d in free_axes(y, right_summed, right_batch)],
        [[(0, d), (1, e)] for d, e in zip(summed, right_summed, strict=True)],
    )

    def size(axes: Sequence[tuple[int, int]]) -> int:
        operand, axis = axes[0]
        found = ctx.avals_in[operand].shape[axis]
        return found if isinstance(found, int) else SYMBOLIC

    before = [math.prod(map(size, group)) for group in groups]
    many = math.prod(size([(0, d)]) for d in batch)
    flops = 2 * many * math.prod(before)
    if min(before) < SMALLEST or flops < LEAST_FLOPS:
        return {}
    left, right, result = _numbers(before)
    # Behind the barrier of a checkpoint, a kernel of its own would take the padding off a result.
    held = result > left + right and is_marked(ctx, STORED)
    after, padding = [*before], dict[tuple[int, int], int]()
    for i, (group, count) in enumerate(zip(groups, before, strict=True)):
        if count % ALIGNED and not (held and i < 2):
            axes = max(group, key=size)
            width = _width(size(axes))
            if _may_be_divided(ctx, size(axes)):
                return {}
            padding |= dict.fromkeys(axes, width)
            after[i] += count // size(axes) * width
    # The operands of a matmul with batch axes are computed, and their padding with them. Else, one
    # may be a weight that is given in 16 bits, which a kernel of its own has to copy.
    copied = not batch
    changes = zip(_numbers(before), _numbers(after), (copied, copied, False), strict=True)
    added = many * sum((new if copy else new - old) * (new > old) for old, new, copy in changes)
    return padding if flops >= FLOPS_PER_BYTE * BYTES * added else {}


def _numbers(counts: Sequence[int]) -> tuple[int, int, int]:
    """Returns how many numbers are in the operands and in the result."""
    rows, columns, products = counts
    return rows * products, products * columns, rows * columns


def _width(size: int) -> int:
    """Returns by how much an axis is padded."""
    widths = (-size % tile for tile in TILES)
    return next((width for width in widths if width * NEGLIGIBLE <= size), -size % ALIGNED)


def _may_be_divided(ctx: Any, size: int) -> bool:
    """Returns whether XLA may divide an axis among devices; to pad it, they would exchange data."""
    if is_local(ctx):
        return False
    axes, mesh = ctx.module_context.axis_context, ctx.avals_out[0].sharding.mesh
    mesh = getattr(axes, "mesh", None) or axes.abstract_mesh or mesh
    if mesh.empty:  # any factor of their number
        return math.gcd(size, axes.num_devices) > 1
    return any(count > 1 and size % count == 0 for count in mesh.axis_sizes)


@internals.at_first_plan
def _register() -> None:
    rule = internals.guarded(_lowering(internals.lowerings[dot_general_p].rule))
    mlir.register_lowering(dot_general_p, rule, platform="cuda")
