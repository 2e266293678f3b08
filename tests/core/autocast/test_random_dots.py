"""Random matmuls under autocast, as users compile them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
PROGRAM = TESTS / "helpers" / "random_dots.py"


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.thorough)])
def test_random_matmuls_run_and_are_exact_to_the_last_rounding(count, rng):
    # Not in this process: conftest's flags for XLA:CPU hide matmuls that it has no kernel for.
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(TESTS.parent)}
    environ.pop("XLA_FLAGS", None)
    command = [sys.executable, PROGRAM, str(count), str(rng.integers(1 << 31))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
