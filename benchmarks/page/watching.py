"""The table of docs/watching.md: the cost of a watched step relative to one without watching."""

from typing import Any

from benchmarks.page.charts import Chart
from benchmarks.page.tables import table

NOTE = """Bytes that a step moves, its temporary memory and the time that it takes to compile, all
relative to the same step without watching.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns the table. There are no charts."""
    rows = []
    for model, found in stored["cases"].items():
        base = next(iter(found.values()))["seconds"]
        for name, row in found.items():
            ratios = row["bytes"], row["temp"], row["seconds"] / base
            rows.append((model, name, *(f"{ratio:.2f}x" for ratio in ratios)))
    return f"{table(['model', 'step', 'moved', 'temp', 'compiling'], rows)}\n{NOTE}", {}
