"""Every measurement of mpjax beside its rivals, as suites of one command.

    python -m benchmarks --suite cpu|aot|gpu|scaling|gate [CASE ...] [--part PART]
    python -m benchmarks --list
    python -m benchmarks --page

A suite is a module of this package: ``CASES``, the names that can be selected; ``run(options,
results)``, which measures what `Results.get` does not hold yet and puts each row as it comes, and
may return what went wrong, a line each; and if it likes ``LONG``, cases that run only when they
are named, ``PARTS``, names for ``--part``, ``FILE``, the name of its JSON, and ``SETTINGS``, what
its rows have in common. Figures that the documentation quotes are ratios of rows of one suite.
"""

import dataclasses
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"

# What can be measured; a suite is offered where its module exists.
SUITES = {
    "cpu": "steps timed in pairs on this machine's CPU, dispatch, tracing, reports and instruments",
    "aot": "memory, bytes and matmuls of training steps, for GPUs and TPUs that are not present",
    "gpu": "steps timed in pairs on a GPU",
    "weights": "what is kept for each weight: bytes, bytes moved, and held-out quality",
    "scaling": "loss scaling, memory and time as models and devices grow",
    "watching": "steps whose precision is watched, compiled for an absent GPU: memory and bytes",
    "gate": "models of few layers, compiled for an H100: no worse than what is recorded",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """What the command line asks of a suite.

    Attributes:
        cases: Which of the suite's ``CASES`` to measure.
        parts: Which of its ``PARTS``.
        smoke: Small models and few rounds: does it run at all?
        fresh: Measure anew what is recorded.
        budget: Seconds after which a suite that heeds it starts nothing more.
        cache: Where such a suite keeps compiled programs.
    """

    cases: tuple[str, ...]
    parts: tuple[str, ...] = ()
    smoke: bool = False
    fresh: bool = False
    budget: float = 470.0
    cache: Path | None = None
