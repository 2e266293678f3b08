"""Suite "cpu": what mpjax costs and gains on this machine's CPU, in minutes.

    python -m benchmarks --suite cpu [steps overhead dispatch ...]

    steps        small models trained by each rival
    overhead     gate, loss scale and masters, relative to plain optax with the same casts
    gates        the step's gate as a select and as a branch, relative to no gate
    dispatch     the host's time to dispatch an almost empty step
    tracing      tracing and compiling by hand and under autocast
    reports      reports of overflow and underflow, relative to a step without reports
    histogram    histograms of gradients, relative to a step without histograms
    instruments  find_nonfinite and compare, relative to a gradient
    checkpoints  checksums, relative to a save and to a restore without them
    underflow    the error of float16 gradients, by loss scale and batch
    codes        the error of gradients by what the backward pass reads, for each model
    searches     tune beside the searches of others, on sums of errors and on programs
    bf16_dots    half beside float32, on CPUs that multiply half
    inference    forward passes with bfloat16 weights beside float32 ones, by batch
    quality      half's held-out quality, three seeds: a long case, which runs only when named

Steps are timed in pairs, round after round (`benchmarks.on_cpu.paired`). Each row records how busy
other processes kept the machine. The goals are in `benchmarks.on_cpu.goals`.
"""

from typing import Any

import click
import jax
from tqdm import tqdm

from benchmarks import Options
from benchmarks.on_cpu import (
    checkpoints,
    codes,
    dispatch,
    dots,
    gates,
    goals,
    inference,
    instruments,
    overhead,
    quality,
    reports,
    searches,
    steps,
    tracing,
    underflow,
)
from benchmarks.on_cpu.others import watched
from benchmarks.results import FAILED

jax.config.update("jax_platforms", "cpu")

CASES = {
    "steps": steps.case,
    "overhead": overhead.case,
    "gates": gates.case,
    "dispatch": dispatch.case,
    "tracing": tracing.case,
    "reports": reports.reports,
    "histogram": reports.histogram,
    "instruments": instruments.case,
    "checkpoints": checkpoints.case,
    "underflow": underflow.case,
    "codes": codes.case,
    "searches": searches.case,
    "bf16_dots": dots.case,
    "inference": inference.case,
    quality.CASE: quality.case,
}
LONG = (quality.CASE,)


def run(options: Options, results: Any) -> list[str]:
    """Measures missing and failed rows, and compares them with the goals; returns the failures."""
    todo = [
        (case, name, measure)
        for case in options.cases
        for name, measure in CASES[case](options.smoke)
        if FAILED in (results.get(case, name) or FAILED)
    ]
    problems = []
    for case, name, measure in tqdm(todo, unit="row", disable=None):
        try:
            row = watched(measure)
        except Exception as error:  # a failed row does not stop the others
            row = {FAILED: f"{type(error).__name__}: {str(error)[:300]}"}
            problems.append(f"{case}, {name}: {row[FAILED]}")
        results.put(case, name, row)
        jax.clear_caches()
    goals.judge(results)
    for name, row in results.cases[goals.CASE].items():
        click.echo(f"{name}: {goals.words(row)}")
    return problems
