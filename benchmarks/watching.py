"""Suite "watching": what a training step takes that is watched, compiled for an H100.

    python -m benchmarks --suite watching [gpt2 resnet50]

Of each model `build_train_step`'s step under mixed_bfloat16, its state donated: as it is ("not
watched"); as `watch_precision` runs it between samples; and as it runs a sample. Per row temporary
memory and bytes moved, loops by their turns and library calls counted; and both over those of the
first row. Needs mpjax[aot].
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
    """Compiles what is not measured yet."""
    for model in options.cases:
        found = program(model, "build_train_step", HALF, **(SMALL[model] if options.smoke else {}))
        compiled: dict[Any, Row] = {}  # the same program need not be compiled twice
        for name, step in steps(found.step).items():
            row = results.get(model, name) or compiled.get(step) or figures(step, found)
            over = next(iter(compiled.values()), row)
            row["temp"] = round(row["temp_mib"] / over["temp_mib"], 3)
            row["bytes"] = round(row["moved_gb"] / over["moved_gb"], 3)
            if not results.get(model, name):
                results.put(model, name, row)
            compiled.setdefault(step, row)


def steps(step: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Returns the programs that a loop runs, by what they are."""
    jitted = jax.jit(step, donate_argnums=0)
    return {
        "not watched": jitted,
        "watched, not sampled": mpjax.watch_precision(jitted).step,
        "watched, sampled": jax.jit(mpjax.measure_precision(step), donate_argnums=0),
    }


def figures(step: Callable[..., Any], found: Any) -> Row:
    """Compiles a step; returns its figures."""
    start = time.monotonic()
    report = mpjax.compile_for(TARGET, step, found.state, found.batch, timeout=TIMEOUT)
    return {
        "dtype": HALF,
        "temp_mib": round(report.temp_bytes / 2**20, 3),
        "moved_gb": round(report.bytes_accessed / 1e9, 4),
        "seconds": round(time.monotonic() - start, 1),
    }
