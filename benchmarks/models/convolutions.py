"""Convolutional classifiers: ResNet-50, ConvNeXt-T, EfficientNet-B0."""

from typing import Any

import flax.linen as nn
import jax.numpy as jnp

from .losses import array, classifier, with_statistics


class Bottleneck(nn.Module):
    filters: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def norm(**kwargs):
            return nn.BatchNorm(use_running_average=False, dtype=self.dtype, **kwargs)

        def conv(filters, size, stride=1):
            return nn.Conv(
                filters, (size, size), (stride, stride), use_bias=False, dtype=self.dtype
            )

        y = nn.relu(norm()(conv(self.filters, 1)(x)))
        y = nn.relu(norm()(conv(self.filters, 3, self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.filters, 1)(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.filters, 1, self.stride)(x))
        return nn.relu(x + y)


class Basic(nn.Module):
    """The block of ResNet-18 and ResNet-34."""

    filters: int
    stride: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def conv(x, size, stride=1, **kwargs):
            y = nn.Conv(
                self.filters, (size, size), (stride, stride), use_bias=False, dtype=self.dtype
            )(x)
            return nn.BatchNorm(use_running_average=False, dtype=self.dtype, **kwargs)(y)

        y = nn.relu(conv(x, 3, self.stride))
        y = conv(y, 3, scale_init=nn.initializers.zeros)
        if x.shape != y.shape:
            x = conv(x, 1, self.stride)
        return nn.relu(x + y)


class ResNet(nn.Module):
    blocks: tuple[int, ...] = (3, 4, 6, 3)
    block: Any = Bottleneck
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, count in enumerate(self.blocks):
            for i in range(count):
                stride = 2 if i == 0 and stage > 0 else 1
                x = self.block(64 * 2**stage, stride, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


def resnet50(dtype=None, batch=128, size=224, blocks=(3, 4, 6, 3), bottleneck=True):
    """ResNet-50; with two basic blocks per stage, ResNet-18."""
    model = ResNet(blocks, Bottleneck if bottleneck else Basic, dtype)
    return with_statistics(model, (batch, size, size, 3), (batch,))


class NextBlock(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.Conv(width, (7, 7), feature_group_count=width, dtype=self.dtype)(x)
        y = nn.LayerNorm(epsilon=1e-6, dtype=self.dtype)(y)
        y = nn.gelu(nn.Dense(4 * width, dtype=self.dtype)(y), approximate=False)
        y = nn.Dense(width, dtype=self.dtype)(y)
        scale = self.param("scale", nn.initializers.constant(1e-6), (width,))
        return x + y * scale.astype(y.dtype)


class ConvNeXt(nn.Module):
    blocks: tuple[int, ...] = (3, 3, 9, 3)
    widths: tuple[int, ...] = (96, 192, 384, 768)
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def norm():
            return nn.LayerNorm(epsilon=1e-6, dtype=self.dtype)

        for stage, (count, width) in enumerate(zip(self.blocks, self.widths, strict=True)):
            size = (2, 2) if stage else (4, 4)
            x = norm()(x) if stage else x
            x = nn.Conv(width, size, size, "VALID", dtype=self.dtype)(x)
            x = x if stage else norm()(x)
            for _ in range(count):
                x = NextBlock(self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(norm()(x.mean((1, 2))))


def convnext(dtype=None, batch=64, size=224, **sizes):
    """ConvNeXt-T."""
    model = ConvNeXt(dtype=dtype, **sizes)
    return classifier(model, array(batch, size, size, 3), array(batch, dtype=jnp.int32))


class MBConv(nn.Module):
    """An inverted bottleneck with squeeze and excitation."""

    widening: int
    filters: int
    stride: int
    kernel: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def conv(filters, size, stride=1, **kwargs):
            return nn.Conv(
                filters, (size, size), (stride, stride), use_bias=False, dtype=self.dtype, **kwargs
            )

        def norm():
            return nn.BatchNorm(use_running_average=False, dtype=self.dtype)

        narrow, wide = x.shape[-1], self.widening * x.shape[-1]
        y = nn.silu(norm()(conv(wide, 1)(x))) if self.widening > 1 else x
        y = nn.silu(norm()(conv(wide, self.kernel, self.stride, feature_group_count=wide)(y)))
        squeezed = y.mean((1, 2), keepdims=True)
        squeezed = nn.silu(nn.Dense(max(1, narrow // 4), dtype=self.dtype)(squeezed))
        y = y * nn.sigmoid(nn.Dense(wide, dtype=self.dtype)(squeezed))
        y = norm()(conv(self.filters, 1)(y))
        return x + y if x.shape == y.shape else y


# widening, filters, blocks, stride, kernel
B0 = (
    (1, 16, 1, 1, 3),
    (6, 24, 2, 2, 3),
    (6, 40, 2, 2, 5),
    (6, 80, 3, 2, 3),
    (6, 112, 3, 1, 5),
    (6, 192, 4, 2, 5),
    (6, 320, 1, 1, 3),
)


class EfficientNet(nn.Module):
    stages: tuple[tuple[int, ...], ...] = B0
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        def conv(filters, size, stride):
            return nn.Conv(filters, size, stride, use_bias=False, dtype=self.dtype)

        def norm():
            return nn.BatchNorm(use_running_average=False, dtype=self.dtype)

        x = nn.silu(norm()(conv(32, (3, 3), (2, 2))(x)))
        for widening, filters, blocks, stride, kernel in self.stages:
            for i in range(blocks):
                x = MBConv(widening, filters, 1 if i else stride, kernel, self.dtype)(x)
        x = nn.silu(norm()(conv(1280, (1, 1), (1, 1))(x)))
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


def efficientnet(dtype=None, batch=128, size=224, **sizes):
    """EfficientNet-B0."""
    return with_statistics(EfficientNet(dtype=dtype, **sizes), (batch, size, size, 3), (batch,))
