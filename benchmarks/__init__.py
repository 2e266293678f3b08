"""Every measurement of mpjax beside its rivals, as suites of one command.

    python -m benchmarks --suite cpu|aot|gpu|scaling|fit|gate [CASE ...] [--part PART]
    python -m benchmarks --list
    python -m benchmarks --page
    python -m benchmarks.flags train.py:step

A suite is a module of this package. It defines ``CASES``, the names that can be selected, and
``run(options, results)``. ``run`` measures the rows that `Results.get` does not have, puts each row
when it is measured, and may return problems, one line each. A suite may also define ``LONG`` (cases
that run only when they are named), ``PARTS`` (names for ``--part``), ``FILE`` (the name of its
JSON) and ``SETTINGS`` (what its rows have in common). Figures that the documentation quotes are
ratios of rows of one suite. `flags` tries XLA flags on a step of yours.
"""

import dataclasses
from pathlib import Path

HERE = Path(__file__).parent
RESULTS = HERE / "results"

# The suites, and what each measures. The command line offers the suites whose modules exist.
SUITES = {
    "cpu": "steps timed in pairs on this CPU, dispatch, tracing, reports, instruments, checksums",
    "aot": "memory, bytes and matmuls of training steps, cross-compiled for GPUs and TPUs",
    "padding": "matmuls with odd axes, padded or not, in steps cross-compiled for a GPU",
    "tried": "small kernels and known bytes: changes one by one, in steps cross-compiled for a GPU",
    "gpu_session": "what a few minutes on a lent GPU decide: each step with a prediction to refute",
    "gpu": "steps on a GPU: times compared with rivals, memory compared with predictions",
    "expected": "times of steps on an H100 as compile_for expects them, and as they were measured",
    "weights": "ways to store weights and moments: bytes, bytes moved, and held-out quality",
    "scaling": "loss scaling, memory and time as models and devices grow",
    "errors": "what explain(errors=True) estimates: held against measurements, time and memory",
    "watching": "steps whose precision is watched, cross-compiled for a GPU: memory and bytes",
    "ladder": "settings that save memory, on language models cross-compiled for a GPU",
    "fit": "settings that save memory, and jax.checkpoint: the frontier of memory and time",
    "others": "other people's training code under `mpjax run` and `mpjax survey`, unchanged",
    "gate": "models of few layers, compiled for an H100: no worse than what is recorded",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """The command line's options for a suite.

    Attributes:
        cases: The names in the suite's ``CASES`` to measure.
        parts: The names in its ``PARTS``.
        smoke: Whether to run small models and few rounds, to test that the suite runs.
        fresh: Whether to measure recorded rows again.
        budget: The seconds after which the suite starts nothing new, if it has a budget.
        cache: The folder for compiled programs, if the suite keeps them.
    """

    cases: tuple[str, ...]
    parts: tuple[str, ...] = ()
    smoke: bool = False
    fresh: bool = False
    budget: float = 470.0
    cache: Path | None = None
