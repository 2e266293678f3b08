"""A script, a module or a notebook runs as Python runs it."""

import json
import os
import signal
import subprocess
import sys

import pytest

from mpjax._src.tools.scripts.launch import LaunchError, launch

# Runs a target as the command does, without importing JAX.
RUN = (
    "import sys; from mpjax._src.tools.scripts.launch import launch; m = sys.argv[1] == '-m';"
    "rest = sys.argv[1 + m:]; launch(rest[0], rest[1:], m)"
)
ABOUT = """
'''A script.'''
import sys, atexit, pickle, inspect
class Thing: pass
main = sys.modules["__main__"]
atexit.register(lambda: print("at exit", sys.modules["__main__"] is main, __name__))
print(__name__, __doc__, __package__, __spec__ and __spec__.name, __file__, sys.argv, sys.path[0])
print(type(__loader__).__name__, __builtins__.__name__, __annotations__, globals().get("x"))
assert pickle.loads(pickle.dumps(Thing())).__class__ is Thing
assert vars(main) is globals() and "jax" not in sys.modules
assert "class Thing" in inspect.getsource(Thing)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "about.py").write_text(ABOUT)
    (tmp_path / "package").mkdir()
    for name in ("__init__", "__main__", "inner"):
        (tmp_path / "package" / f"{name}.py").write_text(ABOUT if name[:3] != "__i" else "x = 1")
    return tmp_path


def ran(*args):
    return subprocess.run([sys.executable, *args], capture_output=True, text=True)


@pytest.mark.parametrize(
    "args", [["about.py", "--flag", "1"], ["-m", "package", "a"], ["-m", "package.inner"]]
)
def test_it_finds_what_it_finds_under_python(folder, args):
    plain, ours = ran(*args), ran("-c", RUN, *args)
    assert plain.returncode == 0 and "at exit True" in plain.stdout, plain.stderr
    assert (ours.stdout, ours.stderr, ours.returncode) == (plain.stdout, plain.stderr, 0)


ENDS = {
    "raises": "def f():\n    raise ValueError('no')\nf()",
    "syntax": "def f(:",
    "exits": "import sys; sys.exit(3)",
    "says": "import sys; sys.exit('why')",
    "none": "import sys; sys.exit()",
    "hook": "import sys; sys.excepthook = lambda *e: print('own hook', e[0]); 1 / 0",
    "group": "raise ExceptionGroup('two', [ValueError(1), KeyError(2)])",
    "caused": "try:\n    1 / 0\nexcept ZeroDivisionError as e:\n    raise OSError(5) from e",
}


def test_it_ends_as_under_python(folder):
    for name, source in ENDS.items():
        (folder / f"{name}.py").write_text(source)
        plain, ours = ran(f"{name}.py"), ran("-c", RUN, f"{name}.py")
        assert (ours.stderr, ours.returncode) == (plain.stderr, plain.returncode), name
        assert ours.stdout == plain.stdout


def test_an_interrupt_ends_it_as_under_python(folder):
    (folder / "slow.py").write_text("import time; print('up', flush=True); time.sleep(60)")
    command = [sys.executable, "-c", RUN, "slow.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"up\n"
        os.kill(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT and b"launch.py" not in err, err


def notebook(path, *sources):
    cells = [{"cell_type": "code", "source": source} for source in sources]
    text = {"cell_type": "markdown", "source": ["# no code"]}
    path.write_text(json.dumps({"cells": [text, *cells], "nbformat": 4}))


@pytest.fixture
def process(monkeypatch):
    """Gives the process back what a launched script changes."""
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def test_a_notebook_runs_cell_by_cell(folder, process, capsys):
    notebook(folder / "cells.ipynb", ["x = 2\n", "y = 3"], "def f(): return x\nprint(f() * y)")
    launch("cells.ipynb")
    assert capsys.readouterr().out == "6\n"
    notebook(folder / "bad.ipynb", "x = 2", "\n1 / 0")
    with pytest.raises(ZeroDivisionError) as error:
        launch("bad.ipynb")
    assert (
        str(error.traceback[-1].path).endswith("bad.ipynb[2]") and error.traceback[-1].lineno == 1
    )
    notebook(folder / "magic.ipynb", "%matplotlib inline\nx = 1", "print(5 %2)")
    if "IPython" not in sys.modules and not _has("IPython"):
        with pytest.raises(LaunchError, match=r"only IPython runs.*pip install ipython"):
            launch("magic.ipynb")


def _has(name):
    import importlib.util

    return importlib.util.find_spec(name) is not None


@pytest.mark.parametrize(
    ("args", "match"),
    [
        (["aboot.py"], r"no file 'aboot.py'. Did you mean 'about.py'"),
        (["about"], r"Did you mean 'about.py'"),
        (["package.inner"], r"To run a module, write -m package.inner"),
        ([os.curdir], r"without a __main__.py"),
        (["nowhere", (), True], r"no module 'nowhere' in"),
        (["package.nowhere", (), True], r"no module 'package.nowhere'"),
    ],
)
def test_what_is_not_there_is_refused(folder, process, args, match):
    with pytest.raises(LaunchError, match=match):
        launch(*args)
