"""Prints documents as text of 80 columns."""

import re
from collections.abc import Callable, Iterable, Sequence

from mpjax._src.tools.document.model import Document, Table

WIDTH = 80

# If less room than NARROWEST is left for the last column, it goes on its own lines, indented.
NARROWEST, INDENT = 24, 4


def text_of(
    document: Document,
    width: int = WIDTH,
    draw: Callable[[Table, int], Sequence[str]] | None = None,
) -> str:
    """Returns a document as lines of text that do not exceed a width.

    ``draw`` returns the lines of a table in another form than plain text.
    """
    parts = [_fit([document.sentence, *document.lines], width)]
    tables = [each for each in document.tables if each.rows]
    for each in tables:
        part = [f"{each.title}:"] if len(tables) > 1 and each.title else []
        part += (draw or _lines)(each, width)
        more = len(each.rows) - len(each.rows[: each.most])
        part += [f"and {more} more"] if more else []
        parts.append([*part, *_fit([each.note], width)])
    parts.append(_fit(document.notes, width))
    return "\n\n".join("\n".join(part).rstrip() for part in parts if part)


def _fit(texts: Sequence[str], width: int) -> list[str]:
    """Returns texts in lines that fit. What goes on is indented, if there are several texts."""
    indent = INDENT if sum(map(bool, texts)) > 1 else 0
    lines = []
    for first, *others in (text.split("\n") for text in texts if text):
        lines += folds(first, width, indent)
        lines += [" " * INDENT + line for each in others for line in folds(each, width - INDENT)]
        lines += [""] if others else []
    return lines


def _lines(each: Table, width: int) -> list[str]:
    return table(each.columns, each.rows[: each.most], each.words, each.folded, width)


def table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    words: Sequence[str],
    folded: int = -1,
    width: int = WIDTH,
) -> list[str]:
    """Returns the lines of a table, wrapped to a width.

    A column whose cells are all empty is left out. Those titled by ``words`` are aligned to the
    left, the others to the right. Cells of the ``folded`` one, the first or the last, are wrapped
    if they do not fit; if there is no room for the last one, it goes on its own lines.
    """
    cells = [list(titles), *map(list, rows)]
    # The titles do not count: a column that has nothing else says nothing.
    used = [i for i in range(len(titles)) if any(row[i] for row in cells[1:])]
    cells = [[row[i] for i in used] for row in cells]
    wide = [max(map(len, column)) for column in zip(*cells, strict=True)]
    # What the other columns, and two spaces between columns, leave to the folded one.
    room = width - sum(wide) - 2 * (len(wide) - 1) + wide[folded]
    below = folded == -1 and room < min(NARROWEST, wide[-1])
    wide[folded] = width - INDENT if below else min(wide[folded], max(room, NARROWEST))

    def line(row):
        sides = zip(row, cells[0], wide, strict=True)
        padded = [c.ljust(n) if title in words else c.rjust(n) for c, title, n in sides]
        return "  ".join(padded).rstrip()

    lines: list[str] = []
    for row in cells if any(cells[0]) else cells[1:]:
        parts = folds(row[folded], wide[folded])
        blank = [""] * len(row)
        if below:
            lines += [line([*row[:-1], ""]), *(" " * INDENT + part for part in parts)]
            continue
        for whole, part in zip([row, *[blank] * len(parts)], parts, strict=False):
            lines.append(line([part if i == folded % len(row) else c for i, c in enumerate(whole)]))
    return lines


def folds(text: str, width: int, indent: int = 0) -> list[str]:
    """Wraps a text to a width: at spaces, else after "/" or ",", else anywhere.

    All lines but the first are indented.
    """
    words: list[str] = []
    for word in re.findall(r"\S+|\s+", text):
        parts = re.findall(r"[^/,]*[/,]?", word) if len(word) > width - indent else [word]
        most = width - indent
        words += [part[i : i + most] for part in parts for i in range(0, len(part), most)]
    lines = [""]
    for word in words:
        if lines[-1].strip() and len(lines[-1] + word.rstrip()) > width:
            lines.append(" " * indent)
        lines[-1] += word if lines[-1].strip() else word.lstrip()
    return [line.rstrip() for line in lines]
