"""A few shapes as SVG text, in colours and sizes that both themes and a phone can show.

Each colour has a contrast of 3:1 or more on a white and on a dark page (#14181e), and white text on
a filled box one of 4:1 or more.
"""

from html import escape

WIDTH = 360
GREY, BLUE, ORANGE, GREEN, RED = "#7b7b7b", "#3b7dd8", "#c2660a", "#2f8a57", "#d14d4d"


def text(x, y, words, size=12, anchor="start", fill=GREY, weight="normal"):
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}" '
        f'font-weight="{weight}">{escape(words)}</text>'
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
