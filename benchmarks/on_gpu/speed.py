"""Times training steps in turn: mpjax's ways and its rivals, all of a model in the same rounds.

A round times each of them once, one after the other. Every ratio is taken within a round. Those of
the part `memory` were compiled there, several at a time, and are read from the cache. The most
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
    (
        *("by hand", "float32", "mpjax lean", "mpjax 8bit", "mpjax 0.5", "mpjax 0"),
        *("mpjax lean, chunked loss", "mpjax 8bit, chunked loss, fused"),
        *("mpjax 0, chunked loss, fused", "float32, TF32"),
    ),
    ("torch autocast, compile", "by hand, fused", "mpjax float16", "DynamicScale float16"),
    ("torch float16, GradScaler, compile", "torch float32, compile", "jmp"),
    ("torch autocast", "torch float32, TF32, compile", "Transformer Engine"),
    ("torch autocast, max-autotune", "mixed-precision-for-JAX"),
)
# The benchmarks' Llama is not written in PyTorch, and takes no kernel by hand.
NOT_LLAMA = {"by hand, fused", *(r for t in TIERS for r in t if worker.framework_of(r) == "torch")}
# The number of rounds, and the largest number of seconds and steps of a turn.
ROUNDS, SMOKE_ROUNDS, TURN, MOST = 11, 2, 0.2, 60


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
    with (
        processes(options.smoke, variables, left) as started,
        contextlib.suppress(children.Late),
    ):
        bench = Bench(options, results, left, started)
        for tier in TIERS:
            for case in tqdm(options.cases, unit="model", disable=None):
                if (rivals := asked(bench, case, tier)) and left() > 0:
                    with contextlib.suppress(children.Died):
                        measure(bench, case, rivals)


def asked(bench: Bench, case: str, tier: tuple[str, ...]) -> list[str]:
    """Returns the missing rivals. A smoke test has all rivals of the first model, one of others."""
    few = bench.options.smoke and case != bench.options.cases[0]
    tier = tier[: tier is TIERS[0]] if few else tier
    return [rival for rival in tier if applies(case, rival) and missing(bench, case, rival)]


def applies(case: str, rival: str) -> bool:
    """Returns whether a rival differs from others on this model."""
    if rival == "Transformer Engine":
        return case.startswith("gpt2")
    if "chunked" in rival:
        return case in cases.LANGUAGE_MODELS
    if case == "llama" and rival in NOT_LLAMA:
        return False
    return "fused" not in rival or case in cases.TRANSFORMERS


def missing(bench: Bench, case: str, rival: str) -> bool:
    return bench.results.get(f"speed {case}", rival) is None


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


def measure(bench: Bench, case: str, rivals: list[str]) -> None:
    """Builds mpjax's ways and the rivals, those of a framework in one process, and times them."""
    ours = [*(way for way in OURS if applies(case, way)), *in_framework("jax", rivals)]
    theirs = in_framework("torch", rivals)
    with contextlib.ExitStack() as stack:
        live = build(bench, case, ours, stack.enter_context(bench.started("jax")))
        if theirs and live:
            call = stack.enter_context(bench.started("torch"))
            with contextlib.suppress(children.Died):
                live |= build(bench, case, theirs, call)
        compare(bench, case, live)


def in_framework(framework: str, rivals: list[str]) -> list[str]:
    return [rival for rival in rivals if worker.framework_of(rival) == framework]


def build(bench: Bench, case: str, names: list[str], call: children.Call) -> Live:
    """Builds rivals in one process and returns those that can be timed; puts why others cannot."""
    began, live = bench.left(), {}
    for name in names:
        try:
            facts = call(worker.build, case, name, bench.options.smoke)
        except children.Late:
            if began > 0.9 * bench.options.budget:  # the next attempt would be late too
                why = f"takes longer than the budget of {bench.options.budget:g} s"
                bench.results.put(f"speed {case}", name, {"failed": why})
            raise
        except children.Died as error:
            bench.results.put(f"speed {case}", name, {"failed": str(error)})
            raise
        keep(bench, case, name, call, facts, "peak", live)
    return live


def compare(bench: Bench, case: str, live: Live) -> None:
    """Times rivals beside each other and puts their rows."""
    smoke, warm = bench.options.smoke, {}
    for name, (call, facts) in live.items():
        seconds = call(worker.warm, case, name, smoke)
        keep(bench, case, name, call, facts | seconds, "seconds", warm)
    times = rounds(case, warm, smoke)
    for name, (call, facts) in warm.items():
        if missing(bench, case, name):
            row = figures(case, smoke, name, facts, times)
            row["loss"] = call(worker.loss, case, name)
            bench.results.put(f"speed {case}", name, row)


def keep(bench: Bench, case: str, name: str, call: children.Call, facts: dict, key: str, to: Live):
    """Adds a rival that has a fact, and puts the row of one that has a reason instead."""
    if key in facts:
        to[name] = call, facts
    else:
        bench.results.put(f"speed {case}", name, facts)


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
