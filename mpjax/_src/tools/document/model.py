"""What a report shows, as plain data: sentences, tables, and drawings of the program.

Every report says it once, as a `Document`, which is printed (`text`) and drawn as a page (`html`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mpjax._src.core.base.lines import short

# The class of an operation that has no value for a color.
NONE = "none"


def size(count: float) -> str:
    """Returns a number of bytes as text with a unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def time(seconds: float) -> str:
    """Returns a time as text, such as "1.5 ms"."""
    for unit, each in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= each:
            return f"{seconds / each:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def share(part: float) -> str:
    """Returns a share or a relative error as text: a percentage, or "10.2 times"."""
    return f"{100 * part:.3g}%" if part < 10 else f"{part:.3g} times"


# Dtypes by the short names that all pages use, in the order of their colors.
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "other": "any other dtype"}

# The functions that write amounts, by unit.
UNITS: dict[str, Callable[[float], str]] = {
    "bytes": size,
    "share": share,
    "number": lambda count: f"{count:.3g}",
    "ms": lambda count: f"{count:.3g} ms",
}


@dataclasses.dataclass(frozen=True)
class Color:
    """A property by which operations are colored."""

    name: str  # the name in the page's switch, such as "dtype"
    words: str  # its meaning, as a sentence for the legend
    # The values of the property, in the order of the legend. Other values come after them. Empty if
    # the property is an amount.
    classes: tuple[str, ...] = ()
    unit: str = ""  # the unit of an amount, one of `UNITS`; "" if the property is not an amount
    # Amounts of at least this share one color, so that the largest do not hide the others.
    most: float = math.inf
    # The function that combines the amounts in a box, such as `sum` or `max`.
    of_box: Callable[[Sequence[float]], float] = sum


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program."""

    label: str  # the name of the operation, such as "dot_general"
    scope: str  # the boxes around it, joined with "/"
    facts: tuple[tuple[str, str], ...]  # the titles and texts that a click on it shows, in order
    colors: Mapping[str, str | float | None]  # its class or its amount, by the name of the color
    number: int | None = None  # its number in the report; None if it has no number
    backward: bool = False  # whether it belongs to the backward pass
    # Whether its tile is drawn large, as for the operations that do most of the work.
    large: bool = False


@dataclasses.dataclass(frozen=True)
class Bar:
    """A bar that shows a whole and its parts, for example in bytes."""

    title: str  # the title of the bar
    # The names and sizes of the parts. The sum of the sizes is the whole.
    parts: tuple[tuple[str, float], ...]
    unit: str = "bytes"  # the unit of the sizes, one of `UNITS`
    words: str = ""  # one or two sentences that explain the bar


@dataclasses.dataclass(frozen=True)
class Table:
    """A table."""

    title: str  # the title, which a document's only table does not need as text
    # The titles of the columns. Text leaves out columns without any cell.
    columns: tuple[str, ...]
    # The cells. A table without rows is left out.
    rows: tuple[tuple[str, ...], ...]
    # The titles of the columns that are aligned to the left; the others are numbers.
    words: tuple[str, ...] = ()
    # The number of rows that the text shows; None for all. The page shows all rows.
    most: int | None = None
    folded: int = -1  # the index of the column whose cells are wrapped if the text is too wide
    note: str = ""  # a sentence below the table


def words_in(title: str, columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    """Returns a table without numbers: all columns are aligned to the left."""
    return Table(title, columns, tuple(rows), columns)


@dataclasses.dataclass(frozen=True)
class Histogram:
    """Counts by bin."""

    title: str  # the title, which says what is counted
    # The start of each bin and its count. The starts are consecutive integers.
    bins: tuple[tuple[int, int], ...]
    axis: str  # the label of the axis
    limits: tuple[tuple[int, str], ...] = ()  # the marked places on the axis, with their names


@dataclasses.dataclass(frozen=True)
class Drawing:
    """What only a page shows."""

    bars: tuple[Bar, ...] = ()  # drawn above the map
    histograms: tuple[Histogram, ...] = ()  # likewise
    operations: tuple[Operation, ...] = ()  # the operations on the map
    colors: tuple[Color, ...] = ()  # what can color the map; the page opens with the first
    things: str = "operations"  # the word for the operations, if the map shows something else


@dataclasses.dataclass(frozen=True)
class Document:
    """What a report shows."""

    title: str  # the title of the page
    sentence: str = ""  # the main result, in one sentence
    # Further results. The first line of one may be a heading of the others.
    lines: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    notes: tuple[str, ...] = ()  # sentences at the end, such as the meaning of columns
    # Returns the drawing, which takes longer than the rest and which no text needs.
    drawing: Callable[[], Drawing] = Drawing


DTYPE = Color(
    "dtype",
    "The dtype that each operation computes in: the widest floating dtype of its operands.",
    tuple(DTYPES.values()),
)
# A share or a relative error; one of all of a result, or more, is as bad as any.
WORST = functools.partial(Color, unit="share", most=3.0, of_box=max)
PASS = Color("pass", "The pass that the operation runs in.", ("forward", "backward"))


def facts(**pairs: object) -> tuple[tuple[str, str], ...]:
    """Returns the facts about an operation without empty ones, "_" in titles as spaces."""
    titled = ((title.replace("_", " "), value) for title, value in pairs.items())
    # A number is one, even if it is 0.
    return tuple((title, str(value)) for title, value in titled if value or type(value) is int)


def code_at(source: str) -> str:
    """Returns the line of code at "file:line", or "" if it cannot be read."""
    import linecache

    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if file and line.isdecimal() else ""


def box_of(scope: str, source: str) -> str:
    """Returns the box of an operation: its scope, or else its source line."""
    return scope or short(source).rpartition("/")[2] or "no scope, no line"


def place_of(row: Any) -> dict[str, str]:
    """Returns the facts on the place of an operation, which is a row of a report."""
    return {
        "line": short(row.source),
        "code": code_at(row.source),
        "in_the_library": short(row.library),
        "scope": row.scope,
    }


def shares(amounts: Mapping[str, float], most: int = 16) -> tuple[tuple[str, float], ...]:
    """Returns amounts by scope as parts of a bar, in their order.

    The largest part is split into the boxes in it, as long as there are at most ``most`` parts. If
    there are more all the same, the smallest are joined.
    """
    whole = {(*name.split("/"), ""): amount for name, amount in amounts.items()}

    def cut(parts: list[tuple[str, ...]], part: tuple[str, ...]) -> list[tuple[str, ...]]:
        inner = dict.fromkeys(n[: len(part) + 1] for n in whole if n[: len(part)] == part)
        return [p for old in parts for p in (inner if old == part else (old,))]

    def held(part: tuple[str, ...]) -> float:
        return sum(amount for name, amount in whole.items() if name[: len(part)] == part)

    parts: list[tuple[str, ...]] = cut([()], ())
    while open_parts := [p for p in parts if p[-1]]:
        largest = max(open_parts, key=held)
        finer = cut(parts, largest)
        if len(finer) > most:
            break
        parts = finer
    kept = {*sorted(parts, key=held, reverse=True)[: most - 1 if len(parts) > most else most]}
    bar = {"/".join(p).rstrip("/"): held(p) for p in parts if p in kept}
    others = sum(held(p) for p in parts if p not in kept)
    return (*bar.items(), *([("others", others)] if others else []))
