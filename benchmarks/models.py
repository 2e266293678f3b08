"""The models that the autocast benchmark compiles: GPT-2 124M and ResNet-50, in flax linen.

Written once. ``dtype=None`` is the plain float32 model that autocast takes; ``dtype=jnp.bfloat16``
is the same model with casts placed by hand.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Block(nn.Module):
    heads: int
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        y = nn.LayerNorm(dtype=self.dtype)(x)
        qkv = nn.Dense(3 * width, dtype=self.dtype)(y)
        q, k, v = jnp.split(qkv.reshape(*x.shape[:2], 3 * self.heads, -1), 3, axis=2)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + nn.Dense(width, dtype=self.dtype)(y.reshape(x.shape))
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.Dense(4 * width, dtype=self.dtype)(y)
        return x + nn.Dense(width, dtype=self.dtype)(nn.gelu(y))


class GPT2(nn.Module):
    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50257
    context: int = 1024
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)
        position = nn.Embed(self.context, self.width, dtype=self.dtype)
        x = embed(tokens) + position(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            x = Block(self.heads, self.dtype)(x)
        x = nn.LayerNorm(dtype=self.dtype)(x)
        return embed.attend(x)


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


class ResNet50(nn.Module):
    dtype: Any = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(64, (7, 7), (2, 2), use_bias=False, dtype=self.dtype)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x))
        x = nn.max_pool(x, (3, 3), (2, 2), padding="SAME")
        for stage, count in enumerate((3, 4, 6, 3)):
            for i in range(count):
                stride = 2 if i == 0 and stage > 0 else 1
                x = Bottleneck(64 * 2**stage, stride, self.dtype)(x)
        return nn.Dense(1000, dtype=self.dtype)(x.mean((1, 2)))


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def gpt2(dtype=None, batch=8, length=1024, **sizes):
    """Returns (loss, abstract variables, abstract batch, optimizer)."""
    model = GPT2(dtype=dtype, context=length, **sizes)
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(params, rest, batch):
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1]), rest

    return loss, variables["params"], {}, (tokens, tokens), optax.adamw(3e-4)


def resnet50(dtype=None, batch=128, size=224):
    """Returns (loss, abstract parameters, abstract statistics, abstract batch, optimizer)."""
    model = ResNet50(dtype=dtype)
    images = jax.ShapeDtypeStruct((batch, size, size, 3), jnp.float32)
    labels = jax.ShapeDtypeStruct((batch,), jnp.int32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, stats, batch):
        logits, updated = model.apply(
            {"params": params, "batch_stats": stats}, batch[0], mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch[1]), updated["batch_stats"]

    stats = variables["batch_stats"]
    return loss, variables["params"], stats, (images, labels), optax.sgd(0.1, momentum=0.9)


MODELS = {"gpt2": gpt2, "resnet50": resnet50}


def training_step(loss, optimizer):
    """Returns the step that trains a loss of ``(params, rest, batch)``."""

    def step(state, batch):
        params, rest, opt = state
        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params, rest, batch)
        updates, opt = optimizer.update(grads, opt, params)
        return (optax.apply_updates(params, updates), rest, opt), value

    return step
