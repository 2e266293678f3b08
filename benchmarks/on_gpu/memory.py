"""The memory of a training step that `mpjax.compile_for` predicts, beside what a device uses.

Each row has four figures of one step with its state donated. All except "tuning" are measured in a
process of their own:

    predicted   `compile_for` the device's own target, in a process that sees no device
    compiled    `memory_analysis()` of the executable that the device compiled
    tuning      the most bytes in use during that compilation: autotuning runs kernels on the device
    peak        the most bytes in use while a fresh process runs the step, less those in use before;
                the program comes from JAX's cache, so nothing is tuned

"predicted" and "compiled" differ by the choice of kernels, because autotuning needs a device.
"compiled" and "peak" differ by the memory of libraries and of the allocator.
"""

import contextlib
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks.on_gpu import children, worker

WAYS = ("mpjax", "float32", "mpjax lean", "mpjax fused")


def run(options: Any, results: Any, left: Callable[[], float], variables: dict[str, str]) -> None:
    """Measures missing rows until the budget is spent."""
    todo = [
        (case, way)
        for way in (WAYS[:1] if options.smoke else WAYS)
        for case in (options.cases[:1] if options.smoke else options.cases)
        if results.get(f"memory {case}", way) is None
        and not (way == "mpjax fused" and case == "resnet50")
    ]
    with contextlib.suppress(children.Late):
        for case, way in tqdm(todo, unit="program", disable=None):
            if left() <= 0:
                return
            try:
                row = measure(options, case, way, left, variables)
            except children.Died as error:
                row = {"failed": str(error)}
            results.put(f"memory {case}", way, row)


def measure(options, case, way, left, variables) -> dict[str, Any]:
    """Returns a row with the four figures and their differences."""
    row = {}
    with children.child(variables, left) as call:
        kind = call(worker.attempt_in, "memory_worker.kind")["kind"]
        row |= call(worker.attempt_in, "memory_worker.compiled", case, way, options.smoke)
    if "compiled" not in row:
        return row
    with children.child(variables, left) as call:
        row |= call(worker.attempt_in, "memory_worker.peak", case, way, options.smoke)
    blind = {**variables, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    with children.child(blind, left) as call:
        found = call(worker.attempt_in, "memory_worker.predicted", case, way, options.smoke, kind)
    why = found.get("skipped") or found.get("failed")
    return with_differences(row | ({"no_prediction": why} if why else found))


def with_differences(row: dict[str, Any]) -> dict[str, Any]:
    """Adds the differences and ratios of a row's figures."""
    predicted, compiled, peak = (row.get(key) for key in ("predicted", "compiled", "peak"))
    if predicted:
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
