"""The table of docs/watching.md: the cost of a watched step relative to one without watching."""

from typing import Any

from benchmarks.page.tables import table

NOTE = """Bytes moved by a step, its temporary memory and its compile time, relative to the same
step without watching.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the table."""
    rows = []
    for model, found in stored["cases"].items():
        base = next(iter(found.values()))["seconds"]
        for name, row in found.items():
            ratios = row["bytes"], row["temp"], row["seconds"] / base
            rows.append((model, name, *(f"{ratio:.2f}x" for ratio in ratios)))
    return f"{table(['model', 'step', 'bytes moved', 'memory', 'compile time'], rows)}\n{NOTE}"
