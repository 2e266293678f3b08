"""Prints the suite's tables."""

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks.on_gpu.repository_tests import ALL
from benchmarks.on_gpu.speed import OURS
from benchmarks.on_gpu.statistics import quotient

WIDTH = 120  # if the output is not a terminal

Rows = dict[str, dict[str, dict[str, Any]]]


def show(rows: Rows) -> None:
    """Prints a table for each part that has rows, and the goals."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    for case, found in rows.items():
        part, _, model = case.partition(" ")
        if part == "speed":
            console.print(speed(model, found))
        elif part == "memory":
            console.print(memory(model, found))
    if "tests" in rows:
        console.print(tests(rows["tests"]))
    if "goals" in rows:
        console.print(goal_table(rows["goals"]))


def speed(model: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = _table(
        f"{model}: steps in turn",
        *("Rival", "ms", "Share of peak", "J", *(f"{way} / rival" for way in OURS)),
    )
    for name, row in rows.items():
        if why := reason(row):
            table.add_row(name, why)
            continue
        ratios = [row.get("ratios", {}).get(f"{way} / {name}") for way in OURS]
        table.add_row(
            name,
            f"{row['ms']:.2f}",
            f"{row['mfu']:.1%}" if row["mfu"] else "-",
            f"{row['joules']:.2f}" if row["joules"] else "-",
            *(quotient(ratio) if ratio else "-" for ratio in ratios),
        )
    return table


def memory(model: str, rows: dict[str, dict[str, Any]]) -> Table:
    table = _table(
        f"{model}: memory of a step",
        *("Program", "Predicted / peak", "Compiled / peak", "Kernels, MiB", "Library, MiB"),
    )
    for name, row in rows.items():
        if why := reason(row):
            table.add_row(name, why)
            continue
        shares = [row.get(f"{key}_over_peak") for key in ("predicted", "compiled")]
        sizes = [row.get(key) for key in ("kernels", "library_and_allocator")]
        notes = [row.get("no_prediction"), row.get("no_peak")]
        table.add_row(
            name,
            *(f"{x:.3f}" if x else note or "-" for x, note in zip(shares, notes, strict=True)),
            *(f"{x / 2**20:.1f}" if x is not None else "-" for x in sizes),
        )
    return table


def tests(rows: dict[str, dict[str, Any]]) -> Table:
    table = _table("The repository's tests", "File", "Passed", "Failed", "Skipped", "Failures")
    for name, row in rows.items():
        if why := reason(row):
            table.add_row(name, why)
        elif row.get("failures"):
            counts = (str(row[key]) for key in ("passed", "failures", "left_out"))
            table.add_row(name, *counts, "\n".join(row["names"]))
    counted = [row for row in rows.values() if "passed" in row]
    sums = (str(sum(row[key] for row in counted)) for key in ("passed", "failures", "left_out"))
    table.add_row(f"{len(counted)} of {rows.get(ALL, {}).get('files')} files", *sums)
    return table


def goal_table(rows: dict[str, dict[str, Any]]) -> Table:
    table = _table("Goals", "Goal", "Bound", "Found", "Met")
    for name, row in rows.items():
        met = {None: "not measured", True: "met", False: "not met"}[row["met"]]
        table.add_row(name, text(row["bound"]), text(row["found"]), met)
    return table


def text(value: Any) -> str:
    if isinstance(value, dict):
        return quotient(value)
    if isinstance(value, list | tuple):
        return " to ".join(map(text, value))
    return "-" if value is None else f"{value:.4g}"


def reason(row: dict[str, Any]) -> str | None:
    """Returns the reason why a row has no figures, or None if it has some."""
    return next((f"{key}: {row[key]}" for key in ("skipped", "failed") if key in row), None)


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.add_column(first, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    return table
