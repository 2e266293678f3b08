"""Suite "watching": the cost of a watched training step, compiled for an H100.

    python -m benchmarks --suite watching [gpt2 resnet50]

The steps are those of `build_train_step` under mixed_bfloat16, with the state donated. The rows of
a model are: the step without watching ("not watched"), the step that `watch_precision` runs between
samples, and the step that takes a sample. A row contains temporary memory, bytes moved (loop
iterations and library calls are counted), and their ratios to the first row. Needs mpjax[aot].
"""

import time
from collections.abc import Callable
from typing import Any

import jax

import mpjax
from benchmarks import Options
from benchmarks.models import SMALL
from benchmarks.results import Results, Row
from benchmarks.rivals import program

jax.config.update("jax_platforms", "cpu")

SETTINGS = {"device": "none: compiled for an absent H100"}
CASES = ("gpt2", "resnet50")
TARGET, HALF, TIMEOUT = "h100", "bfloat16", 3600


def run(options: Options, results: Results) -> None:
    """Compiles the programs that have no row yet."""
    for model in options.cases:
        found = program(model, "build_train_step", HALF, **(SMALL[model] if options.smoke else {}))
        compiled: dict[Any, Row] = {}  # identical programs are compiled once
        for name, step in steps(found.step).items():
            row = results.get(model, name) or compiled.get(step) or figures(step, found)
            over = next(iter(compiled.values()), row)
            row["temp"] = round(row["temp_mib"] / over["temp_mib"], 3)
            row["bytes"] = round(row["moved_gb"] / over["moved_gb"], 3)
            if not results.get(model, name):
                results.put(model, name, row)
            compiled.setdefault(step, row)


def steps(step: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns the programs that a training loop runs, by name."""
    jitted = jax.jit(step, donate_argnums=0)
    return {
        "not watched": jitted,
        "watched, not sampled": mpjax.watch_precision(jitted).step,
        "watched, sampled": jax.jit(mpjax.debug.measure_precision(step), donate_argnums=0),
    }


def figures(step: Callable[..., Any], found: Any) -> Row:
    """Compiles a step and returns its figures."""
    start = time.monotonic()
    report = mpjax.compile_for(TARGET, step, found.state, found.batch, timeout=TIMEOUT)
    return {
        "dtype": HALF,
        "temp_mib": round(report.temp_bytes / 2**20, 3),
        "moved_gb": round(report.bytes_accessed / 1e9, 4),
        "seconds": round(time.monotonic() - start, 1),
    }
