"""Trains a small Gemma-like transformer with Penzai's StatefulTrainer."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from penzai import pz
from penzai.models.transformer.variants import llamalike_common
from penzai.toolshed import basic_training

parser = argparse.ArgumentParser()
parser.add_argument("--half", action="store_true")
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

VOCAB, BATCH, LENGTH = 256, 8, 48

config = llamalike_common.LlamalikeTransformerConfig(
    num_kv_heads=2,
    query_head_multiplier=2,
    embedding_dim=128,
    projection_dim=32,
    mlp_hidden_dim=256,
    num_decoder_blocks=2,
    vocab_size=VOCAB,
    mlp_variant="geglu_approx",
    tie_embedder_and_logits=True,
    activation_dtype=jnp.bfloat16 if args.half else jnp.float32,
)
model = llamalike_common.build_llamalike_transformer(config, jax.random.key(0), name="model")


def loss_fn(model, state, rng, tokens):
    inputs = pz.nx.wrap(tokens[:, :-1]).tag("batch", "seq")
    positions = pz.nx.arange("seq", tokens.shape[1] - 1)
    logits = model(inputs, token_positions=positions)
    logits = logits.untag("batch", "seq", "vocabulary").unwrap().astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return losses.mean(), None, {"loss": losses.mean()}


trainer = basic_training.StatefulTrainer.build(
    root_rng=jax.random.key(42),
    model=model,
    optimizer_def=optax.adamw(3e-3),
    loss_fn=loss_fn,
)
rng = np.random.default_rng(0)
for step in range(args.steps):
    tokens = (rng.integers(0, VOCAB, (BATCH, 1)) + np.arange(LENGTH + 1)) % VOCAB
    out = trainer.step(tokens=tokens.astype(np.int32))
    print(f"step {step} loss {out['loss']}")
