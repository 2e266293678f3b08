"""Does half precision reach float32's held-out quality? Both examples, every policy, three seeds.

    python benchmarks/quality.py

The runs are the demo's, and those that cast operation by operation once more with casts at the
boundary. A policy's mean over the seeds is held against the spread of float32's.
"""

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import byte_gpt
import demo
import digits_cnn

# The held-out figures of each example, and whether a larger one is better.
FIGURES = {
    digits_cnn: {"accuracy": True, "held_out_loss": False},
    byte_gpt: {"bits_per_byte": False},
}
RUNS = demo.RUNS | {
    f"{name}, boundary": (f"{policy},casting=boundary", scale)
    for name, (policy, scale) in demo.RUNS.items()
    if name in ("mixed_bfloat16", "mixed_float16", "O2:float16")
}
KEPT = ("final_train_loss", "skipped_steps", "final_loss_scale", "step_ms")


def train_all(seeds: range, steps: int | None) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Returns results without curves, by example and run, one per seed."""
    budgets = {example: steps or example.STEPS for example in FIGURES}
    results: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tqdm(total=len(RUNS) * len(seeds) * sum(budgets.values()), unit="step") as bar:
        for example, budget in budgets.items():
            runs = results[example.__name__] = {name: [] for name in RUNS}
            for seed in seeds:
                for name, (policy, scale) in RUNS.items():
                    bar.set_description(f"{example.__name__}, seed {seed}, {name}")
                    result = example.train(policy, budget, seed, scale, bar.update)
                    runs[name].append({k: result[k] for k in (*FIGURES[example], *KEPT)})
    return results


def verdict(runs: dict[str, list[dict[str, Any]]], figure: str, more_is_better: bool) -> dict:
    """Returns each run's mean of a figure, and where it lies in the spread of float32's seeds."""
    spread = sorted(result[figure] for result in runs["float32"])
    low, high = spread[0], spread[-1]
    means = {name: mean(result[figure] for result in results) for name, results in runs.items()}
    return {
        "float32_spread": [low, high],
        "means": means,
        "within_spread": {name: low <= value <= high for name, value in means.items()},
        "as_good_as_float32s_worst_seed": {
            name: value >= low if more_is_better else value <= high for name, value in means.items()
        },
    }


def table(title: str, found: dict[str, Any]) -> Table:
    """Returns a verdict as a table."""
    low, high = found["float32_spread"]
    out = Table(
        title=title, caption=f"float32's seeds: {low:.4f} to {high:.4f}", box=box.SIMPLE_HEAD
    )
    out.add_column("Run", no_wrap=True)
    for column in ("Mean", "Less float32's", "In its spread", "No worse"):
        out.add_column(column, justify="right")
    for name, value in found["means"].items():
        out.add_row(
            name,
            f"{value:.4f}",
            f"{value - found['means']['float32']:+.4f}",
            "yes" if found["within_spread"][name] else "no",
            "yes" if found["as_good_as_float32s_worst_seed"][name] else "no",
        )
    return out


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="for both examples; default: as each one has it")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "quality_cpu.json")
    args = parser.parse_args(argv)

    results = train_all(range(args.seeds), args.steps)
    verdicts = {
        example.__name__: {
            figure: verdict(results[example.__name__], figure, more_is_better)
            for figure, more_is_better in figures.items()
        }
        for example, figures in FIGURES.items()
    }
    console = Console()
    for example, figures in verdicts.items():
        for figure, found in figures.items():
            console.print(table(f"{example}: {figure}, {args.seeds} seeds", found))
    report = {
        "command": "python benchmarks/quality.py",
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": jax.devices()[0].device_kind,
        "steps": {example.__name__: args.steps or example.STEPS for example in FIGURES},
        "seeds": args.seeds,
        "verdicts": verdicts,
        "results": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"Written to {args.out}", soft_wrap=True)


if __name__ == "__main__":
    main()
