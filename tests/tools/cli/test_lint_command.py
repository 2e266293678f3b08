"""`mpjax lint`: what it prints and its exit codes."""

import json
import sys

import pytest
from click.testing import CliRunner

from mpjax._src.tools.cli import commands
from mpjax._src.tools.hardware import compiler
from mpjax._src.tools.lint.table import RULES

PROGRAM = """
import jax, jax.numpy as jnp

def summed(x):
    return jax.lax.reduce_sum(x, (0,)).astype(jnp.float32)

def step():
    return summed, (jax.ShapeDtypeStruct((300,), jnp.bfloat16),)

def clean():
    return jnp.sum, (jnp.ones(300, jnp.bfloat16),)

def breaks():
    return (lambda x: x @ jnp.ones((3, 3))), (jnp.ones((4, 4)),)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "linted.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda *arguments: CliRunner().invoke(commands.cli, ["lint", *arguments])
    sys.modules.pop("linted", None)


def test_lint_shows_a_finding_and_exits_with_1(run):
    result = run("linted:step")
    assert result.exit_code == 1
    assert result.stdout.startswith("linted.py:5: half-sum\n    reduce_sum adds 300 terms")
    assert run("linted:step", "--argnums", "0", "--select", "half-sum").exit_code == 1


def test_lint_without_findings_exits_with_0(run):
    result = run("linted:clean")
    assert result.exit_code == 0 and "no findings" in result.stdout
    assert run("linted:step", "--ignore", "half-*,double-rounding").exit_code == 0


def test_lint_with_wrong_arguments_exits_with_2(run):
    for arguments, message in (
        ((), "Missing argument 'TARGET'"),
        (("linted:nothing",), "has no 'nothing'"),
        (("linted:breaks",), "linted.py:14"),
        (("linted:step", "--select", "half_sum"), "Did you mean 'half-sum'?"),
        (("linted:step", "--json", "--sarif"), "exclude each other"),
        (("linted:step", "--target", "h10000"), "h10000"),
        (("linted:step", "--argnums", "3"), "no argument 3"),
    ):
        result = run(*arguments)
        assert result.exit_code == 2 and message in " ".join(result.stderr.split()), result.stderr


def test_lint_without_the_compiler_of_a_target_exits_with_2(run, monkeypatch):
    def require(target):
        raise ImportError(f"compiling for {target.name} needs: pip install 'mpjax[aot]'")

    monkeypatch.setattr(compiler, "require", require)
    result = run("linted:clean", "--target", "h100")
    assert result.exit_code == 2 and "compiling for h100 needs: pip install" in result.stderr
    assert run("linted:clean", "--target", "h100", "--select", "half-sum").exit_code == 0
    assert run("linted:clean", "--target", "cpu").exit_code == 0


def test_lint_prints_json_and_sarif(run):
    found = json.loads(run("linted:step", "--json").stdout)
    assert [each["rule"] for each in found["findings"]] == ["half-sum"]
    log = json.loads(run("linted:step", "--sarif").stdout)
    (result,) = log["runs"][0]["results"]
    place = result["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "linted.py" and place["region"]["startLine"] == 5


def test_lint_rules_option_lists_the_rules(run):
    shown = run("--rules")
    assert shown.exit_code == 0 and all(rule.name in shown.stdout for rule in RULES)
    listed = json.loads(run("--rules", "--json", "--select", "half-sum").stdout)
    assert [row["name"] for row in listed] == ["half-sum"] and "check" not in listed[0]
