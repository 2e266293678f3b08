"""Models that gather rows and sum over segments: a graph network, and DLRM."""

import itertools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from .layers import used
from .losses import array


class NormedMLP(nn.Module):
    width: int
    dtype: Any = None

    @nn.compact
    def __call__(self, *inputs):
        y = nn.Dense(self.width, dtype=self.dtype)(jnp.concatenate(inputs, -1))
        y = nn.Dense(self.width, dtype=self.dtype)(nn.silu(y))
        return nn.LayerNorm(dtype=self.dtype)(y)


class GraphNetwork(nn.Module):
    """Encode, process, decode, as in MeshGraphNets and GraphCast."""

    layers: int = 4
    width: int = 512
    dtype: Any = None

    @nn.compact
    def __call__(self, nodes, edges, senders, receivers):
        results = nodes.shape[-1] // 2
        x = NormedMLP(self.width, self.dtype)(nodes)
        e = NormedMLP(self.width, self.dtype)(edges)
        for _ in range(self.layers):
            e = e + NormedMLP(self.width, self.dtype)(e, x[senders], x[receivers])
            # Casts by hand sum messages in float32 too, as in GraphCast.
            got = jax.ops.segment_sum(e.astype(jnp.float32), receivers, x.shape[0])
            x = x + NormedMLP(self.width, self.dtype)(x, got.astype(x.dtype))
        y = nn.silu(nn.Dense(self.width, dtype=self.dtype)(x))
        return nn.Dense(results, dtype=self.dtype)(y)


def graph(dtype=None, nodes=40962, edges=327660, features=166, **sizes):
    """A graph network on the finest mesh of GraphCast, with 4 of its 16 layers."""
    model = GraphNetwork(dtype=dtype, **sizes)
    ends = array(edges, dtype=jnp.int32)
    inputs = array(nodes, features), array(edges, 4), ends, ends
    variables = jax.eval_shape(model.init, jax.random.key(0), *inputs)

    def loss(params, rest, batch):
        *inputs, wanted = batch
        found = model.apply({"params": params}, *inputs)
        return jnp.mean((found.astype(jnp.float32) - wanted) ** 2), rest

    batch = (*inputs, array(nodes, features // 2))
    return loss, variables["params"], {}, batch, optax.adamw(1e-3)


def dlrm(
    dtype=None,
    batch=32768,
    numbers=13,
    tables=26,
    rows=10000,
    width=128,
    bottom=(512, 256),
    top=(1024, 1024, 512, 256, 1),
):
    """DLRM on Criteo's features, with MLPerf's layers and small tables."""
    pairs = (tables + 1) * tables // 2

    def mlp(*widths):
        return [{"w": array(m, n), "b": array(n)} for m, n in itertools.pairwise(widths)]

    params = {
        "tables": array(tables * rows, width),
        "bottom": mlp(numbers, *bottom, width),
        "top": mlp(width + pairs, *top),
    }

    def run(x, layers):
        for i, p in enumerate(layers):
            x = jax.nn.relu(x) if i else x
            x = x @ p["w"] + p["b"]
        return x

    def loss(params, rest, batch):
        dense, chosen, clicked = batch
        layers = used({k: params[k] for k in ("bottom", "top")}, dtype)
        x = jax.nn.relu(run(dense.astype(dtype or dense.dtype), layers["bottom"]))
        # Rows are cast after they are looked up, which reads less than a cast of the tables.
        found = params["tables"][chosen + rows * jnp.arange(tables)].astype(x.dtype)
        every = jnp.concatenate([x[:, None], found], axis=1)
        products = jnp.einsum("bfw,bgw->bfg", every, every)
        lower = jnp.tril_indices(tables + 1, -1)
        x = jnp.concatenate([x, products[:, *lower]], -1)
        logits = run(x, layers["top"])[:, 0].astype(jnp.float32)
        return optax.sigmoid_binary_cross_entropy(logits, clicked).mean(), rest

    batch = array(batch, numbers), array(batch, tables, dtype=jnp.int32), array(batch)
    return loss, params, {}, batch, optax.sgd(0.1)
