"""Public faults of losses, matmuls, attention, casts and promotion."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from faults import BF16, F32, Fault, labels, normal
from jax.experimental import pallas as pl

TOKENS, WIDTH, WORDS = 32, 16, 64
BATCH, LENGTH, HEADS, DEPTH = 2, 16, 2, 8
SCORES = "bqhd,bkhd->bhqk"
ROWS = (((1,), (0,)), ((), ()))  # by columns


# ---- marin#8217: one pass computes the logits in bfloat16, the other in float32 ------------------


def normalized(logits, ids):
    shift = jax.scipy.special.logsumexp(logits, axis=-1)
    picked = jnp.take_along_axis(logits, ids[:, None], -1)[:, 0]
    return jnp.mean(shift - picked), shift


def cotangents(hidden, head, ids, shift):
    logits = jnp.dot(hidden, head, preferred_element_type=F32)
    wanted = jnp.exp(logits - shift[:, None]) - jax.nn.one_hot(ids, head.shape[1])
    wanted = (wanted / len(ids)).astype(BF16)
    return wanted @ head.T, hidden.T @ wanted, None


@jax.custom_vjp
def narrow_cross_entropy(hidden, head, ids):
    return narrow_forward(hidden, head, ids)[0]


def narrow_forward(hidden, head, ids):
    logits = jnp.dot(hidden, head)  # <- here: marin#8217
    loss, shift = normalized(logits.astype(F32), ids)
    return loss, (hidden, head, ids, shift)


@jax.custom_vjp
def wide_cross_entropy(hidden, head, ids):
    return wide_forward(hidden, head, ids)[0]


def wide_forward(hidden, head, ids):
    logits = jnp.dot(hidden, head, preferred_element_type=F32)
    loss, shift = normalized(logits, ids)
    return loss, (hidden, head, ids, shift)


narrow_cross_entropy.defvjp(narrow_forward, lambda kept, g: cotangents(*kept))
wide_cross_entropy.defvjp(wide_forward, lambda kept, g: cotangents(*kept))


def trained_by(cross_entropy):
    def gradients(head, hidden, ids):
        def loss(head):
            return cross_entropy(hidden, head.astype(BF16), ids)

        return jax.value_and_grad(loss)(head)

    return gradients


# ---- jax#24047: float32 scores make the backward matmuls of attention float32 --------------------


def attended(scores, v):
    weights = jax.nn.softmax(scores / math.sqrt(DEPTH))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(BF16), v)


def wide_scores(q, k, v):
    def loss(q, k):
        scores = jnp.einsum(SCORES, q, k, preferred_element_type=F32)  # <- here: jax#24047
        return jnp.sum(attended(scores, v).astype(F32))

    return jax.grad(loss, (0, 1))(q, k)


def scores_of_one_algorithm(q, k, v):
    def loss(q, k):
        scores = jnp.einsum(
            *(SCORES, q, k),
            preferred_element_type=F32,
            precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32,
        )
        return jnp.sum(attended(scores, v).astype(F32))

    return jax.grad(loss, (0, 1))(q, k)


def heads(dtype=BF16):
    return tuple(normal(BATCH, LENGTH, HEADS, DEPTH, dtype=dtype, seed=i) for i in range(3))


# ---- jax#34330, jax#27144: operands of two dtypes ------------------------------------------------


def mixed_layer(w, x):
    def loss(w):
        out = jax.lax.dot_general(x, w, ROWS, preferred_element_type=BF16)  # <- here: jax#34330
        return jnp.mean(jnp.square(out.astype(F32)))

    return jax.grad(loss)(w)


def half_layer(w, x):
    def loss(w):
        out = jax.lax.dot_general(x, w.astype(BF16), ROWS)
        return jnp.mean(jnp.square(out.astype(F32)))

    return jax.grad(loss)(w)


def wide_product(x, y, precision):
    return jax.lax.dot(x, y, precision=precision, preferred_element_type=F32)


def wide_projection(w, x):
    def loss(w):
        out = jax.lax.dot(x, w.astype(BF16), preferred_element_type=F32)  # <- here: jax#27144
        return jnp.mean(jnp.square(jax.nn.gelu(out)))

    return jax.grad(loss)(w)


def projection_of_one_algorithm(w, x):
    def loss(w):
        out = wide_product(x, w.astype(BF16), jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
        return jnp.mean(jnp.square(jax.nn.gelu(out)))

    return jax.grad(loss)(w)


# ---- jax#23007, jax#22244: what a rounding took --------------------------------------------------


def lost_by_half_sum(x, y):
    total = x + y
    taken = total - x  # <- here: jax#23007
    return total, y - taken


def lost_by_sum(x, y):
    wide_x, wide_y = x.astype(F32), y.astype(F32)
    total = jax.lax.reduce_precision(wide_x + wide_y, 8, 7)
    return total.astype(BF16), wide_y - (total - wide_x)


@jax.custom_vjp
def half_kept(x, w):
    return half_kept_forward(x, w)[0]


def half_kept_forward(x, w):
    scores = jnp.dot(x, w, preferred_element_type=F32)
    shift = jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.mean(shift), (x, w, scores.astype(BF16), shift)


def half_kept_backward(kept, g):
    x, w, scores, shift = kept
    shares = jnp.exp(scores.astype(F32) - shift)
    shares = (g * shares / len(x)).astype(BF16)
    return shares @ w.T, x.T @ shares


@jax.custom_vjp
def rounded_first(x, w):
    return rounded_first_forward(x, w)[0]


def rounded_first_forward(x, w):
    scores = jnp.dot(x, w, preferred_element_type=F32)
    scores = jax.lax.reduce_precision(scores, 8, 7)
    shift = jax.scipy.special.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.mean(shift), (x, w, scores.astype(BF16), shift)


half_kept.defvjp(half_kept_forward, half_kept_backward)
rounded_first.defvjp(rounded_first_forward, half_kept_backward)


def half_kept_gradients(x, w):
    def loss(w):
        return half_kept(x, w.astype(BF16))  # <- here: jax#22244

    return jax.grad(loss)(w)


def rounded_first_gradients(x, w):
    def loss(w):
        return rounded_first(x, w.astype(BF16))

    return jax.grad(loss)(w)


# ---- jax#7368, axlearn#1214, jax#30337: float32 that nobody asked for, half that nobody needs ----


def angles():
    """Positions as NumPy computes them: float32, whatever the model is."""
    steps = np.arange(TOKENS)[:, None] / 10000 ** (np.arange(WIDTH) / WIDTH)
    return np.sin(steps).astype(np.float32)


def promoted(w, x):
    placed = x + angles()
    return placed @ w  # <- here: jax#7368


def not_promoted(w, x):
    placed = x + angles().astype(BF16)
    return placed @ w


def kernel(q, k, out):
    out[...] = jnp.dot(q[...], k[...].T, preferred_element_type=F32)


def scores_of(q, k):
    shape = jax.ShapeDtypeStruct((q.shape[0], k.shape[0]), F32)
    return pl.pallas_call(kernel, out_shape=shape, interpret=True)(q, k)  # <- here: axlearn#1214


def decoded(q, cache):
    return scores_of(q, cache)


def decoded_in_half(q, cache):
    return scores_of(q.astype(cache.dtype), cache)


def narrow_gradients(weights, x):
    def loss(w):
        out = x.astype(F32) @ w.astype(F32)  # <- here: jax#30337
        return jnp.mean(jnp.square(out))

    return jax.grad(loss)(weights).astype(F32)


def wide_gradients(weights, x):
    def loss(w):
        return jnp.mean(jnp.square(x @ w))

    return jax.grad(loss)(weights.astype(F32))


FAULTS = (
    Fault(
        "marin#8217",
        "marin-community/marin/pull/8217",
        "A streamed cross entropy rounds its logits to bfloat16 in the forward pass and recomputes"
        " them in float32 in the backward pass, so its softmax does not sum to one.",
        "recomputed-dtype",
        trained_by(narrow_cross_entropy),
        trained_by(wide_cross_entropy),
        lambda: (
            normal(WIDTH, WORDS),
            normal(TOKENS, WIDTH, dtype=BF16),
            labels(TOKENS, WORDS),
        ),
    ),
    Fault(
        "jax#24047",
        "jax-ml/jax/issues/24047",
        "Attention asks for float32 scores of bfloat16 operands. The matmuls of its backward pass "
        "then read float32 cotangents, and run in TF32 or float32.",
        "mixed-matmul",
        wide_scores,
        scores_of_one_algorithm,
        heads,
    ),
    Fault(
        "jax#34330",
        "jax-ml/jax/issues/34330",
        "A matmul of bfloat16 activations with float32 weights rounds the weights' gradient to "
        "bfloat16 before it is cast to float32.",
        "mixed-matmul",
        mixed_layer,
        half_layer,
        lambda: (normal(WIDTH, WORDS), normal(TOKENS, WIDTH, dtype=BF16)),
    ),
    Fault(
        "jax#27144",
        "jax-ml/jax/issues/27144",
        "The backward matmuls of a 16-bit matmul with a float32 result mix two operand dtypes.",
        "mixed-matmul",
        wide_projection,
        projection_of_one_algorithm,
        lambda: (normal(WIDTH, WORDS), normal(TOKENS, WIDTH, dtype=BF16)),
    ),
    Fault(
        "jax#23007",
        "jax-ml/jax/issues/23007",
        "Compensated sums need the rounding error of a bfloat16 sum. Under jit it is always 0.",
        "rounding-error",
        lost_by_half_sum,
        lost_by_sum,
        lambda: (normal(TOKENS, dtype=BF16), normal(TOKENS, dtype=BF16, seed=1)),
    ),
    Fault(
        "jax#22244",
        "jax-ml/jax/pull/22244",
        "The backward pass combines a value that was saved in bfloat16 with a result that the "
        "forward pass computed from the same value in float32.",
        "rounding-error",
        half_kept_gradients,
        rounded_first_gradients,
        lambda: (normal(TOKENS, WIDTH, dtype=BF16), normal(WIDTH, WORDS)),
        instead="jax.checkpoint, where it was found, rounds what it saves since that change; it is "
        "made here by a custom_vjp that saves in half.",
    ),
    Fault(
        "jax#7368",
        "jax-ml/jax/issues/7368",
        "A float32 constant silently promotes everything after it in a bfloat16 model.",
        "promoted-matmul",
        promoted,
        not_promoted,
        lambda: (normal(WIDTH, WORDS, dtype=BF16), normal(TOKENS, WIDTH, dtype=BF16)),
    ),
    Fault(
        "jax#30337",
        "jax-ml/jax/issues/30337",
        "The gradient of a bfloat16 weight is rounded to bfloat16, although it was computed in "
        "float32 and is used in float32.",
        "rounded-gradient",
        narrow_gradients,
        wide_gradients,
        lambda: (normal(WIDTH, WORDS, dtype=BF16), normal(TOKENS, WIDTH)),
    ),
    Fault(
        "axlearn#1214",
        "apple/axlearn/pull/1214",
        "A fused attention kernel is given a float32 query and a bfloat16 cache.",
        "kernel-dtypes",
        decoded,
        decoded_in_half,
        lambda: (normal(LENGTH, DEPTH), normal(LENGTH, DEPTH, dtype=BF16)),
    ),
)
