"""Transformers of images other than ViT: Swin."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from .layers import softmax_attention
from .losses import array, classifier


def windows(x, size):
    """Cuts ``x[batch, side, side, ...]`` into ``[batch, windows, size * size, ...]``."""
    batch, side, _, *rest = x.shape
    x = x.reshape(batch, side // size, size, side // size, size, *rest).swapaxes(2, 3)
    return x.reshape(batch, -1, size * size, *rest)


def joined(x, side, size):
    """The inverse of `windows`."""
    batch, _, _, width = x.shape
    x = x.reshape(batch, side // size, side // size, size, size, width).swapaxes(2, 3)
    return x.reshape(batch, side, side, width)


def offsets(size):
    """Returns for each pair of places in a window the index of their offset."""
    places = np.stack(np.meshgrid(np.arange(size), np.arange(size), indexing="ij"), -1)
    apart = places.reshape(-1, 1, 2) - places.reshape(1, -1, 2) + size - 1
    return apart[..., 0] * (2 * size - 1) + apart[..., 1]


def apart(side, size, shift):
    """Returns what is added to scores: -100 where a shift brought far places into one window."""
    parts = np.digitize(np.arange(side), (side - size, side - shift))
    regions = windows((3 * parts[:, None] + parts)[None], size)[0]
    far = regions[:, :, None] != regions[:, None, :]
    return np.where(far, np.float32(-100), np.float32(0))


class SwinBlock(nn.Module):
    heads: int
    window: int
    shifted: bool
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        x = x + self.attend(nn.LayerNorm(dtype=self.dtype)(x))
        y = nn.Dense(4 * width, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x))
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y, approximate=False))

    def attend(self, x):
        _, side, _, width = x.shape
        size = self.window
        shift = size // 2 if self.shifted and side > size else 0
        y = windows(jnp.roll(x, (-shift, -shift), (1, 2)), size)
        qkv = nn.Dense(3 * width, dtype=self.dtype)(y)
        q, k, v = jnp.split(qkv.reshape(*y.shape[:-1], 3 * self.heads, -1), 3, axis=-2)
        shape = ((2 * size - 1) ** 2, self.heads)
        bias = self.param("bias", nn.initializers.normal(0.02), shape)
        bias = bias[offsets(size)].transpose(2, 0, 1)
        if shift:
            bias = bias + apart(side, size, shift)[:, None]
        y = softmax_attention(q, k, v, bias=bias).reshape(y.shape)
        y = joined(nn.Dense(width, dtype=self.dtype)(y), side, size)
        return jnp.roll(y, (shift, shift), (1, 2))


class Swin(nn.Module):
    blocks: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    width: int = 96
    window: int = 7
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (4, 4), (4, 4), "VALID", dtype=self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        for stage, (count, heads) in enumerate(zip(self.blocks, self.heads, strict=True)):
            if stage:
                batch, side, _, width = x.shape
                x = windows(x, 2).reshape(batch, side // 2, side // 2, 4 * width)
                x = nn.LayerNorm(dtype=self.dtype)(x)
                x = nn.Dense(2 * width, use_bias=False, dtype=self.dtype)(x)
            for i in range(count):
                x = SwinBlock(heads, self.window, i % 2 == 1, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


def swin(dtype=None, batch=64, size=224, **sizes):
    """Swin-T, with windows of 7 x 7."""
    model = Swin(dtype=dtype, **sizes)
    return classifier(model, array(batch, size, size, 3), array(batch, dtype=jnp.int32))
