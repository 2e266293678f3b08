"""GRPO: reinforcement learning of a language model, with the rollout as a separate program.

    python examples/grpo.py --size small --policy mixed_float16

The rollout writes one token at a time, with a cache of keys and values and half weights, like an
inference engine. Training reads whole sequences, with float32 weights. Both compute the same
probabilities up to rounding. |log ratio| is that difference per token (the mean over all steps,
before an update comes between the two), and KL is estimated from the same ratios. float16 has three
more bits than bfloat16, so its difference is smaller (Qi et al., 2025, "Defeating the
Training-Inference Mismatch via FP16").

The task is to sort digits. The reward is the share of correct places; a guess has 0.1. These are
the expected figures of the small size on a CPU. The last row, spread, is the range of float32 over
three seeds. Columns with a ~ are orders of magnitude:

    policy          reward   ~|log ratio|  ~KL
    float32         0.5515   1.068e-07     2.316e-14
    mixed_bfloat16  0.5794   0.00349       5.622e-05
    mixed_float16   0.5691   0.0003721     5.841e-07
    spread          0.05703  7.046e-09     1.239e-14
"""

import functools
import math

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax

NAMES = ("steps", "prompts", "group", "digits", "width", "layers", "rate")
SIZES = {
    "smoke": dict(zip(NAMES, (3, 2, 4, 2, 8, 1, 1e-3), strict=True)),
    "small": dict(zip(NAMES, (200, 16, 16, 4, 64, 2, 2e-3), strict=True)),
    "full": dict(zip(NAMES, (5000, 64, 32, 16, 1024, 12, 1e-4), strict=True)),
}
START, VOCABULARY, HEADS = 10, 11, 2  # digits, and the token after which the answer starts


def initial(key, o):
    keys = iter(jax.random.split(key, 3 + 4 * o.layers))
    normal = lambda n, m: jax.random.normal(next(keys), (n, m)) / math.sqrt(n)  # noqa: E731
    layer = lambda: {  # noqa: E731
        "qkv": normal(o.width, 3 * o.width),
        "out": normal(o.width, o.width) / 4,
        "up": normal(o.width, 4 * o.width),
        "down": normal(4 * o.width, o.width) / 4,
    }
    return {
        "tokens": normal(VOCABULARY, o.width) * 3,
        "positions": normal(2 * o.digits + 1, o.width) * 4,
        "layers": [layer() for _ in range(o.layers)],
        "head": normal(o.width, VOCABULARY) / 4,
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def heads(x, w):
    """Returns queries, keys and values, [..., heads, width of a head]."""
    return (x.reshape(*x.shape[:-1], HEADS, -1) for x in jnp.split(norm(x) @ w, 3, axis=-1))


def attend(q, k, v, mask):
    scores = jnp.einsum("bihd,bjhd->bhij", q, k) / math.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bhij,bjhd->bihd", weights, v).reshape(*q.shape[:2], -1)


def feed_forward(x, p):
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]


def log_probabilities(params, tokens):
    """Returns the log probabilities of all tokens after the first, all at once."""
    x = params["tokens"][tokens[:, :-1]] + params["positions"][: tokens.shape[1] - 1]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for p in params["layers"]:
        x = x + attend(*heads(x, p["qkv"]), mask) @ p["out"]
        x = feed_forward(x, p)
    chosen = jax.nn.log_softmax(norm(x) @ params["head"])
    return jnp.take_along_axis(chosen, tokens[:, 1:, None], -1)[..., 0]


def rollout(params, prompts, key, half):
    """Samples answers token by token; returns prompts with answers, and the log probabilities."""
    length = 2 * (prompts.shape[1] - 1)  # a prompt without START, and an answer of the same length
    width = params["head"].shape[0] // HEADS
    empty = jnp.zeros((len(prompts), length, HEADS, width), half)
    caches = [(empty, empty) for _ in params["layers"]]
    forced = jnp.pad(prompts[:, 1:], ((0, 0), (0, length - prompts.shape[1] + 1)))

    def write(carry, now):
        token, caches = carry
        place, given, key = now
        x = (params["tokens"][token] + params["positions"][place])[:, None]
        mask, kept = jnp.arange(length) <= place, []
        for p, (keys, values) in zip(params["layers"], caches, strict=True):
            q, k, v = heads(x, p["qkv"])
            keys = jax.lax.dynamic_update_slice_in_dim(keys, k.astype(half), place, 1)
            values = jax.lax.dynamic_update_slice_in_dim(values, v.astype(half), place, 1)
            x = feed_forward(x + attend(q, keys, values, mask) @ p["out"], p)
            kept.append((keys, values))
        chances = jax.nn.log_softmax((norm(x) @ params["head"])[:, 0].astype(jnp.float32))
        sampled = jax.random.categorical(key, chances)
        token = jnp.where(place < prompts.shape[1] - 1, given, sampled)
        chance = jnp.take_along_axis(chances, token[:, None], -1)[:, 0]
        return (token, kept), (token, chance)

    now = jnp.arange(length), forced.T, jax.random.split(key, length)
    _, (tokens, chances) = jax.lax.scan(write, (prompts[:, 0], caches), now)
    return jnp.concatenate([prompts[:, :1], tokens.T], 1), chances.T


def train(options):
    policy = mpjax.get_policy(options.policy)
    half, digits = jnp.dtype(policy.compute_dtype), options.digits
    key = jax.random.key(options.seed)

    @jax.jit
    def experience(params, key):
        """Returns sequences, the rollout's log probabilities of them, and their advantages."""
        keys = jax.random.split(key)
        prompts = jax.random.randint(keys[0], (options.prompts, digits), 0, 10)
        start = jnp.full((options.prompts, 1), START)
        asked = jnp.repeat(jnp.concatenate([prompts, start], 1), options.group, 0)
        engine = mpjax.cast(params, half)
        tokens, chances = mpjax.autocast(rollout, policy)(engine, asked, keys[1], half)
        right = jnp.repeat(jnp.sort(prompts, 1), options.group, 0)
        rewards = jnp.mean(tokens[:, -digits:] == right, 1).reshape(-1, options.group)
        spread = rewards.std(1, keepdims=True) + 1e-4
        advantages = (rewards - rewards.mean(1, keepdims=True)) / spread
        return (tokens, chances[:, -digits:], advantages.reshape(-1, 1)), rewards.mean()

    def loss_fn(params, batch):
        tokens, chances, advantages = batch
        log_ratio = log_probabilities(params, tokens)[:, -digits:] - chances
        ratio = jnp.exp(log_ratio)
        clipped = jnp.clip(ratio, 0.8, 1.2)
        gain = jnp.minimum(ratio * advantages, clipped * advantages).mean()
        kl = jnp.mean(jnp.expm1(log_ratio) - log_ratio)
        return -gain, {"|log ratio|": jnp.abs(log_ratio).mean(), "KL": kl}

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(options.rate))
    init, step = mpjax.build_train_step(loss_fn, optimizer, policy, has_aux=True)
    state = init(jax.jit(functools.partial(initial, o=options))(key))
    step = jax.jit(step, donate_argnums=0)
    curves = {"reward": [], "|log ratio|": [], "KL": [], "loss_scale": []}
    for index in common.steps(options.steps):
        batch, reward = experience(state.params, jax.random.fold_in(key, index))
        state, metrics = step(state, batch)
        found = {"reward": reward, **metrics["aux"], "loss_scale": metrics["loss_scale"]}
        for name, value in found.items():
            curves[name].append(value)
    return {
        "figures": {
            "reward": np.mean(curves["reward"][-20:]),
            "~|log ratio|": np.mean(curves["|log ratio|"]),
            "~KL": np.mean(curves["KL"]),
        },
        "skipped": state.skipped_steps,
        "curves": curves,
    }


main = functools.partial(common.main, __doc__, SIZES, train)
if __name__ == "__main__":
    main()
