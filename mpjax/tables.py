"""What each command prints: which columns, which rows."""

import collections
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from mpjax.explain import CastReport, Row
from mpjax.show import size, table

LEFT, RIGHT = "left", "right"
Data = Mapping[str, Any]

# A row of `compile`: its name, and its cell for a target.
COMPILED: dict[str, Callable[[Data], str]] = {
    "fits": lambda d: "yes" if d["fits"] else "NO",
    "memory": lambda d: size(d["total_bytes"]),
    "  of": lambda d: size(d["device_bytes"]),
    "  arguments": lambda d: size(d["argument_bytes"]),
    "  results": lambda d: size(d["output_bytes"]),
    "  shared by both": lambda d: size(d["alias_bytes"]),
    "  temporary": lambda d: size(d["temp_bytes"]),
    "  code": lambda d: size(d["code_bytes"]),
    "GFLOP": lambda d: _figure(d["flops"] / 1e9),
    "  in matmuls": lambda d: _figure(d["matmul_flops"] / 1e9),
    "GB moved": lambda d: _figure(d["bytes_accessed"] / 1e9),
    "least time, ms": lambda d: _figure(d["roofline_ms"]),
    "  bound by": lambda d: d["bound"],
    "matmuls": lambda d: ", ".join(f"{n} {dtype}" for dtype, n in d["matmul_dtypes"].items()),
    "  wider than asked": lambda d: f"{sum(row['share'] for row in d['disguised']):.1%}",
}

# What the error of a row of `compare` may be called.
ERRORS = ("error", "relative_error", "max_relative_error")


def doctor(found: Data) -> None:
    """Prints versions, devices and self-tests."""
    click.echo(", ".join(f"{name} {version}" for name, version in found["versions"].items()))
    devices = collections.Counter(
        (d["name"], ", ".join(d["fast"]) or "float32 alone", d["policy"], d["reason"])
        for d in found["devices"]
    )
    counted = [(f"{count} x {name}", *rest) for (name, *rest), count in devices.items()]
    table({"device": LEFT, "fast": LEFT, "policy": LEFT, "why": LEFT}, counted)
    checks = [(c["dtype"], c["name"], c["status"], c["found"]) for c in found["checks"]]
    table({"dtype": LEFT, "test": LEFT, "": LEFT, "found": LEFT}, checks)
    click.echo(f"\nRecommended policy: {found['policy']}")


def explain(report: CastReport, rows: int) -> None:
    """Prints a report of autocast, and so many of its rows."""
    click.echo("\n".join(report.summary()))
    dtypes = ("f16", "bf16", "f32", "other")
    counts = [
        (name, *(cells[dtype] or "" for dtype in dtypes))
        for name, cells in sorted(report.calls().items())
        if sum(cells.values()) > cells["other"]
    ]
    if counts:
        table({"operation": LEFT, **dict.fromkeys(dtypes, RIGHT)}, counts)
    short = [(r.primitive, r.after, _where(r), r.reason) for r in report.shortfalls()]
    if short:
        named = dict.fromkeys(("operation", "dtypes", "where", "why"), LEFT)
        table(named, short, "Not in half, or left alone:")
    listed = [
        (i, r.primitive, r.before, r.after, _where(r), r.reason)
        for i, r in enumerate(report.rows[:rows])
    ]
    if listed:
        named = dict.fromkeys(("operation", "written", "planned", "where", "why"), LEFT)
        table({"row": RIGHT, **named}, listed)


def compiled(found: Sequence[Data]) -> None:
    """Prints the reports of all targets side by side; then what has no place in a column."""
    columns = {"": LEFT, **{each["target"]: RIGHT for each in found}}
    rows = [(name, *(_cell(figure, each) for each in found)) for name, figure in COMPILED.items()]
    table(columns, [("compiler", *(each["status"] for each in found)), *rows])
    remarks: dict[str, list[str]] = {}
    for each in found:
        for line in [each["error"]] if "error" in each else each.get("notes", ()):
            remarks.setdefault(line, []).append(each["target"])
    click.echo()
    for line, targets in remarks.items():
        click.echo(f"{', '.join(targets)}: {line}")


def compared(found: Data, rows: Sequence[Data], top: int) -> None:
    """Prints the first rows of a comparison."""
    for name, value in found.items():
        if name != "rows" and not isinstance(value, dict | list | tuple):
            click.echo(f"{name}: {value}")
    if rows:
        columns = {
            name: RIGHT if isinstance(value, int | float) else LEFT
            for name, value in rows[0].items()
        }
        table(columns, [[_short(row.get(name)) for name in columns] for row in rows[:top]])
    if len(rows) > top:
        click.echo(f"\n{len(rows) - top} more rows: --top {len(rows)} shows them.")


def worst_first(rows: Sequence[Data]) -> list[Data]:
    """Returns the rows of a comparison by their error; one that is not a number is the worst."""

    def badness(row: Data) -> float:
        error = error_of(row)
        return math.inf if math.isnan(error) else error

    return sorted(rows, key=badness, reverse=True)


def error_of(row: Data) -> float:
    """Returns the error of a row of a comparison."""
    return float(next((row[name] for name in ERRORS if row.get(name) is not None), 0.0))


# ---- cells ---------------------------------------------------------------------------------------


def _cell(figure: Callable[[Data], str], found: Data) -> str:
    try:
        return figure(found)
    except KeyError:
        return "-"


def _figure(value: float) -> str:
    """Returns a number with at least three digits that mean something."""
    return f"{value:,.1f}" if value >= 100 else f"{value:.3g}"


def _where(row: Row) -> str:
    return row.scope or row.path or _relative(row.source)


def _relative(source: str) -> str:
    file, _, line = source.rpartition(":")
    if not file:
        return source
    path = Path(file)
    inside = path.is_relative_to(os.getcwd())
    return f"{path.relative_to(os.getcwd()) if inside else path.name}:{line}"


def _short(value: Any) -> Any:
    return f"{value:.3g}" if isinstance(value, float) else value
