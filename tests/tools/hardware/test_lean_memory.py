"""storage=lean on an H100 that need not be there: memory, bytes, and what runs twice."""

import jax
import jax.numpy as jnp
import pytest
from absent import compiles, shape

import mpjax
from benchmarks.models import MODELS, training_step

pytestmark = [pytest.mark.thorough, compiles("h100")]

LEAN = "mixed_bfloat16,storage=lean"


def compiled(wrap=lambda loss: loss, **arguments):
    loss, params, rest, batch, optimizer = MODELS["resnet50"](**arguments)
    step = jax.jit(training_step(wrap(loss), optimizer), donate_argnums=0)
    state = params, rest, jax.eval_shape(optimizer.init, params)
    return mpjax.compile_for("h100", step, state, batch)


def test_lean_storage_of_resnet50_takes_less_memory_than_casts_by_hand():
    hand = compiled(dtype=jnp.bfloat16)
    lean = compiled(lambda loss: mpjax.autocast(loss, LEAN))
    assert lean.temp_bytes <= 0.75 * hand.temp_bytes
    key = "bytes accessed"
    assert lean.xla_costs[key] <= 1.15 * hand.xla_costs[key]
    count = [sum(row.runs for row in report.matmuls) for report in (hand, lean)]
    assert count[0] == count[1]


NUMBERS = ("NHWC", "HWIO", "NHWC")
PARAMS = [shape(3, 3, 64, 64)] * 6


def normalized(x, w):
    y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS)
    mean = y.mean((0, 1, 2))
    return (y - mean) * jax.lax.rsqrt(jnp.square(y - mean).mean((0, 1, 2)) + 1e-5)


def residual_blocks(params, x):
    """The basic blocks of a ResNet: two convolutions, then the sum."""
    for first, second in zip(params[::2], params[1::2], strict=True):
        x = jax.nn.relu(x + normalized(jax.nn.relu(normalized(x, first)), second))
    return jnp.mean(x**2)


def sum_after_each_convolution(params, x):
    for w in params:
        x = jax.nn.relu(x + normalized(x, w))
    return jnp.mean(x**2)


def test_lean_storage_makes_the_largest_batch_grow():
    largest = [
        mpjax.hardware.largest_batch(
            "h100",
            lambda batch: (PARAMS, shape(batch, 512, 512, 64)),
            jax.grad(mpjax.autocast(residual_blocks, policy)),
            limit=256,
        ).batch
        for policy in ("mixed_bfloat16", LEAN)
    ]
    assert largest[1] >= 1.2 * largest[0]


def test_lean_storage_saves_little_of_a_sum_after_each_convolution_and_a_number_half():
    """The sums are computed again together, so XLA writes them all before it reads one.

    Close to the limit of a device, XLA recomputes parts of the default, which lean has no more: the
    largest batch, 104 on an H100, is 90 with lean. This batch is far from the limit.
    """
    default, lean, number = (
        mpjax.compile_for(
            "h100",
            jax.grad(mpjax.autocast(sum_after_each_convolution, policy)),
            PARAMS,
            shape(64, 512, 512, 64),
        ).temp_bytes
        for policy in ("mixed_bfloat16", LEAN, "mixed_bfloat16,storage=0.5")
    )
    assert lean <= 0.96 * default
    assert number <= 0.55 * lean
