"""Models of sound: Whisper, WaveNet."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .layers import attend
from .losses import array, cross_entropy, language_model, sinusoids


class Attention(nn.Module):
    heads: int
    is_causal: bool = False
    dtype: Any = None

    @nn.compact
    def __call__(self, x, read):
        def project(y, **kwargs):
            y = nn.Dense(x.shape[-1], dtype=self.dtype, **kwargs)(y)
            return y.reshape(*y.shape[:2], self.heads, -1)

        q, k, v = project(x), project(read, use_bias=False), project(read)
        y = attend(q, k, v, is_causal=self.is_causal).reshape(x.shape)
        return nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class WhisperLayer(nn.Module):
    """A layer of the encoder; with ``read``, one of the decoder."""

    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, read=None):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        x = x + Attention(self.heads, read is not None, self.dtype)(y, y)
        if read is not None:
            y = nn.LayerNorm(dtype=self.dtype)(x)
            x = x + Attention(self.heads, dtype=self.dtype)(y, read)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(4 * x.shape[-1], dtype=self.dtype)(y), approximate=False)
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class Whisper(nn.Module):
    layers: int
    width: int
    heads: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, sound, tokens):
        x = nn.gelu(nn.Conv(self.width, (3,), dtype=self.dtype)(sound), approximate=False)
        x = nn.gelu(nn.Conv(self.width, (3,), (2,), dtype=self.dtype)(x), approximate=False)
        x = x + sinusoids(*x.shape[1:]).astype(x.dtype)
        for _ in range(self.layers):
            x = WhisperLayer(self.heads, self.dtype)(x)
        read = nn.LayerNorm(dtype=self.dtype)(x)
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        x = embed(tokens)
        places = self.param("places", nn.initializers.normal(0.02), x.shape[1:])
        x = x + places.astype(x.dtype)
        for _ in range(self.layers):
            x = WhisperLayer(self.heads, self.dtype)(x, read)
        return embed.attend(nn.LayerNorm(dtype=self.dtype)(x))


def whisper(
    dtype=None,
    batch=8,
    frames=3000,
    channels=80,
    answer=448,
    layers=6,
    width=512,
    heads=8,
    vocabulary=51865,
):
    """Whisper base: 30 seconds of sound to text."""
    model = Whisper(layers, width, heads, vocabulary, dtype)
    sound, tokens = array(batch, frames, channels), array(batch, answer, dtype=jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), sound, tokens)

    def loss(params, rest, batch):
        sound, tokens = batch
        return cross_entropy(model.apply({"params": params}, sound, tokens), tokens), rest

    return loss, variables["params"], {}, (sound, tokens), optax.adamw(3e-4)


class WaveNet(nn.Module):
    stacks: int = 2
    doublings: int = 10
    width: int = 128
    skip: int = 256
    levels: int = 256
    dtype: Any = None

    @nn.compact
    def __call__(self, sound):
        x = nn.Embed(self.levels, self.width, dtype=self.dtype)(sound)
        total = 0
        for i in range(self.stacks * self.doublings):
            rate = 2 ** (i % self.doublings)
            y = nn.Conv(
                *(2 * self.width, (2,)),
                padding="CAUSAL",
                kernel_dilation=(rate,),
                dtype=self.dtype,
            )(x)
            y, gate = jnp.split(y, 2, axis=-1)
            y = nn.tanh(y) * nn.sigmoid(gate)
            total = total + nn.Dense(self.skip, dtype=self.dtype)(y)
            x = x + nn.Dense(self.width, dtype=self.dtype)(y)
        y = nn.relu(nn.Dense(self.skip, dtype=self.dtype)(nn.relu(total)))
        return nn.Dense(self.levels, dtype=self.dtype)(y)


def wavenet(dtype=None, batch=8, length=16384, **sizes):
    """WaveNet, which predicts the next of 16,000 samples a second as one of 256 levels."""
    return language_model(WaveNet(dtype=dtype, **sizes), batch, length)
