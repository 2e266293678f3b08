"""Which 16-bit convolutions XLA:CPU is asked for as matmuls.

XLA:CPU has no bfloat16 kernel for convolutions: it converts the operands to float32. But a
convolution is a sum of matmuls, one for each position of the kernel, and the gradient of a kernel
is a matmul for each of its positions. `cpu_matmuls` lowers these with the CPU's own instructions.
"""

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import mlir

from mpjax._src.core.base._jax.cpu_matmuls import has_kernel
from mpjax._src.core.base._jax.matmuls import is_algorithm, is_local, is_marked

conv_p = jax.lax.conv_general_dilated_p

# A matmul for each position copies its part of the input. That pays if each copied value is then
# multiplied by at least this number of output features; measured on a CPU with AMX.
USES_OF_A_SUM, USES_OF_A_STACK = 256, 64
MOST = 64  # matmuls in place of one convolution


def _lowering(own: Any) -> Any:
    """Returns the lowering rule of `conv_general_dilated` for "cpu", given JAX's own."""

    def lower(ctx: Any, x: Any, kernel: Any, **params: Any) -> Any:
        (left, right), (out,) = ctx.avals_in, ctx.avals_out
        if not (is_marked(ctx) and is_local(ctx) and _pays(left, right, out, params)):
            return own(ctx, x, kernel, **params)
        names = ("window_strides", "padding", "rhs_dilation", "dimension_numbers")
        options = {name: params[name] for name in names}
        run = functools.partial(_multiply, shape=out.shape, dtype=out.dtype, **options)
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


def _multiply(x, kernel, window_strides, padding, rhs_dilation, dimension_numbers, shape, dtype):
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


_OWN = mlir._platform_specific_lowerings["cpu"][conv_p].rule
mlir.register_lowering(conv_p, _lowering(_OWN), platform="cpu")
