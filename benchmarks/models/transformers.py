"""Transformers: GPT-2, BERT and ViT as flax modules, Llama and T5 in plain JAX."""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .layers import attend, grouped_attention, rms_norm, softmax_attention, used
from .losses import (
    HEADS,
    array,
    classifier,
    cross_entropy,
    language_model,
    masked_cross_entropy,
)

# ---- GPT-2 ---------------------------------------------------------------------------------------


class Block(nn.Module):
    heads: int
    spelled_out: bool = False
    attention: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        qkv = nn.Dense(3 * width, dtype=self.dtype)(y)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        attention = softmax_attention if self.spelled_out else attend
        y = (self.attention or attention)(q, k, v, is_causal=True)
        x = x + nn.Dense(width, dtype=self.dtype)(y.reshape(x.shape))
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = expanded(y, self.dtype)
        return x + nn.Dense(width, dtype=self.dtype)(y)


def expanded(x, dtype):
    return nn.gelu(nn.Dense(4 * x.shape[-1], dtype=dtype)(x))


class GPT2(nn.Module):
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    spelled_out: bool = False
    attention: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens, logits=True):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        position = nn.Embed(self.context, self.width, dtype=self.dtype)
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block(self.heads, self.spelled_out, self.attention, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x) if logits else x


def gpt2(dtype=None, batch=8, length=1024, head="written", **sizes):
    """GPT-2. Its attention is `jax.nn.dot_product_attention`, spelled out, or a given function."""
    return language_model(GPT2(dtype=dtype, context=length, **sizes), batch, length, head)


# ---- BERT and ViT --------------------------------------------------------------------------------


class Encoder(nn.Module):
    """Layers of BERT, or of ViT with ``norm_first``, built from flax's own modules.

    With ``masked``, the head that predicts masked words, instead of a classifier.
    """

    layers: int
    width: int = 768
    heads: int = 12
    vocabulary: int = 0
    norm_first: bool = False
    masked: bool = False
    wide_softmax: bool = True
    attention: Any = None
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        if self.vocabulary:
            embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
            x = embed(x)
        else:
            x = nn.Conv(self.width, (16, 16), (16, 16), "VALID", dtype=self.dtype)(x)
            x = x.reshape(x.shape[0], -1, self.width)
        places = self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        x = x + places.astype(x.dtype)
        for _ in range(self.layers):
            x = self.around(x, self.attend)
            x = self.around(x, self.mlp)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        if self.masked:
            x = nn.gelu(nn.Dense(self.width, dtype=self.dtype)(x), approximate=False)
            logits = embed.attend(nn.LayerNorm(dtype=self.dtype)(x))
            bias = self.param("bias", nn.initializers.zeros, logits.shape[-1:])
            return logits + bias.astype(logits.dtype)
        return nn.Dense(1000, dtype=self.dtype)(x.mean(1))

    def around(self, x, layer):
        norm = nn.LayerNorm(dtype=self.dtype)
        return x + layer(norm(x)) if self.norm_first else norm(x + layer(x))

    def attend(self, x):
        def attend(q, k, v, **_):
            if self.attention:
                return self.attention(q, k, v)
            return softmax_attention(q, k, v, wide=self.wide_softmax)

        return nn.MultiHeadDotProductAttention(self.heads, dtype=self.dtype, attention_fn=attend)(x)

    def mlp(self, x):
        y = nn.gelu(nn.Dense(4 * self.width, dtype=self.dtype)(x), approximate=False)
        return nn.Dense(self.width, dtype=self.dtype)(y)


def bert(dtype=None, batch=16, length=512, layers=12, vocabulary=30522, wide_softmax=True, **sizes):
    """BERT's layers and a classifier. ``wide_softmax`` keeps a float32 softmax in casts by hand."""
    model = Encoder(layers, vocabulary=vocabulary, wide_softmax=wide_softmax, dtype=dtype, **sizes)
    tokens, labels = (array(*s, dtype=jnp.int32) for s in ((batch, length), (batch,)))
    return classifier(model, tokens, labels)


def bert_mlm(dtype=None, batch=16, length=512, layers=12, vocabulary=30522, **sizes):
    """BERT with the head and the loss of masked words; other words have a label below 0."""
    model = Encoder(layers, vocabulary=vocabulary, masked=True, dtype=dtype, **sizes)
    tokens = array(batch, length, dtype=jnp.int32)
    return classifier(model, tokens, tokens, masked_cross_entropy)


def vit(dtype=None, batch=64, size=224, layers=12, wide_softmax=True, **sizes):
    """ViT-B's layers on patches of 16 x 16; the softmax as in `bert`."""
    model = Encoder(layers, norm_first=True, wide_softmax=wide_softmax, dtype=dtype, **sizes)
    return classifier(model, array(batch, size, size, 3), array(batch, dtype=jnp.int32))


# ---- Llama ---------------------------------------------------------------------------------------


def llama_layer(x, params, dtype, heads, groups):
    p = used(params, dtype)
    x = x + grouped_attention(rms_norm(x, p["norm"]), p, heads, groups)
    y = rms_norm(x, p["mlp_norm"])
    return x + (jax.nn.silu(y @ p["gate"]) * (y @ p["up"])) @ p["down"]


def llama(
    dtype=None,
    batch=4,
    length=2048,
    layers=12,
    width=1024,
    heads=16,
    groups=4,
    vocabulary=32000,
    scanned=True,
    head="written",
    around=None,
):
    """Llama with grouped queries, scanned or unrolled. ``around`` is put around its layers."""
    shared, hidden = width // heads * groups, 11 * width // 4
    shapes = {
        "norm": (width,),
        "q": (width, width),
        "k": (width, shared),
        "v": (width, shared),
        "out": (width, width),
        "mlp_norm": (width,),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    params = {
        "embed": array(vocabulary, width),
        "layers": {k: array(layers, *s) for k, s in shapes.items()}
        if scanned
        else [{k: array(*s) for k, s in shapes.items()} for _ in range(layers)],
        "norm": array(width),
        "head": array(width, vocabulary),
    }
    layer = functools.partial(llama_layer, dtype=dtype, heads=heads, groups=groups)
    layer = around(layer) if around else layer

    def loss(params, rest, batch):
        x = used(params["embed"], dtype)[batch[0]]
        if scanned:
            x, _ = jax.lax.scan(lambda x, p: (layer(x, p), None), x, params["layers"])
        else:
            x = functools.reduce(layer, params["layers"], x)
        x = rms_norm(x, used(params["norm"], dtype))
        return HEADS[head](x, used(params["head"], dtype), batch[1]), rest

    tokens = array(batch, length, dtype=jnp.int32)
    return loss, params, {}, (tokens, tokens), optax.adamw(3e-4)


# ---- T5 ------------------------------------------------------------------------------------------


def buckets(queries, keys, both_ways, count=32, farthest=128):
    """T5's buckets of relative positions: near distances have their own, far ones share them."""
    distance = jnp.arange(keys)[None, :] - jnp.arange(queries)[:, None]
    start = 0
    if both_ways:
        count //= 2
        start = jnp.where(distance > 0, count, 0)
        distance = jnp.abs(distance)
    else:
        distance = jnp.maximum(-distance, 0)
    near = count // 2
    far = jnp.log(jnp.maximum(distance, 1) / near) / jnp.log(farthest / near) * (count - near)
    far = jnp.minimum(near + far.astype(jnp.int32), count - 1)
    return start + jnp.where(distance < near, distance, far)


def t5_attention(x, read, p, heads, bias=None, is_causal=False):
    """Attention from x to ``read``. T5 does not divide scores by the square root of the size."""
    q, k, v = (
        (y @ p[name]).reshape(*y.shape[:2], heads, -1)
        for name, y in (("q", x), ("k", read), ("v", read))
    )
    y = softmax_attention(q, k, v, bias=bias, is_causal=is_causal, scale=1)
    return y.reshape(*x.shape[:2], -1) @ p["out"]


def t5(
    dtype=None,
    batch=32,
    length=512,
    answer=128,
    layers=6,
    width=512,
    heads=8,
    hidden=2048,
    vocabulary=32128,
):
    """T5 with an encoder and a decoder of the same number of layers."""
    attention = {name: array(width, width) for name in ("q", "k", "v", "out")}
    attention["norm"] = array(width)
    mlp = {"norm": array(width), "up": array(width, hidden), "down": array(hidden, width)}
    encoder, decoder = (
        {"self": attention, "mlp": mlp},
        {
            "self": attention,
            "cross": attention,
            "mlp": mlp,
        },
    )
    params = {
        "embed": array(vocabulary, width),
        "encoder": {"layers": [encoder] * layers, "bias": array(32, heads), "norm": array(width)},
        "decoder": {"layers": [decoder] * layers, "bias": array(32, heads), "norm": array(width)},
    }

    def stack(x, params, read=None):
        where = buckets(x.shape[1], x.shape[1], both_ways=read is None)
        bias = params["bias"][where].transpose(2, 0, 1)  # float32, like the softmax
        for layer in params["layers"]:
            p = used(layer, dtype)
            y = rms_norm(x, p["self"]["norm"])
            x = x + t5_attention(y, y, p["self"], heads, bias, is_causal=read is not None)
            if read is not None:
                y = rms_norm(x, p["cross"]["norm"])
                x = x + t5_attention(y, read, p["cross"], heads)
            y = rms_norm(x, p["mlp"]["norm"])
            x = x + jax.nn.relu(y @ p["mlp"]["up"]) @ p["mlp"]["down"]
        return rms_norm(x, used(params["norm"], dtype))

    def loss(params, rest, batch):
        embed = used(params["embed"], dtype)
        read = stack(embed[batch[0]], params["encoder"])
        x = stack(embed[batch[1]], params["decoder"], read)
        return cross_entropy((x / width**0.5) @ embed.T, batch[1]), rest

    tokens, answers = (array(batch, n, dtype=jnp.int32) for n in (length, answer))
    return loss, params, {}, (tokens, answers), optax.adamw(3e-4)
