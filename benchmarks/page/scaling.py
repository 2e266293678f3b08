"""The section of the scaling suite: a row for each size, with its ratios side by side."""

from typing import Any

from benchmarks.on_gpu.tables import reason
from benchmarks.page.tables import UNKNOWN, above, prose, shortfalls, shown, table, written

# The heading of each case, and what is said above its table.
SAYS = {
    "layers": (
        "Tracing and compile time by number of layers",
        "A Llama whose layers are unrolled in Python",
    ),
    "programs": (
        "Tracing time of large programs",
        "GPT-2, and neural ODEs with unrolled steps",
    ),
    "batch": (
        "Memory by batch",
        "Temporary memory of GPT-2 with four layers, compiled for an H100",
    ),
    "devices": (
        "Memory and bytes sent by number of devices",
        "A data-parallel step, compiled for H100s",
    ),
    "wire": (
        "Bytes sent by sharding",
        "What each of eight H100s sends in a step, by how the state is sharded",
    ),
    "steps": ("Growth over many steps", "Arrays, memory and compilations may not grow"),
}


def section(stored: dict[str, Any], causes: dict[str, Any]) -> str:
    """Returns a table for each case, and the largest of each ratio above 1."""
    parts, worst = [], {}
    for case, rows in stored["cases"].items():
        title, says = SAYS.get(case, (case, case))
        parts.append(f"### {title}\n\n{says}.\n")
        names = list(dict.fromkeys(n for row in rows.values() for n in row.get("ratios", {})))
        if names:
            cells = [(shown(size), *map(written, ratios(row, names))) for size, row in rows.items()]
            parts.append(table(("size", *map(shown, names)), cells))
            sent = {size: row["sent_mib"] for size, row in rows.items() if "sent_mib" in row}
            if sent:
                cells = [(size, *map(amounts, found.values())) for size, found in sent.items()]
                head = ("MiB sent by each device", *next(iter(sent.values())))
                parts.append(prose(head, cells))
        else:
            parts.append(prose(("policy", "growth"), [(k, words(row)) for k, row in rows.items()]))
        for name in names:
            found = [value for row in rows.values() for value in ratios(row, [name]) if value]
            worst[case, name] = max(found)
    short = [
        (SAYS.get(case, [case])[0], shown(name), value, causes.get(case, {}).get(name, UNKNOWN))
        for (case, name), value in worst.items()
        if above(value)
    ]
    return "\n".join((*parts, shortfalls(short)))


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
    units = {"mib": "MiB"}
    return reason(row) or f"in {row['steps']:,} steps: " + ", ".join(
        f"{value:.3g} {units.get(name, name)}" for name, value in grown.items()
    )
