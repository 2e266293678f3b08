"""Plots of reports. The only module that needs matplotlib, of the extra `plot`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpjax._src.core.base.dtypes import DTypeLike, canonical, limits_of

# How many operations a plot names, and where it draws an infinite error.
OPERATIONS = 5
INFINITE = 8.0

# How many tensors at risk a plot names.
NAMED = 6

# How many parameters a plot has room to name.
PARAMETERS = 80


def plot_compare(comparison: Any, path: str | Path | None = None) -> Any:
    """Plots a `Comparison`."""
    figure, axes = _panel(11, 5.5)
    ordered = sorted(zip(comparison.order, comparison.rows, strict=True), key=lambda pair: pair[0])
    rows = [row for _, row in ordered]
    if not rows:
        raise ValueError(
            "comparison has no rows, because no operation of the program rounds. There is nothing "
            "to plot."
        )
    floor = 2.0**-26
    for backward, color in ((False, "tab:blue"), (True, "tab:orange")):
        some = [(i, row) for i, row in enumerate(rows) if row.backward == backward]
        if not some:
            continue
        name = "backward" if backward else "forward"
        # A logarithmic axis has no place for an error of 0.
        drawn = [(i, _drawn(row.error, floor)) for i, row in some if row.error]
        places, errors = zip(*drawn, strict=True) if drawn else ((), ())
        axes.scatter(places, errors, s=14, color=color, label=f"error, {name} pass", zorder=3)
        added = [_drawn(row.added, floor) for _, row in some]
        line = {"color": color, "alpha": 0.35, "lw": 2}
        axes.vlines([i for i, _ in some], floor, added, **line, label=f"added, {name}")
    for number, row in enumerate([r for r in comparison.rows if not r.noise][:OPERATIONS], 1):
        name = f"{row.primitive}, {row.source.rpartition('/')[2]} {row.scope}"
        place = rows.index(row), _drawn(row.error, floor)
        axes.scatter(*place, s=90, marker="o", facecolors="none", edgecolors="black", zorder=4)
        _number(axes, number, place, 7, name, "black", zorder=5)
    for dtype, bits in (("float16", 11), ("bfloat16", 8)):
        axes.axhline(2.0**-bits, color="gray", lw=0.8, ls="--")
        _name_level(axes, 2.0**-bits, f"one rounding to {dtype} ", fontsize="x-small")
    axes.set_yscale("log", base=2)
    axes.set_ylim(bottom=floor)
    axes.set(xlabel="operations, in the order of the program")
    axes.set(ylabel=f"relative error against {comparison.reference}")
    figure.legend(fontsize="small", ncols=3, loc="outside upper center")
    return _saved(figure, path)


def plot_agreement(report: Any, path: str | Path | None = None) -> Any:
    """Plots an `Agreement`."""
    figure = _figure(11, 4)
    tokens, lines = figure.subplots(1, 2, width_ratios=(3, 2))
    sizes = np.abs(report.differences)
    if report.meaning == "logits":
        sizes = sizes.max(-1)  # over the vocabulary
    picture = tokens.imshow(sizes.reshape(-1, sizes.shape[-1] if sizes.ndim else 1), aspect="auto")
    what = "difference" if report.meaning == "values" else "|log ratio|"
    figure.colorbar(picture, ax=tokens, label=what)
    tokens.set(xlabel="token", ylabel="sequence")
    tokens.set_title(f"{report.names[0]} and {report.names[1]}", fontsize="medium")
    shown = [] if report.by_formula else report.partings[:OPERATIONS]
    names = [f"{row.source.rpartition('/')[2]} {row.primitive}" for row in shown]
    places = np.arange(len(shown))
    lines.barh(places, [100 * (row.left or 0) for row in shown])
    lines.set_yticks(places, names, fontsize="small")
    lines.invert_yaxis()
    lines.axvline(100, color="black", lw=0.8)
    lines.set_xlabel("% left where the line gives float32")
    return _saved(figure, path)


def plot_fit(fit: Any, path: str | Path | None = None) -> Any:
    """Plots a `MemoryFit`."""
    shown = [each for each in fit.tries if not (each.refused or each.same_as)]
    if not shown:
        raise ValueError("fit has no settings that compile, so there is nothing to plot.")
    figure, axes = _panel(10, 5)
    front = sorted(_place(each) for each in shown if each.frontier)
    axes.step(*zip(*front, strict=True), where="post", color="gray", lw=1, label="frontier")
    for number, each in enumerate(sorted(shown, key=_place), 1):
        color = "tab:orange" if each.checkpoint else "tab:blue"
        axes.scatter(*_place(each), s=30, color=color, zorder=3)
        _number(axes, number, _place(each), 6, each.setting, color, fontsize="small")
    # A limit far above all settings would press them to the bottom of the picture.
    room, most = fit.available_bytes / 2**30, 1.2 * max(memory for _, memory in map(_place, shown))
    if room < 2 * most:
        axes.axhline(room, color="tab:red", lw=1, ls="--", label=f"available on {fit.target}")
    axes.set_ylim(0, max(most, 1.1 * room if room < 2 * most else 0))
    axes.set(xlabel="roofline, ms", ylabel="memory, GiB")
    figure.legend(fontsize="small", loc="outside right upper")
    return _saved(figure, path)


def _place(one: Any) -> tuple[float, float]:
    return one.roofline_ms, one.total_bytes / 2**30


def plot_precision(reports: Sequence[Any], path: str | Path | None = None) -> Any:
    """Plots the `PrecisionReport` of each sampled step of a run, in order."""
    if not reports or not all(report.steps for report in reports):
        raise ValueError(
            "There must be at least one report, and each must come from a step that "
            "watch_precision sampled."
        )
    room: dict[str, list[tuple[int, float]]] = {}
    named: dict[tuple[str, str], tuple[int, float]] = {}
    for report in reports:
        for row in report.rows:
            if row.headroom is None:
                continue
            place = report.steps[-1], max(row.headroom, 0.0)
            room.setdefault(row.name, []).append(place)
            if row.risk:
                named.setdefault((row.direction, row.name), place)
    figure, axes = _panel(11, 5.5)
    first = sorted(named.items(), key=lambda item: item[1])
    # The forward pass first, because no loss scale prevents an overflow there.
    shown = sorted(first, key=lambda item: item[0][0] == "backward")[:NAMED]
    colors = {name: f"C{i}" for i, ((_, name), _) in enumerate(shown)}
    for name, places in room.items():
        drawn = {"color": colors.get(name, "silver"), "lw": 1.8 if name in colors else 0.7}
        axes.plot(*zip(*places, strict=True), **drawn, zorder=3 if name in colors else 2)
    for (_, name), place in shown:
        label = f"step {place[0]}: {name}"
        axes.scatter(*place, s=70, color=colors[name], edgecolors="black", label=label, zorder=4)
    axes.axhline(0, color="black", lw=1.2)
    _name_level(axes, 0, "overflow ")
    axes.set_ylim(bottom=-0.5)
    axes.set(xlabel="step", ylabel="powers of two below the largest number of its dtype")
    if shown:
        title = "named at risk at"
        figure.legend(title=title, fontsize="small", ncols=2, loc="outside upper center")
    return _saved(figure, path)


def plot_gradient_histogram(
    histogram: Any,
    exponents: np.ndarray,
    path: str | Path | None,
    dtype: DTypeLike,
    shift: int,
) -> Any:
    """Plots a `GradientHistogram` of ``exponents``, with a loss scale of 2^shift."""
    count = len(histogram.paths)
    height = 0.22 * min(count, PARAMETERS)
    figure = _figure(9, 4 + height)
    limits, smallest = limits_of(dtype), exponents[0]
    numbers = histogram.numbers()
    finite = numbers[:, 1:-1]
    used = np.flatnonzero(finite.sum(0))
    if not used.size:
        raise ValueError("histogram has no finite nonzero gradient, so there is nothing to plot.")
    marks = {"flushed to zero": limits.flush - shift, "overflow": limits.overflow - shift}
    marks["subnormal"] = limits.normal - shift
    # The window shows what was counted and the lower limits. It shows the overflow only if
    # gradients come near it.
    first = min(exponents[used[0]], marks["flushed to zero"]) - 2
    last = max(exponents[used[-1]], marks["subnormal"]) + 3
    first, last = max(first, smallest), min(last, exponents[-1] + 1)
    window = slice(first - smallest, last - smallest)
    shares = finite[:, window] / np.maximum(numbers.sum(1, keepdims=True), 1)
    whole = finite[:, window].sum(0) / max(numbers.sum(), 1)

    top, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, max(1, height)])
    edges = np.arange(first, last)
    top.bar(edges, whole, width=1.0, align="edge", color="tab:blue", edgecolor="white")
    top.set_ylabel("share of all entries")
    zeros, bad = (numbers[:, i].sum() / max(numbers.sum(), 1) for i in (0, -1))
    name = canonical(dtype, "dtype").name
    top.set_title(
        f"Gradients by size: {zeros:.1%} zero, {bad:.1%} Inf or NaN; the marks are {name}'s at "
        f"loss scale 2^{shift}",
        fontsize="medium",
    )
    place = {"aspect": "auto", "extent": (first, last, count - 0.5, -0.5)}
    image = below.imshow(shares, interpolation="nearest", cmap="Blues", **place)
    named = range(0, count, -(-count // PARAMETERS))
    below.set_yticks(named, [histogram.paths[i] for i in named], fontsize="x-small")
    below.set_xlabel("log2 |g|")
    figure.colorbar(image, ax=below, label="share of the parameter", shrink=0.9)
    _shade_limits((top, below), first, last, marks)
    top.set_xlim(first, last)
    return _saved(figure, path)


def _shade_limits(
    panels: tuple[Any, Any], first: int, last: int, marks: Mapping[str, float]
) -> None:
    """Shades the exponents that a dtype loses, and names them in the first panel."""
    flushed, subnormal = marks["flushed to zero"], marks["subnormal"]
    overflow = min(marks["overflow"], last)
    top = panels[0]
    for name, start, end, color, alpha in (
        ("flushed", first, flushed, "tab:red", 0.15),
        ("subnormal", flushed, subnormal, "tab:orange", 0.12),
        ("overflow", overflow, last, "tab:red", 0.15),
    ):
        for axes in panels:
            axes.axvspan(start, end, color=color, alpha=alpha, lw=0)
        if end - start >= 2:  # else the word does not fit
            top.text((start + end) / 2, top.get_ylim()[1] * 0.94, name, ha="center", va="top")


def _number(axes: Any, number: int, place: Any, above: int, name: str, color: str, **style) -> None:
    """Writes a number above a place, and the number with a name into the legend."""
    offset = {"xytext": (0, above), "textcoords": "offset points", "ha": "center"}
    axes.annotate(str(number), place, **offset, **style)
    # Draws nothing: the legend gets the number and the name of what it marks.
    axes.plot([], [], " ", marker=f"${number}$", color=color, label=name)


def _name_level(axes: Any, level: float, name: str, **style: Any) -> None:
    """Writes a name above a level, at the right end of the axes."""
    place = {"ha": "right", "va": "bottom", "transform": axes.get_yaxis_transform()}
    axes.text(1, level, name, **place, **style)


def _saved(figure: Any, path: str | Path | None) -> Any:
    """Returns a figure, after writing it to a PNG file if a path is given."""
    if path is not None:
        figure.savefig(path, dpi=120)
    return figure


def _figure(width: float, height: float) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'mpjax[plot]'.") from error
    return Figure(figsize=(width, height), layout="constrained")


def _panel(width: float, height: float) -> tuple[Any, Any]:
    figure = _figure(width, height)
    return figure, figure.add_subplot()


def _drawn(error: float, floor: float) -> float:
    return max(error, floor) if error < INFINITE else INFINITE  # NaN too
