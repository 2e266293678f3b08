"""Recurrent models: an LSTM, Mamba, a neural ODE."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .layers import narrow, rms_norm, used
from .losses import array, cross_entropy, language_model


class Cell(nn.OptimizedLSTMCell):
    """flax's cell, whose carry is float32. In strict casts by hand, what layers read is not."""

    def __call__(self, carry, x):
        (c, h), _ = super().__call__(carry, x)
        h = narrow(h, self.dtype)
        return (c, h), h

    def initialize_carry(self, rng, input_shape):
        c, h = super().initialize_carry(rng, input_shape)
        return c, narrow(h, self.dtype)


class LSTM(nn.Module):
    width: int
    layers: int
    vocabulary: int
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width, dtype=self.dtype)(tokens)
        for _ in range(self.layers):
            x = nn.RNN(Cell(self.width, dtype=self.dtype))(x)
        return nn.Dense(self.vocabulary, dtype=self.dtype)(x)


def lstm(dtype=None, batch=64, length=256, width=1024, layers=2, vocabulary=10000):
    """A language model of LSTMs."""
    return language_model(LSTM(width, layers, vocabulary, dtype), batch, length)


def mamba_layer(x, params, dtype, state):
    """A selective state space layer. Its recurrence is a float32 associative scan."""
    p = used({k: w for k, w in params.items() if k != "decay"}, dtype)
    y, z = jnp.split(rms_norm(x, p["norm"]) @ p["in"], 2, axis=-1)
    padded = jnp.pad(y, ((0, 0), (3, 0), (0, 0)))
    y = sum(padded[:, i : i + y.shape[1]] * p["conv"][i] for i in range(4))
    y = jax.nn.silu(y)
    rank = p["steps"].shape[0]
    steps, inputs, outputs = jnp.split(y @ p["choose"], [rank, rank + state], axis=-1)
    steps = jax.nn.softplus((steps @ p["steps"] + p["bias"]).astype(jnp.float32))
    decay = jnp.exp(-steps[..., None] * jnp.exp(params["decay"]))
    drive = (steps * y.astype(jnp.float32))[..., None] * inputs.astype(jnp.float32)[..., None, :]
    _, h = jax.lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (decay, drive), axis=1
    )
    read = jnp.einsum("blds,bls->bld", h.astype(y.dtype), outputs)
    y = read + p["skip"] * y
    return x + (y * jax.nn.silu(z)) @ p["out"]


def mamba(dtype=None, batch=8, length=1024, layers=2, width=768, state=16, vocabulary=4096):
    """A language model of selective state space layers."""
    inner = 2 * width
    layer = {
        "norm": array(width),
        "in": array(width, 2 * inner),
        "conv": array(4, inner),
        "choose": array(inner, inner // 32 + 2 * state),
        "steps": array(inner // 32, inner),
        "bias": array(inner),
        "decay": array(inner, state),
        "skip": array(inner),
        "out": array(inner, width),
    }
    params = {"embed": array(vocabulary, width), "layers": [layer] * layers, "norm": array(width)}

    def loss(params, rest, batch):
        x = used(params["embed"], dtype)[batch[0]]
        for layer in params["layers"]:
            x = mamba_layer(x, layer, dtype, state)
        x = rms_norm(x, used(params["norm"], dtype))
        return cross_entropy(x @ used(params["embed"], dtype).T, batch[1]), rest

    tokens = array(batch, length, dtype=jnp.int32)
    return loss, params, {}, (tokens, tokens), optax.adamw(3e-4)


def ode(dtype=None, steps=64, batch=32, width=64):
    """A neural ODE with unrolled Runge-Kutta steps."""
    params = {"up": array(width, width), "bias": array(width), "down": array(width, width)}

    def loss(params, rest, batch):
        def slope(x):
            p = used(params, dtype)
            h = jnp.tanh(x.astype(dtype or x.dtype) @ p["up"] + p["bias"])
            return (h @ p["down"]).astype(x.dtype)

        x, step = batch[0], 1.0 / steps
        for _ in range(steps):
            a = slope(x)
            b = slope(x + 0.5 * step * a)
            c = slope(x + 0.5 * step * b)
            d = slope(x + step * c)
            x = x + step / 6 * (a + 2 * b + 2 * c + d)
        return jnp.mean((x - batch[1]) ** 2), rest

    x = array(batch, width)
    return loss, params, {}, (x, x), optax.adamw(3e-4)
