"""Faults of probabilities, distances, saturation and scales: each is named, its mended twin is not.

The programs come from public reports, or are members of the same class as one that does.
"""

import faults_distances
import faults_expectations
import faults_orders
import faults_probabilities
import faults_saturation
import faults_scales
import pytest

import mpjax
from mpjax._src.tools.lint.table import RULES

TABLES = (
    *(faults_probabilities, faults_expectations, faults_orders, faults_saturation),
    *(faults_distances, faults_scales),
)
FAULTS = tuple(fault for table in TABLES for fault in table.FAULTS)

each = pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)


@each
def test_the_rule_names_the_line_of_each_fault(fault):
    report = mpjax.lint(fault.faulty, fault.argnums, run=False)(*fault.args())
    found = [f for f in report.findings if f.rule == fault.rule]
    assert [f.source for f in found] == [fault.line], str(report)


@each
def test_nothing_is_found_in_the_mended_twin(fault):
    args = (fault.mended_args or fault.args)()
    report = mpjax.lint(fault.mended, fault.argnums, run=False)(*args)
    assert fault.rule in report.ran and not report.findings, str(report)


@pytest.mark.thorough
@each
def test_nothing_is_found_in_the_mended_twin_when_it_runs(fault):
    args = (fault.mended_args or fault.args)()
    report = mpjax.lint(fault.mended, fault.argnums)(*args)
    assert fault.rule in report.ran and not report.findings, str(report)


def test_the_tables_have_thirty_faults_of_which_reports_tell_and_members_of_their_class():
    names = [fault.name for fault in FAULTS]
    told = [fault for fault in FAULTS if "#" in fault.name]
    assert len(names) == len({*names}) >= 30 and len(told) >= 10
    assert all(fault.where.split("/")[-1] == fault.name.split("#")[1] for fault in told)
    assert {fault.rule for fault in FAULTS} <= {rule.name for rule in RULES}
