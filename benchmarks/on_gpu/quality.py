"""Half's losses beside the spread of float32's seeds, on a real model and real text.

Trains `examples/byte_gpt.py` at a size that suits a GPU, on the source code of Python's standard
library, which every machine has. A half run is as good as float32 if the mean of its seeds is no
worse than float32's worst seed.
"""

import contextlib
import statistics
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from benchmarks.on_gpu import children, worker

CASE = "quality byte_gpt"
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
SEEDS = range(3)
# The example's constants; then the number of steps.
SIZES = {"WIDTH": 512, "HEADS": 8, "LAYERS": 8, "CONTEXT": 256, "BATCH": 64, "LEARNING_RATE": 1e-3}
SMOKE = {"WIDTH": 16, "HEADS": 2, "LAYERS": 1, "CONTEXT": 16, "BATCH": 4}
STEPS, SMOKE_STEPS = 1000, 3
TEXT, SMOKE_TEXT = 2**24, 2**16  # bytes
FIGURES = ("bits_per_byte", "final_train_loss")  # less is better


def run(options: Any, results: Any, left: Callable[[], float], variables: dict[str, str]) -> None:
    """Trains missing runs until the budget is spent."""
    seeds = SEEDS[:1] if options.smoke else SEEDS
    runs = [(p, s) for s in seeds for p in POLICIES if results.get(CASE, name(p, s)) is None]
    settings = (SMOKE, SMOKE_STEPS, SMOKE_TEXT) if options.smoke else (SIZES, STEPS, TEXT)
    if not runs:
        return
    with contextlib.suppress(children.Late), children.child(variables, left) as call:
        for policy, seed in tqdm(runs, unit="run", disable=None):
            if left() <= 0:
                return
            try:
                row = call(worker.attempt_in, "quality_worker.train", policy, seed, *settings)
            except children.Died as error:
                results.put(CASE, name(policy, seed), {"failed": str(error)})
                return
            results.put(CASE, name(policy, seed), row)


def name(policy: str, seed: int) -> str:
    return f"{policy}, seed {seed}"


def verdicts(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns the mean of each policy and figure beside float32's spread, if all seeds ran."""
    found: dict[str, dict[str, Any]] = {}
    for figure in FIGURES:
        values = {
            policy: [
                row[figure]
                for key, row in rows.items()
                if key.startswith(f"{policy},") and figure in row
            ]
            for policy in POLICIES
        }
        if any(len(seeds) < len(SEEDS) for seeds in values.values()):
            continue
        spread = min(values["float32"]), max(values["float32"])
        for policy in POLICIES[1:]:
            mean = statistics.mean(values[policy])
            found[f"{policy}, {figure}"] = {
                "mean": mean,
                "float32": spread,
                "no_worse": mean <= spread[1],
            }
    return found
