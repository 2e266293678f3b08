"""Matmuls and kernels that are given operands of two dtypes."""

import jax
import jax.numpy as jnp
import pairs
import pytest
from jax.experimental import pallas as pl
from pairs import Pair, bf16, f16, f32

import mpjax

PRESET = jax.lax.DotAlgorithmPreset.F16_F16_F32


def mixed(x, w):
    return jnp.tanh(x @ w)  # fault


def of_one_dtype(x, w):
    return jnp.tanh(x @ w.astype(x.dtype))


def wide_result(x, w):
    def loss(w):
        return jnp.mean(jnp.dot(x, w, preferred_element_type=jnp.float32) ** 2)  # fault

    return jax.grad(loss)(w)


def wide_result_of_one_algorithm(x, w):
    def loss(w):
        out = jnp.dot(x, w, precision=PRESET, preferred_element_type=jnp.float32)
        return 1024 * jnp.mean(out**2)

    return jax.grad(loss)(w)


def kernel(*refs):
    *read, out = refs
    out[...] = jnp.dot(read[0][...], read[1][...].T, preferred_element_type=jnp.float32)


call = pl.pallas_call(kernel, f32(4, 4), interpret=True)


def given_two(q, k):
    return call(q.astype(jnp.float32) * 2, k)  # fault


def given_what_was_half(q, k):
    return call(q.astype(jnp.float32), k.astype(jnp.float32))  # fault


def given_half(q, k):
    return call(q * 2, k)


def streamed(logits_of):
    """Returns a sum of logarithms of sums, whose backward pass computes the logits again."""

    @jax.custom_vjp
    def shift(x, w):
        return forward(x, w)[0]

    def forward(x, w):
        total = jax.nn.logsumexp(logits_of(x, w).astype(jnp.float32), -1)
        return jnp.sum(total), (x, w, total)

    def backward(kept, g):
        x, w, total = kept
        logits = jnp.einsum("dv,nd->vn", w, x, preferred_element_type=jnp.float32)
        shares = (g * jnp.exp(logits.T - total[:, None])).astype(x.dtype)
        return shares @ w.T, x.T @ shares

    shift.defvjp(forward, backward)
    return shift


def streamed_in_half(x, w):
    def logits(x, w):
        return x @ w  # fault

    return jax.grad(streamed(logits))(x, w)


def streamed_in_float32(x, w):
    def logits(x, w):
        return jnp.dot(x, w, preferred_element_type=jnp.float32)

    return jax.grad(streamed(logits))(x, w)


CASES = {
    "forward": Pair("mixed-matmul", mixed, of_one_dtype, (bf16(4, 8), f32(8, 4))),
    "in a loop": Pair(
        "mixed-matmul",
        lambda xs, w: jax.lax.map(lambda x: x @ w, xs),  # fault
        lambda xs, w: jax.lax.map(lambda x: x @ w.astype(x.dtype), xs),
        (f16(3, 4, 8), f32(8, 4)),
    ),
    "backward": Pair(
        "mixed-matmul", wide_result, wide_result_of_one_algorithm, (f16(4, 8), f16(8, 4))
    ),
    "computed again": Pair(
        "recomputed-dtype", streamed_in_half, streamed_in_float32, (bf16(4, 8), bf16(8, 16))
    ),
    "a kernel": Pair("kernel-dtypes", given_two, given_half, (bf16(4, 8), bf16(4, 8))),
    "a kernel of what was half": Pair(
        "kernel-dtypes", given_what_was_half, given_half, (bf16(4, 8), bf16(4, 8))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_operands_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_rematerialized_matmul_is_no_fault():
    def loss(w, x):
        layer = jax.checkpoint(lambda w: jnp.sin(x @ w.astype(x.dtype)))
        return jnp.sum(layer(w).astype(jnp.float32))

    assert not mpjax.lint(loss, argnums=0)(f32(8, 4), bf16(4, 8)).findings


def test_matmuls_inside_a_library_are_no_fault():
    def loss(x):
        return jnp.sum(jax.nn.dot_product_attention(x, x, x).astype(jnp.float32))

    assert not mpjax.lint(loss, argnums=0)(bf16(2, 8, 2, 4)).findings


def test_outer_product_of_two_dtypes_is_no_fault():
    assert not mpjax.lint(lambda x, y: jnp.einsum("i,j->ij", x, y))(bf16(4), f32(8)).findings


def test_numbers_beside_a_kernel_may_be_float32():
    fun = lambda q, k, scale, shift: call(q, k, scale, shift)  # noqa: E731
    assert not mpjax.lint(fun)(bf16(4, 8), bf16(4, 8), f32(8), f32(4, 1)).findings
