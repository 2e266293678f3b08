"""Training steps timed in pairs: mpjax and one rival at a time, each in a process of its own.

A round times each once, one after the other, and every ratio is taken within a round. The rivals
that matter most come first, for all models, so that a budget that runs out leaves the rest.
"""

import contextlib
import statistics as median_of
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

from benchmarks.on_gpu import cases, children, flops, worker
from benchmarks.on_gpu.statistics import paired_ratio

# What every rival is held against, in the same rounds.
OURS = ("mpjax", "mpjax fused")
TIERS = (
    ("torch autocast, compile", "by hand", "float32"),
    ("by hand, fused", "torch float32, compile", "mpjax float16", "DynamicScale float16"),
    ("torch float16, GradScaler, compile", "mpjax lean", "float32, TF32", "jmp"),
    ("torch autocast", "torch float32, TF32, compile", "Transformer Engine"),
    ("torch autocast, max-autotune",),
)
ROUNDS, TURN = 15, 0.4  # rounds, and the seconds of a turn in them
MOST = 60  # steps of a turn


def applies(case: str, rival: str) -> bool:
    """Tells whether a model has what sets a rival apart."""
    if rival == "Transformer Engine":
        return case.startswith("gpt2")
    return "fused" not in rival or case in cases.TRANSFORMERS


def run(options: Any, results: Any, left: Callable[[], float], variables: dict[str, str]) -> None:
    """Measures what is missing, until the budget is spent."""
    todo = [
        (case, [rival for rival in tier if applies(case, rival) and missing(results, case, rival)])
        for tier in TIERS
        for case in options.cases
    ]
    todo = [(case, rivals) for case, rivals in todo if rivals]
    with (
        tqdm(total=sum(len(rivals) for _, rivals in todo), unit="rival") as bar,
        shared(options.smoke, variables, left) as started,
    ):
        for case, rivals in todo:
            if left() <= 0:
                return
            with started("jax") as ours:
                measure(options, results, left, case, rivals, ours, started, bar)


def missing(results: Any, case: str, rival: str) -> bool:
    return results.get(f"speed {case}", rival) is None


@contextlib.contextmanager
def shared(smoke: bool, variables: dict[str, str], left: Callable[[], float]) -> Iterator[Any]:
    """Yields what starts processes: one for each rival, or in a trial one for each framework."""
    if not smoke:
        yield lambda framework: children.child(variables, left)
        return
    with contextlib.ExitStack() as stack:
        running: dict[str, children.Call] = {}

        def started(framework: str) -> Any:
            if framework not in running:
                running[framework] = stack.enter_context(children.child(variables, left))
            return contextlib.nullcontext(running[framework])

        yield started


def measure(options, results, left, case, rivals, ours, started, bar) -> None:
    """Times mpjax, and beside it each rival."""
    try:
        base = built(ours, case, [r for r in OURS if applies(case, r)], options.smoke)
        if missing(results, case, OURS[0]):
            record(results, case, rounds(case, base, left, options.smoke), base)
    except children.Late:
        return late(results, case, OURS[0], left)
    except children.Died as error:
        results.put(f"speed {case}", OURS[0], {"failed": str(error)})
        return
    for rival in rivals:
        if left() <= 0:
            return
        bar.set_description(f"{case}, {rival}")
        try:
            with started(worker.framework_of(rival)) as theirs:
                both = {**base, **built(theirs, case, [rival], options.smoke)}
                times = rounds(case, both, left, options.smoke)
                record(results, case, times, {rival: both[rival]})
                drop(case, rival, both)
        except children.Late:
            late(results, case, rival, left)
        except children.Died as error:
            results.put(f"speed {case}", rival, {"failed": str(error)})
        bar.update()
    for rival in base:
        drop(case, rival, base)
