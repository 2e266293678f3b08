"""The section of docs/performance.md on settings that save memory, for language models."""

from typing import Any

from benchmarks.ladder import FIGURES, FIRST, LEAN
from benchmarks.models import TITLES
from benchmarks.page.charts import Chart
from benchmarks.page.tables import table, written
from benchmarks.results import FAILED, SKIPPED

NOTE = """Temporary memory and bytes moved, first relative to `autocast`, then to `storage=lean`.
"chunked loss" is `chunked_loss=true`, "linear_cross_entropy" the same by a call, and "jax-cce" a
package with such a function.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns a table for each model. There are no charts."""
    parts = [NOTE]
    head = ["setting", "memory", "", "", "bytes moved", "", ""]
    for case, found in stored["cases"].items():
        rows = [(rung, *cells(row, found)) for rung, row in found.items() if figures_in(row)]
        parts.append(f"{TITLES[case]}:\n\n{table(head, rows)}")
    return "\n".join(parts), {}


def figures_in(row: dict[str, Any]) -> bool:
    return FAILED not in row and SKIPPED not in row


def cells(row: dict[str, Any], rows: dict[str, Any]) -> list[str]:
    """Returns the figures of a row, and their ratios to other rows."""
    texts = []
    for key, (_, unit, per) in FIGURES.items():
        texts.append(f"{row[key] / per:.2f} {unit}")
        texts += [written(row[key] / rows[other][key]) for other in (FIRST, LEAN)]
    return texts
