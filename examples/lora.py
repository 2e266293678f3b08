"""LoRA: trains narrow float32 adapters next to frozen weights that are stored in half.

    python examples/lora.py --size small --policy mixed_bfloat16

A byte-level language model first learns Python's help topics, with all weights in float32. Then its
weights are frozen and stored in the policy's half dtype. The adapters stay float32 and have a few
percent as many parameters. They learn to continue Python's own source code (or the .txt files of
`--data FOLDER`). The optimizer state is as small as the adapters.

These are the expected figures of the small size on a CPU, in bits per byte of held-out source code,
after and before the adapters are trained. The last row, spread, is the range of float32 over three
seeds:

    policy          bits per byte  before
    float32         2.873          3.249
    mixed_bfloat16  2.873          3.249
    mixed_float16   2.873          3.249
    spread          0.02242        0.02841
"""

import functools
import math
import sysconfig
from pathlib import Path

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

SIZES = {
    "smoke": {"steps": 3, "base": 3, "batch": 4, "context": 8, "width": 8, "layers": 1, "rank": 2},
    "small": {
        "steps": 300, "base": 300, "batch": 32, "context": 32, "width": 64, "layers": 2, "rank": 4
    },
    "full": {
        "steps": 5000, "base": 50000, "batch": 128, "context": 512, "width": 1024, "layers": 12,
        "rank": 16,
    },
}  # fmt: skip


def initial(key, o):
    keys = iter(jax.random.split(key, 5 + 4 * o.layers))
    normal = lambda n, m: jax.random.normal(next(keys), (n, m)) / math.sqrt(n)  # noqa: E731
    layers = [
        {
            "qkv": normal(o.width, 3 * o.width),
            "out": normal(o.width, o.width) / 4,
            "up": normal(o.width, 4 * o.width),
            "down": normal(4 * o.width, o.width) / 4,
        }
        for _ in range(o.layers)
    ]
    embeddings = {"tokens": normal(256, o.width) * 4, "positions": normal(o.context, o.width)}
    return {**embeddings, "layers": layers, "head": normal(o.width, 256)}


def adapters_of(key, params, rank):
    """Returns matrices a and b for each matrix of a layer; b starts at zero: no change at first."""

    matrices, structure = jax.tree.flatten(params["layers"])
    keys = jax.random.split(key, len(matrices))
    narrow = [jax.random.normal(k, (len(w), rank)) for k, w in zip(keys, matrices, strict=True)]
    adapters = [
        {"a": a / math.sqrt(len(w)), "b": jnp.zeros((rank, w.shape[1]))}
        for a, w in zip(narrow, matrices, strict=True)
    ]
    return jax.tree.unflatten(structure, adapters)


def dense(x, layer, adapters, name):
    y = x @ layer[name]
    if adapters is None:
        return y
    return y + 2 * (x @ adapters[name]["a"]) @ adapters[name]["b"]


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def cross_entropy(params, adapters, batch):
    x = params["tokens"][batch[:, :-1]] + params["positions"]
    for layer, adapted in zip(params["layers"], adapters or [None] * 99, strict=False):
        use = functools.partial(dense, layer=layer, adapters=adapted)
        q, k, v = jnp.split(use(norm(x), name="qkv")[:, :, None], 3, axis=-1)  # one head
        y = mpjax.dot_product_attention(q, k, v, is_causal=True)
        x = x + use(y.reshape(x.shape), name="out")
        x = x + use(jax.nn.gelu(use(norm(x), name="up")), name="down")
    logits = norm(x) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()


def fit(loss_fn, params, text, options, steps, policy, frozen=None):
    """Trains parameters on windows of a text; returns the state and the curves."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    init, step = mpjax.build_train_step(loss_fn, optimizer, policy)
    state, step, losses, scales = init(params), jax.jit(step, donate_argnums=0), [], []
    rows = [common.windows(text, options.context + 1)]
    batches = common.batches(rows, options.batch, options.seed)
    for _, (batch,) in zip(common.steps(steps), batches, strict=False):
        state, metrics = step(state, (frozen, batch.astype(np.int32)))
        losses.append(metrics["loss"])
        scales.append(metrics["loss_scale"])
    return state, {"loss": losses, "loss_scale": scales}


def source_code(folder):
    """Returns the bytes of Python's modules, some of them held out; or of files."""
    if folder:
        return common.read_text(folder)
    paths = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    texts = (b"".join(path.read_bytes() for path in paths[first::10]) for first in (0, 5))
    return [np.frombuffer(text, np.uint8) for text in texts]


def train(options):
    policy = mpjax.get_policy(options.policy)
    topics, _ = common.read_text(None)
    key = jax.random.key(options.seed)
    params = jax.jit(functools.partial(initial, o=options))(key)
    whole = lambda params, batch: cross_entropy(params, None, batch[1])  # noqa: E731
    base, _ = fit(whole, params, topics, options, options.base, "float32")

    half = jnp.dtype(policy.compute_dtype)
    frozen = mpjax.cast(base.params, half)
    adapters = adapters_of(key, frozen, options.rank)
    count = lambda tree: sum(leaf.size for leaf in jax.tree.leaves(tree))  # noqa: E731
    print(f"{count(frozen):,} frozen in {half}, {count(adapters):,} trained in float32")

    # Frozen weights are part of the batch: an argument without a gradient, and not a constant
    # of the compiled program.
    def loss_fn(adapters, batch):
        frozen, tokens = batch
        return cross_entropy(frozen, adapters, tokens)

    source, held_out = source_code(options.data)
    state, curves = fit(loss_fn, adapters, source, options, options.steps, policy, frozen)
    some = common.windows(held_out, options.context + 1)[:: options.context * 8][:512].astype(
        np.int32
    )
    evaluate = mpjax.autocast(loss_fn, policy)
    return {
        "figures": {
            "bits per byte": evaluate(state.params, (frozen, some)) / math.log(2),
            "before": evaluate(adapters, (frozen, some)) / math.log(2),
        },
        "skipped": state.skipped_steps,
        "curves": curves,
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
