"""Markdown tables and the text of ratios."""

from collections.abc import Iterable
from statistics import geometric_mean

Cell = str | None
# Whether a goal is met.
MET = {None: "not measured", True: "met", False: "**not met**"}


def table(header: Iterable[str], rows: Iterable[Iterable[Cell]]) -> str:
    """Returns a table whose first column is text. The other columns are figures."""
    header = list(header)
    lines = [header, ["---", *["---:"] * (len(header) - 1)]]
    lines += [["-" if cell is None else cell for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def above(ratio: float | None) -> bool:
    """Returns whether a ratio, rounded as it is printed, is above 1."""
    return ratio is not None and round(ratio, 2) > 1


def written(ratio: float | None) -> Cell:
    if ratio is None:
        return None
    return f"**{ratio:.2f}x**" if above(ratio) else f"{ratio:.2f}x"


def mean(ratios: Iterable[float | None]) -> float | None:
    """Returns the geometric mean of the ratios that are not None."""
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None


def shortfalls(found: Iterable[tuple[str, str, float, str]]) -> str:
    """Returns the table of ratios above 1.00x: case, figure, ratio, cause."""
    rows = [(case, figure, written(ratio), cause) for case, figure, ratio, cause in found]
    if not rows:
        return "Nothing is above 1.00x.\n"
    lines = ["| above 1.00x | figure | ratio | cause |", "| --- | --- | ---: | --- |"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
