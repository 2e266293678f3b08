"""Reports as plain data: what a map says of an operation."""

from mpjax._src.tools.document.model import facts


def test_facts_are_all_but_the_empty_ones():
    given = {"in_turn": 0, "name": "", "path": None, "overflows": False, "line": "net.py:3"}
    assert facts(**given) == (("in turn", "0"), ("line", "net.py:3"))
