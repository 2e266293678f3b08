"""A masked language model like BERT: it predicts 15% of a text's bytes from the bytes around them.

    python examples/bert.py --size small --policy mixed_float16

The model is in Flax linen. The attention masks and the loss over hidden bytes are plain float32
code. A mean over few bytes has large cotangents, so the loss scale must leave room for them.

Data: Python's help topics, or the .txt files of `--data FOLDER`. These are the expected figures of
the small size on a CPU, in bits per hidden byte. The last row, spread, is the range of float32 over
three seeds:

    policy          held out  training
    float32         3.303     3.59
    mixed_bfloat16  3.301     3.589
    mixed_float16   3.303     3.59
    spread          0.05878   0.04629
"""

import functools
import math

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

NAMES = ("steps", "batch", "context", "width", "heads", "layers", "rate")
SIZES = {
    "smoke": dict(zip(NAMES, (3, 4, 16, 8, 2, 1, 1e-3), strict=True)),
    "small": dict(zip(NAMES, (300, 64, 32, 64, 4, 2, 5e-3), strict=True)),
    "full": dict(zip(NAMES, (50000, 256, 512, 768, 12, 12, 1e-4), strict=True)),
}
MASK, HIDDEN = 256, 0.15  # the token in place of a hidden byte, and their share


class Encoder(nn.Module):
    width: int
    heads: int
    layers: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(257, self.width)(tokens)
        x = x + nn.Embed(tokens.shape[1], self.width)(jnp.arange(tokens.shape[1]))
        for _ in range(self.layers):
            zeros = nn.initializers.zeros
            y = nn.MultiHeadDotProductAttention(self.heads, out_kernel_init=zeros)(
                nn.LayerNorm()(x)
            )
            x = x + y
            y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
            x = x + nn.Dense(self.width, kernel_init=zeros)(y)
        return nn.Dense(256)(nn.LayerNorm()(x))


def train(options):
    text, held_out = common.read_text(options.data)
    model = Encoder(options.width, options.heads, options.layers)

    def loss_fn(params, batch, rng):
        """Returns the mean cross entropy over hidden places."""
        chance = jax.random.uniform(rng, batch.shape)
        hidden = chance < HIDDEN
        # As in BERT, one in ten of these stays visible, and one in ten becomes a random byte.
        other = jax.random.randint(jax.random.fold_in(rng, 1), batch.shape, 0, 256)
        shown = jnp.where(
            chance < 0.8 * HIDDEN, MASK, jnp.where(chance < 0.9 * HIDDEN, other, batch)
        )
        logits = model.apply({"params": params}, jnp.where(hidden, shown, batch))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch)
        return jnp.sum(losses * hidden) / jnp.maximum(hidden.sum(), 1)

    windows = common.windows(text, options.context)
    keys = jax.random.split(jax.random.key(options.seed))
    params = jax.jit(model.init)(keys[0], windows[:1].astype(np.int32))["params"]
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, options.steps // 10, options.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    init, step = mpjax.build_train_step(
        loss_fn, optimizer, options.policy, loss_scale=options.loss_scale
    )
    state, step = init(params, rng=keys[1]), jax.jit(step, donate_argnums=0)

    losses, scales = [], []
    batches = common.batches([windows], options.batch, options.seed)
    for _, (batch,) in zip(common.steps(options.steps), batches, strict=False):
        state, metrics = step(state, batch.astype(np.int32))
        losses.append(metrics["loss"])
        scales.append(metrics["loss_scale"])
    mpjax.raise_if_diverged(metrics, limit=20)

    some = common.windows(held_out, options.context)[:: options.context][:1024].astype(np.int32)
    loss = mpjax.autocast(loss_fn, options.policy)(state.params, some, jax.random.key(0))
    return {
        "figures": {
            "held out": loss / math.log(2),
            "training": np.mean(losses[-50:]) / math.log(2),
        },
        "skipped": state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
