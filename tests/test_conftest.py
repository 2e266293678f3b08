"""What every run of the tests prints and refuses."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import thorough_but

CHEAP = Path(__file__).parent / "test_layout.py"


@pytest.mark.parametrize(("budget", "status"), thorough_but([("0.001", 1), ("100", 0)], 0))
def test_a_run_over_its_budget_of_processor_time_fails(budget, status):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", CHEAP]
    environ = {**os.environ, "BUDGET": budget, "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == status, done.stdout
    assert "s at the pace of the machine that budgets are from" in done.stdout
    assert (f"over the budget of {budget} s" in done.stdout) == bool(status)
