"""Losses and norms in half."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from pairs import Pair, bf16, f16, f32

import mpjax


def wide(x):
    return x.astype(jnp.float32)


LABELS = jax.ShapeDtypeStruct((8,), jnp.int32)


def entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()  # fault


def entropy_wide(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(wide(logits), labels).mean()


def by_hand(logits, labels):
    probabilities = jnp.log(jnp.sum(jnp.exp(logits), -1))  # fault
    return wide(probabilities).mean()


def binary(logits, labels):
    return optax.sigmoid_binary_cross_entropy(logits, labels[:, None] > 0).mean()  # fault


def binary_wide(logits, labels):
    return optax.sigmoid_binary_cross_entropy(wide(logits), labels[:, None] > 0).mean()


def of_probabilities(logits, labels):
    return -jnp.mean(jnp.log(jax.nn.softmax(logits))[:, 0])  # fault


def cast_probabilities(logits, labels):
    shares = jax.nn.softmax(logits).astype(jnp.float16)
    return -jnp.mean(wide(jnp.log(shares))[:, 0])  # fault


def protected_probabilities(logits, labels):
    shares = jax.nn.softmax(logits).astype(jnp.float16)
    return -jnp.mean(wide(jnp.log(wide(shares) + 1e-9))[:, 0])  # fault


def weighted(logits, labels):
    shares = jax.nn.sigmoid(logits).astype(jnp.float16)
    return jnp.mean(1 / wide(shares))  # fault


def float32_probabilities(logits, labels):
    return -jnp.mean(jnp.log(jax.nn.softmax(logits))[:, 0])


def binary_by_hand(logits, labels):
    return -jnp.mean(jnp.log(jax.nn.sigmoid(logits)))  # fault


def variance(x):
    return jnp.mean(x * x, -1) - jnp.mean(x, -1) ** 2  # fault


def variance_wide(x):
    return jnp.var(x, -1)


def scaled(x):
    return x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5).astype(x.dtype)  # fault


def scaled_wide(x):
    return x * jax.lax.rsqrt(jnp.mean(wide(x) ** 2, -1, keepdims=True) + 1e-5).astype(x.dtype)


CASES = {
    "cross entropy": Pair("half-loss", entropy, entropy_wide, (bf16(8, 32), LABELS)),
    "with gradients": Pair(
        "half-loss", entropy, entropy_wide, (bf16(8, 32), LABELS), {"argnums": 0}
    ),
    "by hand": Pair("half-loss", by_hand, entropy_wide, (bf16(8, 32), LABELS)),
    "binary": Pair("half-loss", binary, binary_wide, (bf16(8, 1), LABELS)),
    "of probabilities": Pair("half-loss", of_probabilities, entropy_wide, (bf16(8, 32), LABELS)),
    "sigmoid": Pair("half-loss", binary_by_hand, binary_wide, (f16(8, 1), LABELS)),
    "cast probabilities": Pair(
        "rounded-probability", cast_probabilities, float32_probabilities, (f32(8, 32), LABELS)
    ),
    "and an epsilon": Pair(
        *("rounded-probability", protected_probabilities, float32_probabilities),
        *((f32(8, 32), LABELS), {"argnums": 0}),
    ),
    "inverse probabilities": Pair(
        "rounded-probability", weighted, float32_probabilities, (f32(8, 32), LABELS)
    ),
    "variance": Pair("half-variance", variance, variance_wide, (bf16(8, 32),)),
    "rms norm": Pair("half-norm", scaled, scaled_wide, (f16(8, 32),)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_losses_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def clean(fun, *args, **options):
    return not mpjax.lint(fun, **options)(*args).findings


def test_a_softmax_is_no_loss():
    def attention(q, k):
        return jax.nn.softmax(q @ k.T) @ k

    assert clean(attention, bf16(8, 4), bf16(8, 4))


def test_activations_of_logarithms_are_no_losses():
    def model(x, w):
        return wide(jax.nn.softplus(x @ w) @ w.T).mean()

    assert clean(model, bf16(8, 4), bf16(4, 8), argnums=1)


def test_variances_of_float32_are_no_fault():
    assert clean(variance, f32(8, 32)) and clean(lambda x: variance(wide(x)), bf16(8, 32))
    assert clean(lambda x: x - jnp.mean(x) ** 2, bf16(8, 32))


def test_squares_that_are_no_norm_or_have_the_range_are_no_fault():
    assert clean(lambda x: wide(x * x).sum(), f16(8)) and clean(scaled, bf16(8, 4))
    assert clean(scaled, f32(8, 4))


def test_probabilities_in_half_for_a_matmul_are_no_fault():
    def attention(q, k):
        shares = jax.nn.softmax(wide(q @ k.T)).astype(q.dtype)
        return shares @ k / 3, jnp.log(1 + wide(k) ** 2)

    def distribution(logits):
        return jnp.log(jax.nn.softmax(logits).astype(jnp.bfloat16))  # bfloat16 has the range

    assert clean(attention, f16(8, 4), f16(8, 4)) and clean(distribution, f32(8, 4))
