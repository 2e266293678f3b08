"""Whole models that several tests use, written as usual in their frameworks."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from support import normal

equinox = pytest.importorskip("equinox")


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(num_heads=2)(y, mask=nn.make_causal_mask(x[..., 0]))
        x = x + y
        y = nn.LayerNorm()(x)
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(32)(y))), None


class Transformer(nn.Module):
    scanned: bool = False

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(17, 16)
        x = embed(tokens) + nn.Embed(8, 16)(jnp.arange(tokens.shape[1]))
        if self.scanned:
            layer = nn.remat(Layer, prevent_cse=False)
            axes = {"params": 0}
            scan = nn.scan(layer, variable_axes=axes, split_rngs={"params": True}, length=3)
            x, _ = scan()(x, None)
        else:
            for _ in range(2):
                x, _ = Layer()(x)
        return embed.attend(nn.LayerNorm()(x))


TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 17, (2, 8)))


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def linen_transformer(scanned=False):
    model = Transformer(scanned)
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)
    return lambda p: cross_entropy(model.apply(p, TOKENS), TOKENS), params


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(16, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 16, decode=False, rngs=rngs)
        self.up = nnx.Linear(16, 32, rngs=rngs)
        self.down = nnx.Linear(32, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(17, 16, rngs=rngs)
        self.layers = nnx.List([NnxLayer(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.embed.attend(x)


def nnx_transformer():
    graph, state = nnx.split(NnxTransformer(nnx.Rngs(0)))
    return lambda s: cross_entropy(nnx.merge(graph, s)(TOKENS), TOKENS), state


def equinox_mlp():
    model = equinox.nn.MLP(8, 4, 16, 2, key=jax.random.key(0))
    arrays, static = equinox.partition(model, equinox.is_inexact_array)
    x = normal(0, 6, 8)
    return lambda a: jnp.mean(jax.vmap(equinox.combine(a, static))(x) ** 2), arrays


def lstm():
    model = nn.RNN(nn.LSTMCell(16))
    x = normal(0, 3, 7, 8)
    params = jax.jit(model.init)(jax.random.key(0), x)
    return lambda p: jnp.mean(model.apply(p, x) ** 2), params


def mixture_of_experts():
    experts, width = 4, 8
    params = {
        "router": normal(0, width, experts),
        "up": normal(1, experts, width, 16, scale=0.3),
        "down": normal(2, experts, 16, width, scale=0.3),
    }
    x = normal(3, 12, width)

    def loss(params):
        gates = jax.nn.softmax(x @ params["router"])
        top, chosen = lax.top_k(gates, 2)
        order = jnp.argsort(chosen.reshape(-1))
        sizes = jnp.bincount(chosen.reshape(-1), length=experts)
        rows = x[order // 2]
        h = jax.nn.silu(lax.ragged_dot(rows, params["up"], sizes))
        y = lax.ragged_dot(h, params["down"], sizes) * top.reshape(-1)[order][:, None]
        return jnp.mean(jnp.zeros_like(x).at[order // 2].add(y) ** 2)

    return loss, params


MAKERS = {
    "linen transformer": linen_transformer,
    "scan over layers": lambda: linen_transformer(scanned=True),
    "nnx transformer": nnx_transformer,
    "equinox": equinox_mlp,
    "lstm": lstm,
    "mixture of experts": mixture_of_experts,
}
MODELS = {name: functools.cache(make) for name, make in MAKERS.items()}
