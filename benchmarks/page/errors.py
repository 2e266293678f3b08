"""The section on what `explain` reports of errors, beside measurements."""

from typing import Any

from benchmarks.models import TITLES
from benchmarks.page.tables import shown, table

NOTE = """
Models at small sizes, and a larger GPT. Each operation that rounds was measured or, in the larger
GPT, a sample of these: the error of the gradient with it alone in 16 bits. *rank* is the rank
correlation of these errors with the estimates by 4 and by 8 random vectors; *ten largest* the
largest factor between the two among the ten largest errors. *as shown* is that factor for the
first ten rows of the report, which measures them. *adds up* is what the report says: whether the
estimates explain the error. *beside compare* is the measured error of all together, relative to
what `compare` finds (the median of all results). *time* is that of the estimates by 8 random
vectors, in float32 gradients: a vector is a reverse pass through the gradient, parts of which are
computed again for it; on CPUs, roundings of small arrays take longer than their float32 gradient.
At small sizes it depends on what else the machine does: only the larger GPT says what to expect.
*memory*, beside the arguments, is relative to that gradient's without `jax.checkpoint`: what the
parts hand on is kept for all vectors, and beside it lie its cotangents and one part's own values.
"""
FIGURES = {
    "rows": "{}",
    "error": "{:.2%}",
    "rank_4": "{:.3f}",
    "rank_8": "{:.3f}",
    "factor_4": "{:.2f}x",
    "factor_8": "{:.2f}x",
    "shown": "{:.2f}x",
    "to_compare": "{:.3f}x",
    "gradients": "{:.0f}",
    "memory": "{:.1f}x",
}
HEAD = (
    *("model", "policy", "adds up", "rows", "error", "rank, 4", "rank, 8", "ten largest, 4"),
    *("ten largest, 8", "as shown", "beside compare", "time", "memory"),
)


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns the table of all models."""
    rows = [
        (
            TITLES.get(case) or shown(case),
            policy,
            "yes" if row["first_order"] else "no",
            *(text.format(row[figure]) for figure, text in FIGURES.items()),
        )
        for case, found in stored["cases"].items()
        for policy, row in found.items()
    ]
    large = {row[0] for row in rows if float(row[-1][:-1]) > 4}
    above = f"Above 4x: {', '.join(sorted(large))}.\n" * bool(large)
    return f"{NOTE[1:]}{above}\n{table(HEAD, rows, 3)}"
