"""The pictures of concepts and guides are what their scripts draw, and both themes show them."""

import json
import re
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"


@pytest.fixture
def drawn(monkeypatch):
    monkeypatch.syspath_prepend(PICTURES)
    import concepts
    import svg

    yield concepts, svg
    del sys.modules["concepts"], sys.modules["svg"]


@pytest.mark.thorough
def test_concept_pictures_are_what_their_script_draws(drawn):
    """Up to last digits: shares of a histogram hang on the order of a machine's sums."""
    number = re.compile(r"(?<![#\w])-?\d+\.?\d*")
    for draw in drawn[0].PICTURES:
        committed = (PICTURES / f"concepts_{draw.__name__}.svg").read_text()
        new = draw()
        assert number.sub("", new) == number.sub("", committed), draw.__name__
        values = [np.array(number.findall(page), float) for page in (new, committed)]
        np.testing.assert_allclose(*values, atol=0.2, err_msg=draw.__name__)


def test_the_page_shows_every_picture_and_says_what_it_shows(drawn):
    page = (PICTURES.parent / "concepts.md").read_text()
    for draw in drawn[0].PICTURES:
        (words,) = re.findall(rf"!\[([^\]]*)\]\(pictures/concepts_{draw.__name__}.svg\)", page)
        assert len(words) > 60, draw.__name__


def luminance(colour):
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(one, other):
    """The contrast of two colours, as WCAG 2 defines it."""
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def test_picture_colors_stand_out_on_white_and_dark_pages(drawn):
    svg = drawn[1]
    for colour in (svg.GREY, svg.BLUE, svg.ORANGE, svg.GREEN, svg.RED):
        assert contrast(colour, "#ffffff") >= 4, colour  # also of white text in a box
        assert contrast(colour, "#14181e") >= 3, colour


@pytest.fixture
def guides(drawn):
    import guides

    yield guides
    del sys.modules["guides"]


def test_pictures_of_guides_are_what_their_script_draws(guides):
    versions = guides.recorded("run")["versions"]
    for name, draw in guides.PICTURES.items():
        if draw is guides.block and jax.__version__ != versions["jax"]:
            continue  # another version has other equations
        assert (PICTURES / f"{name}.svg").read_text() == draw(), name


def test_pictures_of_guides_are_shown_and_described_on_one_page(guides):
    pages = "".join(page.read_text() for page in PICTURES.parent.glob("*.md"))
    for name in guides.PICTURES:
        (words,) = re.findall(rf"!\[([^\]]*)\]\(pictures/{name}.svg\)", pages)
        assert len(words) > 60, name


def test_words_of_guides_fit_a_phone(guides):
    """A character of a wide font is 0.55 of its size wide on average, and a bold one 0.62."""
    word = re.compile(
        r'<text x="([\d.]+)" y="[\d.]+" font-size="([\d.]+)"(?: text-anchor="(\w+)")?'
        r'[^>]*?(?:font-weight="(\w+)")?>([^<]*)<'
    )
    for name in guides.PICTURES:
        drawn = (PICTURES / f"{name}.svg").read_text()
        assert len(drawn) < 60_000
        for x, size, anchor, weight, words in word.findall(drawn):
            each = float(size) * (0.62 if weight == "bold" else 0.55)
            share = {"middle": 0.5, "end": 0.0}.get(anchor, 1.0)
            assert float(x) + share * each * len(unescape(words)) <= 360, (name, words)
            assert float(size) >= 11, (name, words)


def test_recorded_runs_hold_what_the_pictures_say(guides):
    cases = guides.recorded("run")["cases"]
    narrow = cases["mixed_float16"]
    scales = narrow["loss_scale_log2"]
    halved = [i for i in range(len(scales) - 1) if scales[i + 1] == scales[i] - 1]
    assert narrow["skipped"] == halved and len(narrow["loss"]) <= 300
    assert abs(np.mean(narrow["loss"][-20:]) - np.mean(cases["float32"]["loss"][-20:])) < 0.02
    results = json.loads((guides.RESULTS / "aot.json").read_text())["cases"]["h100/gpt2"]
    timeline = guides.recorded("timeline")["cases"]
    for policy, rival in (("float32", "float32"), ("mixed_bfloat16", "autocast")):
        case = timeline[policy]
        assert abs(case["temp_mib"] / results[rival]["temp_mib"] - 1) < 0.01
    for policy, case in timeline.items():  # the arrays that are alive are what XLA counts
        assert abs(max(case["forward"] + case["backward"]) / case["temp_mib"] - 1) < 0.02, policy


@pytest.fixture
def live_map(monkeypatch):
    monkeypatch.syspath_prepend(PICTURES.parent / "_ext")
    monkeypatch.syspath_prepend(PICTURES.parents[1] / "examples")
    import live_map

    yield live_map
    del sys.modules["live_map"]


def test_the_quickstart_shows_a_live_map(live_map, tmp_path):
    app = SimpleNamespace(builder=SimpleNamespace(format="html"), outdir=tmp_path)
    page = [(PICTURES.parent / "quickstart.md").read_text()]
    live_map.show(app, "quickstart", page)
    assert page[0].count("<iframe ") == 2 and "<!-- live map -->" not in page[0]
    (tmp_path / "_static").mkdir()
    live_map.write(app, None)
    sizes = []
    for file in re.findall(r'src="([^"]*)"', page[0]):
        drawn = (tmp_path / file).read_text()
        assert "prefers-color-scheme" not in drawn and '"GPT/Block_0' in drawn
        sizes.append(len(drawn.encode()))
    assert len(sizes) == 2 and sum(sizes) <= 320_000
