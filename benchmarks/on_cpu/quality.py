"""Case "quality": the held-out quality of half training beside float32's, over three seeds.

The demo's examples run under every policy of the demo. The policies that cast each operation also
run with casts at the boundary. Other examples run in float32, in bfloat16, and in bfloat16 with
8-bit storage for the backward pass. The mean of a policy over the seeds is compared with the spread
of float32's. Each row is one run.
"""

import datetime
import functools
from collections.abc import Iterator
from statistics import mean
from typing import Any

from benchmarks.on_cpu.tasks import EXAMPLES, example

CASE = "quality"
SEEDS = range(3)
# The held-out figures of each example, and whether larger is better.
FIGURES: dict[str, dict[str, bool]] = {
    "digits_cnn": {"accuracy": True, "held_out_loss": False},
    "byte_gpt": {"bits_per_byte": False},
    "bert": {"held out": False},
    "moe": {"bits per byte": False},
    "resnet18": {"accuracy %": True},
    "vit": {"accuracy %": True},
    "lstm": {"held out": False},
    "diffusion": {"error": False},
}
CODED = {"mixed_bfloat16, 8bit": ("mixed_bfloat16,storage=8bit", "auto")}
BOUNDARY = ("mixed_bfloat16", "mixed_float16", "O2:float16")
KEPT = ("final_train_loss", "skipped_steps", "final_loss_scale")
SMOKE = ("float32", "mixed_float16")


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    for module in EXAMPLES[:1] if smoke else FIGURES:
        for seed in SEEDS:
            for name, how in runs(module).items():
                if not smoke or (seed == 0 and name in SMOKE):
                    row = functools.partial(train, module, *how, seed, 3 if smoke else None)
                    yield f"{module}, {name}, seed {seed}", row


def runs(module: str) -> dict[str, tuple[str, Any]]:
    """Returns the policy and the loss scale of each run of an example."""
    named = example("demo").RUNS
    if module not in EXAMPLES:
        return {name: named[name] for name in ("float32", "mixed_bfloat16")} | CODED
    boundary = {
        f"{name}, boundary": (f"{policy},casting=boundary", scale)
        for name, (policy, scale) in named.items()
        if name in BOUNDARY
    }
    return named | boundary | CODED


def train(module: str, policy: str, scale: Any, seed: int, steps: int | None) -> dict[str, Any]:
    """Returns the figures of one run, without its curves."""
    if module not in EXAMPLES:
        found = example(module).main(["--policy", policy, "--seed", str(seed)])
        kept = {key: found["figures"][key] for key in FIGURES[module]}
        return {"steps": found["steps"], **kept, "date": datetime.date.today().isoformat()}
    found = example(module).train(policy, steps or example(module).STEPS, seed, scale)
    kept = {key: found[key] for key in (*FIGURES[module], *KEPT)}
    return {"steps": found["steps"], **kept, "date": datetime.date.today().isoformat()}


def verdicts(rows: dict[str, dict[str, Any]]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yields example, figure, run and, if all seeds were run, the mean beside float32's."""
    for module, figures in FIGURES.items():
        names = dict.fromkeys(
            name.removeprefix(f"{module}, ").rpartition(", ")[0]
            for name in rows
            if name.startswith(f"{module}, ")
        )
        for figure, more_is_better in figures.items():
            values = {
                name: [rows.get(f"{module}, {name}, seed {s}", {}).get(figure) for s in SEEDS]
                for name in names
            }
            whole = {name: seeds for name, seeds in values.items() if None not in seeds}
            if "float32" not in whole:
                continue
            low, high = min(whole["float32"]), max(whole["float32"])
            for name, seeds in whole.items():
                value = mean(seeds)
                yield (
                    module,
                    figure,
                    name,
                    {
                        "mean": value,
                        "float32": [low, high],
                        "within": low <= value <= high,
                        "no_worse": value >= low if more_is_better else value <= high,
                    },
                )
