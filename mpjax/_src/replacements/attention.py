"""`dot_product_attention`: attention in the fused kernel of the platform, if it has one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.core.autocast.kernels import given_dtype, half_inputs
from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.errors import (
    as_array,
    brief,
    check_broadcasts,
    check_choice,
    check_flag,
    finite_number,
    is_traced,
    optional_array,
    refuse_traced,
    whole_number,
)
from mpjax._src.core.program.graph import ATTENTION
from mpjax._src.replacements import fused_kernels


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
    """Computes attention like `jax.nn.dot_product_attention`, in a fused kernel if there is one.

    The fused kernels are cuDNN's on NVIDIA GPUs from Ampere on and Pallas' flash attention on
    TPUs. They need 16-bit operands, which they get under `autocast`. Elsewhere XLA runs attention,
    and `autocast` plans it like the rest of the program. `explain` names the implementation and,
    if it is XLA's, the reason: the device, a dtype, a shape or an argument. A fused kernel does
    not write out the scores, so memory grows linearly with the sequence length.

    The function can be passed as ``attention_fn=`` to the modules of Flax linen and NNX.

    Args:
        query: An array of shape [batch, length, heads, size]; the batch axis may be missing.
        key: An array of shape [batch, source length, key heads, size]. ``heads`` must be a multiple
            of ``key heads``.
        value: An array of the shape of ``key``.
        bias: An array that broadcasts to [batch, heads, length, source length] and is added to the
            scores. A fused kernel reads it in 16 bits.
        mask: An array that broadcasts to the same shape. Scores are ignored where it is False or 0.
        scale: The factor of the scores. If None, ``1 / sqrt(size)``.
        is_causal: Whether each position attends only to itself and to earlier positions.
        query_seq_lengths: int32 [batch], the number of valid queries of each sequence.
        key_value_seq_lengths: int32 [batch], the number of valid keys and values.
        local_window_size: The number of positions that each position sees, as one number or as
            (left, right).
        implementation: "cudnn" or "xla". If None, the fused kernel of the device, or else "xla".
        return_residual: Whether to return the logsumexp of each row of scores too.
        dropout_rng: The PRNG key of the dropout, as in `flax.linen.dot_product_attention`. Flax's
            modules pass this argument and the following ones. With dropout, a precision or sown
            weights, Flax's own function runs.
        dropout_rate: The probability of dropping a weight.
        broadcast_dropout: Whether the dropout mask is the same for all batch dimensions.
        deterministic: Whether dropout is off.
        dtype: The dtype that queries, keys and values are cast to; None to leave them as they are.
        precision: The ``jax.lax.Precision`` of the matmuls.
        module: The Flax module that sows the attention weights.

    Returns:
        An array of the shape of ``query``, in the dtype of ``query`` as the surrounding function
        sees it. With ``return_residual``, a pair of it and the logsumexp, an array of shape
        [batch, length, heads].

    Raises:
        ValueError: If shapes do not match, if the requested implementation cannot run them, or if
            dropout, a precision or a module comes with arguments that Flax's function does not
            have.
        NotImplementedError: As in `jax.nn.dot_product_attention`.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> x = jnp.ones((2, 16, 4, 8))
        >>> mpjax.dot_product_attention(x, x, x, is_causal=True).shape
        (2, 16, 4, 8)
        >>> step = lambda x: mpjax.dot_product_attention(x, x, x).sum()
        >>> "attention: " in str(mpjax.explain(step, "mixed_bfloat16")(x))
        True

    References:
        Dao et al., FlashAttention, 2022.
    """
    query, key, value = map(as_array, ("query", "key", "value"), (query, key, value))
    if dtype is not None:
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
    bias, mask = optional_array("bias", bias), optional_array("mask", mask)
    if mask is not None and mask.dtype != bool:  # flax makes masks of floats
        mask = mask != 0
    options = {
        "scale": scale,
        "is_causal": is_causal,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
        "return_residual": return_residual,
    }
    flax = {
        "dropout_rng": dropout_rng,
        "dropout_rate": dropout_rate,
        "broadcast_dropout": broadcast_dropout,
        "deterministic": deterministic,
        "precision": precision,
        "module": module,
    }
    _check_settings({**options, **flax}, implementation)
    arrays = query, key, value, bias, mask
    drops = dropout_rate > 0 and not deterministic
    # JAX's attention has no dropout and no precision, and sows no weights.
    if drops or precision is not None or module is not None:
        return _flax(*arrays, {**options, "implementation": implementation}, **flax)
    _check_shapes(*arrays, {name: options[name] for name in fused_kernels.LENGTHS})
    if implementation is not None:
        return _chosen(arrays, options, implementation)
    return _fused_if_possible(arrays, options)


def _chosen(arrays: tuple[Any, ...], options: dict[str, Any], implementation: str) -> Any:
    """Runs attention as the user asks."""
    run = functools.partial(jax.nn.dot_product_attention, **options, implementation=implementation)
    if implementation == "cudnn":
        run = half_inputs(functools.partial(fused_kernels.cudnn, options=options))
    with _named(implementation, "chosen by implementation="):
        return run(*arrays)


def _fused_if_possible(arrays: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Runs attention in the fused kernel of the device, or else in XLA, and says why not."""
    # The kernel is chosen for the operands that it gets: under autocast, those in 16 bits.
    avals = jax.tree.map(lambda x: _jax.abstract(jax.typeof(x), given_dtype(x.dtype)), arrays)
    kernel, why_not = fused_kernels.choose(avals, options)
    if kernel:
        try:  # under vmap, a kernel may reject operands that it accepts otherwise
            with _named(kernel):
                return half_inputs(fused_kernels.kernel_of(kernel, options))(*arrays)
        except fused_kernels.REFUSALS as error:
            why_not = f"{kernel} rejects it: {error}"
    with _named("xla", why_not):
        return jax.nn.dot_product_attention(*arrays, **options, implementation="xla")


def _flax(query, key, value, bias, mask, options: dict[str, Any], **flax: Any) -> Any:
    """Runs flax's own function, which has dropout and sows weights."""
    if options["is_causal"]:
        # Flax's function knows masks alone.
        seen = jnp.tril(jnp.ones((query.shape[-3], key.shape[-3]), bool))
        mask = seen if mask is None else seen & mask
    extra = {name: x for name, x in options.items() if x is not None and x is not False}
    extra.pop("is_causal", None)
    if extra:
        ((name, x), *_) = extra.items()
        raise ValueError(
            f"{name}={brief(x)} cannot be combined with dropout, a precision or a module that sows "
            "weights: flax.linen.dot_product_attention runs in these cases and has no such "
            "argument. Choose one of bias, mask and is_causal."
        )
    from flax import linen

    with _named("xla", "with dropout, a precision or sown weights flax's own function runs"):
        return linen.dot_product_attention(query, key, value, bias, mask, **flax)


def _named(kernel: str, why: str = "") -> Any:
    """Returns the scope that tells `explain` which kernel runs, and why."""
    # A slash would end the name of the scope.
    text = " ".join(why.replace("/", "|").split()).rstrip(".")
    return jax.named_scope(f"{ATTENTION}{kernel}{': ' if text else ''}{text}")


# ---- checks -------------------------------------------------------------------------------------


def _check_settings(options: dict[str, Any], implementation: Any) -> None:
    scale, window = options["scale"], options["local_window_size"]
    if not (scale is None or is_traced(scale) or finite_number(scale) is not None):
        raise ValueError(f"scale={brief(scale)} must be a finite number or None.")
    for name in ("is_causal", "return_residual", "broadcast_dropout", "deterministic"):
        check_flag(name, options[name])
    sides = window if isinstance(window, tuple | list) else (window, window)
    if window is not None and (len(sides) != 2 or any(whole_number(x) is None for x in sides)):
        raise ValueError(
            f"local_window_size={brief(window)} must be a number of positions, a pair of these "
            "for the left and the right, or None."
        )
    check_choice("implementation", implementation, "cudnn", "xla")
    dropout_rate = options["dropout_rate"]
    refuse_traced("dropout_rate", dropout_rate)
    rate = finite_number(dropout_rate)
    if rate is None or not 0 <= rate <= 1:
        raise ValueError(f"dropout_rate={brief(dropout_rate)} must be a number from 0 to 1.")


def _check_shapes(
    query: Any, key: Any, value: Any, bias: Any, mask: Any, lengths: dict[str, Any]
) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if x.ndim not in (3, 4):
            raise ValueError(
                f"{name} has shape {x.shape}. It must be [batch, length, heads, size], or the "
                "same without batch."
            )
        if not is_float(x):
            raise TypeError(f"{name} is {x.dtype}. Its dtype must be a floating one.")
    if len({x.dtype for x in named.values()}) > 1:
        dtypes = ", ".join(f"{name} is {x.dtype}" for name, x in named.items())
        raise TypeError(f"{dtypes}. They must have one dtype: pass dtype= to cast them.")
    batch, length, heads, size = (1, *query.shape)[-4:]
    whole = (1, *key.shape)[-4:]
    if (whole[0], whole[3]) != (batch, size) or not whole[2] or heads % whole[2]:
        raise ValueError(
            f"key has shape {key.shape} and query {query.shape}. Their batch and size must be the "
            "same, and the heads of query a multiple of those of key."
        )
    if (1, *value.shape)[-4:] != whole:
        raise ValueError(f"value has shape {value.shape}. It must be that of key, {key.shape}.")
    scores = batch, heads, length, whole[1]
    for name, x in {"bias": bias, "mask": mask}.items():
        check_broadcasts(name, x, scores, "[batch, heads, length, source length]")
    for name, x in lengths.items():
        x = optional_array(name, x, "an array of integers")
        if x is not None and (x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer)):
            raise ValueError(
                f"{name} is {x.dtype}{list(x.shape)}. It must be int32[{batch}]: the number of "
                "valid positions of each sequence."
            )
