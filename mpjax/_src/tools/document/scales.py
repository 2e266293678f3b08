"""The colors of operations: of classes by name, of amounts in steps."""

import bisect
import collections
import dataclasses
import itertools
import math
from collections.abc import Sequence

from mpjax._src.tools.document.model import NONE, UNITS, Color, Operation

# The number of steps for amounts, and the number of colors for classes.
STEPS, SLOTS = 6, 8


@dataclasses.dataclass(frozen=True)
class Key:
    """One entry of a legend: its label, its style, and the number of operations that have it."""

    label: str
    style: str
    count: int


@dataclasses.dataclass(frozen=True)
class Scale:
    """A color over the operations of a page: its legend, and each operation's entry in it."""

    color: Color
    legend: tuple[Key, ...]
    places: tuple[int, ...]

    @property
    def amounts(self) -> bool:
        return bool(self.color.unit)


def scale_of(color: Color, operations: Sequence[Operation]) -> Scale:
    """Returns the scale of a color over operations."""
    values = [operation.colors.get(color.name) for operation in operations]
    return (_of_amounts if color.unit else _of_classes)(color, values)


def _of_classes(color: Color, values: Sequence) -> Scale:
    named = [NONE if value is None else str(value) for value in values]
    order = [*dict.fromkeys((*color.classes, *sorted({*named} - {NONE}), NONE))]
    # Classes beyond the number of colors share the last one.
    styles = {name: f"c{min(i, SLOTS - 1)}" for i, name in enumerate(order)} | {NONE: "a0"}
    return _scale(color, named, styles)


def _of_amounts(color: Color, values: Sequence) -> Scale:
    written = UNITS[color.unit]
    finite = [v for v in values if v is not None and 0 < v < math.inf]
    edges = _edges(color.unit, min(max(finite, default=1.0), color.most))
    between = [f"{written(a)} to {written(b)}" for a, b in itertools.pairwise(edges)]
    labels = [f"under {written(edges[0])}", *between, f"{written(edges[-1])} or more"]
    zero, infinite = f"{written(0)}, or nothing to tell", "non-finite"

    def label(value):
        if value is None or not value > 0:
            return zero
        return labels[bisect.bisect(edges, value)] if value < math.inf else infinite

    styles = {text: f"a{STEPS - len(edges) + i}" for i, text in enumerate(labels)}
    named = [label(value) for value in values]
    return _scale(color, named, {zero: "a0", **styles, infinite: f"a{STEPS}"})


def _edges(unit: str, most: float) -> tuple[float, ...]:
    """Returns the ends of steps, the largest amount in the last one: by 4, or 1, 3, 10, 30, 100."""
    if unit == "bytes":
        top = 2.0 ** math.ceil(math.log2(most))
        return tuple(top / 4**i for i in range(STEPS - 1, 0, -1))
    round_numbers = [float(f"{digit}e{power}") for power in range(-30, 31) for digit in (1, 3)]
    top = bisect.bisect_left(round_numbers, most)
    return tuple(round_numbers[max(0, top - STEPS + 1) : top] or round_numbers[:1])


def _scale(color: Color, named: Sequence[str], styles: dict[str, str]) -> Scale:
    """Returns the scale of names, in the order of their styles."""
    counts = collections.Counter(named)
    legend = tuple(Key(name, style, counts[name]) for name, style in styles.items() if counts[name])
    places = {key.label: place for place, key in enumerate(legend)}
    return Scale(color, legend, tuple(places[name] for name in named))
