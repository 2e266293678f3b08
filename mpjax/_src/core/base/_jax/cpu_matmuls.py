"""In which form XLA:CPU is asked for the 16-bit matmuls and convolutions that autocast makes.

In jaxprs these are `dot_general` of 16-bit operands, with a mark (`matmuls`).

XLA:CPU multiplies with the CPU's own bfloat16 instructions if the result is the float32
accumulator, if each array is stored in the order of its dimensions, and if the left operand has its
contracted dimensions last. Otherwise it converts the operands to float32, which is slower than
float32 from the start. For a float32 result and a left operand with its contracted dimensions first
it has no kernel at all, and fails at run time ("BF16 x BF16 = F32"). It merges transposes into
matmuls, its own ones too, so only an optimization barrier keeps an operand as it is.

It has no bfloat16 kernel for convolutions: it converts the operands to float32. But a convolution
is a sum of matmuls, one for each position of the kernel, and the gradient of a kernel is a matmul
for each of its positions.
"""

import functools
import itertools
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import mlir

from mpjax._src.core.base._jax import internals
from mpjax._src.core.base._jax.matmuls import (
    BFLOAT16,
    HALVES,
    free_axes,
    is_algorithm,
    is_local,
    is_marked,
    sizes,
    unmarked,
)

dot_general_p, conv_p = jax.lax.dot_general_p, jax.lax.conv_general_dilated_p

# The flags in /proc/cpuinfo of CPUs with instructions for bfloat16. XLA has no kernels for float16.
CPU_FLAGS = frozenset({"amx_bf16", "avx512_bf16", "bf16", "svebf16"})
SMALLEST = 8  # XLA:CPU calls no kernel if rows, columns and products in a sum are all fewer


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Returns the features with which the host's CPU multiplies bfloat16, as Linux names them.

    On other systems there are none.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    words = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "feat")))
    return CPU_FLAGS & {*next(words, "").split()}


def has_kernel(dtype: Any) -> bool:
    """Returns whether the host's CPU has kernels for operands of a dtype."""
    return dtype == BFLOAT16 and bool(cpu_flags())


# ---- lowering -----------------------------------------------------------------------------------


def _lowering(own: Any) -> Any:
    """Returns the lowering rule of `dot_general` for "cpu", given JAX's own."""

    def lower(ctx: Any, left: Any, right: Any, **params: Any) -> Any:
        x, y = ctx.avals_in
        if not is_marked(ctx) or x.dtype != y.dtype or x.dtype not in HALVES:
            return own(ctx, left, right, **params)
        native, dtype = _is_native(x, y, **params), ctx.avals_out[0].dtype
        if not native and dtype != np.float32:
            return own(ctx, left, right, **params)
        hold = _how_to_hold(ctx) if native else jax.lax.optimization_barrier
        params.update(dtype=dtype, hold=hold, is_native=native)
        run = functools.partial(_multiply, **params)
        return mlir.lower_fun(run, multiple_results=False)(ctx, left, right)

    return lower


def _is_native(x: Any, y: Any, dimension_numbers: Any, precision: Any, **_: Any) -> bool:
    """Returns whether XLA can multiply with the bfloat16 instructions of the host's CPU."""
    if is_algorithm(precision) or not has_kernel(x.dtype):
        return False
    rows, columns, inner = sizes(x, y, dimension_numbers)
    is_small = all(isinstance(n, int) and n < SMALLEST for n in (rows, columns, inner))
    return not is_small and (rows, columns) != (1, 1)


def _how_to_hold(ctx: Any) -> Any:
    """Returns the function that stores an array in the order of its dimensions, if possible.

    XLA gathers an array that is divided among devices to constrain its layout or to flatten it, and
    no exported program may constrain a layout. A barrier alone leaves the order to XLA, which is
    right for all but transposed left operands.
    """
    if not is_local(ctx):
        return jax.lax.optimization_barrier
    return _flattened if ctx.module_context.lowering_parameters.for_export else _constrained


def _flattened(x: Any) -> Any:
    return jax.lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def _constrained(x: Any) -> Any:
    return with_layout_constraint(jax.lax.optimization_barrier(x), Layout(tuple(range(x.ndim))))


# ---- the form -----------------------------------------------------------------------------------


def _multiply(left, right, dimension_numbers, hold, is_native, dtype, **params):
    """Multiplies in the form for which XLA:CPU has a kernel, and casts its float32 accumulator.

    ``hold`` stores an array in the order of its dimensions. If it ``is_native``, the kernel has to
    use the CPU's own instructions.
    """
    (summed, right_summed), (batch, right_batch) = dimension_numbers
    free, right_free = free_axes(left, summed, batch), free_axes(right, right_summed, right_batch)
    rows, columns, _ = sizes(left, right, dimension_numbers)
    start, count = len(batch), len(summed)
    params["preferred_element_type"] = np.dtype(np.float32)

    with unmarked():
        left = jax.lax.transpose(left, (*batch, *free, *summed))
        # The kernel reads either order of the right operand: the one in which its rows stay rows.
        summed_last = right.ndim - 1 in right_summed
        blocks = (right_free, right_summed) if summed_last else (right_summed, right_free)
        order = (*right_batch, *blocks[0], *blocks[1])
        right = jax.lax.transpose(right, order)
        # A transpose before it is merged into a product of two matrices, but not into one of many.
        if start or order != tuple(range(right.ndim)):
            right = hold(right)
        # There is no kernel for a vector: it becomes a row, or a column, next to zeros.
        if is_row := is_native and rows == 1:
            left = jnp.stack([left, jnp.zeros_like(left)], start)
        if is_column := is_native and columns == 1:
            right = jnp.stack([right, jnp.zeros_like(right)], start)
        first = start + is_column
        right_summed = _last(right, count) if summed_last else tuple(range(first, first + count))
        numbers = (_last(left, count), right_summed), (tuple(range(start)),) * 2
        out = dot_general_p.bind(hold(left), right, dimension_numbers=numbers, **params)
        out = jax.lax.optimization_barrier(out)
        if is_row:
            out = jax.lax.index_in_dim(out, 0, start, keepdims=False)
        if is_column:
            out = jax.lax.index_in_dim(out, 0, start + len(free), keepdims=False)
        return jax.lax.convert_element_type(out, dtype)


def _last(x: Any, count: int) -> tuple[int, ...]:
    return tuple(range(x.ndim - count, x.ndim))


@internals.at_first_plan
def _register() -> None:
    own = internals.platform_specific_lowerings["cpu"]
    for primitive, lowering in (dot_general_p, _lowering), (conv_p, _lowering_of_convolutions):
        rule = internals.guarded(lowering(own[primitive].rule))
        mlir.register_lowering(primitive, rule, platform="cpu")


# ---- convolutions as matmuls ---------------------------------------------------------------------

# A matmul for each position copies its part of the input. That pays if each copied value is then
# multiplied by at least this number of output features; measured on a CPU with AMX.
USES_OF_A_SUM, USES_OF_A_STACK = 256, 64
MOST = 64  # matmuls in place of one convolution


def _lowering_of_convolutions(own: Any) -> Any:
    """Returns the lowering rule of `conv_general_dilated` for "cpu", given JAX's own."""

    def lower(ctx: Any, x: Any, kernel: Any, **params: Any) -> Any:
        (left, right), (out,) = ctx.avals_in, ctx.avals_out
        if not (is_marked(ctx) and is_local(ctx) and _pays(left, right, out, params)):
            return own(ctx, x, kernel, **params)
        names = ("window_strides", "padding", "rhs_dilation", "dimension_numbers")
        options = {name: params[name] for name in names}
        run = functools.partial(_convolve, shape=out.shape, dtype=out.dtype, **options)
        return mlir.lower_fun(run, multiple_results=False)(ctx, x, kernel)

    return lower


def _pays(x: Any, kernel: Any, out: Any, params: dict[str, Any]) -> bool:
    """Returns whether a convolution is computed faster as matmuls."""
    if x.dtype != kernel.dtype or not has_kernel(x.dtype):
        return False
    if params["feature_group_count"] > 1 or params["batch_group_count"] > 1:
        return False
    if any(d > 1 for d in params["lhs_dilation"]) or is_algorithm(params["precision"]):
        return False
    if not all(isinstance(d, int) for d in (*x.shape, *kernel.shape)):
        return False
    _, (last, _, *spatial), (_, _, *places) = params["dimension_numbers"]
    kernel_size = math.prod(kernel.shape[d] for d in spatial)
    out_size = math.prod(out.shape[d] for d in places)
    count = min(kernel_size, out_size)
    uses = USES_OF_A_SUM if kernel_size <= out_size else USES_OF_A_STACK
    # With a single position it is one matmul, for which nothing is copied twice.
    return count == 1 or (1 < count <= MOST and kernel.shape[last] >= uses)


def _convolve(x, kernel, window_strides, padding, rhs_dilation, dimension_numbers, shape, dtype):
    """Convolves by matmuls of parts of the input, one for each position of the smaller window."""
    # Batch first and features last, in a kernel also outputs: each part is then a matrix.
    x_spec, kernel_spec, out_spec = dimension_numbers
    x = jax.lax.transpose(x, (x_spec[0], *x_spec[2:], x_spec[1]))
    kernel = jax.lax.transpose(kernel, (*kernel_spec[2:], kernel_spec[1], kernel_spec[0]))
    edges = [(low, high, 0) for low, high in padding]
    x = jax.lax.pad(x, np.zeros((), x.dtype), [(0, 0, 0), *edges, (0, 0, 0)])
    window, places = kernel.shape[:-2], tuple(shape[d] for d in out_spec[2:])

    def part(position, steps, strides, sizes):
        """Returns what a position of one window meets along all positions of the other one."""
        starts = [i * step for i, step in zip(position, steps, strict=True)]
        ends = [
            a + (size - 1) * stride + 1
            for a, size, stride in zip(starts, sizes, strides, strict=True)
        ]
        starts, ends = [0, *starts, 0], [x.shape[0], *ends, x.shape[-1]]
        return jax.lax.slice(x, starts, ends, (1, *strides, 1))

    def dot(left, right):
        return jax.lax.dot(left, right, preferred_element_type=np.dtype(np.float32))

    features, count = kernel.shape[-2:]
    if math.prod(window) <= math.prod(places):  # the products of the window's positions add up
        products = (
            dot(part(p, rhs_dilation, window_strides, places).reshape(-1, features), kernel[p])
            for p in itertools.product(*map(range, window))
        )
        out = functools.reduce(jax.lax.add, products)
    else:  # few positions of the result, as in the gradient of a kernel: each sums a whole window
        flat = kernel.reshape(-1, count)
        products = (
            dot(part(p, window_strides, rhs_dilation, window).reshape(-1, flat.shape[0]), flat)
            for p in itertools.product(*map(range, places))
        )
        out = jnp.stack([*products], 1)
    out = out.reshape(x.shape[0], *places, count)
    order = np.argsort((out_spec[0], *out_spec[2:], out_spec[1]))
    return jax.lax.convert_element_type(jax.lax.transpose(out, order), dtype)
