"""The pictures of docs/concepts.md are what their script draws, and both themes show them."""

import re
import sys
from pathlib import Path

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


def test_pictures_of_guides_are_what_their_script_draws(drawn):
    import guides

    for name, draw in guides.PICTURES.items():
        assert (PICTURES / f"{name}.svg").read_text() == draw(), name
