"""The section of the gpu suite: its goals, and mpjax's steps relative to its rivals'."""

from typing import Any

from benchmarks.models import TITLES
from benchmarks.on_gpu import goals
from benchmarks.on_gpu.speed import OURS
from benchmarks.on_gpu.statistics import quotient
from benchmarks.on_gpu.tables import reason, text
from benchmarks.page.charts import Chart
from benchmarks.page.tables import MET, above, shortfalls, table, written

PREDICTED = """What `compile_for` predicts without the device, relative to what was measured: the
most memory in use while steps run, the memory of the executable that the device compiled after
tuning its kernels, and the bytes that this executable moves by the same count.
"""
RATIOS = ("predicted_over_peak", "predicted_over_compiled", "predicted_over_gb")


def section(stored: dict[str, Any], causes: dict[str, Any]) -> tuple[str, dict[str, Chart]]:
    """Returns the goals, a table of steps for each model, and the ratios above 1.00x."""
    rows = stored["cases"]
    judged = [
        (name, text(row["bound"]), text(row["found"]), MET[row["met"]])
        for name, row in goals.found(rows)
    ]
    parts = [
        "A time is the median ratio over rounds, with its 95% bootstrap interval in brackets.\n",
        table(("goal", "bound", "found", ""), judged),
    ]
    short = []
    for case, rivals in rows.items():
        part, _, model = case.partition(" ")
        if part != "speed":
            continue
        parts.append(f"### {TITLES[model]}\n")
        parts.append(
            table(
                ("relative to", *OURS, "not measured because"),
                [_beside(*row) for row in rivals.items()],
            )
        )
        for name, ratio in _ratios(rivals):
            if above(ratio["median"]):
                cause = causes.get(model, {}).get(name, "not known")
                short.append((TITLES[model], name, ratio["median"], cause))
    parts += ["### What compilers without the device predict\n", PREDICTED, _predictions(rows)]
    return "\n".join((*parts, shortfalls(short))), {}


def _predictions(rows: dict[str, Any]) -> str:
    """Returns the table of predicted memory and bytes relative to the device's."""
    header = ("model, program", "memory, of the peak", "memory, of the program's", "bytes moved")
    found = [
        (
            f"{TITLES[case.removeprefix('memory ')]}, {way}",
            *(f"{row[key]:.3f}" if key in row else None for key in RATIOS),
        )
        for case, ways in rows.items()
        if case.startswith("memory ")
        for way, row in ways.items()
        if "predicted" in row
    ]
    return table(header, found)


def _beside(rival: str, row: dict[str, Any]) -> tuple[str, ...]:
    found = [row.get("ratios", {}).get(f"{way} / {rival}") for way in OURS]
    cells = [
        f"{written(r['median'])}{quotient(r)[quotient(r).index(' ') :]}" if r else "-"
        for r in found
    ]
    return rival, *cells, reason(row) or ""


def _ratios(rivals: dict[str, dict[str, Any]]):
    """Yields the ratios of mpjax's time to that of other rivals."""
    for rival, row in rivals.items():
        if not rival.startswith("mpjax"):
            yield from row.get("ratios", {}).items()
