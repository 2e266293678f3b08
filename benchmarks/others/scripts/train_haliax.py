"""Trains a small GPT of named tensors with Haliax and Equinox, as Levanter does."""

import argparse
from pathlib import Path

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--half", action="store_true")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

Batch, Pos, KeyPos = hax.Axis("batch", 8), hax.Axis("position", 64), hax.Axis("key_position", 64)
Embed, Mlp, Vocab = hax.Axis("embed", 128), hax.Axis("mlp", 512), hax.Axis("vocab", 128)
Heads, HeadSize, Layers = hax.Axis("heads", 4), hax.Axis("head_size", 32), hax.Axis("layers", 2)

compute = "bfloat16" if args.half else "float32"
mp = jmp.get_policy(f"params=float32,compute={compute},output=float32")


class Block(eqx.Module):
    norm_1: hnn.LayerNorm
    qkv: hnn.Linear
    out: hnn.Linear
    norm_2: hnn.LayerNorm
    mlp: hnn.MLP

    @staticmethod
    def init(*, key):
        k_qkv, k_out, k_mlp = jax.random.split(key, 3)
        three = hax.Axis("qkv", 3)
        return Block(
            hnn.LayerNorm.init(Embed),
            hnn.Linear.init(In=Embed, Out=(three, Heads, HeadSize), key=k_qkv),
            hnn.Linear.init(In=(Heads, HeadSize), Out=Embed, key=k_out),
            hnn.LayerNorm.init(Embed),
            hnn.MLP.init(Embed, Embed, Mlp.size, 2, activation=hnn.gelu, key=k_mlp),
        )

    def __call__(self, x):
        q, k, v = self.qkv(self.norm_1(x)).unbind("qkv")
        k, v = (y.rename({"position": "key_position"}) for y in (k, v))
        mask = hax.nn.attention.causal_mask(Pos, KeyPos)
        x = x + self.out(hnn.attention.dot_product_attention(KeyPos, HeadSize, q, k, v, mask=mask))
        return x + self.mlp(self.norm_2(x))


class Gpt(eqx.Module):
    tokens: hnn.Embedding
    positions: hax.NamedArray
    blocks: hnn.Stacked
    norm: hnn.LayerNorm

    @staticmethod
    def init(key):
        k_tokens, k_positions, k_blocks = jax.random.split(key, 3)
        keys = jax.random.split(k_blocks, Layers.size)
        return Gpt(
            hnn.Embedding.init(Vocab, Embed, key=k_tokens),
            hax.random.normal(k_positions, (Pos, Embed)) * 0.02,
            hnn.Stacked.init(Layers, Block, gradient_checkpointing=True)(key=keys),
            hnn.LayerNorm.init(Embed),
        )

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions
        return self.tokens.unembed(self.norm(self.blocks.fold(x)))


def compute_loss(model, tokens, targets):
    model = mp.cast_to_compute(model)
    logits = mp.cast_to_output(model(tokens))
    return hnn.cross_entropy_loss(logits, Vocab, hax.nn.one_hot(targets, Vocab)).scalar()


optimizer = optax.adamw(1e-3)


@hax.named_jit
def train_step(model, opt_state, tokens, targets):
    loss, grads = eqx.filter_value_and_grad(compute_loss)(model, tokens, targets)
    updates, opt_state = optimizer.update(grads, opt_state, params=model)
    return loss, eqx.apply_updates(model, updates), opt_state


text = np.frombuffer(Path(__file__).read_bytes(), np.uint8) % Vocab.size
rng = np.random.default_rng(0)
model = Gpt.init(jax.random.key(0))
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
for step in range(args.steps):
    starts = rng.integers(0, len(text) - Pos.size - 1, Batch.size)
    windows = jnp.stack([text[s : s + Pos.size + 1] for s in starts]).astype(jnp.int32)
    tokens, targets = (hax.named(x, (Batch, Pos)) for x in (windows[:, :-1], windows[:, 1:]))
    loss, model, opt_state = train_step(model, opt_state, tokens, targets)
    print(f"step {step} loss {loss}")
