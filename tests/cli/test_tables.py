"""Tables that commands print."""

import types

from mpjax._src.cli import tables


def test_figures_are_on_the_right_and_words_on_the_left(capsys):
    titles = ["added", "error", "inherited", "underflow", "operation", "dtypes", "where"]
    cells = [["x"] * len(titles)]
    comparison = types.SimpleNamespace(
        worst_results=list, diverged=(), rows=cells, cells=lambda top: cells
    )
    tables.compared(comparison, 1)
    header, row = capsys.readouterr().out.splitlines()[-2:]
    assert header.split() == titles
    sides = [header.index(t) + (len(t) - 1 if i < 4 else 0) for i, t in enumerate(titles)]
    assert [i for i, letter in enumerate(row) if letter == "x"] == sides
