"""Pages as data and as text: what they hold, in how many bytes, and what they must not."""

import json
import re
import shutil
import sys
from importlib import resources
from pathlib import Path

import jax.numpy as jnp
import pytest
from browsers import find_browser

import mpjax
from mpjax._src.tools.document.html import _templates, framed, page_of
from mpjax._src.tools.document.model import (
    Bar,
    Color,
    Document,
    Drawing,
    Operation,
    Table,
    share,
    shares,
    size,
)
from mpjax._src.tools.document.scales import scale_of

TEMPLATES = resources.files("mpjax._src.tools.document") / "templates"
HOSTILE = "</script><script>alert(1)</script><!-- \u2028 ' \" & <b>"


def operations(*values, name="bytes", scope="a/b"):
    return [Operation(f"op{i}", scope, (), {name: v}, i) for i, v in enumerate(values)]


def drawn(**fields):
    return page_of(Document("a", drawing=lambda: Drawing(**fields)))


def data_of(html):
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.S)
    return json.loads(text)


# ---- what is in it -------------------------------------------------------------------------------


def test_page_data_holds_all_that_a_drawing_says():
    told = (("why", "half list"), ("line", "net.py:3"))
    made = Operation("dot", "Net/Dense_0", told, {"dtype": "bfloat16", "bytes": 96}, 7, True, True)
    colors = Color("dtype", "", ("float32", "bfloat16")), Color("bytes", "", unit="bytes")
    data = data_of(drawn(operations=(made,), colors=colors))
    label, scope, number, flags, places, amounts, facts = data["rows"][0]
    texts = data["texts"]
    assert (texts[label], texts[scope], number, flags, amounts) == (
        "dot",
        "Net/Dense_0",
        7,
        3,
        [96],
    )
    assert [texts[i] for i in facts] == ["why", "half list", "line", "net.py:3"]
    keys = [scale["keys"][place] for scale, place in zip(data["scales"], places, strict=True)]
    assert keys[0] == ["bfloat16", "c1"] and "96" not in keys[1][0]


def test_user_text_ends_no_script_and_opens_no_tag():
    fact = (("why", HOSTILE),)
    drawing = Drawing(
        bars=(Bar(HOSTILE, ((HOSTILE, 3.0),)),),
        operations=(Operation(HOSTILE, HOSTILE, fact, {HOSTILE: HOSTILE}, 0),),
        colors=(Color(HOSTILE, HOSTILE),),
    )
    table = Table(HOSTILE, (HOSTILE,), ((HOSTILE,),), note=HOSTILE)
    document = Document(HOSTILE, HOSTILE, (HOSTILE,), (table,), (HOSTILE,), lambda: drawing)
    html = page_of(document)
    assert html.count("<script") == html.count("</script>") == 2 and "<b>" not in html[-9000:]
    assert "alert(1)</" not in html and "<!-- " not in html
    data = data_of(html)
    assert data["texts"][data["rows"][0][0]] == HOSTILE
    frame = framed(document)
    assert frame.count("<") == 2 and frame.startswith("<iframe") and "allow-scripts" in frame


def test_a_page_names_nothing_to_load():
    html = mpjax.explain(lambda w, x: jnp.sum(x @ w), "O2")(
        jnp.ones((3, 2)), jnp.ones((4, 3))
    ).to_html()
    assert not re.findall(r"""(?:src|href)=["'](?!data:,)|url\((?!#)|@import|https?://""", html)
    assert "default-src 'none'" in html


def test_amounts_that_are_no_numbers_have_a_place():
    color = Color("error", "", unit="share", most=1.0)
    values = (None, 0.0, 0.001, 0.05, 3.0, float("inf"), float("nan"))
    scale = scale_of(color, operations(*values, name="error"))
    labels = [scale.legend[place].label for place in scale.places]
    assert labels[0] == labels[1] and labels[2:5] == ["under 0.3%", "3% to 10%", "30% or more"]
    assert labels[5] == "non-finite" and sum(key.count for key in scale.legend) == len(values)
    data_of(drawn(operations=tuple(operations(*values)), colors=(color,)))


def test_steps_of_bytes_are_powers_of_four_below_the_largest():
    scale = scale_of(Color("bytes", "", unit="bytes"), operations(0, 5, 3000, 2**20, 2**20 + 1))
    labels = [scale.legend[place].label for place in scale.places]
    assert labels[0].startswith("0 B") and labels[1] == "under 2 KiB"
    assert labels[2:] == ["2 KiB to 8 KiB", "512 KiB or more", "512 KiB or more"]
    (only,) = scale_of(Color("bytes", "", unit="bytes"), operations(1024)).legend
    assert only.count == 1


def test_scale_has_a_color_for_a_class_that_nobody_named():
    scale = scale_of(Color("dtype", "", ("float32",)), operations("int4", "float32", name="dtype"))
    assert [(key.label, key.style) for key in scale.legend] == [("float32", "c0"), ("int4", "c1")]


def test_shares_take_the_largest_part_apart_and_sum_up():
    amounts = {f"net/block_{i}/dense": 10.0 for i in range(4)} | {"net": 1.0, "loss.py:3": 2.0}
    found = dict(shares(amounts))
    assert sum(found.values()) == sum(amounts.values())
    assert found["net/block_0/dense"] == 10 and found["net"] == 1 and found["loss.py:3"] == 2
    few = dict(shares({f"layer_{i}": float(i) for i in range(30)}, most=4))
    assert len(few) == 4 and few["others"] == sum(range(27)) and few["layer_29"] == 29


def test_size_and_share_print_units():
    assert (size(0), size(1536), size(3 * 2**40)) == ("0 B", "1.5 KiB", "3072 GiB")
    assert (share(0.0123), share(1.0), share(25.0)) == ("1.23%", "100%", "25 times")


# ---- who can read it -----------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_on_every_page_color_has_enough_contrast(scheme):
    """The contrast of WCAG 2.2, 1.4.3: of text and its ground at least 4.5."""
    light, dark = re.findall(r":root \{(.*?)\}", (TEMPLATES / "page.css").read_text(), re.S)[:2]
    variables = dict(re.findall(r"--(\w+): (#\w+);", light + (dark if scheme == "dark" else "")))
    ink = {"a5": "high", "a6": "high"}
    grounds = [name for name in variables if re.fullmatch(r"[ac]\d", name)]
    pairs = [(ink.get(name, "low"), name) for name in grounds]
    pairs += [(text, ground) for text in ("ink", "faint") for ground in ("paper", "box")]
    assert len(grounds) == 15
    for text, ground in pairs:
        high, low = sorted(map(luminance, (variables[text], variables[ground])), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 4.5, (text, ground)


def luminance(color):
    digits = color[1:] if len(color) == 7 else "".join(d * 2 for d in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


# ---- where it is missing -------------------------------------------------------------------------


def test_without_jinja2_a_notebook_shows_the_text(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    _templates.cache_clear()
    report = mpjax.explain(jnp.dot, "O2")(jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert report._repr_html_() is None
    with pytest.raises(ImportError, match=r"pip install 'mpjax\[html\]'"):
        report.to_html()


def test_a_browser_that_is_missing_fails_under_ci_and_nowhere_else(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no chromium"):
        find_browser()
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="no chromium"):
        find_browser()
    path = Path(__file__).parents[3] / ".ci" / "run"
    assert "install -y -qq chromium" in path.read_text() and "export CI=true" in path.read_text()


def test_templates_are_part_of_the_package():
    names = {path.name for path in TEMPLATES.iterdir()}
    assert names == {"page.html.jinja", "parts.html.jinja", "page.css", "map.js"}


def test_a_report_without_a_map_has_no_script():
    html = mpjax.hardware.device_report().to_html()
    assert "<pre" in html and "<table" in html and "<script" not in html
