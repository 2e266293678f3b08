"""The memory of a training step that `mpjax.compile_for` predicts, beside what a device uses.

Each row has four figures of one step with its state donated, and the GB that the compiled and the
predicted program move:

    predicted   `compile_for` the device's own target, in a process that sees no device
    compiled    `memory_analysis()` of the executable that the device compiled
    tuning      the most bytes in use during that compilation: autotuning runs kernels on the device
    peak        the most bytes in use while the same process runs the step

"predicted" and "compiled" differ by the choice of kernels, because autotuning needs a device.
"compiled" and "peak" differ by the memory of libraries and of the allocator. Several programs are
compiled at a time; what they compile is in the cache when `speed` times them. The predictions are a
part of their own, which needs no device.
"""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks.on_gpu import children, speed, worker

# Programs that compile at a time, and those that run: together they must fit the device.
AT_ONCE, RUNNING = 10, 2


def run(options: Any, results: Any, left: Callable[[], float], variables: dict[str, str]) -> None:
    """Measures missing rows until the budget is spent."""
    missing = [key for key, row in programs(options, results).items() if row is None]
    runs = threading.Semaphore(RUNNING)
    for case, way, row in at_once(missing, measure, options, left, variables, runs):
        results.put(f"memory {case}", way, row)


def predictions(options: Any, results: Any, left: Any, variables: dict[str, str]) -> None:
    """Adds the missing predictions to measured rows until the budget is spent."""
    rows = programs(options, results)
    blind = {**variables, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    missing = [key for key, row in rows.items() if row and "kind" in row and "target" not in row]
    for case, way, found in at_once(missing, predict, options, left, blind, rows):
        results.put(f"memory {case}", way, with_differences(rows[case, way] | found))


def programs(options: Any, results: Any) -> dict[tuple[str, str], dict[str, Any] | None]:
    """Returns the rows of all programs of the part by model and way, None for those missing."""
    ways = (*speed.OURS, *speed.TIERS[0])
    return {
        (case, way): results.get(f"memory {case}", way)
        for case in (options.cases[:1] if options.smoke else options.cases)
        for way in (ways[:1] if options.smoke else ways)
        if speed.applies(case, way)
    }


def at_once(asked: list[tuple[str, str]], function: Callable[..., Any], *args: Any):
    """Yields the result of a function for each program within the budget, several at a time."""
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(function, *program, *args): program for program in asked}
        done = concurrent.futures.as_completed(running)
        for future in tqdm(done, total=len(asked), unit="program", disable=None):
            with contextlib.suppress(children.Late):
                try:
                    yield *running[future], future.result()
                except children.Died as error:
                    yield *running[future], {"failed": str(error)}


def measure(case, way, options, left, variables, runs) -> dict[str, Any]:
    """Returns the figures of the device: "compiled", "tuning" and "peak"."""
    with children.child(variables, left) as call:
        row = call(worker.attempt_in, "memory_worker.compiled", case, way, options.smoke)
        if "compiled" in row:
            with runs:
                row |= call(worker.attempt_in, "memory_worker.peak", case, way)
        return row


def predict(case, way, options, left, variables, rows) -> dict[str, Any]:
    """Returns what `compile_for` predicts, or the reason why it does not."""
    kind = rows[case, way]["kind"]
    with children.child(variables, left) as call:
        found = call(worker.attempt_in, "memory_worker.predicted", case, way, options.smoke, kind)
    why = found.get("skipped") or found.get("failed")
    return {"target": None, "no_prediction": why} if why else found


def with_differences(row: dict[str, Any]) -> dict[str, Any]:
    """Adds the differences and ratios of a row's figures."""
    predicted, compiled, peak = (row.get(key) for key in ("predicted", "compiled", "peak"))
    if predicted:
        row["predicted_over_compiled"] = total(predicted) / total(compiled)
        row["predicted_over_gb"] = row["predicted_gb"] / row["gb"]
        row["kernels"] = total(compiled) - total(predicted)
    if peak:
        row["library_and_allocator"] = peak - total(compiled)
        row["compiled_over_peak"] = total(compiled) / peak
    if predicted and peak:
        row["predicted_over_peak"] = total(predicted) / peak
    return row


def total(figures: dict[str, int]) -> int:
    """Returns the memory of a program. Results that alias arguments count once."""
    return sum(figures.values()) - 2 * figures["aliased"]
