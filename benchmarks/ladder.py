"""The ladder of settings that save memory, on language models compiled for an absent H100.

    python -m benchmarks --suite ladder [gpt2 llama ...]

Each rung adds a setting to the policy. A row has what a row of the aot suite has. The table shows
the temporary memory and the bytes moved, and both relative to the first rung and to
`storage=lean`. A rung whose setting this version does not have is skipped. Needs mpjax[aot].
"""

import click

from benchmarks import Options
from benchmarks.aot import SETTINGS, figures, on_the_cpu
from benchmarks.models import SMALL, TITLES
from benchmarks.results import FAILED, SKIPPED, Results, Row
from benchmarks.rivals import LADDER

__all__ = ["SETTINGS"]

CASES = ("gpt2", "llama", "llama_unrolled", "gpt2_medium")
LONG = ("gpt2_medium",)
FIRST, LEAN = "autocast", "autocast, lean"
FIGURES = {"temp_mib": ("memory", "GiB", 2**10), "looped_gb": ("bytes moved", "GB", 1)}


def run(options: Options, results: Results) -> None:
    """Compiles the rows that are missing, and prints a table for each model."""
    on_the_cpu()
    for case in options.cases:
        sizes = SMALL[case] if options.smoke else {}
        for rung in LADDER:
            if not results.get(case, rung):
                results.put(case, rung, figures("h100", case, rung, sizes))
        click.echo(table(case, results.cases[case]))


def table(case: str, rows: dict[str, Row]) -> str:
    """Returns the rungs of a model as text."""
    lines = [f"\n{TITLES[case]}", f"{'':<48}" + "".join(f"{x[0]:>31}" for x in FIGURES.values())]
    for rung, row in rows.items():
        if reason := row.get(FAILED) or row.get(SKIPPED):
            lines.append(f"{rung:<48}  {reason[:60]}")
            continue
        cells = []
        for key, (_, unit, per) in FIGURES.items():
            ratios = [
                f"{row[key] / rows[other][key]:.3f}x" if key in rows.get(other, {}) else ""
                for other in (FIRST, LEAN)
            ]
            cells.append(f"{row[key] / per:>12.2f} {unit:<3}{ratios[0]:>7}{ratios[1]:>8}")
        lines.append(f"{rung:<48}" + "".join(cells))
    return "\n".join([*lines, "(ratios: to the first row, and to storage=lean)"])
