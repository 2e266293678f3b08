"""Suite "cpu": what mpjax costs and gains on this machine's CPU, in minutes.

    python -m benchmarks --suite cpu [steps overhead dispatch ...]

    steps        small models trained by each rival
    overhead     gate, loss scale and masters over a step of plain optax with the same casts
    gates        the step's gate as a select and as a branch, over none
    dispatch     the host's time to hand over an almost empty step
    tracing      tracing and compiling by hand and under autocast
    reports      reports of overflow and underflow over a step without
    histogram    counting gradients over a step that does not
    instruments  find_nonfinite and compare over a gradient
    underflow    what float16 does to gradients, by loss scale and batch
    bf16_dots    half beside float32, where the CPU multiplies half
    quality      half's held-out quality, three seeds: a long case, run when it is named

Steps are timed in pairs, round after round (`benchmarks.on_cpu.paired`); each row says what else
ran on the machine. `benchmarks.on_cpu.goals` holds what is to be reached.
"""

from typing import Any

import click
import jax
from tqdm import tqdm

from benchmarks import Options
from benchmarks.on_cpu import (
    dispatch,
    dots,
    gates,
    goals,
    instruments,
    overhead,
    quality,
    reports,
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
    "underflow": underflow.case,
    "bf16_dots": dots.case,
    quality.CASE: quality.case,
}
LONG = (quality.CASE,)


def run(options: Options, results: Any) -> list[str]:
    """Measures what is missing or failed, and holds it against the goals; returns what failed."""
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
        except Exception as error:  # one row stops none of the others
            row = {FAILED: f"{type(error).__name__}: {str(error)[:300]}"}
            problems.append(f"{case}, {name}: {row[FAILED]}")
        results.put(case, name, row)
        jax.clear_caches()
    goals.judge(results)
    for name, row in results.cases[goals.CASE].items():
        click.echo(f"{name}: {goals.words(row)}")
    return problems
