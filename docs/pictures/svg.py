"""A few shapes as SVG text, in colours and sizes that both themes and a phone can show.

Each colour has a contrast of 3:1 or more on a white and on a dark page (#14181e), and white text on
a filled box one of 4:1 or more.
"""

import math
from html import escape

WIDTH = 360
GREY, BLUE, ORANGE, GREEN, RED = "#7b7b7b", "#3b7dd8", "#c2660a", "#2f8a57", "#d14d4d"


def text(x, y, words, size=12, anchor="start", fill=GREY, weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escape(words)}</text>'
    )


def code(x, y, words, size=12, fill=GREY):
    """A line of code, as wide in every font: a character is 0.6 of its height."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" xml:space="preserve" '
        f'font-family="ui-monospace, monospace" textLength="{0.6 * size * len(words):.1f}" '
        f'lengthAdjust="spacingAndGlyphs">{escape(words)}</text>'
    )


def box(x, y, width, height, fill, label="", size=12):
    """A filled box, with lines of white text in it."""
    drawn = (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
        f'fill="{fill}"/>'
    )
    lines = label.split("\n") if label else []
    first = y + height / 2 + size * 0.35 - (len(lines) - 1) * size * 0.6
    middle = x + width / 2
    return drawn + "".join(
        text(middle, first + i * size * 1.2, line, size, "middle", "#fff")
        for i, line in enumerate(lines)
    )


def line(x1, y1, x2, y2, arrow=False, stroke=GREY, dashed=False):
    end = ' marker-end="url(#arrow)"' if arrow else ""
    dashes = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{stroke}" '
        f'stroke-width="1.5"{end}{dashes}/>'
    )


def curve(points, stroke, width=1.5, ground=None):
    """A line through points. With the height of the ground, what is below it is tinted."""
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    drawn = f'<polyline points="{places}" fill="none" stroke="{stroke}" stroke-width="{width}"/>'
    if ground is None:
        return drawn
    (left, _), *_, (right, _) = points
    corners = f"{left:.1f},{ground:.1f} {places} {right:.1f},{ground:.1f}"
    return f'<polygon points="{corners}" fill="{stroke}" fill-opacity="0.25"/>' + drawn


def arc(middle, radius, first, last, stroke, width):
    """An arrow along a circle, clockwise between two angles, with a head at its middle."""

    def at(angle, distance=radius):
        x, y = middle
        return f"{x + distance * math.cos(angle):.1f} {y + distance * math.sin(angle):.1f}"

    half, head = (first + last) / 2, (width / 2 + 3, 4 / radius + width / 4 / radius)
    side, length = head
    return (
        f'<path d="M{at(first)} A{radius} {radius} 0 0 1 {at(last)}" fill="none" '
        f'stroke="{stroke}" stroke-width="{width:.1f}"/>'
        f'<path d="M{at(half - length, radius + side)} L{at(half + length)} '
        f'L{at(half - length, radius - side)} z" fill="{stroke}"/>'
    )


def picture(height, parts):
    """A drawing of the width of a phone, shown half as large again where there is room."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH * 3 // 2}" height="{height * 3 // 2}" '
        'font-family="system-ui, sans-serif">\n'
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" '
        f'markerHeight="6" orient="auto"><path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker></defs>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def power(exponent):
    """2 to a whole power, in superscript digits."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def legend(y, pairs, step):
    parts = []
    for i, (fill, label) in enumerate(pairs):
        parts += [box(i * step, y - 9, 10, 10, fill), text(i * step + 15, y, label)]
    return parts
