"""The rows that depend on an equation's parameters: powers."""

import pytest

from mpjax._src.core.base import rules
from mpjax._src.core.base.rules import rule_of

POWER = rule_of("integer_pow")


@pytest.mark.parametrize("y", [*range(-102, 103)])
def test_a_power_amplifies_by_its_exponent(y):
    """|x f'(x) / f(x)| is the exponent, whatever its sign."""
    few, bounded = abs(y) <= 4, abs(y) <= 100
    assert POWER.gain_of({"y": y}) == (
        rules.ONE if few else rules.RANGE if bounded else rules.UNBOUNDED
    )
    assert POWER.amplifies({"y": y}) == (not few)
