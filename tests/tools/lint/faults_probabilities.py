"""Faults of probabilities that 16 bits round: their differences and logarithms."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from faults import BF16, F16, F32, Fault, labels, normal
from flax import linen as nn
from flax import nnx

ROWS, CLASSES, WIDTH = 16, 32, 8
MEMBER = "class member"


def wide(x):
    return x.astype(F32)


# ---- differences of probabilities ----------------------------------------------------------------


def consistency(student, teacher):
    p, q = jax.nn.softmax(student), jax.nn.softmax(teacher)
    return jnp.mean(jnp.square(p - q).astype(F32))  # <- here: mean teacher


def consistency_wide(student, teacher):
    p, q = jax.nn.softmax(wide(student)), jax.nn.softmax(wide(teacher))
    return jnp.mean(jnp.square(p - q))


class Student(nn.Module):
    dtype: np.dtype = BF16

    @nn.compact
    def __call__(self, x):
        return nn.Dense(CLASSES, dtype=self.dtype)(nn.relu(nn.Dense(WIDTH, dtype=self.dtype)(x)))


def distilled(params, x, teacher):
    p = jax.nn.softmax(Student().apply(params, x) / 2)
    q = jax.lax.stop_gradient(jax.nn.softmax(teacher / 2))
    return jnp.mean(jnp.square(wide(p) - wide(q)))  # <- here: distillation


def distilled_wide(params, x, teacher):
    p = jax.nn.softmax(wide(Student().apply(params, x)) / 2)
    q = jax.lax.stop_gradient(jax.nn.softmax(wide(teacher) / 2))
    return jnp.mean(jnp.square(p - q))


def students():
    x = normal(ROWS, WIDTH)
    return Student().init(jax.random.key(0), x), x, normal(ROWS, CLASSES, dtype=BF16)


@jax.jit
def total_variation(p_logits, q_logits):
    p, q = jax.nn.softmax(p_logits), jax.nn.softmax(q_logits)
    return 0.5 * jnp.sum(jnp.abs(p - q), -1)  # <- here: total variation


@jax.jit
def total_variation_wide(p_logits, q_logits):
    p, q = jax.nn.softmax(wide(p_logits)), jax.nn.softmax(wide(q_logits))
    return 0.5 * jnp.sum(jnp.abs(p - q), -1)


def pixel(head, x, image):
    """A discretized logistic likelihood, as of PixelCNN++: the mass of a bin of width 2/255."""
    mean = jax.vmap(head)(x)
    above, below = jax.nn.sigmoid(image - mean + 0.004), jax.nn.sigmoid(image - mean - 0.004)
    mass = jnp.maximum(above - below, 1e-6)  # <- here: logistic bins
    return -jnp.mean(jnp.log(wide(mass)))


def pixel_wide(head, x, image):
    mean = wide(jax.vmap(head)(x))
    shift = wide(image) - mean
    mass = jnp.maximum(jax.nn.sigmoid(shift + 0.004) - jax.nn.sigmoid(shift - 0.004), 1e-6)
    return -jnp.mean(jnp.log(mass))


def pixels():
    head = eqx.nn.Linear(WIDTH, WIDTH, key=jax.random.key(0))
    head = jax.tree.map(lambda w: w.astype(BF16), head)
    return head, normal(ROWS, WIDTH, dtype=BF16), normal(ROWS, WIDTH, dtype=BF16, seed=1)


def policy_divergence(new, old):
    shift = new - old
    return jnp.mean(wide(jnp.exp(shift) - 1 - shift))  # <- here: prime-rl#568


def policy_divergence_wide(new, old):
    shift = wide(new) - wide(old)
    return jnp.mean(jnp.expm1(shift) - shift)


def picked(logits, ids):
    return jnp.take_along_axis(jax.nn.log_softmax(wide(logits)), ids[:, None], -1)[:, 0]


def surrogate(logits, ids, old, advantages):
    new = picked(logits, ids).astype(BF16)
    ratio = jnp.exp(new - old)  # <- here: xtuner#1108
    return -jnp.mean(wide(ratio) * advantages)


def surrogate_wide(logits, ids, old, advantages):
    ratio = jnp.exp(picked(logits, ids) - wide(old))
    return -jnp.mean(ratio * advantages)


def rollouts():
    old = normal(ROWS, dtype=BF16) - 3
    return normal(ROWS, CLASSES, dtype=BF16), labels(ROWS, CLASSES), old, normal(ROWS)


def counterfactual(factual, other, returns):
    def one(a, b, r):
        advantage = jax.nn.sigmoid(a) - jax.nn.sigmoid(b)  # <- here: advantages
        return wide(advantage) * r

    return jnp.sum(jax.vmap(one)(factual, other, returns))


def counterfactual_wide(factual, other, returns):
    def one(a, b, r):
        return (jax.nn.sigmoid(wide(a)) - jax.nn.sigmoid(wide(b))) * r

    return jnp.sum(jax.vmap(one)(factual, other, returns))


# ---- logarithms of probabilities that were cast --------------------------------------------------


def selective(logits, ids):
    p = jax.nn.softmax(wide(logits)).astype(BF16)
    chosen = jnp.take_along_axis(p, ids[:, None], -1)[:, 0]
    return -jnp.mean(jnp.log(wide(chosen)))  # <- here: torchforge#237


def selective_wide(logits, ids):
    return -jnp.mean(picked(logits, ids))


def clipped(head, xs, ids):
    def turn(total, chunk):
        x, wanted = chunk
        p = jax.nn.softmax((x @ head).astype(F32)).astype(BF16)
        p = jnp.clip(p[jnp.arange(len(wanted)), wanted], 1e-6, 1.0)
        return total - jnp.sum(jnp.log(p).astype(F32)), None  # <- here: pytext#660

    return jax.lax.scan(turn, jnp.float32(0), (xs, ids))[0]


def unclipped(head, xs, ids):
    def turn(total, chunk):
        x, wanted = chunk
        logp = jax.nn.log_softmax((x @ head).astype(F32))
        return total - jnp.sum(logp[jnp.arange(len(wanted)), wanted]), None

    return jax.lax.scan(turn, jnp.float32(0), (xs, ids))[0]


def chunks():
    xs = normal(4, ROWS, WIDTH, dtype=BF16)
    return normal(WIDTH, CLASSES, dtype=BF16), xs, jnp.tile(labels(ROWS, CLASSES), (4, 1))


def binary(model, x, y):
    def loss(model):
        p = jax.nn.sigmoid(wide(model(x))[:, 0]).astype(BF16)
        yes, no = jnp.log(p + 1e-6), jnp.log(1 - p + 1e-6)  # <- here: binary cross entropy
        return -jnp.mean(wide(y * yes + (1 - y) * no))

    return nnx.grad(loss)(model)


def binary_wide(model, x, y):
    def loss(model):
        return optax.sigmoid_binary_cross_entropy(wide(model(x))[:, 0], wide(y)).mean()

    return nnx.grad(loss)(model)


def binary_model():
    model = nnx.Linear(WIDTH, 1, dtype=BF16, rngs=nnx.Rngs(0))
    return model, normal(ROWS, WIDTH, dtype=BF16), (jnp.arange(ROWS) % 2).astype(BF16)


def uncertainty(logits):
    p = jax.checkpoint(jax.nn.softmax)(wide(logits)).astype(BF16)
    return -jnp.sum(wide(p) * jnp.log(wide(p) + 1e-9), -1).mean()  # <- here: entropy


def uncertainty_wide(logits):
    logp = jax.checkpoint(jax.nn.log_softmax)(wide(logits))
    return -jnp.sum(jnp.exp(logp) * logp, -1).mean()


def two(dtype):
    return lambda: (normal(ROWS, CLASSES, dtype=dtype), normal(ROWS, CLASSES, dtype=dtype, seed=1))


RULE = "rounded-probability"
LOST = (
    "Two probabilities that are nearly equal are subtracted in 16 bits: what is left is rounding."
)
LOGGED = "A softmax is computed in float32 and cast to bfloat16, and the loss takes its logarithm."

FAULTS = (
    Fault("mean teacher", MEMBER, LOST, RULE, consistency, consistency_wide, two(BF16), argnums=0),
    Fault("distillation", MEMBER, LOST, RULE, distilled, distilled_wide, students, argnums=0),
    Fault(
        *("total variation", MEMBER, LOST, RULE, total_variation, total_variation_wide, two(F16)),
    ),
    Fault("logistic bins", MEMBER, LOST, RULE, pixel, pixel_wide, pixels),
    Fault(
        "prime-rl#568",
        "PrimeIntellect-ai/prime-rl/pull/568",
        "The ratio of two policies is near one, and 1 is subtracted from it in bfloat16.",
        *(RULE, policy_divergence, policy_divergence_wide),
        lambda: (normal(ROWS, dtype=BF16), normal(ROWS, dtype=BF16, seed=1)),
        argnums=0,
    ),
    Fault(
        "xtuner#1108",
        "InternLM/xtuner/pull/1108",
        "Log-probabilities are rounded to bfloat16 before their difference becomes a ratio.",
        *(RULE, surrogate, surrogate_wide, rollouts),
        argnums=0,
    ),
    Fault(
        *("advantages", MEMBER, LOST, RULE, counterfactual, counterfactual_wide),
        lambda: (normal(ROWS, dtype=BF16), normal(ROWS, dtype=BF16, seed=1), normal(ROWS)),
        argnums=0,
    ),
    Fault(
        *("torchforge#237", "meta-pytorch/torchforge/pull/237", LOGGED, RULE),
        *(selective, selective_wide),
        lambda: (normal(ROWS, CLASSES, dtype=BF16), labels(ROWS, CLASSES)),
        argnums=0,
    ),
    Fault(
        *("pytext#660", "facebookresearch/pytext/pull/660", LOGGED, RULE),
        *(clipped, unclipped, chunks),
        argnums=0,
    ),
    Fault("binary cross entropy", MEMBER, LOGGED, RULE, binary, binary_wide, binary_model),
    Fault(
        *("entropy", MEMBER, LOGGED, RULE, uncertainty, uncertainty_wide),
        lambda: (normal(ROWS, CLASSES, dtype=BF16),),
        argnums=0,
    ),
)
