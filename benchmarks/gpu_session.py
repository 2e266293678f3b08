"""Suite "gpu_session": ten minutes on a lent GPU, spent in the order of what they decide.

    python benchmarks/gpu_session.py [EXPERIMENT ...] [--budget 560] [--smoke]

This is ``python -m benchmarks --suite gpu_session``. Each experiment is one training step, with the
question that it answers and, where there was one, the prediction to refute. Its row has the
measured time, beside the reference of its model in the same rounds; what its kernels do, by kind,
from its own HLO; the time that `targets.PACES` expects; and, if it is traced, the measured time of
each kind of kernels, from the profiler's events joined to the HLO by their names. At the end, the
constants are fitted to the rows of this device. It stops starting experiments when its budget is
spent, and resumes at the next call. ``--smoke`` runs small models on any device.
"""

import collections
import contextlib
import math
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

if __name__ == "__main__":  # this file's folder would shadow packages
    sys.path[0] = str(Path(__file__).parent.parent)

import click
import jax

from benchmarks import Options, expected
from benchmarks.on_gpu import cases, flops, jax_rivals
from benchmarks.on_gpu.statistics import paired_ratio, quotient
from benchmarks.results import FAILED, SKIPPED, Results, Row
from mpjax._src.core.base._jax import gpu_matmuls, stacks
from mpjax._src.tools.hardware.hlo_costs import costs
from mpjax._src.tools.hardware.targets import PACES, find_target
from mpjax._src.tools.hardware.times import kinds_of

ROUNDS, SMOKE_ROUNDS = 11, 2
TURN = 0.2  # seconds of steps in a turn
TRACED_STEPS = 3
# What starts one kernel after the other, so that each has its own event.
ALONE = {"xla_gpu_enable_command_buffer": ""}
FIT = "constants"


class Experiment(NamedTuple):
    """A training step to measure.

    Attributes:
        question: What its time decides.
        case: A model of `on_gpu.cases`.
        way: A rival of `on_gpu.jax_rivals`.
        sizes: The model's sizes that differ.
        flags: XLA's flags.
        odd: Whether odd axes of matmuls are left as they are.
        zeros: Whether loops fill what they stack with zeros first.
        traced: Whether the time of each kind of kernels is measured too.
        predicted_ms: The time of a step that was predicted for an H100.
    """

    question: str
    case: str
    way: str
    sizes: dict[str, int] | None = None
    flags: dict[str, Any] | None = None
    odd: bool = False
    zeros: bool = False
    traced: bool = False
    predicted_ms: float | None = None


FUSED = "mpjax fused"
NO_TRITON = {"xla_gpu_enable_triton_gemm": False}
# The first one of a model is its reference. Those that decide the most come first.
EXPERIMENTS = {
    "gpt2": Experiment(
        "which term of the expected time is wrong", "gpt2", FUSED, traced=True, predicted_ms=19.0
    ),
    "gpt2, odd axes": Experiment(
        "what padding saves", "gpt2", FUSED, odd=True, traced=True, predicted_ms=22.4
    ),
    "gpt2, no Triton": Experiment(
        "cuBLAS or Triton for aligned matmuls", "gpt2", FUSED, flags=NO_TRITON
    ),
    "gpt2, odd axes, no Triton": Experiment(
        "XLA's own padding", "gpt2", FUSED, flags=NO_TRITON, odd=True, predicted_ms=19.0
    ),
    "gpt2, chunked loss": Experiment(
        "the loss in blocks", "gpt2", f"{FUSED}, chunked loss", predicted_ms=19.9
    ),
    # 64 x 1024 tokens at 460,000 a second.
    "gpt2, batch 64": Experiment(
        "other libraries' rates", "gpt2", FUSED, {"batch": 64}, predicted_ms=142.5
    ),
    "bert": Experiment(
        "a forecast for a step that was never timed", "bert", FUSED, predicted_ms=15.0
    ),
    "resnet50": Experiment("the constant of convolutions", "resnet50", "mpjax", traced=True),
    "llama": Experiment(
        "a scanned model, whose stacks are not filled first",
        "llama",
        FUSED,
        traced=True,
        predicted_ms=18.4,
    ),
    "llama, zeros": Experiment(
        "the same loop as JAX lowers it", "llama", FUSED, zeros=True, predicted_ms=19.1
    ),
    "gpt2, vocabulary 50304": Experiment(
        "whether padding costs anything", "gpt2", FUSED, {"vocabulary": 50304}, predicted_ms=19.0
    ),
}
CASES = tuple(EXPERIMENTS)


class Step(NamedTuple):
    """A compiled step: a function that runs it so many times and returns the seconds, and facts."""

    run: Callable[[int], float]
    text: str
    facts: Row


def run(options: Options, results: Results) -> None:
    """Runs the experiments that have no row yet, until the budget is spent."""
    end = time.monotonic() + options.budget
    reference: tuple[str, Step] | None = None  # of the model at hand; others leave the memory
    for name in options.cases:
        if results.get(name, "step"):
            continue
        if time.monotonic() > end:
            click.echo(f"The budget of {options.budget:g} s is spent before {name!r}.")
            break
        experiment = EXPERIMENTS[name]
        if reference and reference[0] != experiment.case:
            reference = None
        try:
            step = prepared(experiment, options.smoke)
            row = measured(experiment, step, reference and reference[1], options.smoke)
        except jax_rivals.Skip as why:
            results.put(name, "step", {SKIPPED: str(why)})
            continue
        except jax.errors.JaxRuntimeError as error:  # the memory, or a flag that this XLA lacks
            results.put(name, "step", {FAILED: str(error).splitlines()[0][:200]})
            continue
        results.put(name, "step", row)
        reference = reference or (experiment.case, step)
    conclude(results)


# ---- one experiment ------------------------------------------------------------------------------


def sizes_of(experiment: Experiment, smoke: bool) -> dict[str, Any]:
    """Returns the sizes of a model. A smoke test keeps its own."""
    sizes = cases.sizes_of(experiment.case, smoke)
    return sizes if smoke else {**sizes, **(experiment.sizes or {})}


def prepared(experiment: Experiment, smoke: bool) -> Step:
    """Compiles a step and loads its arrays."""
    changes = contextlib.ExitStack()
    if experiment.odd:
        changes.enter_context(mock.patch.object(gpu_matmuls, "LEAST_FLOPS", math.inf))
    if experiment.zeros:
        changes.enter_context(mock.patch.object(stacks, "may_be_partitioned", lambda ctx: True))
    on_gpu = jax.default_backend() == "gpu"
    flags = {**(experiment.flags or {}), **(ALONE if experiment.traced else {})} if on_gpu else {}
    with changes:
        jax.clear_caches()  # of programs without these changes
        sizes = sizes_of(experiment, smoke)
        found = jax_rivals.program_of(experiment.case, sizes, experiment.way)
        start = time.perf_counter()
        compiled = jax_rivals.compile_step(found, experiment.way, flags)
    facts = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(found.params)),
        "compile_s": round(time.perf_counter() - start, 1),
    }
    run, _ = jax_rivals.loaded(found, compiled, sizes)
    run(1)
    return Step(run, compiled.as_text(), facts)


def measured(experiment: Experiment, step: Step, reference: Step | None, smoke: bool) -> Row:
    """Times a step, in turn with its model's reference; returns its row."""
    beside = [step, reference] if reference else [step]
    count = 1 if smoke else max(1, min(60, round(TURN / (step.run(3) / 3))))
    times: list[list[float]] = [[] for _ in beside]
    for _ in range(SMOKE_ROUNDS if smoke else ROUNDS):
        for one, found in zip(beside, times, strict=True):
            found.append(one.run(count) / count)
    seconds = statistics.median(times[0])
    sizes = sizes_of(experiment, smoke)
    needs = cases.step_flops(experiment.case, sizes, step.facts["parameters"])
    # A smoke test on another device takes the figures of an H100.
    target = flops.target_of(jax.devices()[0].device_kind) or find_target("h100")
    counted, pace = expected.counted(step.text, target), PACES.get(target.chip)
    return {
        "question": experiment.question,
        "ms": 1e3 * seconds,
        "predicted_ms": experiment.predicted_ms,
        "expected_ms": expected.time_of(counted, [*pace[:-1]]) if pace else None,
        **({"ratio": paired_ratio(*times)} if reference else {}),
        "per_second": cases.items(sizes) / seconds,
        "mfu": flops.mfu(needs, seconds, target.peaks["bf16"]) if needs else None,
        **counted,
        **({"traced": traced(step)} if experiment.traced else {}),
        **step.facts,
    }


# ---- a trace -------------------------------------------------------------------------------------


def traced(step: Step) -> Row:
    """Returns the milliseconds of each kind of kernels in a step, from the profiler's events."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            wall = step.run(TRACED_STEPS)
        (path,) = Path(folder).rglob("*.xplane.pb")
        times = times_of(jax.profiler.ProfileData.from_file(str(path)))
    kind_of, kinds = kinds_of(step.text), collections.Counter[str]()
    for kernel in costs(step.text).kernels:
        kinds[kind_of(kernel)] += times.pop(kernel.op.name, 0.0)
    return {
        "wall": 1e3 * wall / TRACED_STEPS,
        "kinds": {kind: 1e3 * seconds / TRACED_STEPS for kind, seconds in kinds.most_common()},
        # Events of no kernel, such as loops on the host.
        "unknown": 1e3 * sum(times.values()) / TRACED_STEPS,
    }


def times_of(profile: Any) -> dict[str, float]:
    """Returns the seconds of a profile's events by the name of their HLO instruction.

    A device's events count; where there are none, as on a CPU, the host's do.
    """
    planes = list(profile.planes)
    found = [plane for plane in planes if plane.name.startswith("/device:")] or planes
    times = collections.Counter[str]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of jaxlib's own types
        for event in events_of(found):
            name = dict(event.stats).get("hlo_op")
            if name:
                times[str(name)] += event.duration_ns / 1e9
    return dict(times)


def events_of(planes: list[Any]) -> Iterator[Any]:
    return (event for plane in planes for line in plane.lines for event in line.events)


# ---- what they decide ----------------------------------------------------------------------------


def conclude(results: Results) -> None:
    """Fits the constants to the rows, and prints what was found beside what was predicted."""
    rows = {name: rows["step"] for name, rows in results.cases.items() if "step" in rows}
    timed = {name: row for name, row in rows.items() if row.get("kinds")}
    if len(timed) >= len(expected.FIELDS):
        constants = expected.fit(timed.values())
        results.put(FIT, "fitted", dict(zip(expected.FIELDS, constants, strict=True)))
    for name, row in timed.items():
        ratio = f", {quotient(row['ratio'])} of its reference" if "ratio" in row else ""
        wanted = f"{row['predicted_ms']:.1f}" if row["predicted_ms"] else "none"
        click.echo(f"{name}: {row['ms']:.2f} ms, predicted {wanted}{ratio}")


if __name__ == "__main__":
    from benchmarks.__main__ import main

    main(["--suite", "gpu_session", *sys.argv[1:]])
