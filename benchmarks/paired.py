"""Steps timed side by side: in turn, round after round, so that a busy machine slows all of them.

Ratios are taken within a round; their median is what is reported.
"""

import datetime
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp
from rich import box
from rich.console import Console
from rich.table import Table
from tqdm import tqdm


def timer(state: Any, step: Callable[..., Any], batch: Any) -> Callable[[int], float]:
    """Returns a function that does so many steps and returns the seconds per step."""
    # Its own copy: the steps donate their state, and the parameters are shared at first.
    state = jax.tree.map(jnp.copy, state)
    jitted = jax.jit(step, donate_argnums=0)

    def seconds_per_step(count):
        nonlocal state
        start = time.perf_counter()
        for _ in range(count):
            state, _ = jitted(state, batch)
        jax.block_until_ready(state)
        return (time.perf_counter() - start) / count

    return seconds_per_step


def measure(
    timers: dict[str, Callable[[int], float]],
    pairs: Sequence[tuple[str, str]],
    rounds: int,
    count: int,
    bar: tqdm,
) -> dict[str, Any]:
    """Returns the times of all steps, and the ratio of each pair (measured, measured against)."""
    for run in timers.values():
        run(count)
    names = list(timers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in (*names[turn % len(names) :], *names[: turn % len(names)]):
            times[name].append(timers[name](count))
        bar.update()
    ratios = {}
    for name, base in pairs:
        each = [t / b for t, b in zip(times[name], times[base], strict=True)]
        low, _, high = quantiles(each, n=4)
        ratios[f"{name} / {base}"] = {"median": median(each), "quartiles": [low, high]}
    return {
        "median_ms": {name: 1000 * median(values) for name, values in times.items()},
        "ratios": ratios,
    }


def report(found: dict[str, Any], out: Path, **settings: Any) -> None:
    """Prints the ratios of each model, and writes everything that was measured."""
    console = Console()
    for model, result in found.items():
        table = Table(title=model, box=box.SIMPLE_HEAD)
        for column in ("Step times", "Median ratio", "Quartiles"):
            table.add_column(column, justify="left" if column == "Step times" else "right")
        for name, ratio in result["ratios"].items():
            low, high = ratio["quartiles"]
            table.add_row(name, f"{ratio['median']:.3f}", f"{low:.3f} to {high:.3f}")
        console.print(table)
    save(out, {**settings, "models": found})
    console.print(f"Written to {out}", soft_wrap=True)


def save(out: Path, figures: dict[str, Any]) -> None:
    """Writes figures with the machine that they were measured on."""
    machine = {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "device": jax.devices()[0].device_kind,
        "cpu_cores": os.cpu_count(),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**machine, **figures}, indent=1) + "\n")
