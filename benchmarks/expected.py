"""Suite "expected": times of steps on an H100 by `compile_for`, beside those that were measured.

    python -m benchmarks --suite expected [gpt2 llama resnet50 bert]

Every step of the suite ``gpu`` that was timed is compiled for an H100, without one, by the version
of mpjax whose step was timed: git has it. Its row has, for each kind of kernels, their number and
the times of their bytes and FLOPs, which a line through the measured times makes into constants:
`targets.PACES`. Each program is predicted by the constants of all others. Programs in float32 are
predicted too, but not fitted. Forecasts are steps that nobody has timed, compiled by this version.
Needs mpjax[aot] and a clone with its history; minutes.
"""

import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jax
import numpy as np
from scipy.optimize import lsq_linear

from benchmarks import HERE, RESULTS, Options
from benchmarks.results import FAILED, Results, Row
from mpjax._src.tools.hardware.hlo_costs import costs
from mpjax._src.tools.hardware.targets import Pace, Target, find_target
from mpjax._src.tools.hardware.times import PACE_OF, kernel_rows

SETTINGS = {"device": "none: compiled for an absent H100"}
TARGET, ROOT = "h100", HERE.parent
# By model, the commit whose steps were timed; `gpu.json` has the times.
TIMED = {"gpt2": "c5e2d81f", "llama": "834f71e2", "resnet50": "a3425928"}
# Steps that nobody has timed yet: the model, the way, and sizes that differ from those timed.
FORECASTS: dict[str, tuple[str, str, dict[str, int]]] = {
    "bert, mpjax fused": ("bert", "mpjax fused", {}),
    "gpt2, 50304 words, mpjax fused": ("gpt2", "mpjax fused", {"vocabulary": 50304}),
}
# Their first forecasts in milliseconds, of 2026-11-28, which constants of ten programs gave.
FIRST = {"bert, mpjax fused": 15.0, "gpt2, 50304 words, mpjax fused": 19.0}
CASES = (*TIMED, "bert")
FORECAST, FIT = "forecast", "fit"  # cases of the results beside the models

FIELDS = Pace._fields[:6]  # without the source
# The constants in their range: no kernel beats the roofline, and starting one takes CUDA from half
# a microsecond in a graph to two alone.
LEAST, MOST = (1, 1, 1, 1, 1, 0.5e-6), (3, 3, 6, 6, 4, 2e-6)

# Run in the folder of a version: compiles a step and stores its HLO.
COMPILE = """
import json, sys
from pathlib import Path
import jax
jax.config.update("jax_platforms", "cpu")
import mpjax
from benchmarks.on_gpu.cases import sizes_of
from benchmarks.on_gpu.jax_rivals import jitted, precisely, program_of

case, way, target, smoke, sizes, path = sys.argv[1:]
found = program_of(case, sizes_of(case, smoke == "True") | json.loads(sizes), way)
with precisely(way):
    report = mpjax.compile_for(target, jitted(found), found.state, found.batch, timeout=3600)
Path(path).write_text(report.hlo)
"""


def run(options: Options, results: Results) -> list[str]:
    """Compiles the steps that have no row yet, and predicts each by the others."""
    jax.config.update("jax_platforms", "cpu")  # compilers run in separate processes
    measured = {
        case: {way: row["ms"] for way, row in rows.items() if "ms" in row}
        for case, rows in _timed().items()
    }
    for case in options.cases:
        for way, ms in measured.get(case, {}).items():
            if not results.get(case, way):
                row = figures(case, way, {}, "" if options.smoke else TIMED[case], options.smoke)
                results.put(case, way, {**row, "ms": ms})
    for name, (case, way, sizes) in FORECASTS.items():
        if case in options.cases and not results.get(FORECAST, name):
            row = figures(case, way, {} if options.smoke else sizes, "", options.smoke)
            results.put(FORECAST, name, row)
    rows = {(c, w): row for c in TIMED for w, row in results.cases.get(c, {}).items()}
    broken = [f"{c}, {w}: {row[FAILED]}" for (c, w), row in rows.items() if FAILED in row]
    if not broken and len(rows) > len(FIELDS):
        predict(results.cases)
        results.write()
        click.echo(", ".join(f"{k} {v:.3g}" for k, v in results.cases[FIT]["all"].items()))
    return broken


def _timed() -> dict[str, dict[str, Row]]:
    stored = json.loads((RESULTS / "gpu.json").read_text())["cases"]
    return {case: stored[f"speed {case}"] for case in TIMED}


# ---- the constants -------------------------------------------------------------------------------


def predict(cases: dict[str, dict[str, Row]]) -> None:
    """Adds the constants to a suite's rows, and to each program what the others predict of it."""
    programs = {(c, w): row for c in TIMED for w, row in cases.get(c, {}).items()}
    fitted = [key for key in programs if "float32" not in key[1]]
    for key, row in programs.items():
        row["predicted_ms"] = time_of(row, fit(programs[k] for k in fitted if k != key))
    constants = fit(programs[key] for key in fitted)
    for row in cases.get(FORECAST, {}).values():
        row["predicted_ms"] = time_of(row, constants)
    misses = [abs(programs[key]["predicted_ms"] / programs[key]["ms"] - 1) for key in fitted]
    cases[FIT] = {
        "all": dict(zip(FIELDS, constants, strict=True)),
        "left out": {"mean": statistics.mean(misses), "most": max(misses), "programs": len(misses)},
    }


def fit(rows: Iterator[Row]) -> list[float]:
    """Returns the constants with the least squares of relative errors, in their range."""
    terms, times = zip(*((_terms(row) / row["ms"], 1.0) for row in rows), strict=True)
    # Where no program has a kind of kernels, its constant does not matter.
    found = lsq_linear(np.array(terms) * [*[1.0] * 5, 1e-6], times, _scaled(LEAST, MOST))
    return [*map(float, found.x[:5]), float(found.x[5]) * 1e-6]


def _scaled(*bounds: tuple[float, ...]) -> tuple[list[float], ...]:
    return tuple([*bound[:5], bound[5] * 1e6] for bound in bounds)


def time_of(row: Row, constants: list[float]) -> float:
    """Returns the milliseconds that constants predict of a program."""
    return float(_terms(row) @ constants)


def _terms(row: Row) -> np.ndarray:
    """Returns what each constant is multiplied by, in milliseconds; the last one in starts."""
    terms = dict.fromkeys(FIELDS, 0.0)
    for kind, found in row["kinds"].items():
        terms[PACE_OF.get(kind, "bandwidth")] += found["ms"]
        terms["start"] += found["runs"] * 1e3
    return np.array([*terms.values()])


# ---- the programs --------------------------------------------------------------------------------


def figures(case: str, way: str, sizes: dict[str, int], commit: str, smoke: bool) -> Row:
    """Compiles a step by a version of mpjax; returns what its kernels do."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "step.hlo"
        try:
            root = checked_out(commit, Path(folder)) if commit else ROOT
            given = (case, way, TARGET, str(smoke), json.dumps(sizes), str(path))
            command = [sys.executable, "-c", COMPILE, *given]
            env = {**os.environ, "PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
            subprocess.run(command, cwd=root, env=env, check=True, capture_output=True, text=True)
        except subprocess.CalledProcessError as error:
            lines = (error.stderr or "no answer").strip().splitlines()
            if "ImportError" in lines[-1]:  # without the compilers, no program would compile
                raise click.ClickException(lines[-1]) from error
            return {FAILED: lines[-1][:200]}
        return {
            **counted(path.read_text(), find_target(TARGET)),
            "commit": commit,
            "seconds": _since(start),
        }


def counted(text: str, target: Target) -> Row:
    """Returns what the kernels of an optimized HLO module do on a target, by kind."""
    found = costs(text)
    rows: Any = kernel_rows(target, text, found)
    return {
        "gb": round(found.bytes / 1e9, 3),
        "kernels": sum(row.runs for row in rows),
        "short": sum(row.short for row in rows),
        "kernels_ms": round(sum(row.bound_ms for row in rows), 3),
        "kinds": {
            row.kind: {
                "runs": row.runs,
                "gb": round(row.bytes / 1e9, 3),
                "gflop": round(row.flops / 1e9, 1),
                "ms": round(row.bound_ms, 4),
            }
            for row in rows
        },
    }


def checked_out(commit: str, folder: Path) -> Path:
    """Returns a folder with the packages of a commit of this repository."""
    archive, root = folder / "version.tar", folder / "version"
    command = ["git", "archive", "-o", str(archive), commit, "mpjax", "benchmarks"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    with tarfile.open(archive) as packed:
        packed.extractall(root, filter="data")
    return root


def _since(start: float) -> float:
    return round(time.monotonic() - start, 1)
