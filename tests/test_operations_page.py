"""docs/operations.md: its tables name every primitive that has a row, under the rule of the row."""

import re

import pages
import pytest

from mpjax._src.core.base import rules

PAGE = pages.ROOT / "docs" / "operations.md"
CALLED = {"custom_jvp_call"}  # its row says "follow", and only its traits count
NEEDS = {
    "16-bit inputs": rules.HALF,
    "Follow their inputs": rules.FOLLOW,
    "Float32": rules.FULL,
    "Fixed float32": rules.FULL,
    "Any dtype": rules.MOVE,
    "No float result": rules.COMPARE,
    "Calls and loops": rules.PROGRAM,
    "As written": rules.LEFT,
}


def tables():
    """Returns the primitives in the first column of each section's table."""
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    titled = dict(section.split("\n", 1) for section in sections)
    cells = {title: re.findall(r"^\|([^|]*)\|", titled[title], re.MULTILINE) for title in NEEDS}
    return {title: re.findall(r"`([^`]+)`", " ".join(column)) for title, column in cells.items()}


@pytest.mark.parametrize("title", NEEDS)
def test_a_table_names_primitives_that_have_its_rule(title):
    for name in set(tables()[title]) - CALLED:
        assert rules.RULES[name].need == NEEDS[title], name


def test_every_primitive_with_a_row_is_in_one_table():
    named = [name for names in tables().values() for name in names]
    assert sorted(named) == sorted(rules.RULES)


def test_the_table_of_fixed_float32_names_what_op_lists_refuse():
    full = {*rules.names_where(lambda rule: rule.need == rules.FULL)}
    assert {*tables()["Fixed float32"]} == full & rules.having(rules.NO_HALF_FORM)
