"""Draws charts as SVG. The same figures always give the same bytes."""

import dataclasses
import hashlib
import itertools
import json
from pathlib import Path

# Colors from a palette for the color-blind. A series looks the same in every chart.
STYLES = {
    "autocast": ("#0072b2", "o"),
    "autocast, lean": ("#56b4e9", "D"),
    "by hand": ("#e69f00", "s"),
    "float32": ("#000000", "v"),
}
OTHERS = (("#009e73", "^"), ("#cc79a7", "P"), ("#d55e00", "X"), ("#8c6d31", "*"))


@dataclasses.dataclass(frozen=True)
class Chart:
    """Ratios as dots on lines, in panels side by side.

    Attributes:
        title: The title above all panels.
        rows: The labels of the lines, from the top.
        panels: The panels by title. A panel has series by label, and a series has a ratio or None
            for each row.
        alt: The alternative text of the picture.
    """

    title: str
    rows: tuple[str, ...]
    panels: dict[str, dict[str, tuple[float | None, ...]]]
    alt: str

    @property
    def digest(self) -> str:
        """A hash of the figures, which the SVG contains."""
        return hashlib.sha256(json.dumps(dataclasses.asdict(self)).encode()).hexdigest()[:16]


def image(name: str, chart: Chart) -> str:
    """Returns the Markdown image of a chart."""
    return f"![{chart.alt}](pictures/{name}.svg)\n"


def is_drawn(chart: Chart, path: Path) -> bool:
    """Returns whether a file shows these figures."""
    return path.exists() and chart.digest in path.read_text()


def draw(chart: Chart, path: Path) -> None:
    """Draws a chart, unless the file already shows it."""
    if is_drawn(chart, path):
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    all_series = [series for panel in chart.panels.values() for series in panel.values()]
    most = 1.05 * max((ratio for series in all_series for ratio in series if ratio), default=1)
    style = {
        "svg.hashsalt": "mpjax",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.spines.left": False,
    }
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(
            1,
            len(chart.panels),
            figsize=(5 + 2.6 * len(chart.panels), 1.5 + 0.3 * len(chart.rows)),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for ax, (title, series) in zip(axes[0], chart.panels.items(), strict=True):
            _panel(ax, title, chart.rows, series, most)
        axes[0][0].set_xlim(0, most)
        handles, labels = axes[0][0].get_legend_handles_labels()
        figure.suptitle(chart.title, x=0.01, ha="left", weight="bold")
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
        about = {"Date": None, "Creator": None, "Description": chart.digest, "Title": chart.title}
        figure.savefig(path, metadata=about)
        pyplot.close(figure)


def _panel(ax, title, rows, series, most) -> None:
    places = range(len(rows))
    ax.set_title(title, loc="left", fontsize=10)
    ax.axvline(1, color="#444444", linewidth=1)
    ax.hlines(places, 0, most, color="#e6e6e6", linewidth=1, zorder=0)
    others = itertools.cycle(OTHERS)
    for label, ratios in series.items():
        colour, marker = STYLES.get(label) or next(others)
        known = [(ratio, place) for ratio, place in zip(ratios, places, strict=True) if ratio]
        ax.plot(
            *zip(*known, strict=True) if known else ([], []),
            marker,
            color=colour,
            markersize=6,
            alpha=0.85,
            label=label,
            clip_on=False,
        )
    ax.set_yticks(places, rows)
    ax.set_ylim(len(rows) - 0.5, -0.5)
    ax.xaxis.set_major_formatter("{x:g}x")
    ax.tick_params(axis="y", length=0)
