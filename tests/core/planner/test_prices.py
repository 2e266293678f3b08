"""What is kept moves the fewest bytes: what is written anyway is kept, what is fused is not."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attend import FUSED, on
from jax import lax
from joint import planned
from planners import kept
from support import equations, normal, thorough_but

import mpjax
from mpjax._src.replacements import fused_kernels

N, D = 8, 32
X, W, V = normal(0, N, D), normal(1, D, D, scale=0.2), normal(2, D, D, scale=0.2)
WIDE, NARROW = normal(3, 64, 16), normal(4, 16, 64)
HALF = 2 * N * D  # bytes of a 16-bit array


def layer(x, w):
    return jax.nn.gelu(x @ w)


def head(y):
    return jnp.sum(jnp.sin(y))


def test_what_a_matmul_reads_is_written_and_so_kept():
    """Computed again for the gradient of ``v``, it would be written again."""
    fun = lambda x, w, v: head(layer(x, w) @ v)  # noqa: E731
    assert kept(planned(fun), (X, W, V), (0, 1, 2)) == 3 * HALF


def test_what_is_read_by_elementwise_operations_is_computed_again():
    fun = lambda x, w: head(layer(x, w))  # noqa: E731
    assert kept(planned(fun), (X, W), (0, 1)) == HALF


def test_what_several_kernels_compute_again_is_not_kept():
    """Both gradients of a gate read its sigmoid, in one kernel or in two: they compute it."""

    def gated(x, w, v):
        return head((jax.nn.sigmoid(x @ w) * (x @ v)) @ V)

    assert kept(planned(gated), (X, W, V), (0, 1, 2)) == 3 * HALF


def test_what_a_kernel_reads_in_another_layout_is_kept():
    """Nothing fuses into it: a slice that is computed again is written again."""

    def fun(x, w):
        q, k, v = jnp.split(x @ w, 3, -1)
        return jnp.sum(jnp.sin(attention(*(y.reshape(1, len(x), 2, -1) for y in (q, k, v)))))

    def attention(q, k, v):
        p = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k))
        return jnp.einsum("bnts,bsnh->btnh", p, v)

    x, w = normal(0, 128, 64), normal(1, 64, 384)
    with on("h100", fused_kernels.cudnn):
        jaxpr = jax.make_jaxpr(jax.grad(mpjax.autocast(fun, FUSED), 1))(x, w)
    assert sum(e.primitive.name == "split" for e in equations(jaxpr)) == 1


def test_what_no_gradient_needs_is_not_kept():
    fun = lambda w: head(layer(X, w) @ V)  # noqa: E731
    assert kept(planned(fun), (W,)) == 2 * HALF


def test_loops_keep_the_fewest_bytes():
    def fun(x, w, v):
        return head(lax.scan(lambda c, _: (layer(c, w) @ v + c, None), x, length=2)[0])

    carry, of_layer = 2 * 4 * N * D, 2 * HALF
    assert kept(planned(fun), (X, W, V), (0, 1, 2)) <= carry + of_layer + 4 * N * D


def test_gates_are_computed_again():
    """The cotangents of both parts are parts of one array, which one kernel writes."""

    def fun(x, w):
        y, gate = jnp.split(x @ w, 2, 1)
        return jnp.sum(jnp.tanh(jnp.tanh(y) * jax.nn.sigmoid(gate) @ w[:, :32].T))

    read = WIDE.size + NARROW.size
    assert kept(planned(fun), (WIDE, NARROW), (0, 1)) <= 2 * (
        64 * 64 + 64 * 32 + 64 * 16 + 2 * read
    )


def test_what_matmuls_read_is_written_in_16_bits():
    """A concatenation of rounded streams: its parts are kept, and it is written again."""

    def fun(x, w):
        a = x @ w + jnp.tanh(x) @ w
        b = x @ (w * 2) + jnp.sin(x) @ w
        both = jnp.concatenate([a, b], 1)
        both = both * jax.lax.rsqrt(jnp.mean(both**2, 1, keepdims=True) + 1e-3) + both
        return jnp.sum(jnp.tanh(both @ jnp.concatenate([w, w], 1).T))

    assert (
        kept(planned(fun), (WIDE, NARROW), (0, 1))
        <= 2 * (4 * 64 * 64) + 4 * 4 * WIDE.size + 4 * NARROW.size
    )


LEAN = {
    "norms and activations": lambda x, w: head(layer(layer(x, w), w) * jnp.mean(x**2)),
    "residual layers": lambda x, w: head(x + layer(x + jnp.tanh(x @ w), w) @ w),
    "a loop": lambda x, w: head(lax.scan(lambda c, _: (c + layer(c, w), None), x, length=3)[0]),
    "attention": lambda x, w: head(jax.nn.softmax((x @ w) @ x.T) @ layer(x, w)),
}


CASES = [*itertools.product(LEAN, ("bfloat16", "float16"))]


@pytest.mark.parametrize(("name", "half"), thorough_but(CASES, *range(0, len(CASES), 3)))
def test_no_setting_of_storage_changes_a_number(name, half):
    """Keeping and computing again are both exact: compilers round otherwise, in float32."""
    args, numbers = (X, W), (0, 1)
    fast, lean = (planned(LEAN[name], half, storage=s) for s in ("fast", "lean"))
    found, want = (jax.jit(jax.grad(f, numbers))(*args) for f in (lean, fast))
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5 * np.abs(y).max())
    assert kept(lean, args, numbers) <= kept(fast, args, numbers)


def test_lean_keeps_less():
    """What a matmul reads is written again, which costs as many bytes as it spares."""
    fun = lambda x, w, v: head(layer(x, w) @ v)  # noqa: E731
    fast, lean = (planned(fun, storage=s) for s in ("fast", "lean"))
    assert kept(lean, (X, W, V), (0, 1, 2)) == kept(fast, (X, W, V), (0, 1, 2)) - HALF


def test_lean_computes_again_in_turns():
    """Behind the cotangents that are read beside it, and not all at once."""

    def fun(x, w):
        for _ in range(4):
            x = x + layer(x, w) @ w
        return head(x)

    def held(storage):
        program = planned(fun, storage=storage)
        eqns = equations(jax.make_jaxpr(lambda *args: jax.grad(program, (0, 1))(*args))(X, W))
        return [len(e.invars) for e in eqns if e.primitive.name == "optimization_barrier"]

    assert len(held("fast")) <= 1 < 3 <= len(held("lean"))
