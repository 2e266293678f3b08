"""Tables and data, as a terminal and a pipe get them."""

import math
import sys
import textwrap
from pathlib import Path

import jax

from mpjax._src.cli import show


def test_a_terminal_gets_a_rich_table(monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show.table({"name": "left", "n": "right"}, [("[red]x[/]", 1), ("FAIL", None)], "A title")
    printed = capsys.readouterr().out
    assert "─" in printed and "[red]x[/]" in printed and "A title" in printed


def test_plain_tables(capsys):
    show.table({"name": "left", "n": "right"}, [("x" * 200, 1), ("y", None)], "A title")
    want = f"""
        A title
        name{" " * 196}  n
        {"x" * 200}  1
        y
        """
    assert capsys.readouterr().out.strip() == textwrap.dedent(want).strip()


def test_plain_data():
    found = show.plain({"a": (math.nan, jax.numpy.ones(2)), 1: {Path("x")}, "n": None, "b": True})
    assert found == {"a": ["nan", [1.0, 1.0]], "1": ["x"], "n": None, "b": True}
    assert [show.size(n) for n in (5, 2048, 3 * 2**20, 2**41)] == [
        *("5 B", "2.0 KiB", "3.0 MiB", "2048.0 GiB")
    ]
