"""Models of images that are not convolutional: Swin, MLP-Mixer, DiT."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from .layers import attend, softmax_attention
from .losses import array, classifier, sinusoids

# ---- Swin ----------------------------------------------------------------------------------------


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


# ---- MLP-Mixer -----------------------------------------------------------------------------------


class MixerBlock(nn.Module):
    between: int
    within: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def mlp(y, hidden):
            width = y.shape[-1]
            y = nn.gelu(nn.Dense(hidden, dtype=self.dtype)(y), approximate=False)
            return nn.Dense(width, dtype=self.dtype)(y)

        y = nn.LayerNorm(dtype=self.dtype)(x).swapaxes(1, 2)
        x = x + mlp(y, self.between).swapaxes(1, 2)
        return x + mlp(nn.LayerNorm(dtype=self.dtype)(x), self.within)


class Mixer(nn.Module):
    layers: int = 12
    width: int = 768
    between: int = 384
    within: int = 3072
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(self.width, (16, 16), (16, 16), "VALID", dtype=self.dtype)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        for _ in range(self.layers):
            x = MixerBlock(self.between, self.within, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean(1))


def mixer(dtype=None, batch=64, size=224, **sizes):
    """Mixer-B/16."""
    model = Mixer(dtype=dtype, **sizes)
    return classifier(model, array(batch, size, size, 3), array(batch, dtype=jnp.int32))


# ---- DiT -----------------------------------------------------------------------------------------


def modulated(x, shift, scale, dtype):
    """A layer norm whose shift and scale are functions of the time and the class."""
    x = nn.LayerNorm(use_bias=False, use_scale=False, epsilon=1e-6, dtype=dtype)(x)
    return x * (1 + scale[:, None]) + shift[:, None]


class DiTBlock(nn.Module):
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, condition):
        width = x.shape[-1]
        gates = nn.Dense(6 * width, dtype=self.dtype)(nn.silu(condition))
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = jnp.split(gates, 6, axis=-1)
        y = modulated(x, shift, scale, self.dtype)
        qkv = nn.Dense(3 * width, dtype=self.dtype)(y)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        y = nn.Dense(width, dtype=self.dtype)(attend(q, k, v).reshape(x.shape))
        x = x + gate[:, None] * y
        y = modulated(x, mlp_shift, mlp_scale, self.dtype)
        y = nn.Dense(width, dtype=self.dtype)(nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y)))
        return x + mlp_gate[:, None] * y


class DiT(nn.Module):
    layers: int = 12
    width: int = 768
    heads: int = 12
    classes: int = 1000
    dtype: Any = None

    @nn.compact
    def __call__(self, x, times, labels):
        batch, side, _, channels = x.shape
        rates = jnp.exp(-jnp.log(10000.0) * jnp.arange(128) / 128)
        angles = times.astype(jnp.float32)[:, None] * rates
        time = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        time = nn.silu(nn.Dense(self.width, dtype=self.dtype)(time))
        condition = nn.Dense(self.width, dtype=self.dtype)(time)
        condition = condition + nn.Embed(self.classes + 1, self.width, dtype=self.dtype)(labels)
        x = nn.Conv(self.width, (2, 2), (2, 2), "VALID", dtype=self.dtype)(x)
        x = x.reshape(batch, -1, self.width)
        x = x + sinusoids(*x.shape[1:]).astype(x.dtype)
        for _ in range(self.layers):
            x = DiTBlock(self.heads, self.dtype)(x, condition)
        gates = nn.Dense(2 * self.width, dtype=self.dtype)(nn.silu(condition))
        x = modulated(x, *jnp.split(gates, 2, axis=-1), self.dtype)
        x = nn.Dense(4 * channels, dtype=self.dtype)(x)
        x = x.reshape(batch, side // 2, side // 2, 2, 2, channels).swapaxes(2, 3)
        return x.reshape(batch, side, side, channels)


def dit(dtype=None, batch=64, size=32, channels=4, **sizes):
    """DiT-B/2, which predicts the noise in latent images."""
    model = DiT(dtype=dtype, **sizes)
    images, numbers = array(batch, size, size, channels), array(batch, dtype=jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images, numbers, numbers)

    def loss(params, rest, batch):
        images, noise, times, labels = batch
        kept = jnp.cos(0.5 * jnp.pi * times / 1000)[:, None, None, None]
        noisy = kept * images + jnp.sqrt(1 - kept**2) * noise
        found = model.apply({"params": params}, noisy, times, labels)
        return jnp.mean((found.astype(jnp.float32) - noise) ** 2), rest

    return loss, variables["params"], {}, (images, images, numbers, numbers), optax.adamw(1e-4)
