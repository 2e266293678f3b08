"""Lines are shown with short names of files, and the user's files are told from a library's."""

import sys
import types

import numpy as np

from mpjax._src.core.base.lines import is_library, short


def test_short_gives_short_names_of_files(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert short(f"{tmp_path}/models/net.py:3") == "models/net.py:3"
    assert short("/elsewhere/net.py:3") == "net.py:3"
    assert short("/x/lib/python3/dist-packages/flax/core.py:1") == "flax/core.py:1"
    assert short("") == ""
    assert is_library(np.__file__) and not is_library(str(tmp_path / "net.py"))


def test_a_cell_of_a_notebook_has_the_name_that_ipython_gives_it(monkeypatch, tmp_path):
    cells = {f"{tmp_path}/ipykernel_7/123.py": ("Cell", "In[3]")}  # else None, as IPython has it
    compiler = types.SimpleNamespace(format_code_name=cells.get)
    shell = types.SimpleNamespace(compile=compiler)
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.chdir(tmp_path)
    assert short(f"{tmp_path}/ipykernel_7/123.py:9") == "In[3]:9"
    assert short(f"{tmp_path}/net.py:9") == "net.py:9"
    ipython.get_ipython = lambda: None  # imported, but not running
    assert short(f"{tmp_path}/net.py:9") == "net.py:9"
