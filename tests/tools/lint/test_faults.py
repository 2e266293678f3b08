"""Public faults: a rule names each of them, at its line, and nothing of the program without it."""

from pathlib import Path

import faults_devices
import faults_matmuls
import faults_states
import pytest

import mpjax
from mpjax._src.tools.lint.rule import VALUES
from mpjax._src.tools.lint.table import RULES

FAULTS = (*faults_matmuls.FAULTS, *faults_states.FAULTS, *faults_devices.FAULTS)
NAMED = (
    *("marin#8217", "speculators#765", "Model-Optimizer#2322", "Optimisers.jl#215"),
    *("jax#27496", "jax#23543", "jax#24047", "jax#34330", "jax#27144", "jax#23007", "jax#22244"),
    *("jax#30337", "jax#7368", "optax#1405", "optax#1444", "optax#1552", "flax#2547"),
    *("maxtext#3721", "maxtext#5039", "maxtext#1350", "xla#26371", "axlearn#1214"),
)
PAGE = Path(__file__).parents[3] / "docs" / "lint_rules.md"

each = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


def lint(fault, fun):
    """Lints a program, and runs it if the rule of its fault looks at values."""
    needs = {rule.name: rule.needs for rule in RULES}[fault.rule]
    return mpjax.lint(fun, target=fault.target, run=needs == VALUES)


@each
def test_lint_rule_names_the_line_of_each_public_fault(fault):
    report = lint(fault, fault.faulty)(*fault.args())
    found = [f for f in report.findings if f.rule == fault.rule]
    assert [f.source for f in found] == [fault.line], str(report)


@each
def test_lint_finds_nothing_in_the_mended_program(fault):
    report = lint(fault, fault.mended)(*(fault.mended_args or fault.args)())
    assert fault.rule in report.ran and not report.findings, str(report)


@pytest.mark.thorough
@each
def test_rules_of_values_find_nothing_in_the_mended_program(fault):
    args = (fault.mended_args or fault.args)()
    report = mpjax.lint(fault.mended, target=fault.target)(*args)
    assert fault.rule in report.ran and not report.findings, str(report)


def test_every_named_fault_is_in_the_table():
    assert sorted(fault.name for fault in FAULTS) == sorted(NAMED)
    assert all(fault.where.split("/")[-1] == fault.name.split("#")[1] for fault in FAULTS)


def test_lint_has_at_least_twenty_rules():
    assert len({rule.name for rule in RULES}) >= 20
    assert {fault.rule for fault in FAULTS} <= {rule.name for rule in RULES}


def test_lint_page_lists_the_faults():
    rows = [
        f"| [{fault.name}](https://github.com/{fault.where}) | {fault.wrong} | `{fault.rule}` |"
        for fault in FAULTS
    ]
    table = "\n".join(["| fault | what was wrong | rule |", "| --- | --- | --- |", *rows])
    assert f"\n{table}\n\n" in PAGE.read_text(), f"docs/lint_rules.md: the table must be\n{table}"
