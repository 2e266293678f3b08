"""Matmuls that something amplifies, and gradients whose terms cancel."""

import jax
import jax.numpy as jnp
from jax import lax
from members import Case, Members, judge
from support import normal

AMPLIFIED = Members("a matmul that sums few products has half operands, and a sine amplifies it")
CANCELLING = Members("a gradient's terms are rounded before they cancel")


# ---- amplified matmuls --------------------------------------------------------------------------


def fourier(count):
    def fun(x, b, w):
        angles = 2 * jnp.pi * (x @ b)
        return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1) @ w

    args = (normal(2, 32, count), normal(3, count, 16, scale=6 / count**0.5), normal(4, 32, 4))
    return Case(fun, args, (0, 1, 2))


@AMPLIFIED()
def fourier_features_of_one_coordinate():
    return fourier(1)


@AMPLIFIED()
def fourier_features_of_two_coordinates():
    return fourier(2)


@AMPLIFIED()
def fourier_features_of_three_coordinates():
    return fourier(3)


@AMPLIFIED()
def fourier_features_of_four_coordinates():
    return fourier(4)


@AMPLIFIED()
def plane_waves():
    def fun(r, k, amplitudes):
        phases = jnp.einsum("nd,kd->nk", r, k) + 0.3
        return jnp.cos(phases) * amplitudes

    return Case(fun, (normal(5, 32, 3, scale=8), normal(6, 16, 3, scale=3), normal(7, 16)), (0, 1))


@AMPLIFIED()
def gaussian_kernel_by_matmul():
    def fun(x, y):
        squared = jnp.sum(x**2, -1)[:, None] + jnp.sum(y**2, -1)[None] - 2 * x @ y.T
        return jnp.exp(-squared / 2)

    return Case(fun, (8 + normal(8, 16, 3, scale=0.5), 8 + normal(9, 16, 3, scale=0.5)), (0, 1))


@AMPLIFIED()
def rotations_of_a_vector_field():
    def fun(x, a):
        angle = 20 * (x @ a)  # one angle per row
        turned = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1)
        return turned * jnp.linalg.norm(x, axis=-1)[:, None, None]

    return Case(fun, (normal(10, 32, 2), normal(11, 2, 4)), (0, 1))


@AMPLIFIED()
def fourier_features_in_a_scan():
    def fun(x, b):
        return lax.scan(lambda c, x: (c + jnp.sin(x @ b).sum(), jnp.sin(x @ b)), 0.0, x)[1]

    return Case(fun, (normal(12, 4, 8, 3), normal(13, 3, 16, scale=20)), (0, 1))


@AMPLIFIED()
def power_of_a_short_matmul():
    def fun(x, w):
        return jnp.power(1.5 + jnp.abs(x @ w), 24.0) * 1e-6

    return Case(fun, (normal(14, 32, 2), normal(15, 2, 8, scale=0.3)), (0, 1))


# ---- gradients that cancel ----------------------------------------------------------------------

TOKENS = normal(23, 64, 16)
HEADS = {name: normal(24 + i, 16, 16, scale=0.3) for i, name in enumerate("qkvo")}
BACK = jnp.arange(64)[None] - jnp.arange(64)[:, None]  # minus how far back a key lies
CAUSAL = jnp.where(BACK > 0, -1e9, 0.0)
PADDING = jnp.where(jnp.arange(64) > 50, -1e9, 0.0)[None]
RATIO = "the derivative of a division squares a half divisor, which leaves half's range"


def attention(bias, common=0.0, args=()):
    """Attention whose keys, and values, have so large a part in common."""

    def fun(p, x, *args):
        q, k, v = (x @ p[name] for name in "qkv")
        scores = bias(q @ (k + common).T / 4, *args)
        return jax.nn.softmax(scores) @ (v + common) @ p["o"]

    return Case(fun, (HEADS, TOKENS, *args), (0, 1))


@CANCELLING()
def plain_attention():
    return attention(lambda s: s)


@CANCELLING()
def attention_to_keys_and_values_with_a_common_part():
    return attention(lambda s: s, 8.0)


@CANCELLING()
def alibi():
    return attention(lambda s: s + 0.25 * BACK + CAUSAL)


@CANCELLING()
def alibi_with_a_common_part():
    return attention(lambda s: s + 0.25 * BACK + CAUSAL, 8.0)


@CANCELLING()
def two_additive_masks():
    return attention(lambda s, a, b: s + a + b, args=(CAUSAL, PADDING))


@CANCELLING()
def two_additive_masks_with_a_common_part():
    return attention(lambda s, a, b: s + a + b, 8.0, args=(CAUSAL, PADDING))


@CANCELLING()
def softcapped_with_a_common_part():
    return attention(lambda s: 8 * jnp.tanh(s / 8), 8.0)


@CANCELLING()
def learned_relative_positions():
    def fun(p, x, table):
        q, k, v = (x @ p[name] for name in "qkv")
        return jax.nn.softmax(q @ k.T / 4 + 4 * table[BACK + 63]) @ v

    return Case(fun, (HEADS, TOKENS, normal(22, 127)), (0, 1, 2))


def linear(feature, eps=0.0):
    def fun(p, x):
        q, k, v = (x @ p[name] for name in "qkv")
        q, k = feature(q), feature(k)
        return (q @ (k.T @ v)) / (q @ k.sum(0) + eps)[:, None] @ p["o"]

    return Case(fun, (HEADS, TOKENS), (0, 1))


@CANCELLING(reason=RATIO)
def linear_attention():
    return linear(lambda x: jax.nn.elu(x) + 1)


@CANCELLING(reason=RATIO)
def linear_attention_of_exponentials():
    return linear(jnp.exp)


@CANCELLING()
def linear_attention_of_softmaxes():
    return linear(jax.nn.softmax)


@CANCELLING()
def causal_linear_attention():
    def fun(p, x):
        q, k, v = (x @ p[name] for name in "qkv")
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
        states = jnp.cumsum(k[:, :, None] * v[:, None, :], 0)
        total = jnp.sum(q * jnp.cumsum(k, 0), -1)
        return jnp.einsum("nd,nde->ne", q, states) / total[:, None] @ p["o"]

    return Case(fun, (HEADS, TOKENS[:32]), (0, 1))


@CANCELLING(reason=RATIO)
def ratio_of_large_matmuls():
    def fun(p, x):
        return (100 * x @ p["q"]) / (1000 + 100 * jnp.tanh(x @ p["k"])) @ p["o"]

    return Case(fun, (HEADS, TOKENS), (0, 1))


@CANCELLING()
def normalized_matmul():
    def fun(p, x):
        y = (x @ p["q"]) @ p["k"]
        return (y - y.mean(0)) / jnp.sqrt(y.var(0) + 1e-5) @ p["o"]

    return Case(fun, (HEADS, TOKENS + 2), (0, 1))


@CANCELLING()
def contrastive_loss():
    def fun(p, x):
        a, b = x @ p["q"], x @ p["k"]
        a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
        b = b / jnp.linalg.norm(b, axis=-1, keepdims=True)
        s = 10 * a @ b.T
        return jnp.diag(jax.nn.log_softmax(s, 0)) + jnp.diag(jax.nn.log_softmax(s, 1))

    return Case(fun, (HEADS, TOKENS), (0, 1))


@AMPLIFIED.test()
def test_amplified_matmuls_are_sound(member, half, part):
    judge(member, half, part)


@CANCELLING.test()
def test_gradients_whose_terms_cancel_are_sound(member, half, part):
    judge(member, half, part)
