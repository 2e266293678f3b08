"""Faults of saturating functions in 16 bits that are cast up one operation too late."""

import jax
import jax.numpy as jnp
import optax
from faults import BF16, F16, F32, Fault, labels, normal
from flax import linen as nn

ROWS, WORDS, WIDTH, HEADS = 16, 64, 8, 2
MEMBER = "class member"


def wide(x):
    return x.astype(F32)


def entropy(logits, ids):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()


def capped(head, x, ids):
    logits = x @ head
    logits = 15 * jnp.tanh(logits / 15)  # <- here: nanochat#326
    return entropy(wide(logits), ids)


def capped_wide(head, x, ids):
    return entropy(15 * jnp.tanh(wide(x @ head) / 15), ids)


class Head(nn.Module):
    late: bool

    @nn.compact
    def __call__(self, x):
        logits = nn.Dense(WORDS, dtype=F16)(x)
        if not self.late:
            return 30.0 * jnp.tanh(wide(logits) / 30.0)
        return wide(jnp.tanh(logits / 30.0)) * 30.0  # <- here: final soft cap


def modelled(late):
    def loss(x, params, ids):
        return entropy(Head(late).apply(params, x), ids)

    return loss


def head():
    x = normal(ROWS, WIDTH, dtype=F16)
    return x, Head(True).init(jax.random.key(0), x), labels(ROWS, WORDS)


def attention(x, weights):
    def layer(x, w):
        scores = 50.0 * jnp.tanh(jnp.einsum("qd,kd->qk", x @ w, x) / 50.0)  # <- here: attention cap
        shares = jax.nn.softmax(wide(scores)).astype(x.dtype)
        return x + shares @ x, None

    return jax.lax.scan(layer, x, weights)[0]


def attention_wide(x, weights):
    def layer(x, w):
        scores = 50.0 * jnp.tanh(wide(jnp.einsum("qd,kd->qk", x @ w, x)) / 50.0)
        shares = jax.nn.softmax(scores).astype(x.dtype)
        return x + shares @ x, None

    return jax.lax.scan(layer, x, weights)[0]


@jax.jit
def pointers(query, keys, visited):
    scores = 10 * jnp.tanh(keys @ query)  # <- here: pointer network
    return jax.nn.log_softmax(jnp.where(visited, -1e9, wide(scores)))


@jax.jit
def pointers_wide(query, keys, visited):
    scores = 10 * jnp.tanh(wide(keys @ query))
    return jax.nn.log_softmax(jnp.where(visited, -1e9, scores))


def squashed(mean, noise):
    action = jnp.tanh(mean + 0.1 * noise)
    correction = jnp.log(1 - wide(action) ** 2 + 1e-6)  # <- here: squashed policy
    return jnp.mean(-0.5 * wide(noise) ** 2 - correction)


def squashed_wide(mean, noise):
    raw = wide(mean + 0.1 * noise)
    correction = 2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))
    return jnp.mean(-0.5 * wide(noise) ** 2 - correction)


def probit(x):
    share = 0.5 * (1 + jax.lax.erf(x / 1.4142135))
    return -jnp.mean(jnp.log(wide(share) + 1e-6))  # <- here: probit


def probit_wide(x):
    return -jnp.mean(jax.scipy.stats.norm.logcdf(wide(x)))


def undone(x):
    return jnp.arctanh(wide(jnp.tanh(x)) * 0.999)  # <- here: inverse


def undone_wide(x):
    return jnp.arctanh(jnp.tanh(wide(x)) * 0.999)


def odds(x):
    p = wide(jax.nn.sigmoid(x))
    return jnp.mean(p / (1 - p + 1e-4))  # <- here: odds


def odds_wide(x):
    p = jax.nn.sigmoid(wide(x))
    return jnp.mean(p / (1 - p + 1e-4))


RULE, OF_PROBABILITIES = "half-saturation", "rounded-probability"
CAPPED = "A soft cap is computed in 16 bits and cast up after it: large logits become equal."
ENDS = (
    "A saturating function is computed in 16 bits, and float32 code divides by its distance to 1."
)

FAULTS = (
    Fault(
        *("nanochat#326", "karpathy/nanochat/pull/326", CAPPED, RULE, capped, capped_wide),
        lambda: (
            normal(WIDTH, WORDS, dtype=BF16),
            normal(ROWS, WIDTH, dtype=BF16),
            labels(ROWS, 9),
        ),
        argnums=0,
    ),
    Fault("final soft cap", MEMBER, CAPPED, RULE, modelled(True), modelled(False), head),
    Fault(
        *("attention cap", MEMBER, CAPPED, RULE, attention, attention_wide),
        lambda: (normal(ROWS, WIDTH, dtype=BF16), normal(3, WIDTH, WIDTH, dtype=BF16)),
    ),
    Fault(
        *("pointer network", MEMBER, CAPPED, RULE, pointers, pointers_wide),
        lambda: (
            *(normal(WIDTH, dtype=BF16), normal(ROWS, WIDTH, dtype=BF16)),
            jnp.arange(ROWS) < 3,
        ),
    ),
    Fault(
        *("squashed policy", MEMBER, ENDS, RULE, squashed, squashed_wide),
        lambda: (normal(ROWS, WIDTH, dtype=BF16), normal(ROWS, WIDTH, dtype=BF16, seed=1)),
        argnums=0,
    ),
    Fault(
        *("probit", MEMBER, ENDS, RULE, probit, probit_wide),
        lambda: (normal(ROWS, WIDTH, dtype=F16),),
        mended_args=lambda: (normal(ROWS, WIDTH, dtype=F16),),
    ),
    Fault(
        *("inverse", MEMBER, ENDS, RULE, undone, undone_wide),
        lambda: (normal(ROWS, WIDTH, dtype=BF16),),
    ),
    Fault(
        *("odds", MEMBER, ENDS, OF_PROBABILITIES, odds, odds_wide),
        lambda: (normal(ROWS, WIDTH, dtype=BF16),),
    ),
)
