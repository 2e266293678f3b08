"""The section on settings that save memory, for language models."""

from typing import Any

from benchmarks.ladder import FIGURES, FIRST, LEAN
from benchmarks.models import TITLES
from benchmarks.page.tables import shown, table, written
from benchmarks.results import FAILED, SKIPPED

NOTE = """Temporary memory and bytes moved on an H100: absolute, relative to `autocast`, and
relative to `storage=lean`. *Chunked loss* is `chunked_loss=true`, *fused attention* is
`fused_attention=true`, *linear_cross_entropy* is a chunked loss by a call, and *jax-cce* is a
package with such a function.
"""


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns a table for each model."""
    parts = [NOTE]
    head = ["setting"]
    for name, _, _ in FIGURES.values():
        head += [name, "to autocast", "to lean"]
    for case, found in stored["cases"].items():
        rows = [(shown(rung), *cells(row, found)) for rung, row in found.items() if figures_in(row)]
        parts.append(f"### Memory settings: {TITLES[case]}\n\n{table(head, rows)}")
    return "\n".join(parts)


def figures_in(row: dict[str, Any]) -> bool:
    return FAILED not in row and SKIPPED not in row


def cells(row: dict[str, Any], rows: dict[str, Any]) -> list[str]:
    """Returns the figures of a row, and their ratios to other rows."""
    texts = []
    for key, (_, unit, per) in FIGURES.items():
        texts.append(f"{row[key] / per:.2f} {unit}")
        texts += [written(row[key] / rows[other][key]) for other in (FIRST, LEAN)]
    return texts
