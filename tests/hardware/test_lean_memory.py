"""storage=lean on an H100 that need not be there: memory, bytes, and what runs twice."""

import importlib.util
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from absent import compiles, shape

import mpjax

pytestmark = [pytest.mark.slow, compiles("h100")]

LEAN = "mixed_bfloat16,storage=lean"


@pytest.fixture(scope="module")
def models():
    """The models of the benchmarks."""
    path = Path(__file__).parents[2] / "benchmarks" / "models.py"
    spec = importlib.util.spec_from_file_location("benchmark_models", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def compiled(models, wrap=lambda loss: loss, **arguments):
    loss, params, rest, batch, optimizer = models.resnet50(**arguments)
    step = jax.jit(models.training_step(wrap(loss), optimizer), donate_argnums=0)
    state = params, rest, jax.eval_shape(optimizer.init, params)
    return mpjax.compile_for("h100", step, state, batch)


def test_resnet50_beside_casts_by_hand(models):
    hand = compiled(models, dtype=jnp.bfloat16)
    lean = compiled(models, lambda loss: mpjax.autocast(loss, LEAN))
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


def test_the_largest_batch_grows():
    params = [shape(3, 3, 64, 64)] * 6
    largest = [
        mpjax.largest_batch(
            "h100",
            lambda batch: (params, shape(batch, 512, 512, 64)),
            jax.grad(mpjax.autocast(convolutions, policy)),
            limit=256,
        ).batch
        for policy in ("mixed_bfloat16", LEAN)
    ]
    assert largest[1] >= 1.2 * largest[0]
