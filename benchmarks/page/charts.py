"""Draws charts as SVG, in the colors and the size of the other pictures of the documentation."""

import dataclasses
import importlib.util
import itertools
import textwrap

from benchmarks import HERE

_spec = importlib.util.spec_from_file_location("shapes", HERE.parent / "docs/pictures/svg.py")
assert _spec and _spec.loader
svg = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(svg)

# A series looks the same in every chart.
STYLES = {
    "autocast": (svg.BLUE, "circle"),
    "autocast, lean": (svg.GREEN, "diamond"),
    "by hand, strict": (svg.ORANGE, "square"),
    "by hand": (svg.ORANGE, "square"),
    "float32": (svg.GREY, "triangle"),
}
WORDS = {"by hand": "casts by hand", "by hand, strict": "strict casts by hand"}
OTHERS = ((svg.RED, "triangle"), (svg.GREY, "diamond"))
LABELS, LONGEST = 142, 25  # the width of the column of labels, and the characters in one line
PITCH, LEADING = 18, 11  # between rows, and between the lines of a label
TOP = 88.0  # of the axis


@dataclasses.dataclass(frozen=True)
class Chart:
    """Ratios as marks on lines, in panels side by side.

    Attributes:
        title: The title above all panels.
        unit: What the ratios are relative to.
        rows: The labels of the lines, from the top.
        panels: The panels by title. A panel has series by label, and a series has a ratio or None
            for each row.
        alt: The alternative text of the picture.
    """

    title: str
    unit: str
    rows: tuple[str, ...]
    panels: dict[str, dict[str, tuple[float | None, ...]]]
    alt: str


def image(name: str, chart: Chart) -> str:
    """Returns the Markdown image of a chart."""
    return f"![{chart.alt}](pictures/{name}.svg)\n"


def drawn(chart: Chart) -> str:
    """Returns the SVG of a chart."""
    all_series = [series for panel in chart.panels.values() for series in panel.values()]
    most = max((ratio for series in all_series for ratio in series if ratio), default=1)
    parts = [
        svg.text(0, 13, chart.title, 13, weight="bold"),
        svg.text(0, 30, f"{chart.unit}; lower is better"),
    ]
    series = list(dict.fromkeys(label for panel in chart.panels.values() for label in panel))
    styles = dict(zip(series, _styles(series), strict=True))
    for i, label in enumerate(series):
        x = i * svg.WIDTH / max(len(series), 3)
        words = WORDS.get(label, label)
        parts += [mark(x + 5, 48, *styles[label]), svg.text(x + 14, 52, words)]
    places, bottom = [], TOP + 10
    for row in chart.rows:
        lines = textwrap.wrap(row, LONGEST)
        places.append(bottom + PITCH / 2 + (len(lines) - 1) * LEADING / 2)
        for i, line in enumerate(lines):
            y = places[-1] + 4 + (i - (len(lines) - 1) / 2) * LEADING
            parts.append(svg.text(0, y, line, 11))
        bottom += PITCH + (len(lines) - 1) * LEADING
    width = (svg.WIDTH - LABELS) / len(chart.panels) - 12
    for i, (title, panel) in enumerate(chart.panels.items()):
        left = LABELS + i * (width + 12)

        def across(ratio, left=left):
            return left + ratio / (1.05 * max(most, 1)) * width

        parts.append(svg.text(left, TOP - 14, title, weight="bold"))
        for tick, dashed in ((0, False), (0.5, True), (1, False)):
            x = across(tick)
            parts.append(svg.text(x, TOP + 2, f"{tick:g}x", 10, "start" if tick == 0 else "middle"))
            parts.append(svg.line(x, TOP + 7, x, bottom, dashed=dashed))
        for place in places:
            parts.append(_guide(left, place, width))
        for label, ratios in panel.items():
            for ratio, place in zip(ratios, places, strict=True):
                if ratio is not None:
                    parts.append(mark(across(ratio), place, *styles[label]))
    return svg.picture(round(bottom + 4), parts)


def mark(x: float, y: float, color: str, shape: str) -> str:
    """Returns a mark of a series around a point."""
    if shape == "circle":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}"/>'
    corners = {
        "diamond": ((0, -5), (5, 0), (0, 5), (-5, 0)),
        "square": ((-3.5, -3.5), (3.5, -3.5), (3.5, 3.5), (-3.5, 3.5)),
        "triangle": ((0, -4.5), (4.5, 3.5), (-4.5, 3.5)),
    }[shape]
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
    return f'<polygon points="{points}" fill="{color}"/>'


def _guide(left: float, y: float, width: float) -> str:
    """Returns the faint line on which the marks of a row are."""
    return (
        f'<line x1="{left:.1f}" y1="{y:.1f}" x2="{left + width:.1f}" y2="{y:.1f}" '
        f'stroke="{svg.GREY}" stroke-opacity="0.35"/>'
    )


def _styles(series):
    others = itertools.cycle(OTHERS)
    return [STYLES.get(label) or next(others) for label in series]
