"""Draws recorded curves as SVG that is legible on light and on dark pages.

A figure is inlined in its page, so its axes and text take the color of the page's text. The small
pictures are separate files, which cannot know that color, so they show only lines.
"""

import html
import io
import re
from collections.abc import Iterator

import matplotlib
import numpy as np
from matplotlib.figure import Figure

# Distinct in grayscale too, with a contrast of at least 3:1 on white and on black.
STYLES = (
    *(("#808080", "-"), ("#2f7fd6", "-"), ("#d2691e", "--")),
    *(("#1f9a63", "-."), ("#b04fc4", ":")),
)
INK = "#010203"  # replaced by the color of the page's text
# Without this metadata, which holds a date and a version, each build gives the same bytes.
NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))
SCALES = re.compile(r"(loss_)?scale\b")
COINCIDE = "The curves coincide."


def names(runs: dict) -> list[str]:
    """Returns the names of the curves to draw. A loss scale that is 1 in every run is left out."""
    first = [seeds[0]["curves"] for seeds in runs.values()]
    return [
        name
        for name in first[0]
        if not SCALES.match(name) or any(set(curve[name]) != {1.0} for curve in first)
    ]


def alt(runs: dict) -> str:
    return f"Curves of {names(runs)[0]} under {', '.join(runs)}"


def short(row: str) -> str:
    """Writes the names of policies as a card has room for."""
    row = re.sub(r"mixed_(\w+),", r"\1 with ", row)
    return row.replace("mixed_", "").replace(" --loss-scale none", " without a loss scale")


def seen(runs: dict) -> str:
    """Says which of the first curves coincide with that of float32, and which do not.

    They do if they differ on average by less than 1% of the picture's height; and they vary like
    another seed if they differ by about as much as the seeds of float32 do.
    """
    (_, of_float32), *others = runs.items()
    name = names(runs)[0]
    length = min(len(seeds[0]["curves"][name]) for seeds in runs.values())
    seeds = np.array([run["curves"][name][:length] for run in of_float32], float)
    near, far = 0.01 * np.ptp(seeds[0]), 1.5 * np.ptp(seeds, 0).mean()
    away = {
        short(row): np.abs(np.array(run["curves"][name][:length], float) - seeds[0]).mean()
        for row, (run, *_) in others
    }
    fails = [row for row, by in away.items() if by > max(near, far)]
    varies = [row for row, by in away.items() if near < by <= far]
    said = [f"{row} fails to converge" for row in fails]
    if varies:
        verb = "varies" if len(varies) == 1 else "vary"
        said.append(f"{' and '.join(varies)} {verb} like other seeds of float32")
    if not said:
        return COINCIDE
    rest = "; the others coincide" if len(fails + varies) < len(away) else ""
    return f"{'; '.join(said)}{rest}."


def lines(runs: dict, name: str) -> Iterator[tuple]:
    """Yields the steps, the values and the line style of each run of a curve."""
    for (color, style), seeds in zip(STYLES, runs.values(), strict=False):
        for run in seeds:
            values = np.array(run["curves"][name], float)
            steps = (np.arange(len(values)) + 0.5) * run["steps"] / len(values)
            width = 1.5 if run is seeds[0] else 0.5
            yield steps, values, {"color": color, "linestyle": style, "linewidth": width}


def svg(figure: Figure, salt: str) -> str:
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(file, format="svg", transparent=True, metadata=NOTHING)
    text = file.getvalue()
    return text[text.index("<svg") :]


def figures(name: str, runs: dict) -> str:
    """Returns a legend and a figure for each curve, as HTML."""
    labels = "".join(
        f'<li><svg width="32" height="8" aria-hidden="true"><line x1="0" x2="32" y1="4" y2="4" '
        f'stroke="{color}" stroke-width="3" stroke-dasharray="{dashes(style)}"/></svg> '
        f"<code>{html.escape(row)}</code></li>"
        for (color, style), row in zip(STYLES, runs, strict=False)
    )
    drawn = "".join(panel(f"{name} {curve}", runs, curve) for curve in names(runs))
    return f'<ul class="legend">{labels}</ul>\n<div class="curves">{drawn}</div>'


def dashes(style: str) -> str:
    return {"-": "none", "--": "8 4", "-.": "8 3 2 3", ":": "2 3"}[style]


def panel(salt: str, runs: dict, name: str) -> str:
    figure = Figure((4.2, 2.7), layout="constrained")
    axes = figure.add_subplot()
    for steps, values, style in lines(runs, name):
        axes.plot(steps, values, **style)
    if SCALES.match(name):
        axes.set_yscale("log", base=2)
    axes.set_xlabel("step", color=INK)
    axes.set_title(name.replace("_", " "), color=INK, fontsize="medium")
    axes.tick_params(colors=INK, which="both")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    text = svg(figure, salt).replace(INK, "currentColor")
    used = set(re.findall(r"#(\w+)", text))
    text = re.sub(r' id="(\w+)"', lambda match: match[0] if match[1] in used else "", text)
    size = re.compile(r'<svg ([^>]*?)width="[^"]*" ?|height="[^"]*pt" ?')
    text = size.sub(lambda match: f"<svg {match[1]}" if match[1] is not None else "", text, 2)
    label = html.escape(f"{name} by step, under {', '.join(runs)}")
    return text.replace("<svg ", f'<svg role="img" aria-label="{label}" ', 1)


def thumbnail(name: str, runs: dict) -> str:
    figure = Figure((3.2, 1.5))
    axes = figure.add_axes((0.02, 0.04, 0.96, 0.92))
    axes.set_axis_off()
    for steps, values, style in lines(runs, names(runs)[0]):
        axes.plot(steps, values, **style)
    return svg(figure, name)
