"""Error messages of commands say what to install or which option to pass."""

import pytest
from click.testing import CliRunner

import mpjax
from mpjax._src.tools.cli.commands import cli

PROGRAM = """
import jax, jax.numpy as jnp

def shapes(): return jax.ShapeDtypeStruct((4, 4), jnp.float32), jax.ShapeDtypeStruct((2, 4), "f4")
def loss(): return (lambda w, x: jnp.mean(x @ w)), shapes()
def with_aux(): return (lambda w, x: (jnp.mean(x @ w), {"x": x})), shapes()
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "foreign.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    return lambda *argv: CliRunner().invoke(cli, argv)


def test_compile_without_compilers_says_what_to_install(run, monkeypatch):
    def compile_for(target, fun, *args, progress):
        raise ImportError(f"compiling for target={target!r} needs more: pip install 'mpjax[aot]'")

    monkeypatch.setattr(mpjax, "compile_for", compile_for)
    result = run("compile", "foreign.py:loss", "--target", "v100,h100")
    assert result.exit_code == 2 and not result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("Error: v100, h100: ImportError") and "mpjax[aot]" in line


def test_errors_of_commands_advise_options_not_arguments(run):
    result = run("explain", "foreign.py:with_aux", "--argnums", "0")
    assert result.exit_code == 2 and "pass --has-aux" in result.stderr
    assert "--argnums none" in result.stderr and "has_aux=" not in result.stderr
    result = run("explain", "foreign.py:with_aux", "--argnums", "0", "--has-aux")
    assert result.exit_code == 0
    result = run("explain", "foreign.py:loss", "--argnums", "0", "--has-aux")
    assert result.exit_code == 2 and "--has-aux, so the function must return" in result.stderr
