"""The gate: checks that autocast takes no more memory and bytes than recorded. Minutes, no GPU.

    python -m benchmarks --suite gate [gpt2 resnet50 ...]

Compiles a training step of many kinds of models for an H100, which need not be there. The models
have few layers of real sizes, so that a change of the planner shows at once. The gate fails where
autocast takes more temporary memory or bytes than recorded in ``results/gate_h100.json``. It prints
the ratios to casts by hand as well, strict and not. Figures do not change from run to run. Figures
that another JAX recorded are not compared. ``--fresh`` records them again.
"""

import click

from benchmarks import Options
from benchmarks.aot import SETTINGS, STRICT, figures, on_the_cpu
from benchmarks.results import FAILED, SKIPPED, Results, Row

__all__ = ["SETTINGS"]

FILE = "gate_h100.json"
SLACK = 1.02
JUDGED = ("temp_mib", "bytes_gb", "looped_gb")
OURS = ("autocast", "autocast, lean")
# Settings that are judged for one model.
MORE = {
    "gpt2": ("autocast, lean, chunked loss", "autocast, 8bit", "autocast, 0.25"),
    "llama": ("autocast, 0.5",),
}
HAND = (STRICT, "by hand")
SOFTMAX = (*HAND, "by hand, half softmax")

# The sizes of each model, and its variants with casts by hand.
CASES = {
    "gpt2": ({"layers": 2}, HAND),
    "resnet50": ({"blocks": (2, 1, 1, 1)}, HAND),
    "unet": ({}, HAND),
    "bert": ({"layers": 2}, SOFTMAX),
    "vit": ({"layers": 2, "batch": 128}, SOFTMAX),
    "llama": ({}, HAND),
    "lstm": ({}, HAND),
    "mamba": ({}, HAND),
    "efficientnet": ({"stages": ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3))}, HAND),
    "ddpm": ({"widths": (64, 128), "blocks": 1}, HAND),
}


def run(options: Options, results: Results) -> list[str]:
    """Records missing rows; returns the figures in which autocast is worse than the record."""
    on_the_cpu()
    if results.other and not options.fresh:
        click.echo(f"Not compared: recorded with {results.other.get('versions')}. --fresh records.")
        return []
    problems = []
    for case in options.cases:
        sizes, hand = CASES[case]
        for rival in (*hand, *OURS, *MORE.get(case, ())):
            recorded = results.get(case, rival)
            if recorded and rival in hand:
                continue
            found = figures("h100", case, rival, sizes)
            if recorded:
                problems += worse(f"{case}, {rival}", found, recorded)
                show(f"{case}, {rival}", found, {"recorded": recorded, **results.cases[case]})
            else:
                results.put(case, rival, found)
                problems += worse(f"{case}, {rival}", found, found)
    return problems


def worse(name: str, found: Row, recorded: Row) -> list[str]:
    """Returns the figures in which a row is worse than the recorded one, or why it has none."""
    if reason := found.get(FAILED) or found.get(SKIPPED):
        return [f"{name}: {reason}"]
    return [
        f"{name}: {key} {found[key]:g} is {found[key] / recorded[key]:.3f}x of {recorded[key]:g}"
        for key in JUDGED
        if key in recorded and found[key] > SLACK * recorded[key]
    ]


def show(name: str, found: Row, beside: dict[str, Row]) -> None:
    """Prints a row and its ratios to other rows."""
    if FAILED in found:
        return
    click.echo(f"{name:<34}" + "".join(f"{f'{key} {found[key]:g}':<21}" for key in JUDGED))
    for other, row in beside.items():
        if not other.startswith(OURS[0]) and FAILED not in row:
            ratios = (f"{key} {found[key] / row[key]:.3f}x" for key in JUDGED)
            click.echo(f"{'    of ' + other:<34}" + "".join(f"{ratio:<21}" for ratio in ratios))
