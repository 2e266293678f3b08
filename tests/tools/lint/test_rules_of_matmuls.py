"""Matmuls that a promotion makes float32, and backward passes in half."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pairs
import pytest
from pairs import Pair, bf16, f32

import mpjax

TABLE = np.ones((8,), np.float32)


def wide(x):
    return x.astype(jnp.float32)


def promoted(x, w):
    h = jax.nn.relu(x @ w) * TABLE
    return h @ w  # fault


def kept(x, w):
    h = jax.nn.relu(x @ w) * jnp.asarray(TABLE, x.dtype)
    return h @ w


def by_a_scalar(x, w):
    h = (x @ w) / np.sqrt(np.float32(8.0))
    return jnp.einsum("ij,jk->ik", h, w)  # fault


def by_a_number(x, w):
    return jnp.einsum("ij,jk->ik", (x @ w) / np.sqrt(8.0).item(), w)


def matmul(narrow):
    @jax.custom_vjp
    def multiply(x, w):
        return x @ w

    def backward(kept, g):
        x, w = (each.astype(narrow) for each in kept)
        g = g.astype(narrow)
        return wide(g @ w.T), wide(x.T @ g)

    multiply.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    return multiply


def narrowed(x, w):
    @jax.custom_vjp
    def multiply(x, w):
        return x @ w

    def backward(kept, g):
        x, w = kept
        return wide(g.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16).T), x.T @ g

    multiply.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    return multiply(x, w).sum()  # fault


CASES = {
    "array": Pair("promoted-matmul", promoted, kept, (bf16(4, 8), bf16(8, 8))),
    "scalar": Pair("promoted-matmul", by_a_scalar, by_a_number, (bf16(4, 8), bf16(8, 8))),
    "custom_vjp": Pair(
        "narrow-backward",
        narrowed,
        lambda x, w: matmul("float32")(x, w).sum(),
        (f32(4, 8), f32(8, 8)),
        {"argnums": (0, 1)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_matmuls_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_promoted_matmul_names_the_cause():
    (finding,) = mpjax.lint(promoted, select="promoted-*")(bf16(4, 8), bf16(8, 8)).findings
    assert "mul with a constant f32[8] at " in finding.message


def blocks(x, w, scale):
    """A transformer's stream: each block reads it through a norm, and adds to it in bfloat16."""
    for _ in range(2):
        normed = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt((x**2).mean(-1, keepdims=True))
        y = jax.nn.gelu((normed * scale) @ w)
        x = x + (y @ w).astype(jnp.bfloat16)
    return x


def with_positions(x, w, scale, table):
    return blocks(x + table, w, scale)


def with_constant_positions(x, w, scale, table):
    return blocks(x + np.ones((4, 8), np.float32), w, scale)


def with_float32_norm(x, w, scale, table):
    first = x.astype(jnp.float32) / 2
    return blocks(first + x @ w, w, scale)


def looked_up(x, w, scale, table):
    return blocks(table[jnp.arange(4)] + x @ w, w, scale)


def multiplied(x, w, scale, table):
    scores = jnp.dot(x, w, preferred_element_type=jnp.float32)
    return blocks(x + scores, w, scale)


def in_a_loop(x, w, scale, table):
    return jax.lax.fori_loop(0, 3, lambda _, h: h + blocks(x, w, scale) @ w, x + table)


STREAMS = {
    with_positions: r"add with table at .*:\d+ promoted",
    with_constant_positions: r"add with a constant f32\[4,8\] at",
    with_float32_norm: r"add with a cast of x to float32 \(.*:\d+\) at",
    looked_up: r"add with table at",
    multiplied: r"add with the result f32\[4,8\] of dot_general \(.*\) at",
}


@pytest.mark.parametrize("fun", STREAMS)
def test_the_cause_of_a_float32_stream_is_what_made_it_float32(fun):
    """Not the stream itself, to which later blocks add."""
    args = bf16(4, 8), bf16(8, 8), bf16(8), f32(4, 8)
    found = mpjax.lint(fun, select="promoted-*")(*args).findings
    assert found
    for finding in found:
        assert re.search(STREAMS[fun], finding.message), finding.message


def clean(fun, *args, **options):
    """Of two dtypes in one matmul another rule speaks."""
    return not mpjax.lint(fun, ignore="mixed-matmul", **options)(*args).findings


def test_float32_that_was_asked_for_is_no_fault():
    def cast(x, w):
        return (wide(x) * TABLE) @ wide(w)

    def result(x, w):
        return jnp.matmul(x, w, preferred_element_type=jnp.float32) @ wide(w)

    def multiplied(x, w):
        return wide(x) * TABLE @ w  # half, read by a float32 matmul that its author asked for

    def head(x, w):
        return jnp.tanh(x) @ w  # a float32 weight, which is an argument

    assert clean(multiplied, bf16(4, 8), bf16(8, 8))
    assert clean(cast, bf16(4, 8), bf16(8, 8)) and clean(result, bf16(4, 8), bf16(8, 8))
    assert clean(head, bf16(4, 8), f32(8, 8)) and clean(promoted, f32(4, 8), f32(8, 8))


def test_a_matmul_that_autocast_plans_is_no_mixed_one():
    def adapted(x, w, a, b):
        return jnp.tanh(x @ w) @ w + (x @ a) @ b  # w is frozen in 16 bits, a and b are trained

    args = f32(4, 8), bf16(8, 8), f32(8, 2), f32(2, 8)
    cast = mpjax.autocast(adapted, "mixed_bfloat16")
    assert not mpjax.lint(cast)(*args).findings
    faults = mpjax.lint(lambda x, w: jax.lax.dot(x, w))(args[0], args[1]).findings
    assert [f.rule for f in faults] == ["mixed-matmul"]


def test_what_is_multiplied_again_for_a_constant_is_no_backward_matmul():
    @jax.checkpoint
    def distilled(w, x, teacher):
        half = jnp.tanh(x.astype(jnp.float16) @ teacher.astype(jnp.float16))
        target = jax.lax.stop_gradient(wide(half))
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) * target))

    args = f32(8, 8), f32(4, 8), f32(8, 8)
    assert not mpjax.lint(distilled, argnums=0, select="narrow-backward")(*args).findings


def test_backward_pass_as_wide_as_the_forward_pass_is_no_fault():
    def loss(x, w):
        return wide(jnp.tanh(x @ w) @ w).sum() + (wide(x) @ wide(w)).sum()

    assert clean(loss, bf16(4, 8), bf16(8, 8), argnums=(0, 1))
    assert clean(loss, f32(4, 8), f32(8, 8), argnums=(0, 1))
    cast = mpjax.autocast(loss, "mixed_bfloat16")
    assert clean(cast, f32(4, 8), f32(8, 8), argnums=(0, 1))
