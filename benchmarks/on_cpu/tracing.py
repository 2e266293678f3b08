"""Case "tracing": the cost of tracing and compiling a gradient before its first step.

Seconds are CPU time, the best of several repetitions; the ways are measured in turns, with JAX's
caches cleared. The number of function calls does not change from run to run. Suite "scaling"
measures how the cost grows with the number of layers.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

import mpjax
from benchmarks.models import MODELS, SMALL
from benchmarks.on_cpu.steps import ROWS
from benchmarks.scaling import POLICY, traced, tracing_row

PAIRS = (("autocast", "float32"), ("autocast", "by hand"), ("by hand", "float32"))
TRACED = ("gpt2", "resnet50", "lstm")
REPEATS = 3


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    sizes = {"ode": SMALL["ode"]} if smoke else {model: ROWS[model][1] for model in TRACED}
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
