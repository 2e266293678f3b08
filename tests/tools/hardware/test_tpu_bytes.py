"""Autocast's memory and bytes on an absent TPU, beside casts by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from absent import compiles, shape

import mpjax
from benchmarks.rivals import program

pytestmark = [pytest.mark.thorough, compiles("v5e")]


class Blocks(nn.Module):
    """Group norms over four channels each, as a diffusion U-Net has them."""

    dtype: jnp.dtype | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Conv(128, (3, 3), dtype=self.dtype)(x)
        for _ in range(3):
            normed = nn.GroupNorm(32, dtype=self.dtype)(x)
            x = x + nn.Conv(128, (3, 3), dtype=self.dtype)(nn.silu(normed))
        return jnp.mean(jnp.square(x.astype(jnp.float32)))


def test_autocast_group_norms_take_no_more_than_by_hand_on_a_tpu():
    x = shape(32, 32, 32, 128)
    params = jax.eval_shape(Blocks().init, jax.random.key(0), x)
    auto = mpjax.autocast(lambda p, x: Blocks().apply(p, x), "mixed_bfloat16")
    reports = [
        mpjax.compile_for("v5e", jax.grad(fun), params, x)
        for fun in (auto, lambda p, x: Blocks(jnp.bfloat16).apply(p, x))
    ]
    ours, hand = reports
    assert ours.temp_bytes <= 1.05 * hand.temp_bytes
    assert ours.bytes_accessed <= 1.05 * hand.bytes_accessed


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="what an island alone reads is float32: a TPU's compiler stores the matmul's result so",
)
def test_no_barrier_keeps_what_a_tpu_computes_again_by_itself():
    def compiled(rival):
        found = program("convnext", rival, "bfloat16", blocks=(1, 1), widths=(96, 192))
        step = jax.jit(found.step, donate_argnums=0)
        return mpjax.compile_for("v5e", step, found.state, found.batch)

    ours, hand = compiled("autocast"), compiled("by hand")  # 0.81 and 0.77 of it
    assert ours.temp_bytes <= 0.9 * hand.temp_bytes
    assert ours.bytes_accessed <= 0.85 * hand.bytes_accessed
