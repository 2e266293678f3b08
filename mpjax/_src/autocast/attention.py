"""Attention by the fused kernel of the platform, where dtype, shape and device allow it.

Which one is decided while a function is traced, from what is known then: the target of
`compile_for`, else the local device. (`jax.lax.platform_dependent` would trace all kernels, and
cuDNN's refuses to be traced where it cannot run; it does not know a GPU's compute capability.)
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.autocast.graph import ATTENTION
from mpjax._src.autocast.kernels import given_dtype, half_inputs
from mpjax._src.dtypes import FLOAT16, HALVES
from mpjax._src.hardware.devices import device_facts, target_facts

# The least compute capability that cuDNN's fused attention runs on.
CUDNN = (8, 0)
# What TPUs' flash attention cuts sequences into.
BLOCK = 128


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
    dropout_rng: Any = None,
    dropout_rate: float = 0.0,
    broadcast_dropout: bool = True,
    deterministic: bool = False,
    dtype: Any = None,
    precision: Any = None,
    module: Any = None,
) -> Any:
    """Attention as `jax.nn.dot_product_attention`, by the fused kernel where there is one.

    That is cuDNN's on NVIDIA GPUs from Ampere on and Pallas' flash attention on TPUs; both want
    half operands, which they are given under `autocast`. Everywhere else it is XLA's, planned by
    `autocast` like the rest of the program. `explain` says which was taken and, if it is XLA's,
    why: the device, a dtype, a shape, an argument. A fused kernel never writes the scores out, so
    that memory grows linearly with the sequence. It serves as ``attention_fn=`` of flax's modules,
    linen's and NNX's.

    Args:
        query: An array of shape [batch, length, heads, size], or without the batch.
        key: [batch, source length, key heads, size]; ``heads`` is a multiple of ``key heads``.
        value: As ``key``.
        bias: Added to the scores: an array that broadcasts to [batch, heads, length, source
            length]. A fused kernel takes it in half.
        mask: Of that shape: where false, or zero, a score does not count.
        scale: What scores are multiplied by; one over the root of ``size`` if None.
        is_causal: Whether each position sees those before it alone.
        query_seq_lengths: int32 [batch]: how many positions count.
        key_value_seq_lengths: Likewise, of keys and values.
        local_window_size: How far each position sees, to the left and to the right.
        implementation: "cudnn" or "xla" to choose it; None to have it chosen.
        return_residual: Whether to return the logarithm of each row's sum, too.
        dropout_rng, dropout_rate, broadcast_dropout, deterministic, dtype, precision, module: What
            flax's modules hand on, as in `flax.linen.dot_product_attention`. Where dropout is on,
            a precision is asked for or weights are to be sown, flax's own function runs.

    Returns:
        An array of ``query``'s shape, float32 where ``query`` is, to the function around it; with
        ``return_residual`` a pair of it and [batch, length, heads].

    Raises:
        ValueError, NotImplementedError: As `jax.nn.dot_product_attention`, where shapes do not fit
            or the kernel that was asked for does not take them; if dropout and the like come
            with arguments that flax's function does not have.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> x = jnp.ones((2, 16, 4, 8))
        >>> mpjax.dot_product_attention(x, x, x, is_causal=True).shape
        (2, 16, 4, 8)
        >>> step = lambda x: mpjax.dot_product_attention(x, x, x).sum()
        >>> "attention: " in str(mpjax.explain(step, "mixed_bfloat16")(x))
        True

    Dao et al., FlashAttention, 2022.
    """
    if dtype is not None:
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    if mask is not None and mask.dtype != bool:  # flax makes them of floats
        mask = mask != 0
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
        "return_residual": return_residual,
    }
    drops = dropout_rate > 0 and not deterministic
    if drops or precision is not None or module is not None:
        return _flax(
            *(query, key, value, bias, mask),
            {**options, "implementation": implementation},
            dropout_rng=dropout_rng,
            dropout_rate=dropout_rate,
            broadcast_dropout=broadcast_dropout,
            deterministic=deterministic,
            precision=precision,
            module=module,
        )
    arrays = query, key, value, bias, mask
    plain = functools.partial(jax.nn.dot_product_attention, **options)
    if implementation is not None:
        chosen = functools.partial(plain, implementation=implementation)
        chosen = half_inputs(_cudnn(options)) if implementation == "cudnn" else chosen
        with _named(implementation, "it was asked for"):
            return chosen(*arrays)
    why_not, fused = _fused(query, key, value, bias, mask, options)
    if fused is not None:
        name, run = fused
        given = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, given_dtype(x.dtype)), arrays)
        try:  # its own checks know best what it takes
            jax.eval_shape(run, *given)
            with _named(name):
                return half_inputs(run)(*arrays)
        except (NotImplementedError, ValueError, RuntimeError, TypeError) as error:
            why_not = f"{name} refuses: {error}"
    with _named("xla", why_not):
        return plain(*arrays, implementation="xla")


def _flax(query, key, value, bias, mask, options: dict[str, Any], **flax: Any) -> Any:
    """Runs flax's function, which drops weights out and sows them."""
    if options["is_causal"]:
        seen = jnp.tril(jnp.ones((query.shape[-3], key.shape[-3]), bool))
        mask = seen if mask is None else seen & mask
    given = {name: x for name, x in options.items() if x is not None and x is not False}
    given.pop("is_causal", None)
    if given:
        ((name, x), *_) = given.items()
        raise ValueError(
            f"{name}={x!r} cannot be combined with dropout, a precision or a module that sows "
            "weights: flax's own attention runs for those and has no such argument. Legal are "
            "bias, mask and is_causal."
        )
    from flax import linen

    with _named("xla", "dropout, a precision or sown weights are flax's own"):
        return linen.dot_product_attention(query, key, value, bias, mask, **flax)


def _named(kernel: str, why: str = "") -> Any:
    """Returns the scope by which `explain` knows which kernel was taken."""
    text = " ".join(why.replace("/", "|").split()).rstrip(".")
    return jax.named_scope(f"{ATTENTION}{kernel}{': ' if text else ''}{text}")


Fused = tuple[str, Callable[..., Any]]


def _fused(query, key, value, bias, mask, options: dict[str, Any]) -> tuple[str, Fused | None]:
    """Returns the platform's fused kernel, or why there is none."""
    device = target_facts() or device_facts(None)
    if device.platform == "cpu":
        return "a CPU has no fused kernel", None
    dtypes = {given_dtype(x.dtype) for x in (query, key, value)}
    if len(dtypes) > 1 or not dtypes <= {*HALVES}:
        names = ", ".join(sorted(dtype.name for dtype in dtypes))
        return f"a fused kernel takes operands in half, of one dtype, not {names}", None
    if device.platform == "tpu":
        why_not = _not_on_tpu(query, key, bias, mask, options)
        flash = functools.partial(_flash, scale=options["scale"], is_causal=options["is_causal"])
        return why_not, None if why_not else ("flash", flash)
    capability = device.capability.split(".")
    if not capability[0].isdigit() or tuple(map(int, capability)) < CUDNN:
        return f"cuDNN's fused kernel needs compute capability {CUDNN[0]}.{CUDNN[1]}", None
    lengths = query.shape[-3], key.shape[-3]
    if (bias is not None or mask is not None) and any(n % 2 for n in lengths):
        return f"with a bias or a mask, cuDNN's takes even lengths, not {lengths}", None
    return "", ("cudnn", _cudnn(options))


def _cudnn(options: dict[str, Any]) -> Callable[..., Any]:
    """cuDNN's fused attention, of operands in half."""
    names = "query_seq_lengths", "key_value_seq_lengths"

    def run(query, key, value, bias, mask):
        if bias is not None and bias.dtype == FLOAT16:  # -1e9 is Inf there
            lowest = float(jnp.finfo(FLOAT16).min)
            bias = jnp.clip(bias, lowest / 2, -lowest / 2)
        lengths = [options[name] for name in names]
        *arrays, q, kv = _together([query, key, value, bias, mask, *lengths])
        changed = {**options, **dict(zip(names, (q, kv), strict=True))}
        return jax.nn.dot_product_attention(*arrays, implementation="cudnn", **changed)

    return run


def _together(arrays: list[Any]) -> list[Any]:
    """Returns the arrays as they are, but under `vmap` all of them batched where one is.

    JAX's batching rule for cuDNN's kernel takes no others. XLA removes the choice that is none.
    """
    firsts = (jax.lax.stop_gradient(x).ravel()[0] for x in arrays if x is not None)
    one = sum(x.astype(jnp.float32) for x in firsts)
    return [
        x if x is None else jax.lax.select_n(np.False_, x, jnp.full_like(x, one.astype(x.dtype)))
        for x in arrays
    ]


def _not_on_tpu(query: Any, key: Any, bias: Any, mask: Any, options: dict[str, Any]) -> str:
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


def _flash(query: Any, key: Any, value: Any, *_: None, scale: float | None, is_causal: bool) -> Any:
    """TPUs' flash attention, without bias and mask: heads come before positions."""
    from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

    arrays = [jnp.swapaxes(x, -3, -2) for x in (query, key, value)]
    arrays = [x[None] if x.ndim == 3 else x for x in arrays]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = flash_attention(*arrays, causal=is_causal, sm_scale=scale)
    return jnp.swapaxes(out, -3, -2).reshape(query.shape)
