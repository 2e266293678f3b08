"""Tables and data, as a terminal and a pipe get them."""

import json
import math
import sys
import textwrap
from pathlib import Path

import jax

from mpjax._src.tools.cli import printing
from mpjax._src.tools.document.model import Document, Table


def shown(rows, capsys):
    table = Table("A title", ("name", "n"), rows, ("name",), note="A note.")
    printing.show(Document("", "A sentence.", tables=(table, table)))
    return capsys.readouterr().out


def test_a_terminal_gets_a_rich_table(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    printed = shown((("[red]x[/]", "1"), ("FAIL", "")), capsys)
    assert "─" in printed and "[red]x[/]" in printed
    assert printed.startswith("A sentence.\n\nA title:\n") and printed.endswith("A note.\n")


def test_plain_tables_are_as_wide_as_their_cells(capsys):
    want = f"""
        A title:
        name{" " * 196}  n
        {"x" * 200}  1
        y
        A note.
        """
    assert textwrap.dedent(want).strip() in shown((("x" * 200, "1"), ("y", "")), capsys)


def test_json_has_no_number_that_json_lacks(capsys):
    printing.json_to_stdout(
        {"a": (math.nan, -math.inf, jax.numpy.ones(2)), 1: [Path("x")], "n": None, "b": True}
    )
    found = json.loads(capsys.readouterr().out)
    assert found == {"a": ["nan", "-inf", [1.0, 1.0]], "1": ["x"], "n": None, "b": True}
