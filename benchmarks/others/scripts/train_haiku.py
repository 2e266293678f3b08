"""Trains a transformer on bytes with Haiku, as its examples/transformer does."""

import argparse
from pathlib import Path
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax

parser = argparse.ArgumentParser()
parser.add_argument("--half", action="store_true")
parser.add_argument("--steps", type=int, default=12)
args = parser.parse_args()

LAYERS, HEADS, WIDTH, VOCAB, LENGTH, BATCH = 2, 4, 128, 128, 64, 8


class TrainingState(NamedTuple):
    params: hk.Params
    opt_state: optax.OptState
    rng: jax.Array
    step: jax.Array


class Transformer(hk.Module):
    """A decoder-only transformer with pre-norm blocks."""

    def __call__(self, tokens):
        init = hk.initializers.VarianceScaling(2 / LAYERS)
        mask = np.tril(np.ones((1, 1, LENGTH, LENGTH)))
        norm = lambda x: hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)  # noqa
        h = hk.Embed(VOCAB, WIDTH, w_init=hk.initializers.TruncatedNormal(0.02))(tokens)
        h += hk.get_parameter(
            "positions", [LENGTH, WIDTH], init=hk.initializers.TruncatedNormal(0.02)
        )
        for _ in range(LAYERS):
            attention = hk.MultiHeadAttention(
                num_heads=HEADS, key_size=WIDTH // HEADS, model_size=WIDTH, w_init=init
            )
            x = norm(h)
            h += hk.dropout(hk.next_rng_key(), 0.1, attention(x, x, x, mask=mask))
            dense = hk.Sequential(
                [hk.Linear(4 * WIDTH, w_init=init), jax.nn.gelu, hk.Linear(WIDTH, w_init=init)]
            )
            h += hk.dropout(hk.next_rng_key(), 0.1, dense(norm(h)))
        return hk.Linear(VOCAB)(norm(h))


if args.half:
    policy = jmp.get_policy("params=float32,compute=bfloat16,output=bfloat16")
    hk.mixed_precision.set_policy(Transformer, policy)
    whole = jmp.get_policy("params=float32,compute=float32,output=float32")
    hk.mixed_precision.set_policy(hk.LayerNorm, whole)

forward = hk.transform(lambda tokens: Transformer()(tokens))
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, b2=0.99))


def loss_fn(params, rng, batch):
    logits = forward.apply(params, rng, batch["obs"]).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["target"]).mean()


@jax.jit
def update(state, batch):
    rng, new_rng = jax.random.split(state.rng)
    loss, grads = jax.value_and_grad(loss_fn)(state.params, rng, batch)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = TrainingState(params, opt_state, new_rng, state.step + 1)
    return new, {"step": state.step, "loss": loss, "norm": optax.global_norm(grads)}


def batches(seed=0):
    """Yields windows of this file's own text."""
    text = np.frombuffer(Path(__file__).read_bytes(), np.uint8) % VOCAB
    rng = np.random.default_rng(seed)
    while True:
        starts = rng.integers(0, len(text) - LENGTH - 1, BATCH)
        windows = np.stack([text[s : s + LENGTH + 1] for s in starts]).astype(np.int32)
        yield {"obs": windows[:, :-1], "target": windows[:, 1:]}


data = batches()
rng = jax.random.key(42)
params = forward.init(rng, next(data)["obs"])
state = TrainingState(params, optimizer.init(params), rng, jnp.zeros((), jnp.int32))
for _ in range(args.steps):
    state, metrics = update(state, next(data))
    print(f"step {metrics['step']} loss {metrics['loss']}")
