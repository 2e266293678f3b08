"""autocast on whole models, as their frameworks write them."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from support import assert_near, full_matmuls, normal

import mpjax

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
    params = model.init(jax.random.key(0), TOKENS)
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
    params = model.init(jax.random.key(0), x)
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


MODELS = {
    "linen transformer": linen_transformer,
    "scan over layers": lambda: linen_transformer(scanned=True),
    "nnx transformer": nnx_transformer,
    "equinox": equinox_mlp,
    "lstm": lstm,
    "mixture of experts": mixture_of_experts,
}


@pytest.mark.parametrize(
    ("name", "half"),
    [*((name, "bfloat16") for name in MODELS), ("linen transformer", "float16")],
)
def test_models(name, half):
    loss, params = MODELS[name]()
    auto = mpjax.autocast(loss, f"mixed_{half}")
    gradient = jax.value_and_grad(auto, allow_int=True)
    assert not full_matmuls(auto, params)
    assert not full_matmuls(gradient, params)
    value, got = jax.jit(gradient)(params)
    want_value, want = jax.jit(jax.value_and_grad(loss, allow_int=True))(params)
    assert_near(value, want_value, 0.02)
    got, want = ([x for x in jax.tree.leaves(t) if x.dtype == jnp.float32] for t in (got, want))
    assert_near(
        jnp.concatenate([g.ravel() for g in got]), jnp.concatenate([w.ravel() for w in want]), 0.05
    )


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        for features in (8, 16):
            y = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False)(y))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


def test_batch_norm_network():
    model, x = ConvNet(), 20 + 100 * normal(0, 4, 8, 8, 3)
    variables = model.init(jax.random.key(0), x)

    def loss(params, stats):
        both = {"params": params, "batch_stats": stats}
        y, new = model.apply(both, x, mutable=["batch_stats"])
        return jnp.mean(y**2), new["batch_stats"]

    auto = mpjax.autocast(loss, "mixed_bfloat16")
    args = variables["params"], variables["batch_stats"]
    (value, stats), grads = jax.jit(jax.value_and_grad(auto, has_aux=True))(*args)
    (want, want_stats), want_grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
    assert_near(value, want, 0.05)
    assert_near(stats, want_stats, 0.02)
    assert_near(grads["Dense_0"], want_grads["Dense_0"], 0.08)
    assert not full_matmuls(jax.grad(auto, has_aux=True), *args)


def test_training_learns_as_in_float32():
    loss, params = linen_transformer()
    optimizer = optax.adam(1e-2)

    def train(loss):
        @jax.jit
        def step(params, state):
            value, grads = jax.value_and_grad(loss)(params)
            updates, state = optimizer.update(grads, state)
            return optax.apply_updates(params, updates), state, value

        p, state = params, optimizer.init(params)
        for _ in range(30):
            p, state, value = step(p, state)
        return float(value)

    assert abs(train(mpjax.autocast(loss, "mixed_bfloat16")) - train(loss)) < 0.05
