"""`dot_product_attention`: by the fused kernel of the platform, where there is one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src import _jax
from mpjax._src.autocast import fused_kernels
from mpjax._src.autocast.graph import ATTENTION
from mpjax._src.autocast.kernels import given_dtype, half_inputs
from mpjax._src.errors import brief


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
        if implementation == "cudnn":
            chosen = half_inputs(functools.partial(fused_kernels.cudnn, options=options))
        with _named(implementation, "it was asked for"):
            return chosen(*arrays)
    given = jax.tree.map(lambda x: _jax.abstract(jax.typeof(x), given_dtype(x.dtype)), arrays)
    kernel, why_not = fused_kernels.choose(given, options)
    if kernel:
        try:  # under vmap, a kernel may refuse what it takes otherwise
            with _named(kernel):
                return half_inputs(fused_kernels.kernel_of(kernel, options))(*arrays)
        except fused_kernels.REFUSALS as error:
            why_not = f"{kernel} refuses: {error}"
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
            f"{name}={brief(x)} cannot be combined with dropout, a precision or a module that sows "
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
