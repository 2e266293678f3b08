"""The section of a suite without its own module: its ratios, or the other figures of its rows."""

from typing import Any

from benchmarks.page.tables import UNKNOWN, above, shortfalls, table, written
from benchmarks.results import FAILED, SKIPPED

OURS = ("autocast", "mpjax")


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns a table of all ratios, and one of the rows without ``ratios``.

    A ratio is a number, or has a ``median`` and ``quartiles``; its name is "ours / theirs".
    """
    ratios, others, short = [], [], []
    for case, rivals in stored["cases"].items():
        for rival, row in rivals.items():
            for name, found in row.get("ratios", {}).items():
                value = found["median"] if isinstance(found, dict) else found
                quartiles = found.get("quartiles") if isinstance(found, dict) else None
                spread = "{:.2f} to {:.2f}".format(*quartiles) if quartiles else None
                # Only ratios of ours to others need a cause.
                ours = name.startswith(OURS)
                ratios.append((case, name, written(value) if ours else f"{value:.2f}x", spread))
                if ours and above(value):
                    cause = causes.get(case, {}).get(name, UNKNOWN)
                    short.append((case, name, value, cause))
            if "ratios" not in row:
                others.append((case, rival, _words(row)))
    text = table(("case", "ratio", "median", "quartiles"), ratios) if ratios else ""
    if ratios:
        text += "\n" + shortfalls(short)
    if others:
        text += "\n" + table(("case", "row", "figures"), others)
    return text


def _words(row: dict[str, Any]) -> str:
    for reason in (SKIPPED, FAILED):
        if reason in row:
            return f"{reason}: {row[reason]}"
    flat = {k: v for k, v in row.items() if isinstance(v, int | float | str)}
    return ", ".join(
        f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in flat.items()
    )
