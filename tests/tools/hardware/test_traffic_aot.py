"""The bytes and kernels of programs that an H100's compiler wrote, beside XLA's own count."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import compiles, shape

import mpjax

pytestmark = [pytest.mark.thorough, compiles("h100")]

X, W = shape(1024, 768, dtype=jnp.bfloat16), shape(768, 2001)


def padded(w):
    return jnp.pad(w, ((0, 0), (0, 47))).astype(jnp.bfloat16)


AT_THE_EDGE = {
    "a padded weight": (lambda x, w: x @ padded(w), X, W),
    "sliced logits": (lambda x, w: jnp.tanh((x @ padded(w))[:, :2001]), X, W),
    "a pad behind a cast": (lambda w: (padded(w), w * 2), W),
    "a slice behind a cast": (lambda w: jnp.sin(w.astype(jnp.bfloat16)[:, 3:500]), W),
    "rows backwards": (lambda w: jnp.exp(w[::-1, ::2]), W),
    "joined parts": (lambda w: jnp.sin(jnp.concatenate([w[:, :700], w[:, 700:] * 2], 1)), W),
    "a broadcast": (lambda w: jnp.broadcast_to(jnp.sin(w[0]), (4096, 2001)), W),
}


@functools.cache
def report(name):
    fun, *args = AT_THE_EDGE[name]
    return mpjax.compile_for("h100", fun, *args)


@pytest.mark.parametrize("name", AT_THE_EDGE)
def test_bytes_agree_with_xla_s(name):
    """XLA counts the whole operand of a slice behind a cast: what it reads is at most as much."""
    found = report(name)
    counted = found.xla_costs["bytes accessed"]
    assert found.bytes_accessed == pytest.approx(counted, rel=0.01) or (
        "behind a cast" in name and found.bytes_accessed < counted
    )


def test_sliced_logits_do_not_count_what_the_slice_leaves():
    """The loss of a padded head moves as much as that of one that needs no padding."""

    def loss(labels, w, x):
        logits = (x @ padded(w))[:, :2001].astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    labels = shape(1024, dtype=jnp.int32)
    odd = mpjax.compile_for("h100", jax.value_and_grad(loss, 1), labels, W, X)
    even = mpjax.compile_for("h100", jax.value_and_grad(loss, 1), labels, shape(768, 2048), X)
    assert {row.kind for row in odd.kernels} >= {"logits and loss", "matmuls"}
    assert "matmuls with an odd axis" not in {row.kind for row in odd.kernels}
    assert odd.bytes_accessed <= 1.02 * even.bytes_accessed


def test_memory_that_is_only_set_aside_costs_no_bytes():
    def fill(make):
        def run(x):
            def step(i, out):
                return jax.lax.dynamic_update_index_in_dim(out, x * i, i, 0)

            return jax.lax.fori_loop(0, 64, step, make((64, 1024, 768)))

        return mpjax.compile_for("h100", run, shape(1024, 768)).bytes_accessed

    stack = 4 * 64 * 1024 * 768
    empty = fill(lambda dims: jax.lax.empty(dims, jnp.float32))
    zeros = fill(lambda dims: jnp.zeros(dims, jnp.float32))
    assert zeros - empty == pytest.approx(stack, rel=0.02)
    assert empty == pytest.approx(2 * stack, rel=0.02)  # x is read, and a row written, per turn


@pytest.mark.parametrize(
    ("columns", "kind"), [(2001, "matmuls with an odd axis"), (2048, "matmuls")]
)
def test_odd_axis_of_casts_by_hand_is_named(columns, kind):
    found = mpjax.compile_for("h100", lambda x, w: x @ w.astype(x.dtype), X, shape(768, columns))
    (row,) = [row for row in found.kernels if row.flops]
    assert row.kind == kind and row.flops == 2 * 1024 * 768 * columns
    assert any("2001" in note for note in found.notes) == (columns == 2001)
    off = mpjax.compile_for(
        *("h100", lambda x, w: x @ w.astype(x.dtype), X, shape(768, columns)),
        compiler_options={"xla_gpu_enable_triton_gemm": False},  # XLA pads these itself
    )
    assert {row.kind for row in off.kernels if row.flops} == {"matmuls"}
