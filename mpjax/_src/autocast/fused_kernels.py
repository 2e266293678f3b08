"""Fused attention: which kernel a device has, what it takes, and what runs it.

Which one is decided while a function is traced, from what is known then: the target of
`compile_for`, else the local device. (`jax.lax.platform_dependent` would trace all kernels, and
cuDNN's refuses to be traced where it cannot run; it does not know a GPU's compute capability.)
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src import _jax
from mpjax._src.dtypes import HALVES
from mpjax._src.hardware.devices import device_facts, target_facts

# The least compute capability that cuDNN's fused attention runs on.
CUDNN = (8, 0)
# What TPUs' flash attention cuts sequences into.
BLOCK = 128

Options = Mapping[str, Any]

# What kernels raise of operands that they do not take.
REFUSALS = NotImplementedError, ValueError, RuntimeError, TypeError


def choose(arrays: Sequence[Any], options: Options) -> tuple[str, str]:
    """Returns the name of the fused kernel that takes this on this device, or why there is none.

    Args:
        arrays: Queries, keys, values, a bias and a mask, abstract, as for `dot_product_attention`;
            the last two may be None.
        options: Its other arguments.

    Returns:
        The name and "", or "" and why.
    """
    query, key, value, bias, mask = arrays
    device = target_facts() or device_facts(None)
    if device.platform == "cpu":
        return "", "a CPU has no fused kernel"
    if any(_jax.is_sharded_along(x, -3) for x in (query, key, value)):
        return "", "its sequence is sharded: a fused kernel takes whole ones"
    dtypes = {x.dtype for x in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= {*HALVES}:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return "", f"a fused kernel takes operands in half, of one dtype, not {names}"
    if device.platform == "tpu":
        name, why_not = "flash", _not_on_tpu(query, key, bias, mask, options)
    else:
        name, why_not = "cudnn", _not_on_gpu(query, key, bias, mask, device.capability)
    if why_not:
        return "", why_not
    try:  # its own checks know best what it takes
        jax.eval_shape(kernel_of(name, options), *arrays)
    except REFUSALS as error:
        return "", f"{name} refuses: {error}"
    return name, ""


def kernel_of(name: str, options: Options) -> Callable[..., Any]:
    """Returns a function of queries, keys, values, a bias and a mask."""
    run = functools.partial(KERNELS[name], options=options)

    def sharded(query, *others):
        if not _jax.is_explicit(query):
            return run(query, *others)
        # Kernels do not say how their results are sharded: as queries are.
        return jax.sharding.auto_axes(run, out_sharding=jax.typeof(query).sharding)(query, *others)

    return sharded


# ---- NVIDIA -------------------------------------------------------------------------------------

# Next to this, nothing has weight. cuDNN cannot take larger numbers from each other.
LOWEST = {"float16": -(2.0**15), "bfloat16": -(2.0**41)}


def _not_on_gpu(query: Any, key: Any, bias: Any, mask: Any, capability: str) -> str:
    """Returns why cuDNN's fused attention does not take this, if it does not."""
    parts = capability.split(".")
    if not parts[0].isdigit() or tuple(map(int, parts)) < CUDNN:
        return f"cuDNN's fused kernel needs compute capability {CUDNN[0]}.{CUDNN[1]}"
    lengths = query.shape[-3], key.shape[-3]
    if (bias is not None or mask is not None) and any(n % 2 for n in lengths):
        return f"with a bias or a mask, cuDNN's takes even lengths, not {lengths}"
    return ""


def cudnn(query: Any, key: Any, value: Any, bias: Any, mask: Any, *, options: Options) -> Any:
    """cuDNN's fused attention, of operands in half."""
    names = "query_seq_lengths", "key_value_seq_lengths"
    if bias is not None:  # -1e9 is Inf in float16, and float32's least in bfloat16
        lowest = LOWEST[query.dtype.name]
        bias = jnp.clip(bias, lowest, -lowest).astype(query.dtype)
    lengths = [options.get(name) for name in names]
    *arrays, q, kv = _together([query, key, value, bias, mask, *lengths])
    changed = {**options, **dict(zip(names, (q, kv), strict=True))}
    return jax.nn.dot_product_attention(*arrays, implementation="cudnn", **changed)


def _together(arrays: list[Any]) -> list[Any]:
    """Returns the arrays as they are, but under `vmap` all of them batched where one is.

    JAX's batching rule for cuDNN's kernel takes no others. XLA removes the choice that is none.
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
    """Returns why TPUs' flash attention does not take this, if it does not."""
    given = {"bias": bias, "mask": mask, **options, "scale": None, "is_causal": False}
    others = [name for name, x in given.items() if x is not None and x is not False]
    if others:
        return f"flash attention takes no {' and no '.join(others)} here"
    if query.shape[-2] != key.shape[-2]:
        return "flash attention takes as many heads of keys as of queries"
    lengths = query.shape[-3], key.shape[-3]
    if any(n % BLOCK for n in lengths):
        return f"flash attention takes lengths that are multiples of {BLOCK}, not {lengths}"
    return ""


def flash(query: Any, key: Any, value: Any, *_: None, options: Options) -> Any:
    """TPUs' flash attention, without bias and mask: heads come before positions."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    arrays = [jnp.swapaxes(x, -3, -2) for x in (query, key, value)]
    arrays = [x[None] if x.ndim == 3 else x for x in arrays]
    scale = options.get("scale")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = flash_attention(*arrays, causal=options.get("is_causal", False), sm_scale=scale)
    return jnp.swapaxes(out, -3, -2).reshape(query.shape)


KERNELS: dict[str, Callable[..., Any]] = {"cudnn": cudnn, "flash": flash}
