"""Suite "gpu": mpjax beside its rivals on one NVIDIA GPU.

    python benchmarks/gpu.py [CASE ...] [--part PART] [--budget 470] [--smoke]

PART is memory, speed, predictions, quality or tests; by default all. This is ``python -m benchmarks
--suite gpu``. Each part stops cleanly when its budget of seconds is spent, and resumes at the next
call. Compiled programs are kept in ``--cache``. If something is missing (PyTorch, NVML, compilers
for absent hardware), its row says so. The parts are in `benchmarks.on_gpu`. ``--smoke`` runs small
models on any device, to test that the suite runs.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # this file's folder would shadow packages
    sys.path[0] = str(Path(__file__).parent.parent)

from benchmarks import Options
from benchmarks.on_gpu import children, goals, memory, quality, repository_tests, speed, tables
from benchmarks.on_gpu.cases import SIZES

# This process only asks JAX for the device's name, so it must not reserve the GPU's memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

CASES = tuple(SIZES)
PARTS = {
    "memory": memory.run,
    "speed": speed.run,
    "predictions": memory.predictions,
    "quality": quality.run,
    "tests": repository_tests.run,
}


def run(options: Options, results: Any) -> list[str]:
    """Measures the requested parts, each within the budget, and prints all results."""
    variables = children.environment(options.cache or default_cache())
    for part in options.parts:
        PARTS[part](options, results, countdown(options.budget), variables)
        goals.judge(results)
    tables.show(results.cases)
    return []


def countdown(budget: float) -> Callable[[], float]:
    """Returns a function that returns how many seconds of a budget are left."""
    end = time.monotonic() + budget
    return lambda: end - time.monotonic()


def default_cache() -> Path:
    return Path(tempfile.gettempdir()) / "mpjax_compiled"


def summary(path: Path) -> list[dict[str, Any]]:
    """Returns the goals of a suite's JSON, each with its measured value and whether it is met."""
    return goals.read(path)


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--suite", "gpu", *sys.argv[1:]])
