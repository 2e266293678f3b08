"""Draws a document as one HTML text with style, script and data inside; it loads nothing."""

import base64
import functools
import hashlib
import html
import json
from importlib import resources
from typing import Any

from mpjax._src.tools.document.model import UNITS, Document, Drawing
from mpjax._src.tools.document.scales import Scale, scale_of
from mpjax._src.tools.document.text import text_of

# In a notebook a page is shown in a sandboxed frame, so its script cannot touch anything else.
FRAME = (
    '<iframe title="{title}" sandbox="allow-scripts" srcdoc="{page}" '
    'style="width:100%;height:640px;border:1px solid #8886;border-radius:6px"></iframe>'
)


def page_of(document: Document, title: str = "") -> str:
    """Returns a document as HTML.

    Raises:
        ImportError: Without jinja2, the extra ``html``.
    """
    template = _templates().get_template("page.html.jinja")
    drawing = document.drawing()
    scales = [scale_of(color, drawing.operations) for color in drawing.colors]
    count = len(drawing.operations)
    counted = f"{count} {drawing.things if count != 1 else drawing.things.removesuffix('s')}"
    style, script = _part("page.css"), _part("map.js")
    # The page forbids all scripts but the one with this digest, so no text of a program can run.
    digest = hashlib.sha256(script.encode()).digest()
    return template.render(
        title=title or document.title,
        document=document,
        drawing=drawing,
        text=text_of(document),
        scales=scales,
        counted=counted,
        large=any(operation.large for operation in drawing.operations),
        data=_json(_data(drawing, scales)) if drawing.operations else "",
        style=style,
        script=script,
        allowed=f"'sha256-{base64.b64encode(digest).decode()}'",
    )


def framed(document: Document) -> str:
    """Returns the page of a document for a notebook, in its own frame."""
    return FRAME.format(title=html.escape(document.title), page=html.escape(page_of(document)))


@functools.cache
def _templates() -> Any:
    try:
        import jinja2
    except ImportError as error:
        raise ImportError("pages need jinja2: pip install 'mpjax[html]'.") from error
    loader = jinja2.FunctionLoader(_part)
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,  # the texts of a page come from the user's program
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["written"] = lambda amount, unit: UNITS[unit](amount)
    return environment


def _part(name: str) -> str:
    return (resources.files(__package__) / "templates" / name).read_text("utf-8")


def _data(drawing: Drawing, scales: list[Scale]) -> dict[str, Any]:
    """Returns the operations compactly: each text once, and each operation as a list of numbers."""
    texts: dict[str, int] = {}

    def text(words: str) -> int:
        return texts.setdefault(words, len(texts))

    rows = [
        [
            text(operation.label),
            text(operation.scope),
            operation.number,
            int(operation.backward) + 2 * int(operation.large),
            [scale.places[i] for scale in scales],
            [_number(operation.colors.get(s.color.name)) for s in scales if s.amounts],
            [text(words) for fact in operation.facts for words in fact],
        ]
        for i, operation in enumerate(drawing.operations)
    ]
    return {
        "texts": list(texts),
        "rows": rows,
        "scales": [
            {
                "name": scale.color.name,
                "amount": scale.amounts,
                "most": scale.color.of_box is max,
                "unit": scale.color.unit,
                "keys": [[key.label, key.style] for key in scale.legend],
            }
            for scale in scales
        ],
    }


def _number(value: Any) -> float | None:
    # JSON has no infinity.
    return value if isinstance(value, int | float) and abs(value) < 1e300 else None


def _json(data: Any) -> str:
    """Returns JSON for a script element, escaped so that no text in it can end the element."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
