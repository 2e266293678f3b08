"""The section on a session on a lent GPU: what was predicted, and what was found."""

from typing import Any

from benchmarks.on_gpu.statistics import quotient
from benchmarks.page.tables import table
from benchmarks.results import FAILED, SKIPPED

NOTE = """Each step has a question, and some a prediction for an H100 from before it was timed.
*Expected* is `CompileReport.expected_ms` on this device. *Ratio* is relative to the first step of
the same model, in the same rounds.
"""
COLUMNS = ("step", "question", "predicted", "expected", "measured", "ratio")


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the table of all steps, and one of the kinds of kernels in each traced step."""
    steps = {name: rows["step"] for name, rows in stored["cases"].items() if "step" in rows}
    parts = [NOTE, table(COLUMNS, (_cells(name, row) for name, row in steps.items()))]
    for name, row in steps.items():
        if kinds := row.get("traced", {}).get("kinds"):
            head = (f"{name}: kernels", "at least, ms", "measured, ms")
            bounds = {kind: found["ms"] for kind, found in row["kinds"].items()}
            cells = ((kind, _ms(bounds.get(kind)), _ms(ms)) for kind, ms in kinds.items())
            parts.append(table(head, cells))
    return "\n".join(parts)


def _cells(name: str, row: dict[str, Any]) -> tuple[str | None, ...]:
    if why := row.get(FAILED) or row.get(SKIPPED):
        return name, why, *[None] * 4
    times = (_ms(row[key]) for key in ("predicted_ms", "expected_ms", "ms"))
    return name, row["question"], *times, quotient(row["ratio"]) if "ratio" in row else None


def _ms(found: float | None) -> str | None:
    return None if found is None else f"{found:.2f}"
