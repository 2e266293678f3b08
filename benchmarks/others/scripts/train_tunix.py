"""Fine-tunes a small Qwen3 with Tunix' trainer, with float32 weights."""

import argparse

import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.sft import peft_trainer, utils

parser = argparse.ArgumentParser()
parser.add_argument("--half", action="store_true")
parser.add_argument("--steps", type=int, default=8)
args = parser.parse_args()

config = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=512,
    embed_dim=128,
    hidden_dim=384,
    num_heads=4,
    head_dim=32,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
    use_tied_embedding=True,
    dtype=jnp.bfloat16 if args.half else jnp.float32,
)
model = qwen3.Qwen3(config, rngs=nnx.Rngs(0))


def batches(seed=0, batch=8, length=64):
    rng = np.random.default_rng(seed)
    for _ in range(args.steps):
        tokens = (rng.integers(0, 512, (batch, 1)) + np.arange(length)) % config.vocab_size
        mask = np.ones((batch, length), bool)
        yield peft_trainer.TrainingInput(input_tokens=tokens.astype(np.int32), input_mask=mask)


def model_input(example):
    mask = example.input_mask
    return {
        "input_tokens": example.input_tokens,
        "input_mask": mask,
        "positions": utils.build_positions_from_mask(mask),
        "attention_mask": utils.make_causal_attn_mask(mask),
    }


class Losses(peft_trainer.hooks.TrainingHooks):
    """Prints the loss of each step."""

    def on_train_start(self, trainer): ...
    def on_train_end(self, trainer): ...
    def on_train_step_start(self, trainer): ...
    def on_train_step_end(self, trainer, train_step, train_loss):
        print(f"step {train_step} loss {train_loss}")

    def on_eval_step_start(self, trainer): ...
    def on_eval_step_end(self, trainer, eval_loss): ...


training = peft_trainer.TrainingConfig(eval_every_n_steps=1_000, max_steps=args.steps)
trainer = peft_trainer.PeftTrainer(model, optax.adamw(3e-3), training)
trainer = trainer.with_gen_model_input_fn(model_input)
trainer.with_training_hooks(Losses())
trainer.train(batches())
