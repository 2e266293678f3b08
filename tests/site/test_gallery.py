"""The gallery: a card and a page for each example, with what its curves show."""

import sys

import pages
import pytest

pytest.importorskip("matplotlib")
sys.path.insert(0, str(pages.ROOT / "docs" / "_ext"))

import curves
import gallery


def test_every_table_of_examples_becomes_cards_with_results():
    source = [(pages.ROOT / "docs" / "examples.md").read_text()]
    gallery.show_cards(None, "examples", source)
    assert source[0].count("{grid-item-card}") == len(gallery.examples())
    assert "| model |" not in source[0]
    assert "{grid-item-card} GPT-2, plain JAX\n:link: gallery/gpt2" in source[0]
    assert "held out: float32 2.433, bfloat16 2.431, float16 2.433\n" in source[0]


def test_only_the_lstm_without_a_loss_scale_leaves_the_curve_of_float32():
    seen = {
        name: curves.seen(runs) for name in gallery.examples() if (runs := gallery.recorded(name))
    }
    assert seen["gpt2"] == "The curves coincide."
    assert {name for name, said in seen.items() if "fails" in said} == {"lstm"}
    assert seen["lstm"].startswith("float16 without a loss scale fails")


@pytest.mark.thorough  # it imports every example
def test_a_page_says_each_paragraph_of_its_example_once():
    for name, (model, *_) in gallery.examples().items():
        page = gallery.page(name, model)
        assert page.startswith(f"# {model}\n")
        first = int(page.partition(":lines: ")[2].partition("-")[0])
        shown = (pages.ROOT / "examples" / f"{name}.py").read_text().splitlines()[first - 1]
        assert shown.startswith(("import ", "from ")), name
