"""Fused attention: the kernels of each device, the operands they accept, and how they are called.

The kernel is chosen while a function is traced, for the target of `compile_for` or else for the
local device. `jax.lax.platform_dependent` is no alternative: it traces all kernels, but cuDNN's
cannot be traced for a device that it does not support, and it ignores the compute capability.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.devices import current_facts
from mpjax._src.core.base.dtypes import HALVES

# The least compute capability that cuDNN's fused attention runs on.
CUDNN = (8, 0)
# The block length of TPUs' flash attention.
BLOCK = 128

Options = Mapping[str, Any]
# The options that are arrays.
LENGTHS = "query_seq_lengths", "key_value_seq_lengths"

# The errors that kernels raise for operands that they do not support.
REFUSALS = NotImplementedError, ValueError, RuntimeError, TypeError


def choose(arrays: Sequence[Any], options: Options) -> tuple[str, str]:
    """Returns the name of the fused kernel for some operands on this device, or why none runs them.

    It returns the name and "", or "" and the reason. The arrays are abstract queries, keys, values,
    bias and mask, as for `dot_product_attention`, whose other arguments the options are. The last
    two may be None.
    """
    query, key, value, bias, mask = arrays
    device = current_facts()
    if device.platform == "cpu":
        return "", "a CPU has no fused kernel"
    if any(_jax.is_sharded_along(x, -3) for x in (query, key, value)):
        return "", "its sequence is sharded, and a fused kernel needs whole sequences"
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= {*HALVES}:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return "", f"a fused kernel needs operands of one 16-bit dtype, not {names}"
    if device.platform == "tpu":
        name, why_not = "flash", _not_on_tpu(query, key, bias, mask, options)
    else:
        name, why_not = "cudnn", _not_on_gpu(query, key, bias, mask, device.capability)
    if why_not:
        return "", why_not
    try:  # the kernel's own checks decide
        jax.eval_shape(kernel_of(name, options), *arrays)
    except REFUSALS as error:
        return "", f"{name} rejects it: {error}"
    return name, ""


def kernel_of(name: str, options: Options) -> Callable[..., Any]:
    """Returns a kernel as a function of queries, keys, values, a bias and a mask."""
    run = functools.partial(KERNELS[name], options=options)

    def sharded(query, *others):
        if not _jax.is_explicit(query):
            return run(query, *others)
        # Kernels do not declare the sharding of their results, which is that of the queries.
        return jax.sharding.auto_axes(run, out_sharding=jax.typeof(query).sharding)(query, *others)

    return sharded


# ---- NVIDIA -------------------------------------------------------------------------------------

# A score with this bias has weight 0. cuDNN cannot subtract larger numbers from each other.
LOWEST = {"float16": -(2.0**15), "bfloat16": -(2.0**41)}


def _not_on_gpu(query: Any, key: Any, bias: Any, mask: Any, capability: str) -> str:
    """Returns why cuDNN's fused attention cannot run some operands, or "" if it can."""
    parts = capability.split(".")
    if not parts[0].isdigit() or tuple(map(int, parts)) < CUDNN:
        return f"cuDNN's fused kernel needs compute capability {CUDNN[0]}.{CUDNN[1]}"
    lengths = query.shape[-3], key.shape[-3]
    if (bias is not None or mask is not None) and any(n % 2 for n in lengths):
        return f"with a bias or a mask, cuDNN's kernel needs even lengths, not {lengths}"
    return ""


def cudnn(query: Any, key: Any, value: Any, bias: Any, mask: Any, *, options: Options) -> Any:
    """Runs cuDNN's fused attention on 16-bit operands."""
    if bias is not None:  # a bias of -1e9 would become -Inf in float16
        lowest = LOWEST[query.dtype.name]
        bias = jnp.clip(bias, lowest, -lowest).astype(query.dtype)
    lengths = [options.get(name) for name in LENGTHS]
    *arrays, q, kv = _together([query, key, value, bias, mask, *lengths])
    changed = {**options, **dict(zip(LENGTHS, (q, kv), strict=True))}
    return jax.nn.dot_product_attention(*arrays, implementation="cudnn", **changed)


def _together(arrays: list[Any]) -> list[Any]:
    """Returns the arrays unchanged, but under `vmap` batches all of them if one is batched.

    JAX's batching rule for cuDNN's kernel requires it. XLA removes the `select_n`, whose predicate
    is constant.
    """
    sums = (jnp.sum(jax.lax.stop_gradient(x), dtype=jnp.float32) for x in arrays if x is not None)
    one = functools.reduce(jax.lax.add, sums)
    return [
        x
        if x is None
        else jax.lax.select_n(np.False_, x, jax.lax.full_like(x, one.astype(x.dtype)))
        for x in arrays
    ]


# ---- TPU ----------------------------------------------------------------------------------------


def _not_on_tpu(query: Any, key: Any, bias: Any, mask: Any, options: Options) -> str:
    """Returns why TPUs' flash attention cannot run some operands, or "" if it can."""
    arguments = {"bias": bias, "mask": mask, **options, "scale": None, "is_causal": False}
    others = [name for name, x in arguments.items() if x is not None and x is not False]
    if others:
        return f"on TPUs, flash attention does not support {' and '.join(others)}"
    if query.shape[-2] != key.shape[-2]:
        return "flash attention needs as many heads of keys as of queries"
    lengths = query.shape[-3], key.shape[-3]
    if any(n % BLOCK for n in lengths):
        return f"flash attention needs lengths that are multiples of {BLOCK}, not {lengths}"
    return ""


def flash(query: Any, key: Any, value: Any, *_: None, options: Options) -> Any:
    """Runs TPUs' flash attention, without bias and mask. Its head axis precedes the positions."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    arrays = [jnp.swapaxes(x, -3, -2) for x in (query, key, value)]
    arrays = [x[None] if x.ndim == 3 else x for x in arrays]
    scale = options.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = flash_attention(*arrays, causal=options.get("is_causal", False), sm_scale=scale)
    return jnp.swapaxes(out, -3, -2).reshape(query.shape)


KERNELS: dict[str, Callable[..., Any]] = {"cudnn": cudnn, "flash": flash}
