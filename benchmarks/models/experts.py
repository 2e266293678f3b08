"""A transformer with mixtures of experts. One-hot einsums or a sort bring tokens to the experts."""

import jax
import jax.numpy as jnp
import optax

from .layers import grouped_attention, narrow, rms_norm, used
from .losses import array, cross_entropy

CHOICES = 2


def route(x, router):
    """Returns each token's experts, their weights, and the imbalance of the load.

    The router is float32 in casts by hand too, as in Switch Transformers. If they are strict, its
    softmax is, and its matmul is not.
    """
    wide = narrow(x.astype(jnp.float32), x.dtype)
    shares = jax.nn.softmax((wide @ narrow(router, x.dtype)).astype(jnp.float32))
    best, chosen = jax.lax.top_k(shares, CHOICES)
    experts = router.shape[-1]
    taken = jax.nn.one_hot(chosen[..., 0], experts).reshape(-1, experts).mean(0)
    uneven = experts * jnp.sum(taken * shares.reshape(-1, experts).mean(0))
    return chosen, best / best.sum(-1, keepdims=True), uneven


def one_hot_experts(x, p, chosen, shares):
    """Each expert takes a fixed number of tokens. Dispatch and combine are einsums."""
    batch, length, _ = x.shape
    experts = p["up"].shape[0]
    capacity = int(1.25 * CHOICES * length / experts)
    picks = jax.nn.one_hot(chosen.reshape(batch, -1), experts)
    place = (jnp.cumsum(picks, axis=1) - 1) * picks
    seats = jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)
    picks, seats, shares = (narrow(y, x.dtype) for y in (picks, seats, shares))
    seated = picks[..., None] * seats[..., None, :]
    seated = seated.reshape(batch, length, CHOICES, experts, capacity)
    combine = (seated * shares[..., None, None]).sum(2).astype(x.dtype)
    dispatch = seated.sum(2).astype(x.dtype)
    y = jnp.einsum("blec,blw->ebcw", dispatch, x)
    y = jax.nn.gelu(jnp.einsum("ebcw,ewh->ebch", y, p["up"]))
    y = jnp.einsum("ebch,ehw->ebcw", y, p["down"])
    return jnp.einsum("blec,ebcw->blw", combine, y)


def ragged_experts(x, p, chosen, shares):
    """Tokens are sorted by expert, and none is dropped. Matmuls are over groups of rows."""
    width, experts = x.shape[-1], p["up"].shape[0]
    chosen = chosen.reshape(-1)
    order = jnp.argsort(chosen)
    counts = jnp.bincount(chosen, length=experts)
    y = x.reshape(-1, width)[order // CHOICES]
    y = jax.nn.gelu(jax.lax.ragged_dot(y, p["up"], counts))
    y = jax.lax.ragged_dot(y, p["down"], counts)
    y = y[jnp.argsort(order)].reshape(-1, CHOICES, width)
    y = (y * shares.astype(y.dtype).reshape(-1, CHOICES, 1)).sum(1)
    return y.reshape(x.shape)


def moe(
    dtype=None,
    batch=8,
    length=1024,
    layers=2,
    width=768,
    heads=12,
    groups=4,
    hidden=3072,
    experts=8,
    vocabulary=32000,
    ragged=False,
):
    """A language model whose MLPs are mixtures of experts, with two experts for each token."""
    shared = width // heads * groups
    layer = {
        "norm": array(width),
        "q": array(width, width),
        "k": array(width, shared),
        "v": array(width, shared),
        "out": array(width, width),
        "mlp_norm": array(width),
        "router": array(width, experts),
        "up": array(experts, width, hidden),
        "down": array(experts, hidden, width),
    }
    params = {"embed": array(vocabulary, width), "layers": [layer] * layers, "norm": array(width)}
    mlp = ragged_experts if ragged else one_hot_experts

    def loss(params, rest, batch):
        x = used(params["embed"], dtype)[batch[0]]
        uneven = 0.0
        for layer in params["layers"]:
            p = used({k: w for k, w in layer.items() if k != "router"}, dtype)
            x = x + grouped_attention(rms_norm(x, p["norm"]), p, heads, groups)
            y = rms_norm(x, p["mlp_norm"])
            chosen, shares, more = route(y, layer["router"])
            x, uneven = x + mlp(y, p, chosen, shares), uneven + more
        x = rms_norm(x, used(params["norm"], dtype))
        logits = x @ used(params["embed"], dtype).T
        return cross_entropy(logits, batch[1]) + 0.01 * uneven, rest

    tokens = array(batch, length, dtype=jnp.int32)
    return loss, params, {}, (tokens, tokens), optax.adamw(3e-4)
