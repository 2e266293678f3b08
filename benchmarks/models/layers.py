"""Layers in plain JAX. They contain casts by hand, which do nothing in a float32 model."""

import jax
import jax.numpy as jnp


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


def softmax_attention(q, k, v, *, bias=None, is_causal=False, scale=None, wide=True):
    """Attention spelled out, over ``[batch, length, heads, size]``.

    Scores and probabilities have the operands' dtype. The softmax between them is float32 if
    ``wide``, else it has their dtype too.
    """
    q = q * (q.shape[-1] ** -0.5) if scale is None else q * scale
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    wide_scores = scores.astype(jnp.float32) if wide else scores
    if bias is not None:
        wide_scores = wide_scores + bias
    if is_causal:
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        wide_scores = jnp.where(seen, wide_scores, jnp.finfo(wide_scores.dtype).min)
    probabilities = jax.nn.softmax(wide_scores, axis=-1).astype(q.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, v)


def grouped_attention(x, p, heads, groups):
    """Causal attention with grouped queries and rotary embedding, as in Llama."""
    batch, length, width = x.shape
    q = rotate((x @ p["q"]).reshape(batch, length, heads, -1))
    k = rotate((x @ p["k"]).reshape(batch, length, groups, -1))
    v = (x @ p["v"]).reshape(batch, length, groups, -1)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(batch, length, width) @ p["out"]
