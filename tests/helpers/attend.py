"""Attention and losses of small models, and what mpjax says that it replaces."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from support import fresh_rng, normal

import mpjax
from mpjax._src.core.autocast import transform
from mpjax._src.core.base.devices import traced_for
from mpjax._src.replacements import fused_kernels

B, T, N, H = 2, 16, 4, 8
Q, K, V = (normal(i, B, T, N, H) for i in range(3))
BIAS = normal(4, N, T, T)
FUSED = "mixed_bfloat16,fused_attention=true"

ROWS, LENGTH, WIDTH, WORDS = 4, 12, 16, 300
RNG = fresh_rng()
HEAD = [RNG.normal(size=s).astype("float32") for s in ((ROWS, LENGTH, WIDTH), (WIDTH, WORDS))]
LABELS = RNG.integers(0, WORDS, (ROWS, LENGTH))
CHUNKED = "mixed_bfloat16,chunked_loss=true"


def in_place_of_cudnn(query, key, value, bias, mask, *, options):
    """The same attention in float32, of operands in 16 bits."""
    wide = [x.astype(jnp.float32) for x in (query, key, value)]
    out = jax.nn.dot_product_attention(*wide, bias, mask, implementation="xla", **options)
    return out.astype(query.dtype)


@contextlib.contextmanager
def on(name, kernel=in_place_of_cudnn):
    """Traces for a device that is not there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fused_kernels.KERNELS, "cudnn", kernel)
        with traced_for(name):
            yield


def replaced(fun, *args, policy=FUSED):
    """Returns the program in which attentions and losses are replaced, and what is said of them."""
    with on("h100"):
        return transform.trace(fun, mpjax.get_policy(policy), args, {}).replaced


def notes(fun, *args, policy=FUSED):
    """Returns what is said of attentions and losses."""
    found = replaced(fun, *args, policy=policy)
    return [*found.attention.values(), *found.losses.values()]


def causal(q, k=K, v=V):
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / 3
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e9)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)
