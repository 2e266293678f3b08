"""A mixture of experts: the router in float32, the experts' grouped matmuls in half.

    python examples/moe.py --size small --policy mixed_float16

Each byte of a text is predicted from the bytes before it, by two experts that a router chooses (out
of eight in the small size). A rounded router would choose other experts, so the router is a float32
region. Tokens are sorted by expert, and all experts run as one grouped matmul
(`jax.lax.ragged_dot`). An auxiliary loss keeps the experts equally busy.

Data: Python's help topics, or the .txt files of `--data FOLDER`. These are the expected figures of
the small size on a CPU. The last row, spread, is the range of float32 over three seeds:

    policy          bits per byte  busiest %
    float32         2.603          20.61
    mixed_bfloat16  2.584          21.97
    mixed_float16   2.622          20.64
    spread          0.05505        5.463
"""

import functools
import math

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

NAMES = ("steps", "batch", "context", "width", "experts", "hidden", "rate")
SIZES = {
    "smoke": dict(zip(NAMES, (3, 16, 4, 8, 4, 8, 1e-3), strict=True)),
    "small": dict(zip(NAMES, (500, 512, 6, 32, 8, 64, 5e-3), strict=True)),
    "full": dict(zip(NAMES, (20000, 16384, 32, 128, 64, 4096, 1e-3), strict=True)),
}
CHOSEN = 2


def initial(key, o):
    keys = iter(jax.random.split(key, 6))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])  # noqa: E731
    width = o.context * o.width
    return {
        "tokens": 16 * normal(256, o.width),
        "in": normal(width, width),
        "router": normal(width, o.experts),
        "up": normal(o.experts, width, o.hidden),
        "down": normal(o.experts, o.hidden, width),
        "head": normal(width, 256),
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


@mpjax.precision("float32")
def route(x, router):
    """Returns the experts of each token, their weights, and the imbalance of their load."""
    chances = jax.nn.softmax(x @ router)
    weights, experts = jax.lax.top_k(chances, CHOSEN)
    busy = jnp.mean(jax.nn.one_hot(experts, router.shape[1]).sum(1), 0) / CHOSEN
    unequal = router.shape[1] * jnp.sum(busy * chances.mean(0))  # Fedus et al., 2021, equation 4
    return experts, weights / weights.sum(1, keepdims=True), unequal, busy.max()


def mixture(x, params):
    experts, weights, unequal, busiest = route(x, params["router"])
    order = jnp.argsort(experts.reshape(-1))
    rows = order // CHOSEN  # the token at each position of the order
    sizes = jnp.bincount(experts.reshape(-1), length=params["router"].shape[1])
    hidden = jax.nn.gelu(jax.lax.ragged_dot(x[rows], params["up"], sizes))
    y = jax.lax.ragged_dot(hidden, params["down"], sizes)
    y = y * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[rows].add(y), unequal, busiest


def loss_fn(params, batch):
    x = params["tokens"][batch[:, :-1]].reshape(len(batch), -1)
    x = jax.nn.gelu(norm(x) @ params["in"])
    y, unequal, busiest = mixture(norm(x), params)
    logits = norm(x + y) @ params["head"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, -1]).mean()
    return loss + 0.01 * unequal, {"loss": loss, "busiest": busiest}


def train(options):
    text, held_out = common.read_text(options.data)
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, options.rate, options.steps // 10, options.steps
    )
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98))
    init, step = mpjax.build_train_step(loss_fn, optimizer, options.policy, has_aux=True)
    state = init(jax.jit(functools.partial(initial, o=options))(jax.random.key(options.seed)))
    step = jax.jit(step, donate_argnums=0)

    curves = {"loss": [], "busiest": [], "loss_scale": []}
    rows = [common.windows(text, options.context + 1)]
    batches = common.batches(rows, options.batch, options.seed)
    for _, (batch,) in zip(common.steps(options.steps), batches, strict=False):
        state, metrics = step(state, batch.astype(np.int32))
        for name, value in {**metrics["aux"], "loss_scale": metrics["loss_scale"]}.items():
            curves[name].append(value)

    some = common.windows(held_out, options.context + 1)[:8192].astype(np.int32)
    _, found = mpjax.autocast(loss_fn, options.policy)(state.params, some)
    return {
        "figures": {
            "bits per byte": found["loss"] / math.log(2),
            "busiest %": 100 * found["busiest"],
        },
        "skipped": state.skipped_steps,
        "curves": curves,
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
