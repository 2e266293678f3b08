"""U-Nets: one segments images, and one removes noise from them."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .layers import softmax_attention
from .losses import array, with_statistics


class UNet(nn.Module):
    widths: tuple[int, ...] = (64, 128, 256)
    classes: int = 21
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def convs(x, width):
            for _ in range(2):
                x = nn.Conv(width, (3, 3), use_bias=False, dtype=self.dtype)(x)
                x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
            return x

        *outer, inner = self.widths
        skips = []
        for width in outer:
            skips.append(convs(x, width))
            x = nn.max_pool(skips[-1], (2, 2), (2, 2))
        x = convs(x, inner)
        for width, skip in zip(outer[::-1], skips[::-1], strict=True):
            x = nn.ConvTranspose(width, (2, 2), (2, 2), dtype=self.dtype)(x)
            x = convs(jnp.concatenate([skip, x], -1), width)
        return nn.Conv(self.classes, (1, 1), dtype=self.dtype)(x)


def unet(dtype=None, batch=16, size=256, widths=(64, 128, 256)):
    """A U-Net that segments images into 21 classes."""
    return with_statistics(UNet(widths, dtype=dtype), (batch, size, size, 3), (batch, size, size))


# ---- diffusion -----------------------------------------------------------------------------------


class DiffusionBlock(nn.Module):
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x, time):
        def normed(x):
            return nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x))

        def conv(size):
            return nn.Conv(self.width, size, dtype=self.dtype)

        y = conv((3, 3))(normed(x))
        y = y + nn.Dense(self.width, dtype=self.dtype)(time)[:, None, None]
        y = conv((3, 3))(normed(y))
        return y + (x if x.shape == y.shape else conv((1, 1))(x))


class SpatialAttention(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.GroupNorm(32, dtype=self.dtype)(x).reshape(x.shape[0], -1, 1, width)
        q, k, v = (nn.Dense(width, dtype=self.dtype)(y) for _ in range(3))
        y = softmax_attention(q, k, v).reshape(x.shape)
        return x + nn.Dense(width, dtype=self.dtype)(y)


class Diffusion(nn.Module):
    """The U-Net of DDPM: two blocks at each level, and attention at 16 x 16."""

    widths: tuple[int, ...] = (128, 256, 256, 256)
    blocks: int = 2
    dtype: Any = None

    @nn.compact
    def __call__(self, x, time):
        def block(x, width):
            x = DiffusionBlock(width, self.dtype)(x, time)
            return SpatialAttention(self.dtype)(x) if x.shape[1] == 16 else x

        width, channels = self.widths[0], x.shape[-1]
        rates = jnp.exp(-jnp.log(10000.0) * jnp.arange(width // 2) / (width // 2))
        angles = time.astype(jnp.float32)[:, None] * rates
        time = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        time = nn.silu(nn.Dense(4 * width, dtype=self.dtype)(time))
        time = nn.silu(nn.Dense(4 * width, dtype=self.dtype)(time))
        x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
        skips = [x]
        for level, width in enumerate(self.widths):
            if level:
                x = nn.Conv(x.shape[-1], (3, 3), (2, 2), dtype=self.dtype)(x)
                skips.append(x)
            for _ in range(self.blocks):
                x = block(x, width)
                skips.append(x)
        x = DiffusionBlock(width, self.dtype)(x, time)
        x = SpatialAttention(self.dtype)(x)
        x = DiffusionBlock(width, self.dtype)(x, time)
        for level, width in reversed(list(enumerate(self.widths))):
            for _ in range(self.blocks + 1):
                x = block(jnp.concatenate([x, skips.pop()], -1), width)
            if level:
                x = jax.image.resize(
                    x, (x.shape[0], *(2 * n for n in x.shape[1:3]), width), "nearest"
                )
                x = nn.Conv(width, (3, 3), dtype=self.dtype)(x)
        x = nn.silu(nn.GroupNorm(32, dtype=self.dtype)(x))
        return nn.Conv(channels, (3, 3), dtype=self.dtype)(x)


def ddpm(dtype=None, batch=32, size=64, **sizes):
    """A U-Net that predicts the noise in noisy images."""
    model = Diffusion(dtype=dtype, **sizes)
    images, times = array(batch, size, size, 3), array(batch, dtype=jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images, times)

    def loss(params, rest, batch):
        images, noise, times = batch
        kept = jnp.cos(0.5 * jnp.pi * times / 1000)[:, None, None, None]
        noisy = kept * images + jnp.sqrt(1 - kept**2) * noise
        found = model.apply({"params": params}, noisy, times)
        return jnp.mean((found.astype(jnp.float32) - noise) ** 2), rest

    return loss, variables["params"], {}, (images, images, times), optax.adamw(3e-4)
