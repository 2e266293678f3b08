"""The table of docs/watching.md: what a watched step takes, over one that nobody watches."""

from typing import Any

from benchmarks.page.charts import Chart
from benchmarks.page.tables import table

NOTE = """`moved` and `temp`: bytes that a step moves, and its temporary memory, over those of the
step that nobody watches.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns the table, and no charts."""
    rows = [
        (model, name, f"{row['bytes']:.2f}x", f"{row['temp']:.2f}x")
        for model, found in stored["cases"].items()
        for name, row in found.items()
    ]
    return f"{table(['model', 'step', 'moved', 'temp'], rows)}\n{NOTE}", {}
