"""Layers in plain JAX. They contain casts by hand, which do nothing in a float32 model."""

import contextvars
import functools

import jax
import jax.numpy as jnp

_STRICT = contextvars.ContextVar("strict", default=False)


def strictly(loss):
    """Returns the loss of a model with casts by hand, traced with `narrow` and `attend` strict."""

    @functools.wraps(loss)
    def traced(*args):
        token = _STRICT.set(True)
        try:
            return loss(*args)
        finally:
            _STRICT.reset(token)

    return traced


def narrow(x, dtype):
    """Returns a value that strict casts by hand have in a 16-bit dtype, others in its own."""
    return x if dtype is None or not _STRICT.get() else x.astype(dtype)


def used(params, dtype):
    """Returns a half copy of the parameters for casts by hand; without a dtype, the parameters."""
    return params if dtype is None else jax.tree.map(lambda w: w.astype(dtype), params)


def rms_norm(x, scale):
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)
    return normed.astype(x.dtype) * scale


def rotate(x):
    """Rotary embedding of ``x[batch, length, heads, size]``."""
    length, size = x.shape[1], x.shape[3]
    rates = 10000.0 ** (-jnp.arange(0, size, 2) / size)
    angles = jnp.arange(length)[:, None] * rates
    cos, sin = (f(angles)[:, None, :].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


@jax.custom_vjp
def narrow_softmax(scores):
    """A softmax of 16-bit scores with float32 statistics. It stores its 16-bit result only.

    As the fused softmax of Megatron-LM does.
    """
    return jax.nn.softmax(scores.astype(jnp.float32), axis=-1).astype(scores.dtype)


def _softmax_backward(weights, cotangent):
    wide, g = (x.astype(jnp.float32) for x in (weights, cotangent))
    return ((wide * (g - (wide * g).sum(-1, keepdims=True))).astype(weights.dtype),)


narrow_softmax.defvjp(lambda scores: (narrow_softmax(scores),) * 2, _softmax_backward)


def softmax_attention(q, k, v, *, bias=None, is_causal=False, scale=None, wide=True):
    """Attention spelled out, over ``[..., length, heads, size]``.

    Scores and probabilities have the operands' dtype. The softmax between them is float32 if
    ``wide``, else it has their dtype too. In strict casts by hand it reads and stores 16 bits.
    """
    wide, softmax = (False, narrow_softmax) if _STRICT.get() else (wide, jax.nn.softmax)
    q = q * (q.shape[-1] ** -0.5) if scale is None else q * scale
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k)
    wide_scores = scores.astype(jnp.float32) if wide else scores
    if bias is not None:
        wide_scores = wide_scores + narrow(bias, scores.dtype)
    if is_causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        wide_scores = jnp.where(seen, wide_scores, jnp.finfo(wide_scores.dtype).min)
    probabilities = softmax(wide_scores).astype(q.dtype)
    return jnp.einsum("...hqk,...khd->...qhd", probabilities, v)


def attend(q, k, v, *, is_causal=False):
    """JAX's attention, whose scores and their cotangents are float32; if strict, our own."""
    if not _STRICT.get():
        return jax.nn.dot_product_attention(q, k, v, is_causal=is_causal)
    grouped = q.reshape(*q.shape[:-2], k.shape[-2], -1, q.shape[-1])
    attention = functools.partial(softmax_attention, is_causal=is_causal)
    return jax.vmap(attention, (-2, None, None), -2)(grouped, k, v).reshape(q.shape)


def grouped_attention(x, p, heads, groups):
    """Causal attention with grouped queries and rotary embedding, as in Llama."""
    batch, length, width = x.shape
    q = rotate((x @ p["q"]).reshape(batch, length, heads, -1))
    k = rotate((x @ p["k"]).reshape(batch, length, groups, -1))
    v = (x @ p["v"]).reshape(batch, length, groups, -1)
    y = attend(q, k, v, is_causal=True)
    return y.reshape(batch, length, width) @ p["out"]
