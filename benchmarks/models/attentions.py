"""Attention of other kinds: DeepSeek's latent attention, AlphaFold's pairs and triangles."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .layers import rms_norm, rotate, softmax_attention, used
from .losses import array, cross_entropy

# ---- DeepSeek ------------------------------------------------------------------------------------


def latent_attention(x, p, heads, turned):
    """Attention whose keys and values are functions of one latent vector per token.

    The last ``turned`` features of queries and keys have rotary embedding; the heads share these
    features of a key.
    """
    batch, length, _ = x.shape
    q = (x @ p["q"]).reshape(batch, length, heads, -1)
    same = q.shape[-1] - turned
    q = jnp.concatenate([q[..., :same], rotate(q[..., same:])], -1)
    latent, k_turned = jnp.split(x @ p["latent"], [p["up"].shape[0]], axis=-1)
    kv = (rms_norm(latent, p["latent_norm"]) @ p["up"]).reshape(batch, length, heads, -1)
    k, v = jnp.split(kv, [same], axis=-1)
    k_turned = jnp.broadcast_to(rotate(k_turned[:, :, None]), (*k.shape[:-1], turned))
    y = softmax_attention(q, jnp.concatenate([k, k_turned], -1), v, is_causal=True)
    return y.reshape(batch, length, -1) @ p["out"]


def mla(
    dtype=None,
    batch=4,
    length=2048,
    layers=4,
    width=2048,
    heads=16,
    latent=512,
    size=128,
    turned=64,
    hidden=5632,
    vocabulary=102400,
):
    """A language model with the attention and the sizes of DeepSeek-V2-Lite, without experts."""
    layer = {
        "norm": array(width),
        "q": array(width, heads * (size + turned)),
        "latent": array(width, latent + turned),
        "latent_norm": array(latent),
        "up": array(latent, heads * 2 * size),
        "out": array(heads * size, width),
        "mlp_norm": array(width),
        "gate": array(width, hidden),
        "mlp_up": array(width, hidden),
        "down": array(hidden, width),
    }
    params = {
        "embed": array(vocabulary, width),
        "layers": [layer] * layers,
        "norm": array(width),
        "head": array(width, vocabulary),
    }

    def loss(params, rest, batch):
        x = params["embed"][batch[0]].astype(dtype or jnp.float32)
        for layer in params["layers"]:
            p = used(layer, dtype)
            x = x + latent_attention(rms_norm(x, p["norm"]), p, heads, turned)
            y = rms_norm(x, p["mlp_norm"])
            x = x + (jax.nn.silu(y @ p["gate"]) * (y @ p["mlp_up"])) @ p["down"]
        x = rms_norm(x, used(params["norm"], dtype))
        return cross_entropy(x @ used(params["head"], dtype), batch[1]), rest

    tokens = array(batch, length, dtype=jnp.int32)
    return loss, params, {}, (tokens, tokens), optax.adamw(3e-4)


# ---- AlphaFold -----------------------------------------------------------------------------------


class GatedAttention(nn.Module):
    """Attention along the last axis but one of ``x``, with a bias for each pair and a gate."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, pairs):
        q, k, v = (
            nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype)(x).reshape(
                *x.shape[:-1], self.heads, -1
            )
            for _ in range(3)
        )
        bias = nn.Dense(self.heads, use_bias=False, dtype=self.dtype)(pairs)
        bias = jnp.moveaxis(bias, -1, 1)
        bias = bias[:, None] if x.ndim == 4 else bias  # the same for all rows
        y = softmax_attention(q, k, v, bias=bias).reshape(x.shape)
        gate = nn.sigmoid(nn.Dense(x.shape[-1], dtype=self.dtype)(x))
        return nn.Dense(x.shape[-1], use_bias=False, dtype=self.dtype)(gate * y)


class PairBlock(nn.Module):
    """A block of AlphaFold 3's Pairformer."""

    heads: int
    pair_heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, z):
        def norm(y):
            return nn.LayerNorm(dtype=self.dtype)(y)

        z = z + self.multiply(norm(z), "bikc,bjkc->bijc")
        z = z + self.multiply(norm(z), "bkic,bkjc->bijc")
        y = norm(z)
        z = z + GatedAttention(self.pair_heads, self.dtype)(y, y)
        y = norm(z.swapaxes(1, 2))
        z = z + GatedAttention(self.pair_heads, self.dtype)(y, y).swapaxes(1, 2)
        z = z + self.transition(norm(z))
        x = x + GatedAttention(self.heads, self.dtype)(norm(x), norm(z))
        return x + self.transition(norm(x)), z

    def multiply(self, z, along):
        """The triangle of multiplications: what two edges with a common end say of the third."""

        def dense(y):
            return nn.Dense(z.shape[-1], use_bias=False, dtype=self.dtype)(y)

        a, b = (nn.sigmoid(dense(z)) * dense(z) for _ in range(2))
        y = dense(nn.LayerNorm(dtype=self.dtype)(jnp.einsum(along, a, b)))
        return nn.sigmoid(dense(z)) * y

    def transition(self, x):
        width = x.shape[-1]
        up, gate = (nn.Dense(4 * width, use_bias=False, dtype=self.dtype)(x) for _ in range(2))
        return nn.Dense(width, use_bias=False, dtype=self.dtype)(nn.silu(gate) * up)


class Pairformer(nn.Module):
    layers: int = 2
    width: int = 384
    pair_width: int = 128
    heads: int = 16
    pair_heads: int = 4
    kinds: int = 23
    bins: int = 64
    dtype: Any = None

    @nn.compact
    def __call__(self, residues):
        x = nn.Embed(self.kinds, self.width, dtype=self.dtype)(residues)
        rows, columns = (nn.Dense(self.pair_width, dtype=self.dtype)(x) for _ in range(2))
        z = rows[:, :, None] + columns[:, None]
        places = jnp.arange(residues.shape[1])
        apart = jnp.clip(places[:, None] - places, -32, 32) + 32
        z = z + nn.Embed(65, self.pair_width, dtype=self.dtype)(apart)
        for _ in range(self.layers):
            x, z = PairBlock(self.heads, self.pair_heads, self.dtype)(x, z)
        distances = nn.Dense(self.bins, dtype=self.dtype)(z + z.swapaxes(1, 2))
        return nn.Dense(self.kinds, dtype=self.dtype)(x), distances


def pairformer(dtype=None, batch=1, length=384, **sizes):
    """Blocks of AlphaFold 3's Pairformer, which predict distances and residues."""
    model = Pairformer(dtype=dtype, **sizes)
    residues = array(batch, length, dtype=jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), residues)

    def loss(params, rest, batch):
        kinds, distances = model.apply({"params": params}, batch[0])
        return cross_entropy(kinds, batch[1]) + cross_entropy(distances, batch[2]), rest

    bins = array(batch, length, length, dtype=jnp.int32)
    return loss, variables["params"], {}, (residues, residues, bins), optax.adamw(1e-3)
