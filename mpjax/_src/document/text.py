"""Displays reports: as text of 80 columns, in notebooks, and as HTML pages."""

import dataclasses
import importlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

from mpjax._src.document.model import Page

WIDTH = 80

# If less room than NARROWEST is left for the last column, it goes on lines of its own, indented.
NARROWEST, INDENT = 24, 4


class Report:
    """The base class of all reports, which can be printed, shown in a notebook or saved as HTML."""

    # The module whose ``page_of`` turns a report of the class into a `Page`.
    _drawn_by: ClassVar[str] = ""

    def to_html(self, title: str = "") -> str:
        """Returns the report as a self-contained HTML page.

        Args:
            title: The title of the page. By default, the kind of the report.

        Returns:
            The text of the HTML file. It loads nothing from elsewhere.

        Raises:
            ImportError: If jinja2, which the extra ``html`` installs, is missing.
        """
        from mpjax._src.document.html import render

        return render(self._page(title))

    def _page(self, title: str = "") -> Page:
        if self._drawn_by:
            page = importlib.import_module(self._drawn_by).page_of(self)
        else:
            page = Page(type(self).__name__, "")
        return dataclasses.replace(page, title=title or page.title, text=str(self))

    def _repr_html_(self) -> str | None:
        """Returns the page in a frame, or None if jinja2 is missing: notebooks then show text."""
        from mpjax._src.document.html import framed

        try:
            return framed(self._page())
        except ImportError:
            return None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text("..." if cycle else str(self))


def wrapped(text: str, indent: int = 0) -> str:
    """Returns a sentence wrapped to the page width; all lines but the first are indented."""
    if len(text) <= WIDTH:
        return text
    return textwrap.fill(
        text, WIDTH, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], words: Sequence[str], folded: int = -1
) -> list[str]:
    """Returns the lines of a table, wrapped to the page width.

    Args:
        titles: The titles of the columns. A column whose cells are all empty is left out.
        rows: The cells.
        words: The titles of the columns that are aligned to the left; the others are aligned to
            the right.
        folded: The index of the column whose cells are wrapped if they do not fit: the first or
            the last one. If there is no room for the last one, it goes on lines of its own.
    """
    cells = [list(titles), *map(list, rows)]
    used = [i for i in range(len(titles)) if any(row[i] for row in cells[1:])]
    cells = [[row[i] for i in used] for row in cells]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    room = WIDTH - sum(wide) - 2 * (len(wide) - 1) + wide[folded]
    below = folded == -1 and room < min(NARROWEST, wide[-1])
    wide[folded] = WIDTH - INDENT if below else min(wide[folded], max(room, NARROWEST))

    def line(row):
        sides = zip(row, cells[0], wide, strict=True)
        padded = [c.ljust(n) if title in words else c.rjust(n) for c, title, n in sides]
        return "  ".join(padded).rstrip()

    lines: list[str] = []
    for row in cells:
        parts = folds(row[folded], wide[folded])
        blank = [""] * len(row)
        if below:
            lines += [line([*row[:-1], ""]), *(" " * INDENT + part for part in parts)]
            continue
        for whole, part in zip([row, *[blank] * len(parts)], parts, strict=False):
            lines.append(line([part if i == folded % len(row) else c for i, c in enumerate(whole)]))
    return lines


def folds(text: str, width: int) -> list[str]:
    """Wraps a text to a width: at spaces, else after "/" or ",", else anywhere."""
    words: list[str] = []
    for word in re.findall(r"\S+|\s+", text):
        parts = re.findall(r"[^/,]*[/,]?", word) if len(word) > width else [word]
        words += [part[i : i + width] for part in parts for i in range(0, len(part), width)]
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1] + word.rstrip()) > width:
            lines.append("")
        lines[-1] += word if lines[-1] else word.lstrip()
    return [line.rstrip() for line in lines]
