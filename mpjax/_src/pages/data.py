"""The contents of a page as plain data: figures, tables, bars, and operations in nested scopes.

Every report converts itself to a `Page`, and all pages are rendered in the same way.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

# The class of an operation that has no value for a colour.
NONE = "none"


def size(count: float) -> str:
    """Returns bytes for people."""
    for unit in ("B", "KiB", "MiB"):
        if abs(count) < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} GiB"


def share(part: float) -> str:
    """Returns a share, or a relative error, for people."""
    return f"{100 * part:.3g}%" if part < 10 else f"{part:.3g} times"


# Dtypes by their short names, as every page writes them, in the order of their colours.
DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "other": "any other dtype"}

# How amounts are written.
UNITS: dict[str, Callable[[float], str]] = {
    "bytes": size,
    "share": share,
    "number": lambda count: f"{count:.3g}",
}


@dataclasses.dataclass(frozen=True)
class Colour:
    """What operations can be coloured by.

    Attributes:
        name: What the switch calls it: "dtype".
        words: What it means, a sentence for the legend.
        classes: The values that it takes, in the order of the legend; a value that is not among
            them comes after. Empty where it is an amount.
        unit: How an amount is written, one of `UNITS`; "" where it is none.
        most: Amounts from there on are one step: that the worst hides no other.
        of_box: What a box shows of the amounts in it, such as `sum` or `max`.
    """

    name: str
    words: str
    classes: tuple[str, ...] = ()
    unit: str = ""
    most: float = math.inf
    of_box: Callable[[Sequence[float]], float] = sum


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of a program.

    Attributes:
        label: Its name: "dot_general".
        scope: The boxes around it, joined with "/".
        facts: What is told of it on a click: titles and texts, in order.
        colours: Its class or its amount, by the name of the colour.
        number: What the report calls it by; None where it has no number.
        backward: Whether it belongs to the backward pass.
        large: Whether its tile is drawn large: what most of the work is.
    """

    label: str
    scope: str
    facts: tuple[tuple[str, str], ...]
    colours: Mapping[str, str | float | None]
    number: int | None = None
    backward: bool = False
    large: bool = False


@dataclasses.dataclass(frozen=True)
class Bar:
    """A whole and its parts, in bytes or the like.

    Attributes:
        title: What it is.
        parts: Names and sizes. Their sum is the whole.
        unit: How a size is written, one of `UNITS`.
        words: What is to be known of it, a sentence or two.
    """

    title: str
    parts: tuple[tuple[str, float], ...]
    unit: str = "bytes"
    words: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table. The columns named in ``words`` are set to the left, the others are figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    words: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Histogram:
    """How many lie where.

    Attributes:
        title: What is counted.
        bins: Where each bin begins, and its count; whole numbers, each one more than the last.
        axis: What the axis shows.
        limits: Places on the axis that are marked, with their names.
    """

    title: str
    bins: tuple[tuple[int, int], ...]
    axis: str
    limits: tuple[tuple[int, str], ...] = ()


@dataclasses.dataclass(frozen=True)
class Page:
    """All of a page.

    Attributes:
        title: What it is a report of.
        sentence: What the report says, in one sentence.
        lines: Its other figures, a line each.
        bars, tables, histograms: As they follow each other.
        operations: What the map is drawn of.
        colours: What it can be coloured by, the first at the start.
        things: What the operations are called, where they are something else.
        text: The report as it prints itself, at the end.
    """

    title: str
    sentence: str
    lines: tuple[str, ...] = ()
    bars: tuple[Bar, ...] = ()
    tables: tuple[Table, ...] = ()
    histograms: tuple[Histogram, ...] = ()
    operations: tuple[Operation, ...] = ()
    colours: tuple[Colour, ...] = ()
    things: str = "operations"
    text: str = ""


def facts(**pairs: object) -> tuple[tuple[str, str], ...]:
    """Returns the facts about an operation without empty ones, "_" in titles as spaces."""
    told = ((title.replace("_", " "), value) for title, value in pairs.items())
    return tuple((title, str(value)) for title, value in told if value not in (None, "", False))


def code_at(source: str) -> str:
    """Returns the line of code at "file:line", or "" if it cannot be read."""
    import linecache

    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if file and line.isdecimal() else ""


def box_of(scope: str, source: str) -> str:
    """Returns the box of an operation: its scope, or else its source line."""
    return scope or source.rpartition("/")[2] or "no scope, no line"


def shares(amounts: Mapping[str, float], most: int = 16) -> tuple[tuple[str, float], ...]:
    """Returns amounts by scope as parts of a bar, in their order.

    The largest part is taken apart into the boxes in it, as long as there are not too many.

    Args:
        amounts: By scope.
        most: How many parts there are at most; the least of more are one.
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
    found = {"/".join(p).rstrip("/"): held(p) for p in parts if p in kept}
    others = sum(held(p) for p in parts if p not in kept)
    return (*found.items(), *([("others", others)] if others else []))
