"""Public faults: a rule names each of them, at its line, and nothing of the program without it."""

from pathlib import Path

import faults_devices
import faults_distances
import faults_expectations
import faults_integers
import faults_matmuls
import faults_orders
import faults_phases
import faults_probabilities
import faults_products
import faults_rounding
import faults_saturation
import faults_scales
import faults_states
import faults_totals
import jax
import pytest
from support import thorough_but

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
# Of numbers (counts, angles, totals, products, norms), and of probabilities, distances and scales:
# public ones, and members of the same classes.
NUMBERS = (faults_phases, faults_integers, faults_totals, faults_products, faults_rounding)
PROBABILITIES = (
    *(faults_probabilities, faults_expectations, faults_orders, faults_saturation),
    *(faults_distances, faults_scales),
)
OF_NUMBERS = tuple(fault for table in NUMBERS for fault in table.FAULTS)
OF_PROBABILITIES = tuple(fault for table in PROBABILITIES for fault in table.FAULTS)
EVERY = (*FAULTS, *OF_NUMBERS, *OF_PROBABILITIES)
CORRECT = [each for table in (faults_totals, faults_products) for each in table.CORRECT]
DEAR = ("prefix sums", "running maxima")  # each length of a slice is a program
NEEDS = {rule.name: rule.needs for rule in RULES}
PAGE = Path(__file__).parents[3] / "docs" / "lint_rules.md"

each = pytest.mark.parametrize("fault", EVERY, ids=lambda fault: fault.name)
OF_EACH_RULE = {fault.rule: fault for fault in reversed(EVERY)}.values()


def lint(fault, fun, args):
    """Lints a program, and runs it if the rule of its fault looks at values.

    Otherwise shapes will do, but for arrays on several devices: each array that is made costs a
    program, which is compiled.
    """
    run = NEEDS[fault.rule] == VALUES
    try:
        args = args() if run or fault in faults_devices.FAULTS else jax.eval_shape(args)
    except TypeError:  # they hold more than arrays
        args = args()
    return mpjax.lint(fun, fault.argnums, target=fault.target, run=run)(*args)


@each
def test_lint_rule_names_the_line_of_each_public_fault(fault):
    report = lint(fault, fault.faulty, fault.args)
    found = [f for f in report.findings if f.rule == fault.rule]
    assert [f.source for f in found] == [fault.line], str(report)


@pytest.mark.parametrize(
    "fault", thorough_but(EVERY, *FAULTS, *OF_EACH_RULE), ids=lambda fault: fault.name
)
def test_lint_finds_nothing_in_the_mended_program(fault):
    report = lint(fault, fault.mended, fault.mended_args or fault.args)
    assert fault.rule in report.ran and not report.findings, str(report)


@pytest.mark.thorough
@each
def test_rules_of_values_find_nothing_in_the_mended_program(fault):
    args = (fault.mended_args or fault.args)()
    report = mpjax.lint(fault.mended, fault.argnums, target=fault.target)(*args)
    assert fault.rule in report.ran and not report.findings, str(report)


@pytest.mark.parametrize(
    "name, fun, args",
    thorough_but(CORRECT, *(case for case in CORRECT if case[0] not in DEAR)),
    ids=[name for name, *_ in CORRECT],
)
def test_lint_finds_nothing_in_correct_programs_of_numbers(name, fun, args):
    report = mpjax.lint(fun)(*args())
    assert not report.findings, str(report)


def test_rows_of_public_faults_name_their_pages():
    public = [fault for fault in OF_NUMBERS if fault.where]
    assert len(OF_NUMBERS) >= 32 and len(public) >= 16
    assert all(fault.name == "#".join(fault.where.split("/")[1::2]) for fault in public)


def test_the_tables_have_thirty_faults_of_which_reports_tell_and_members_of_their_class():
    names = [fault.name for fault in OF_PROBABILITIES]
    told = [fault for fault in OF_PROBABILITIES if "#" in fault.name]
    assert len(names) == len({*names}) >= 30 and len(told) >= 10
    assert all(fault.where.split("/")[-1] == fault.name.split("#")[1] for fault in told)


def test_every_named_fault_is_in_the_table():
    assert sorted(fault.name for fault in FAULTS) == sorted(NAMED)
    assert all(fault.where.split("/")[-1] == fault.name.split("#")[1] for fault in FAULTS)


def test_lint_has_at_least_twenty_rules():
    assert len({rule.name for rule in RULES}) >= 20
    assert {fault.rule for fault in EVERY} <= {rule.name for rule in RULES}


def test_lint_page_lists_the_faults():
    rows = [
        f"| [{fault.name}](https://github.com/{fault.where}) | {fault.wrong} | `{fault.rule}` |"
        for fault in FAULTS
    ]
    table = "\n".join(["| fault | what was wrong | rule |", "| --- | --- | --- |", *rows])
    assert f"\n{table}\n\n" in PAGE.read_text(), f"docs/lint_rules.md: the table must be\n{table}"
