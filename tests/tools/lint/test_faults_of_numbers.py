"""Faults of counts, angles, totals, products and norms: each is found, and none where it is mended.

`faults` has the form of the tables; rows without an address are further members of a class.
"""

import faults_integers
import faults_phases
import faults_products
import faults_rounding
import faults_totals
import pytest
from test_faults import lint

import mpjax

TABLES = (faults_phases, faults_integers, faults_totals, faults_products, faults_rounding)
FAULTS = [fault for table in TABLES for fault in table.FAULTS]
CORRECT = [each for table in (faults_totals, faults_products) for each in table.CORRECT]

each = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@each
def test_a_rule_names_the_line_of_each_fault_of_numbers(fault):
    report = lint(fault, fault.faulty)(*fault.args())
    found = [f for f in report.findings if f.rule == fault.rule]
    assert [f.source for f in found] == [fault.line], str(report)


@each
def test_lint_finds_nothing_in_the_mended_program_of_numbers(fault):
    report = lint(fault, fault.mended)(*(fault.mended_args or fault.args)())
    assert not report.findings, str(report)
    assert fault.rule in report.ran or report.not_run, str(report)


@pytest.mark.thorough
@each
def test_lint_finds_nothing_in_the_mended_program_of_numbers_that_runs(fault):
    report = mpjax.lint(fault.mended)(*(fault.mended_args or fault.args)())
    assert not report.findings, str(report)


@pytest.mark.parametrize("name, fun, args", CORRECT, ids=[name for name, *_ in CORRECT])
def test_lint_finds_nothing_in_correct_programs_of_numbers(name, fun, args):
    report = mpjax.lint(fun)(*args())
    assert not report.findings, str(report)


def test_rows_of_public_faults_name_their_pages():
    public = [fault for fault in FAULTS if fault.where]
    assert len(FAULTS) >= 32 and len(public) >= 16
    assert all(fault.name == "#".join(fault.where.split("/")[1::2]) for fault in public)
