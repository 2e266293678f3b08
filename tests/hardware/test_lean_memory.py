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


def convolutions(params, x):
    for w in params:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=NUMBERS)
        mean = y.mean((0, 1, 2))
        y = (y - mean) * jax.lax.rsqrt(jnp.square(y - mean).mean((0, 1, 2)) + 1e-5)
        x = jax.nn.relu(x + y)
    return jnp.mean(x**2)


NUMBERS = ("NHWC", "HWIO", "NHWC")


def test_lean_storage_makes_the_largest_batch_grow():
    params = [shape(3, 3, 64, 64)] * 6
    largest = [
        mpjax.hardware.largest_batch(
            "h100",
            lambda batch: (params, shape(batch, 512, 512, 64)),
            jax.grad(mpjax.autocast(convolutions, policy)),
            limit=256,
        ).batch
        for policy in ("mixed_bfloat16", LEAN)
    ]
    assert largest[1] >= 1.2 * largest[0]
