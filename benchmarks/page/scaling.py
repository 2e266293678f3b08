"""The section of the scaling suite: a row for each size, with its ratios side by side."""

from typing import Any

from benchmarks.on_gpu.tables import reason
from benchmarks.page.charts import Chart
from benchmarks.page.tables import above, shortfalls, table, written


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns a table for each case, and the largest of each ratio above 1."""
    parts, worst = [], {}
    for case, rows in stored["cases"].items():
        names = list(dict.fromkeys(n for row in rows.values() for n in row.get("ratios", {})))
        if names:
            cells = [(size, *map(written, ratios(row, names))) for size, row in rows.items()]
            parts.append(table((case, *names), cells))
            sent = {size: row["sent_mib"] for size, row in rows.items() if "sent_mib" in row}
            if sent:
                cells = [(size, *map(amounts, found.values())) for size, found in sent.items()]
                parts.append(table(("MiB sent by each device", *next(iter(sent.values()))), cells))
        else:
            parts.append(table((case, "figures"), [(k, words(row)) for k, row in rows.items()]))
        for name in names:
            found = [value for row in rows.values() for value in ratios(row, [name]) if value]
            worst[case, name] = max(found)
    short = [
        (case, name, value, causes.get(case, {}).get(name, "not known"))
        for (case, name), value in worst.items()
        if above(value)
    ]
    return "\n".join((*parts, shortfalls(short))), {}


def ratios(row: dict[str, Any], names: list[str]) -> list[float | None]:
    return [row.get("ratios", {}).get(name) for name in names]


def amounts(sent: dict[str, dict[str, float]]) -> str:
    """Returns the amounts that are sent in each dtype, as text."""
    kinds = {
        what: ", ".join(f"{dtype} {mib:.3g}" for dtype, mib in found.items())
        for what, found in sent.items()
        if found
    }
    return "; ".join(f"{what} {mib}" for what, mib in kinds.items())


def words(row: dict[str, Any]) -> str:
    grown = {k.removesuffix("_grown_by"): v for k, v in row.items() if k.endswith("_grown_by")}
    return reason(row) or f"growth in {row['steps']} steps: " + ", ".join(
        f"{name} {value:.3g}" for name, value in grown.items()
    )
