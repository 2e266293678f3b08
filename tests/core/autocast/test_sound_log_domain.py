"""Recursions of log probabilities, phases and thresholds: gradients as with matmuls by hand."""

import itertools

import log_domain
import pytest

from mpjax._src.core.planner import coding

HALVES = ("bfloat16", "float16")
QUICK = {("hmm", "bfloat16", "fast"), ("neighbors", "float16", "lean")}
CASES = [
    pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.thorough])
    for case in itertools.product(log_domain.PROGRAMS, HALVES, log_domain.STORAGES)
]


@pytest.mark.parametrize(("name", "half", "storage"), CASES)
def test_recursion_has_a_gradient_as_by_hand(name, half, storage, monkeypatch):
    monkeypatch.setattr(coding, "FEWEST", 64)  # so that these small arrays are coded too
    # A code has three digits less than float16.
    times = 8 if (half, storage) == ("float16", "8bit") else 1
    rows = log_domain.report(name, half, storage)
    wrong = [row for row in rows if row.nonfinite or row.autocast > times * row.bound]
    assert not wrong, "\n".join(map(str, wrong))
