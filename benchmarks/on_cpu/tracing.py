"""Case "tracing": what tracing and compiling a gradient takes, before its first step.

Seconds are of CPU, the best of several, the ways in turn with JAX's caches cleared; calls of
functions are counted, which does not change from run to run. How it grows with layers is suite
"scaling".
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import mpjax
from benchmarks.models import MODELS, SMALL
from benchmarks.on_cpu.steps import SIZES
from benchmarks.scaling import POLICY, traced, tracing_row

PAIRS = (("autocast", "float32"), ("autocast", "by hand"), ("by hand", "float32"))
REPEATS = 3


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    sizes = {"ode": SMALL["ode"]} if smoke else SIZES
    for model in sizes:
        yield model, functools.partial(row, model, sizes[model], 1 if smoke else REPEATS)


def row(model: str, sizes: dict[str, Any], repeats: int) -> dict[str, Any]:
    loss, *arguments, _ = MODELS[model](**sizes)
    ways = {
        "float32": loss,
        "by hand": MODELS[model](dtype=jnp.bfloat16, **sizes)[0],
        "autocast": mpjax.autocast(loss, POLICY),
    }
    return tracing_row(traced(ways, arguments, repeats, compiles=True), PAIRS)
