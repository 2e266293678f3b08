"""Prints results: rich tables on a terminal, plain tables elsewhere, and JSON."""

import contextlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import click
import numpy as np

# The style of a cell, by its text.
STYLES = {"pass": "green", "FAIL": "bold red", "yes": "green", "NO": "bold red"}


def json_to_stdout(data: Any) -> None:
    """Prints data as JSON. Numbers that JSON does not have become strings: "nan", "inf"."""
    click.echo(json.dumps(plain(data), indent=1, allow_nan=False))


def plain(data: Any) -> Any:
    """Returns data converted to JSON's types."""
    if isinstance(data, Mapping):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple | set | frozenset):
        return [plain(value) for value in data]
    if hasattr(data, "ndim") and hasattr(data, "tolist"):  # NumPy and JAX values
        return plain(np.asarray(data).tolist())
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    return data if data is None or isinstance(data, bool | int | float | str) else str(data)


def waiting(what: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that shows, on a terminal's stderr, what is running."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"{what} ...")


def table(columns: Mapping[str, str], rows: Iterable[Sequence[Any]], title: str = "") -> None:
    """Prints a table. ``columns`` maps the name of each column to "left" or "right"."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    click.echo()
    if sys.stdout.isatty():
        _rich(columns, cells, title)
    else:
        _plain(columns, cells, title)


def _rich(columns: Mapping[str, str], cells: list[list[str]], title: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name, justify in columns.items():
        out.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in cells:
        out.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    if title:
        click.echo(title)
    Console().print(out)


def _plain(columns: Mapping[str, str], cells: list[list[str]], title: str) -> None:
    lines = [list(columns), *cells]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    sides = list(columns.values())
    if title:
        click.echo(title)
    for line in lines:
        padded = [
            cell.rjust(width) if side == "right" else cell.ljust(width)
            for cell, width, side in zip(line, widths, sides, strict=True)
        ]
        click.echo("  ".join(padded).rstrip())


def size(count: float) -> str:
    """Returns a number of bytes as text with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024 or unit == "GiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
