"""Faults of expectations and mixtures of rounded probabilities, and of capped predictions."""

import jax
import jax.numpy as jnp
import optax
from faults import BF16, F16, F32, Fault, labels, normal

import mpjax

ROWS, CLASSES, WIDTH = 16, 32, 8
MEMBER = "class member"


def wide(x):
    return x.astype(F32)


def spread(logits):
    p = jax.nn.softmax(logits)
    mean = jnp.einsum("nc,nc->n", wide(p), wide(logits))
    return jnp.mean(jax.nn.logsumexp(wide(logits), -1) - mean)  # <- here: entropy of logits


def spread_wide(logits):
    return spread(wide(logits))


def flips(logits):
    p = wide(jax.nn.sigmoid(wide(logits)).astype(BF16))
    return jnp.mean(jax.nn.softplus(wide(logits)) - p * wide(logits))  # <- here: Bernoulli entropy


def flips_wide(logits):
    logits = wide(logits)
    return jnp.mean(jax.nn.softplus(logits) - jax.nn.sigmoid(logits) * logits)


def normalized(logits):
    total = jax.nn.logsumexp(wide(logits), -1, keepdims=True).astype(logits.dtype)
    return wide(logits - total)  # <- here: rounded normalizer


def normalized_wide(logits):
    """The logarithm of the sum is small after the maximum is subtracted."""
    shift = wide(logits) - wide(logits).max(-1, keepdims=True)
    return shift - wide(jnp.log(jnp.exp(shift).sum(-1, keepdims=True)).astype(BF16))


def steered(given, free):
    p, q = jax.nn.softmax(wide(given)).astype(BF16), jax.nn.softmax(wide(free)).astype(BF16)
    p = jnp.maximum(q + 4 * (p - q), 0)  # <- here: guidance
    return p / p.sum(-1, keepdims=True)


def interpolated(given, free):
    p, q = jax.nn.softmax(wide(given)).astype(BF16), jax.nn.softmax(wide(free)).astype(BF16)
    p = q + 0.25 * (p - q)
    return p / p.sum(-1, keepdims=True)


def contrasted(expert, amateur):
    p, q = (jax.nn.log_softmax(wide(x)).astype(F16) for x in (expert, amateur))
    return jax.nn.softmax(wide(2 * p - q))  # <- here: contrastive decoding


def contrasted_wide(expert, amateur):
    p, q = (jax.nn.log_softmax(wide(x)) for x in (expert, amateur))
    return jax.nn.softmax(2 * p - q)


def extrapolated(given, free):
    p, q = (jax.nn.softmax(x) for x in (given, free))
    return 10 * p - 9 * q  # <- here: strong guidance


def listed(*names):
    policy = mpjax.get_policy("mixed_bfloat16").replace(half_ops=names)

    def loss(x, head, ids):
        logits = 20 * jnp.tanh(x @ head / 20)  # <- here: op list
        return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()

    return mpjax.autocast(loss, policy=policy)


def shared(*names):
    policy = mpjax.get_policy("mixed_bfloat16").replace(half_ops=names)

    def loss(x, head, ids):
        p = jax.nn.sigmoid(x @ head)
        return -jnp.mean(jnp.log(p[jnp.arange(ROWS), ids] + 1e-9))  # <- here: op list of sigmoids

    return mpjax.autocast(loss, policy=policy)


def steps():
    return normal(ROWS, WIDTH), normal(WIDTH, CLASSES), labels(ROWS, CLASSES)


def softsign(logits):
    return jax.nn.softmax(wide(30 * jax.nn.soft_sign(logits / 30)))  # <- here: softsign cap


def softsign_wide(logits):
    return softsign(wide(logits))


def by_hand(logits):
    up, down = jnp.exp(logits / 20), jnp.exp(-logits / 20)
    return jax.nn.log_softmax(wide(20 * (up - down) / (up + down)))  # <- here: tanh of exponentials


def by_hand_wide(logits):
    return by_hand(wide(logits))


def steer(h, angles, spreads):
    mean = 3.0 * jnp.tanh(h)  # <- here: bounded mean
    return jnp.mean(0.5 * ((angles - wide(mean)) / jnp.exp(spreads)) ** 2 + spreads)


def steer_wide(h, angles, spreads):
    return steer(wide(h), angles, spreads)


def bounded():
    return normal(ROWS, WIDTH, dtype=BF16), normal(ROWS, WIDTH), normal(WIDTH)


RULE, CAPS = "rounded-probability", "half-saturation"
SUMS = "Probabilities that were rounded do not sum to 1, and the logits that they weigh are large."
TERMS = "The terms are larger than their difference, and so are their rounding errors."
CAPPED = "A function saturates in 16 bits, and the loss reads a multiple of it."


def one(dtype):
    return lambda: (10 * normal(ROWS, CLASSES, dtype=dtype),)


def two(dtype):
    return lambda: (normal(ROWS, CLASSES, dtype=dtype), normal(ROWS, CLASSES, dtype=dtype, seed=1))


FAULTS = (
    Fault("entropy of logits", MEMBER, SUMS, RULE, spread, spread_wide, one(BF16)),
    Fault("Bernoulli entropy", MEMBER, SUMS, RULE, flips, flips_wide, one(BF16), argnums=0),
    Fault("rounded normalizer", MEMBER, SUMS, RULE, normalized, normalized_wide, one(BF16)),
    Fault("guidance", MEMBER, TERMS, RULE, steered, interpolated, two(BF16)),
    Fault("strong guidance", MEMBER, TERMS, RULE, extrapolated, interpolated, two(BF16)),
    Fault("contrastive decoding", MEMBER, TERMS, RULE, contrasted, contrasted_wide, two(F16)),
    Fault("op list", MEMBER, CAPPED, CAPS, listed("tanh"), listed(), steps, argnums=1),
    Fault("op list of sigmoids", MEMBER, SUMS, RULE, shared("logistic"), shared(), steps),
    Fault("softsign cap", MEMBER, CAPPED, CAPS, softsign, softsign_wide, one(BF16)),
    Fault("tanh of exponentials", MEMBER, CAPPED, CAPS, by_hand, by_hand_wide, one(BF16)),
    Fault("bounded mean", MEMBER, CAPPED, CAPS, steer, steer_wide, bounded, argnums=0),
)
