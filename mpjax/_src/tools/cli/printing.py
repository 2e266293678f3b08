"""Prints documents, with rich tables on a terminal, and JSON; writes pictures and pages."""

import contextlib
import dataclasses
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.text import text_of

# The style of a cell, by its text.
STYLES = {"pass": "green", "FAIL": "bold red", "yes": "green", "NO": "bold red"}


@dataclasses.dataclass
class Output:
    """Where the result of a command goes."""

    plot: Path | None  # the file of --plot
    html: Path | None  # the file of --html
    as_json: bool
    page: str = ""  # what is written to ``html``

    def draw(self, report: Any, title: str, plots: bool = True) -> None:
        """Draws what was asked for, before anything is printed: a package may be missing."""
        self.plot = self.plot if plots else None
        if self.plot:
            report.plot(self.plot)
        self.page = report.to_html(title) if self.html else ""

    def tell(self, data: Any, title: str, document: Document, more: str = "") -> None:
        """Prints a result as JSON or as a document, and says which files were written."""
        if self.as_json:
            json_to_stdout(data)
        else:
            click.echo(title)
            show(document)
            click.echo(more, nl=bool(more))
        self.finish()

    def finish(self, suffix: str = "") -> None:
        """Writes the page, to a file with this suffix, and says which files were written."""
        html = self.html.with_stem(self.html.stem + suffix) if self.html and self.page else None
        if html:
            html.write_text(self.page, "utf-8")
        for what, file in (("Picture", self.plot), ("Page", html)):
            if file and not self.as_json:
                click.echo(f"\n{what} written to {file}")


def json_to_stdout(data: Any) -> None:
    """Prints data as JSON. Numbers that JSON does not have become strings: "nan", "inf"."""
    from mpjax._src.tools.document.report import plain

    # Python writes these as NaN and Infinity, and reads them back as what this function returns.
    data = json.loads(json.dumps(plain(data)), parse_constant=lambda name: str(float(name)))
    click.echo(json.dumps(data, indent=1, allow_nan=False))


def waiting(what: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context that shows, on a terminal's stderr, what is running."""
    if not sys.stderr.isatty():
        return contextlib.nullcontext()
    from rich.console import Console

    return Console(stderr=True).status(f"{what} ...")


def show(document: Document) -> None:
    """Prints a document: with rich tables on a terminal, and else in lines of any length."""
    if sys.stdout.isatty():
        click.echo(text_of(document, shutil.get_terminal_size().columns, _rich))
    else:
        click.echo(text_of(document, sys.maxsize))


def _rich(table: Table, width: int) -> list[str]:
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    out = RichTable(box=box.SIMPLE_HEAD, show_edge=False)
    for name in table.columns:
        justify = "left" if name in table.words else "right"
        out.add_column(name, justify=justify, overflow="fold")  # type: ignore[arg-type]
    for row in table.rows[: table.most]:
        out.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    # Captured as lines, so that `text_of` prints the table between sentences.
    console = Console()
    with console.capture() as capture:
        console.print(out)
    return capture.get().splitlines()
