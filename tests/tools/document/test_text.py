"""Documents as text: what is shown of them, and how it fits."""

import dataclasses

import jax.numpy as jnp
import pytest

from mpjax._src.tools.document import text
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.report import plain

TABLE = Table("Title", ("word", "n"), (("a", "1"), ("b", "22"), ("c", "3")), ("word",), most=2)


def test_a_document_is_its_sentences_tables_and_notes():
    assert text.text_of(Document("", "First.", ("Second.",), (TABLE,), ("Note.",))) == (
        "First.\nSecond.\n\nword   n\na      1\nb     22\nand 1 more\n\nNote."
    )


def test_tables_have_titles_if_there_are_several_with_rows():
    empty, other = (dataclasses.replace(TABLE, title=t, rows=()) for t in ("Empty", "Other"))
    assert "Title" not in text.text_of(Document("", tables=(TABLE, empty)))
    other = dataclasses.replace(TABLE, title="Other", columns=("", ""), note="And a note.")
    shown = text.text_of(Document("", tables=(TABLE, empty, other)))
    assert shown.startswith("Title:\nword") and "Other:\na" in shown and "Empty" not in shown
    assert shown.endswith("and 1 more\nAnd a note.")


def test_continued_lines_are_indented_among_sentences_and_below_a_heading():
    one, two = "one " * 21, "two " * 21
    assert text.text_of(Document("", one)).splitlines()[1] == "one"
    assert text.text_of(Document("", one, (two,))).splitlines()[1::2] == ["    one", "    two"]
    lines = ("Heading\n" + one, "Another\nbelow it")
    want = ["Heading", "    " + one[:75], "    one one", "", "Another", "    below it"]
    assert text.text_of(Document("", lines=lines)).splitlines() == want


def test_without_a_width_nothing_is_folded():
    assert text.text_of(Document("", "word " * 99), 10**9) == "word " * 98 + "word"


def test_plain_makes_data_of_objects_and_arrays():
    @dataclasses.dataclass(frozen=True)
    class Some:
        array: object
        rows: tuple
        secret: str = ""

        _without, _also = ("secret",), ("total",)

        @property
        def total(self):
            return jnp.float32(3)

    rows = (Some(None, ()), {1: (2, dataclasses)})
    inner = {"array": None, "rows": [], "total": 3.0}
    want = {"array": [1.0, 2.0], "rows": [inner, {"1": [2, str(dataclasses)]}], "total": 3.0}
    assert plain(Some(jnp.arange(1.0, 3), rows)) == want


def test_columns_are_aligned_by_their_titles():
    rows = [("a", "1"), ("long", "22")]
    assert text.table(("name", "n"), rows, ("name",)) == ["name   n", "a      1", "long  22"]


@pytest.mark.parametrize("long", ["word " * 40, "a/path/" * 40, "x" * 200])
def test_tables_fold_what_is_long(long):
    lines = text.table(("n", "word", "empty", "where"), [("1", "a", "", long)], ("word", "where"))
    assert max(map(len, lines)) <= text.WIDTH and "empty" not in lines[0]
    assert "".join("".join(lines[1:]).split()) == "1a" + "".join(long.split())
    lines = text.table(("n", "where"), [("1" * 70, long)], ("where",))
    assert max(map(len, lines)) <= text.WIDTH
    assert lines[-1][:4] == "    " and lines[-1][4] != " "
    lines = text.table(("where", "n"), [(long, "1")], ("where",), folded=0)
    assert max(map(len, lines)) <= text.WIDTH and lines[1].endswith("  1")
