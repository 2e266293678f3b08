"""Two examples in six precisions, and one run in which float16 fails: tables and a picture.

    python examples/demo.py --out demo_out

The examples are digits_cnn.py and byte_gpt.py, with the same seed and number of steps for every
run. The loss scale may grow every 20 finite steps (mpjax's default is 2000), so that a short run
shows how it works: it grows until gradients overflow; then the step is skipped and it halves.

`--page docs/demo.md` writes the tables into that page, and the picture beside it.
"""

import argparse
import contextlib
import functools
import json
import math
import re
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import byte_gpt
import digits_cnn
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

import mpjax

DYNAMIC = mpjax.DynamicLossScale(growth_interval=20)
# The name of a run, its policy, its loss scale.
RUNS = {
    "float32": ("float32", "auto"),
    "mixed_bfloat16": ("mixed_bfloat16", "auto"),
    "mixed_float16": ("mixed_float16", DYNAMIC),
    "mixed_float16 unscaled": ("mixed_float16", "none"),
    # The mean over a batch 256 times as large (2**18 tokens, usual for language models) makes
    # every cotangent 256 times smaller. A loss scale of 2**-8 does that to the small batch here;
    # `python -m benchmarks --suite cpu underflow` compares the two.
    "mixed_float16 x 2^-8": ("mixed_float16", 2.0**-8),
    "O2:float16": ("O2:float16", DYNAMIC),
    "O3:bfloat16": ("O3:bfloat16", "auto"),
}
TITLES = {
    digits_cnn: "Convolutional network on handwritten digits",
    byte_gpt: "Byte-level GPT on Python's help topics",
}
# An example's held-out figure: its column, its key in the result, its format.
FIGURES = {
    digits_cnn: ("Accuracy", "accuracy", "{:.2%}"),
    byte_gpt: ("Bits per\nbyte", "bits_per_byte", "{:.3f}"),
}
NOTES = """\
Accuracy and bits per byte are of held-out data. "unscaled" is without loss scaling; "x 2⁻⁸" makes
its cotangents as small as a batch 256 times as large would. "Stored" is what the forward pass
stores for the backward pass, by mpjax.explain. The runs took their steps in turns."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
# Curves coincide, so each has markers of its own, at steps of its own.
MARKERS = "osD^vPX"
APART = 42  # steps between two markers of a curve
BLOCK = re.compile(r"```text\n.*?\n```", re.DOTALL)


def train_all(
    steps: int | None, seed: int, logdir: Path | None = None
) -> dict[Any, dict[str, dict[str, Any]]]:
    """Returns the result of every run, by example and name."""
    budgets = {example: steps or example.STEPS for example in TITLES}
    results: dict[Any, dict[str, dict[str, Any]]] = {}
    with tqdm(total=len(RUNS) * sum(budgets.values()), unit="step") as bar:
        for example, budget in budgets.items():
            bar.set_description(example.__name__)
            with contextlib.ExitStack() as logs:
                runs = {
                    name: example.training(
                        policy,
                        budget,
                        seed,
                        loss_scale,
                        logs.enter_context(writer(logdir, example.__name__, name)),
                    )
                    for name, (policy, loss_scale) in RUNS.items()
                }
                found = in_turns(runs, bar.update)
            results[example] = {
                name: {**result, "stored_mib": stored(example, RUNS[name][0])}
                for name, result in found.items()
            }
    return results


def in_turns(
    runs: dict[str, Generator[int, None, Any]], progress: Callable[[int], Any]
) -> dict[str, Any]:
    """Takes a few steps of each run in turn, and returns the results in the order of the runs.

    Their times can be compared: what else runs on the machine slows all of them alike.
    """
    results = dict.fromkeys(runs)
    going = dict(runs)
    while going:
        for name, run in list(going.items()):
            try:
                progress(next(run))
            except StopIteration as end:
                results[name] = end.value
                del going[name]
    return results


@contextlib.contextmanager
def writer(
    logdir: Path | None, example: str, run: str
) -> Iterator[Callable[[int, Any], None] | None]:
    """Yields a function that logs a run's metrics to TensorBoard, or None."""
    if logdir is None:
        yield None
        return
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(logdir / example / run.replace(" ", "_"))) as events:
        yield functools.partial(mpjax.debug.log_metrics, events)
        mpjax.debug.flush_metrics(events)


def typeset(text: str) -> str:
    """Returns a text with its powers as superscripts: 2^-8 becomes 2⁻⁸."""
    return re.sub(r"\^(-?\d+)", lambda power: power[1].translate(SUPERSCRIPTS), text)


@functools.cache
def plan(example: Any, policy: str) -> mpjax.reports.CastReport:
    """Returns the plan of an example's gradient."""
    return example.explain(policy)


def stored(example: Any, policy: str) -> float:
    """Returns the MiB that the forward pass stores for the backward pass of a batch."""
    if policy == "float32":  # the program as written, which every plan knows
        return plan(example, "mixed_bfloat16").stored_before / 2**20
    return plan(example, policy).stored_after / 2**20


def on_times() -> str:
    """Says in which dtypes this device multiplies fast, and why."""
    facts = mpjax.hardware.device_report().devices[0]
    fast = " and ".join(facts.fast) or "no 16-bit dtype"
    return (
        f"Times are of this {facts.name}, which multiplies {fast} faster than float32 "
        f"({facts.reason}). They say nothing about other devices."
    )


def table(example: Any, results: dict[str, dict[str, Any]]) -> Table:
    """Returns an example's runs as a table."""
    column, key, form = FIGURES[example]
    base = results["float32"]
    out = Table(title=f"{TITLES[example]}, {base['steps']} steps", box=box.SIMPLE_HEAD)
    out.add_column("Run", no_wrap=True)
    for name in (
        "Train\nloss",
        column,
        "Skips",
        "Last\nscale",
        "Stored\nMiB",
        "ms per\nstep",
    ):
        out.add_column(name, justify="right", no_wrap=True)
    for name, result in results.items():
        out.add_row(
            typeset(name),
            f"{result['final_train_loss']:.4f}",
            form.format(result[key]),
            str(result["skipped_steps"]),
            typeset(f"2^{math.log2(result['final_loss_scale']):.0f}"),
            f"{result['stored_mib']:.2f}",
            f"{result['step_ms']:.1f}",
        )
    if example is byte_gpt:
        out.caption = f"Counting pairs of bytes gives {base['bigram_bits_per_byte']:.3f} bits."
    return out


def picture(results: dict[Any, dict[str, dict[str, Any]]]) -> Figure:
    """Returns loss curves, loss scales and the times of a step, one column per example."""
    figure = Figure(figsize=(12, 9), layout="constrained")
    axes = figure.subplots(3, len(results), height_ratios=(6, 4, 3))
    for column, (example, runs) in enumerate(results.items()):
        axes[0, column].sharex(axes[1, column])
        axes[0, column].tick_params(labelbottom=False)
        for order, (name, result) in enumerate(runs.items()):
            style = {
                "color": f"C{order}",
                "linewidth": 5 if name == "float32" else 1.2,
                "alpha": 0.35 if name == "float32" else 1,
                "marker": MARKERS[order],
                "markevery": (order * APART // len(runs), APART),
                "markersize": 6,
                "label": typeset(name),
            }
            loss = result["curves"]["loss"]
            window = min(10, len(loss))
            smooth = np.convolve(loss, np.full(window, 1 / window), "valid")
            axes[0, column].plot(np.arange(len(smooth)) + window, smooth, **style)
            axes[1, column].plot(np.arange(len(loss)) + 1, result["curves"]["loss_scale"], **style)
        axes[0, column].set(title=TITLES[example], xlim=(0, None))
        axes[1, column].set(xlabel="Step")
        axes[1, column].set_yscale("log", base=2)
        axes[1, column].set_yticks([2.0**power for power in range(-8, 25, 8)])
        times(axes[2, column], runs)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("Training loss, mean of 10 steps")
    axes[1, 0].set_ylabel("Loss scale")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


def times(axis: Axes, runs: dict[str, dict[str, Any]]) -> None:
    """Draws the time of a step of each run as a bar, with its ratio to float32's."""
    taken = [result["step_ms"] for result in runs.values()]
    colors = [f"C{order}" for order in range(len(runs))]
    labels = [
        f"{typeset(name)}: {ms:.1f} ms, {ms / taken[0]:.2f}x"
        for name, ms in zip(runs, taken, strict=True)
    ]
    axis.bar_label(axis.barh(range(len(runs)), taken, color=colors), labels, padding=3)
    axis.invert_yaxis()
    axis.set(
        xlabel="Time of a step (ms) on this device, and relative to float32",
        xlim=(0, 2.3 * max(taken)),
        yticks=[],
    )


def fill(page: Path, shown: str) -> None:
    """Writes the tables into the block of a page that shows them."""
    text, tables = page.read_text(), "\n".join(line.rstrip() for line in shown.splitlines())
    page.write_text(BLOCK.sub(lambda _: f"```text\n{tables}\n```", text, count=1))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="for both examples; default: its own steps")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("demo_out"), help="folder for the results")
    parser.add_argument("--logdir", type=Path, help="folder for TensorBoard's event files")
    parser.add_argument("--page", type=Path, help="a page to write the tables into")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)

    begun = time.perf_counter(), time.process_time()
    results = train_all(args.steps, args.seed, args.logdir)
    spent = time.perf_counter() - begun[0], time.process_time() - begun[1]

    console = Console(record=True, width=80 if args.page else None)
    for example, runs in results.items():
        console.print(table(example, runs))
    shown = console.export_text()
    console.print(f"{NOTES}\n{on_times()}", highlight=False, soft_wrap=True)
    plot, data = args.out / "demo.png", args.out / "demo.json"
    picture(results).savefig(plot, dpi=120)
    data.write_text(json.dumps({example.__name__: runs for example, runs in results.items()}))
    if args.page:
        fill(args.page, shown)
        picture(results).savefig(args.page.parent / "pictures" / "demo.png", dpi=100)
    console.print(f"Curves: {plot}, figures: {data}", soft_wrap=True)
    took = "It took {:.0f} s, and {:.0f} s of CPU time.".format(*spent)
    console.print(took, highlight=False)


if __name__ == "__main__":
    main()
