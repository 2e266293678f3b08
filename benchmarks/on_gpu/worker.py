"""Builds and times rivals in a separate process. It returns plain data."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from benchmarks.on_gpu import energy
from benchmarks.on_gpu.cases import sizes_of
from benchmarks.on_gpu.flops import peak_of

FRAMEWORKS = {"jax": "jax_rivals", "torch": "torch_rivals"}
SKIPPED, FAILED = "skipped", "failed"

# By model and rival: a function that times steps, one that returns the last loss, and facts.
LIVE: dict[tuple[str, str], tuple[Callable[[int], float], Callable[[], float], dict]] = {}


def framework_of(rival: str) -> str:
    return "torch" if rival.startswith(("torch", "Transformer Engine")) else "jax"


def attempt(function: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """Returns the result of a function, or a row that says why it was skipped or failed."""
    try:
        return function(*args)
    except ImportError as error:
        return {SKIPPED: first_line(error)}
    except Exception as error:
        if type(error).__name__ == "Skip":
            return {SKIPPED: str(error)}
        return {FAILED: f"{type(error).__name__}: {first_line(error)}"}


def attempt_in(name: str, *args: Any) -> dict[str, Any]:
    """Attempts a function by name, such as "memory_worker.peak"; its module is imported here."""
    module, _, function = name.partition(".")
    return attempt(lambda: found_in(module, function)(*args))


def found_in(module: str, function: str) -> Callable[..., Any]:
    return getattr(importlib.import_module(f"benchmarks.on_gpu.{module}"), function)


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def build(case: str, rival: str, smoke: bool) -> dict[str, Any]:
    """Compiles a rival; returns facts about it."""
    if (case, rival) in LIVE:
        return LIVE[case, rival][2]
    framework = framework_of(rival)
    if importlib.util.find_spec(framework) is None:
        return {SKIPPED: f"{framework} is not installed"}
    return attempt(_build, framework, case, rival, smoke)


def _build(framework: str, case: str, rival: str, smoke: bool) -> dict[str, Any]:
    module = FRAMEWORKS[framework]
    sizes = sizes_of(case, smoke)
    run, loss, facts = found_in(module, "build")(case, sizes, rival, smoke)
    _, why = energy.meter()
    facts |= {"peak": peak_of(found_in(module, "device")()), "no_joules": why}
    LIVE[case, rival] = run, loss, facts
    return facts


def warm(case: str, rival: str, smoke: bool) -> dict[str, Any]:
    """Runs a rival until its step time is steady; returns the seconds of a step."""
    return attempt(_warm, case, rival, smoke)


def _warm(case: str, rival: str, smoke: bool) -> dict[str, Any]:
    run = LIVE[case, rival][0]
    run(1 if smoke else 3)
    return {"seconds": run(1) if smoke else run(3) / 3}


def run(case: str, rival: str, steps: int) -> dict[str, float]:
    """Returns the seconds of some steps, with their joules if NVML measures them."""
    read, _ = energy.meter()
    before = read() if read else 0.0
    seconds = LIVE[case, rival][0](steps)
    return {"seconds": seconds, **({"joules": read() - before} if read else {})}


def loss(case: str, rival: str) -> float:
    """Returns the last loss of a rival."""
    return LIVE[case, rival][1]()
