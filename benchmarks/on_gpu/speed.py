"""Times training steps in pairs: mpjax and one rival at a time, each in its own process.

A round times each of them once, one after the other. Every ratio is taken within a round. The most
important rivals come first for all models, so that a small budget leaves out the others.
"""

import contextlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.on_gpu import cases, children, flops, worker
from benchmarks.on_gpu.statistics import paired_ratio

# Every rival is compared with these in the same rounds.
OURS = ("mpjax", "mpjax fused")
TIERS = (
    ("torch autocast, compile", "by hand", "float32"),
    ("by hand, fused", "torch float32, compile", "mpjax float16", "DynamicScale float16"),
    ("torch float16, GradScaler, compile", "mpjax lean", "float32, TF32", "jmp"),
    ("torch autocast", "torch float32, TF32, compile", "Transformer Engine"),
    ("torch autocast, max-autotune", "mixed-precision-for-JAX"),
)
# The number of rounds, and the largest number of seconds and steps of a turn.
ROUNDS, SMOKE_ROUNDS, TURN, MOST = 13, 2, 0.3, 60


class Bench(NamedTuple):
    """The arguments that all measurements share; see `run`."""

    options: Any
    results: Any
    left: Callable[[], float]
    started: Callable[[str], Any]  # starts a process for a framework


# By rival: the function that calls its process, and its facts.
Live = dict[str, tuple[children.Call, dict[str, Any]]]


def run(options: Any, results: Any, left: Callable[[], float], variables: dict[str, str]) -> None:
    """Measures missing rows until the budget is spent."""
    todo = [
        (case, [rival for rival in tier if applies(case, rival) and missing(results, case, rival)])
        for case, tier in order(options)
    ]
    with (
        tqdm(total=sum(len(rivals) for _, rivals in todo), unit="rival", disable=None) as bar,
        processes(options.smoke, variables, left) as started,
        contextlib.suppress(children.Late),
    ):
        bench = Bench(options, results, left, started)
        for case, rivals in todo:
            if rivals and left() > 0:
                measure(bench, case, rivals, bar)


def order(options: Any) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yields models and rivals. A smoke test has all rivals of the first model, one of others."""
    for tier in TIERS:
        for case in options.cases:
            few = options.smoke and case != options.cases[0]
            if not few:
                yield case, tier
            elif tier is TIERS[0]:
                yield case, tier[:1]


def applies(case: str, rival: str) -> bool:
    """Returns whether a rival differs from others on this model."""
    if rival == "Transformer Engine":
        return case.startswith("gpt2")
    return "fused" not in rival or case in cases.TRANSFORMERS


def missing(results: Any, case: str, rival: str) -> bool:
    return results.get(f"speed {case}", rival) is None


@contextlib.contextmanager
def processes(smoke: bool, variables: dict[str, str], left: Callable[[], float]) -> Iterator[Any]:
    """Yields a function that starts a process for each rival; in smoke tests, one per framework."""
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


def measure(bench: Bench, case: str, rivals: list[str], bar: tqdm) -> None:
    """Times mpjax's own ways beside each other, and then beside each rival."""
    with bench.started("jax") as ours, contextlib.suppress(children.Died):
        base = compare(bench, case, [name for name in OURS if applies(case, name)], ours, {})
        for rival in rivals if base else ():
            if bench.left() <= 0:
                return
            bar.set_description(f"{case}, {rival}")
            with bench.started(worker.framework_of(rival)) as theirs:
                compare(bench, case, [rival], theirs, base)
            bar.update()


def compare(bench: Bench, case: str, names: list[str], call: children.Call, base: Live) -> Live:
    """Builds rivals in one process, times them beside those of ``base``, and puts their rows.

    Returns:
        All rivals that can be timed now.
    """
    began = bench.left()
    smoke = bench.options.smoke
    try:
        facts = {name: call(worker.build, case, name, smoke) for name in names}
        added = {name: (call, row) for name, row in facts.items() if "seconds" in row}
        for name in names:
            if name not in added:
                bench.results.put(f"speed {case}", name, facts[name])
        times = rounds(case, base | added, smoke) if added else {}
        for name in added:
            if missing(bench.results, case, name):
                row = figures(case, smoke, name, facts[name], times)
                row["loss"] = call(worker.loss, case, name)
                bench.results.put(f"speed {case}", name, row)
        return base | added
    except children.Late:
        if began > 0.9 * bench.options.budget:  # the next attempt would be late too
            why = f"takes longer than the budget of {bench.options.budget:g} s"
            bench.results.put(f"speed {case}", names[0], {"failed": why})
        raise
    except children.Died as error:
        bench.results.put(f"speed {case}", names[0], {"failed": str(error)})
        raise


def rounds(case: str, live: Live, smoke: bool) -> dict[str, dict[str, list[float]]]:
    """Returns the seconds and the joules per step of every rival that is timed, round by round."""
    names = list(live)
    steps = {
        name: 1 if smoke else max(1, min(MOST, round(TURN / facts["seconds"])))
        for name, (_, facts) in live.items()
    }
    times: dict[str, dict[str, list[float]]] = {n: {"seconds": [], "joules": []} for n in names}
    for turn in range(SMOKE_ROUNDS if smoke else ROUNDS):
        start = turn % len(names)
        for name in (*names[start:], *names[:start]):
            found = live[name][0](worker.run, case, name, steps[name])
            for unit, value in found.items():
                times[name][unit].append(value / steps[name])
    return times


def figures(case: str, smoke: bool, name: str, facts: dict, times: dict) -> dict[str, Any]:
    """Returns a rival's row. Its ratios are mpjax's times over the rival's; less is better."""
    sizes = cases.sizes_of(case, smoke)
    seconds, joules = times[name]["seconds"], times[name]["joules"]
    step = statistics.median(seconds)
    needs = cases.step_flops(case, sizes, facts["parameters"])
    share = flops.mfu(needs, step, facts["peak"]) if needs and facts["peak"] else None
    return {
        "ms": 1000 * step,
        "per_second": cases.items(sizes) / step,
        "mfu": share,
        "joules": statistics.mean(joules) if joules else None,
        **({} if joules else {"no_joules": facts["no_joules"]}),
        **{key: facts[key] for key in ("parameters", "compile_s", "torch") if key in facts},
        "ratios": {
            f"{ours} / {name}": paired_ratio(times[ours]["seconds"], seconds)
            for ours in OURS
            if ours in times and ours != name
        },
    }
