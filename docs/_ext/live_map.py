"""Shows the map of a small GPT, live, in place of the picture that follows `<!-- live map -->`.

The map is `explain` of examples/byte_gpt.py, written into the site at the end of a build: once for
each theme, since the scheme that a frame sees is the system's, not the one chosen on the site.
Where the pages are not built, as on GitHub, the picture is shown.
"""

import re
import sys
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[2]
MARK = re.compile(r"<!-- live map -->\n!\[([^\]]*)\]\([^)]*\)")
POLICY = "mixed_bfloat16"
FILE = "_static/map_{theme}.html"
FRAME = (
    '<iframe class="live-map only-{theme}" src="{up}{file}" title="{title}" '
    'sandbox="allow-scripts" loading="lazy"></iframe>'
)
# Of the page of a report, only the map: there is a page around it.
STYLE = """<style>
header, main > :not(.map), .map > :is(h2, .how) { display: none }
body { padding-top: 0 }
</style>
"""
DARK = "@media (prefers-color-scheme: dark)"
SCHEME = '<meta name="color-scheme" content="light dark">'


def show(app, docname, source):
    """Puts the frames into a page before it is parsed."""
    if app.builder.format != "html":
        return
    up = "../" * docname.count("/")

    def frames(match):
        title = escape(match[1])
        both = (
            FRAME.format(theme=theme, up=up, file=FILE.format(theme=theme), title=title)
            for theme in ("light", "dark")
        )
        return "\n".join(["```{raw} html", *both, "```"])

    source[0] = MARK.sub(frames, source[0])


def themed(page, theme):
    """Returns the page of a report with nothing but its map, in one of its color schemes."""
    assert page.count(DARK) == page.count(SCHEME) == 1 and 'class="map"' in page
    page = page.replace(DARK, "@media all" if theme == "dark" else "@media not all")
    page = page.replace(SCHEME, SCHEME.replace("light dark", theme))
    return page.replace("</head>", f"{STYLE}</head>")


def write(app, exception):
    if exception or app.builder.format != "html":
        return
    sys.path.insert(0, str(ROOT / "examples"))
    import byte_gpt

    page = byte_gpt.explain(POLICY).to_html(f"A small GPT under {POLICY}")
    for theme in ("light", "dark"):
        Path(app.outdir, FILE.format(theme=theme)).write_text(themed(page, theme))


def setup(app):
    app.connect("source-read", show)
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
