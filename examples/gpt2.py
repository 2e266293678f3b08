"""GPT-2: a scan over layers, which the backward pass computes again, and fused attention.

    python examples/gpt2.py --size small --policy mixed_bfloat16
    python examples/gpt2.py --size full --policy mixed_bfloat16 --data FOLDER

The small size reads the bytes of Python's help topics. The full size (124 million parameters) reads
the .txt files of a folder as tokens of tiktoken's "gpt2" encoding. `--layers 48 --width 1600
--heads 25` has 1.5 billion parameters. The last tenth of the text is held out.

These are the expected figures of the small size on a CPU, in bits per byte. The last row, spread,
is the range of float32 over three seeds:

    policy          held out  training
    float32         2.433     2.579
    mixed_bfloat16  2.431     2.579
    mixed_float16   2.433     2.58
    spread          0.03526   0.03344
"""

import functools
import math

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

NAMES = ("steps", "batch", "context", "vocabulary", "width", "heads", "layers", "rate")
SIZES = {
    "smoke": dict(zip(NAMES, (3, 2, 8, 256, 8, 2, 2, 1e-3), strict=True)),
    "small": dict(zip(NAMES, (400, 32, 32, 256, 64, 2, 4, 1e-2), strict=True)),
    "full": dict(zip(NAMES, (20000, 32, 1024, 50304, 768, 12, 12, 6e-4), strict=True)),
}


def initial(key, o):
    """Returns the parameters; those of the layers are stacked for a scan."""
    keys = iter(jax.random.split(key, 6))
    base = 0.02 * math.sqrt(768 / o.width)  # GPT-2's value at its width
    normal = lambda *shape, std=base: std * jax.random.normal(next(keys), shape)  # noqa: E731
    residual = base / math.sqrt(2 * o.layers)
    return {
        "tokens": normal(o.vocabulary, o.width),
        "positions": normal(o.context, o.width, std=0.01),
        "layers": {
            "norm1": jnp.ones((o.layers, o.width)),
            "qkv": normal(o.layers, o.width, 3 * o.width),
            "out": normal(o.layers, o.width, o.width, std=residual),
            "norm2": jnp.ones((o.layers, o.width)),
            "up": normal(o.layers, o.width, 4 * o.width),
            "down": normal(o.layers, 4 * o.width, o.width, std=residual),
        },
        "norm": jnp.ones(o.width),
    }


def norm(x, scale):
    mean, variance = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale


def layer(x, p, heads):
    qkv = norm(x, p["norm1"]) @ p["qkv"]
    q, k, v = jnp.split(qkv.reshape(*qkv.shape[:2], heads, -1), 3, axis=-1)
    # cuDNN's kernel on GPUs, flash attention on TPUs; it runs in the policy's half.
    y = mpjax.dot_product_attention(q, k, v, is_causal=True)
    x = x + y.reshape(x.shape) @ p["out"]
    return x + jax.nn.gelu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]


def loss_fn(params, batch, heads):
    """Returns the mean cross entropy of the next token, written in plain float32."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    x = params["tokens"][tokens] + params["positions"][: tokens.shape[1]]
    body = jax.checkpoint(lambda x, p: (layer(x, p, heads), None))
    x, _ = jax.lax.scan(body, x, params["layers"])
    logits = norm(x, params["norm"]) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def read(options):
    """Returns training and held-out tokens."""
    texts = common.read_text(options.data)
    if options.vocabulary > 256:
        encoding = common.optional("tiktoken").get_encoding("gpt2")
        texts = [encoding.encode_ordinary(bytes(text).decode()) for text in texts]
    return [np.asarray(text, np.int32) for text in texts]


def train(options):
    text, held_out = read(options)
    params = jax.jit(functools.partial(initial, o=options))(jax.random.key(options.seed))
    print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")

    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, options.steps // 10, options.steps
    )
    matrices = jax.tree.map(lambda p: p.ndim > 1, params)  # norms are not decayed
    adamw = optax.adamw(schedule, b2=0.95, weight_decay=0.1, mask=matrices)
    init, step = mpjax.build_train_step(
        functools.partial(loss_fn, heads=options.heads),
        optax.chain(optax.clip_by_global_norm(1.0), adamw),
        options.policy,
        loss_scale=options.loss_scale,
    )
    state, step = init(params), jax.jit(step, donate_argnums=0)

    losses, scales = [], []
    rows = [common.windows(text, options.context + 1)]
    batches = common.batches(rows, options.batch, options.seed)
    for _, (batch,) in zip(common.steps(options.steps), batches, strict=False):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        scales.append(metrics["loss_scale"])
    mpjax.raise_if_diverged(metrics, limit=20)

    evaluate = mpjax.autocast(functools.partial(loss_fn, heads=options.heads), options.policy)
    some = common.windows(held_out, options.context + 1)[:: options.context]
    parts = np.array_split(some, max(1, min(50, len(some) // options.batch)))
    parts = [part[: len(parts[-1])] for part in parts]  # all of one shape, for a single compilation
    bits = np.mean([evaluate(state.params, part) for part in parts]) / math.log(2)
    return {
        "figures": {"held out": bits, "training": np.mean(losses[-50:]) / math.log(2)},
        "skipped": state.skipped_steps,
        "curves": {"loss": losses, "loss_scale": scales},
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
