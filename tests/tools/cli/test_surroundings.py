"""The command line where its surroundings are broken: streams, directories, the user's objects."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import thorough_but

from mpjax._src.tools.cli import commands, load

ROOT = Path(__file__).parents[3]

PROGRAM = """
import jax.numpy as jnp

class Odd(Exception):
    def __str__(self): raise RuntimeError("no text")

class Raises:
    def __getattr__(self, name): raise RuntimeError(f"no {name}")
    def __dir__(self): raise RuntimeError("no names")

def loss():
    return (lambda w, x: jnp.mean(x @ w)), (jnp.ones((4, 4)), jnp.ones((2, 4)))
def integers(): return (lambda x: x + 1), (jnp.arange(3),)
def unsorted(): return (lambda x: x), ({1: jnp.ones(2), "a": jnp.ones(2)},)
def odd(): raise Odd
def given(): return Raises()
raises = Raises()

def __getattr__(name):
    raise (SystemExit if name == "leaves" else RuntimeError)(f"no {name}")
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "odd_program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    sys.modules.pop("odd_program", None)


def run(*arguments):
    return CliRunner().invoke(commands.cli, arguments)


def refused(result, message):
    assert result.exit_code == 2, result.output
    assert message in result.stderr and "Traceback" not in result.stderr
    assert isinstance(result.exception, SystemExit)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("odd_program:missing", "reading odd_program:missing failed: RuntimeError: no missing"),
        ("odd_program.py:missing", "RuntimeError: no missing"),
        ("odd_program:leaves", "reading odd_program:leaves ended the program"),
        ("odd_program:raises.loss", "RuntimeError: no loss"),
        ("odd_program:given", "RuntimeError: no"),
        ("odd_program:odd", "odd_program:odd() failed: Odd"),
    ],
)
def test_target_that_raises_is_an_error_without_traceback(folder, target, message):
    refused(run("explain", target), message)


def test_args_that_are_no_tree_are_an_error_without_traceback(folder):
    refused(run("compare", "odd_program:unsorted"), "reading the args of odd_program:unsorted")


@pytest.mark.parametrize(
    ("command", "option"), [("explain", "--fail-under"), ("compare", "--tolerance")]
)
def test_nan_is_no_limit_of_fail_under_and_tolerance(folder, command, option):
    refused(run(command, "odd_program:loss", option, "nan"), f"'{option}': 'nan' is not a number")


def test_a_tolerance_needs_something_to_hold_to_it(folder):
    assert run("compare", "odd_program:integers").exit_code == 0
    result = run("compare", "odd_program:integers", "--tolerance", "0.1")
    refused(result, "has nothing to compare with --tolerance")


def test_without_a_current_directory_modules_are_still_found(tmp_path, monkeypatch):
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    gone.rmdir()
    where = "no longer exists"
    refused(run("explain", "nowhere:f"), where)
    refused(run("explain", "nowhere.py:f"), where)
    refused(run("explain", "json:loads"), "json:loads cannot be called without arguments")
    assert load._here() == ""


def program(*arguments, **streams):
    """Runs the whole program; the streams as the shell's redirections."""
    redirections = " ".join(f"{number}{target}" for number, target in streams.values())
    command = f'exec "{sys.executable}" -W error -m mpjax {" ".join(arguments)} {redirections}'
    return subprocess.run(
        ["sh", "-c", command],
        # Buffered, as it is by default: what is left in the buffer is written at the very end.
        env={
            **{k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
    )


FULL, CLOSED = (">/dev/full", "No space left"), (">&-", "is closed")


@pytest.mark.parametrize(
    ("arguments", "target", "why"),
    [
        (("explain", "odd_program:loss"), *FULL),
        pytest.param(("explain", "odd_program:loss"), *CLOSED, marks=pytest.mark.thorough),
        pytest.param(("--version",), *FULL, marks=pytest.mark.thorough),
        pytest.param(("--version",), *CLOSED, marks=pytest.mark.thorough),
    ],
)
def test_a_result_that_cannot_be_written_is_told_in_one_line(folder, arguments, target, why):
    done = program(*arguments, stdout=(1, target))
    assert done.returncode == 2 and not done.stdout
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: the result could not be written: ") and why in line


@pytest.mark.thorough
def test_a_closed_stderr_loses_no_result(folder):
    done = program("compile", "odd_program:loss", "--target", "x9", "--json", stderr=(2, ">&-"))
    assert done.returncode == 2 and "Unknown target='x9'" in done.stdout


HELP = """
import atexit, runpy, sys
heavy = ("jax", "jaxlib", "numpy", "absl", "optax", "rich", "matplotlib", "orbax", "tensorstore")
atexit.register(lambda: print(*[len(sys.modules), *(n for n in heavy if n in sys.modules)]))
runpy.run_module("mpjax", run_name="__main__")
"""


ASKED = [["--help"], *([name, "--help"] for name in commands.cli.commands), ["--version"]]
WRONG = [["lint", "--what"], ["nothing"], ["explain"]]


QUICK = [["--help"], ["explain", "--help"], ["survey", "--help"], ["--version"], ["nothing"]]


@pytest.mark.parametrize("arguments", thorough_but([*ASKED, *WRONG], *QUICK), ids=" ".join)
def test_help_imports_nothing_that_logs_or_takes_long(arguments):
    """JAX logs where a plugin finds no hardware, and takes most of a second to import."""
    command = [sys.executable, "-c", HELP, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == (2 if arguments in WRONG else 0), done.stderr
    assert bool(done.stderr) == (arguments in WRONG)
    count, *heavy = done.stdout.splitlines()[-1].split()
    assert not heavy and int(count) < 300
