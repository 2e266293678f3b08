"""How published code is run small: its sizes, made-up data, and the values that it reads."""

import ast
import importlib.util
import io
import json
import sys

import numpy as np
import pytest

from benchmarks.others import COMMITS, HERE


def loaded(path):
    """Returns a script or a shim as a module."""
    spec = importlib.util.spec_from_file_location(f"loaded_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def with_sizes():
    return loaded(HERE / "scripts" / "with_sizes.py")


TEXT = """steps = 100_000
def main(width=512, *, depth=6, name=None):
    steps = 7
    return steps, width, depth
"""


def test_sizes_are_those_of_a_cell_and_of_parameters_and_nothing_else_changes(with_sizes):
    sizes = with_sizes.Sizes({"steps": "3", "width": "8", "depth": "2"})
    tree = sizes.visit(ast.parse(TEXT))
    expected = TEXT.replace("100_000", "3").replace("512", "8").replace("=6", "=2")
    assert ast.dump(tree) == ast.dump(ast.parse(expected))
    assert sizes.used == {"steps", "width", "depth"}


def test_a_notebook_runs_with_sizes_as_main(with_sizes, tmp_path, monkeypatch, capsys):
    cells = [
        "%time\n!pip install x\nsteps = 10",
        "import sys\nprint(__name__, steps, sys.argv[1:])",
    ]
    cells = [{"cell_type": "code", "source": [cell]} for cell in cells]
    path = tmp_path / "book.ipynb"
    path.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": ["# A"]}, *cells]}))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", ["with_sizes.py", str(path), "steps=2", "--", "--seed", "1"])
    with_sizes.main()
    assert capsys.readouterr().out == "__main__ 2 ['--seed', '1']\n"
    monkeypatch.setattr(sys, "argv", ["with_sizes.py", str(path), "step=2"])
    with pytest.raises(SystemExit, match=r"has no sizes \['step'\]"):
        with_sizes.main()


def test_each_value_that_is_read_is_written_in_full():
    class Kind:
        def __init__(self, value):
            self.value = np.asarray(value)

        @property
        def _value(self):
            return self.value

        def __float__(self):
            return float(self._value)

    out = io.StringIO()
    loaded(HERE / "shims" / "numbers" / "sitecustomize.py").watch(Kind, out)
    assert float(Kind(np.float32(0.1))) == np.float32(0.1)
    assert Kind(np.arange(3))._value.tolist() == [0, 1, 2]
    number, array = out.getvalue().splitlines()
    assert float.fromhex(number) == np.float32(0.1)
    assert array.startswith("int64 (3,) ") and len(array.split()[-1]) == 64


def test_a_code_base_by_commit_says_which_and_where_it_is():
    for case, base in COMMITS["base"].items():
        assert len(base["commit"]) == 40 and base["repository"].count("/") == 1, case
        assert ("why" in base) != ("path" in base or "command" in base), case
