"""Steps timed side by side: in turn, round after round, so that a busy machine slows all of them.

Ratios are taken within a round; their median is what is reported, with its 95% bootstrap interval
and the quartiles of the rounds.
"""

import time
from collections.abc import Callable, Iterable
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.on_gpu.statistics import paired_ratio

Timer = Callable[[int], float]  # does so many steps, and returns the seconds of one

TURN = 0.08  # seconds of the slowest, at each turn


def timer(state: Any, step: Callable[..., Any], batch: Any) -> Timer:
    """Returns what times a step, from the first to the end of the last."""
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
    timers: dict[str, Timer], pairs: Iterable[tuple[str, str]], rounds: int, turn: float = TURN
) -> dict[str, Any]:
    """Returns the times of all steps, and the ratio of each pair (measured, measured against)."""
    for run in timers.values():
        run(2)  # compiles, once more where the first step returns other layouts or weak types
    count = max(1, round(turn / max(run(1) for run in timers.values())))
    names = list(timers)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        start = index % len(names)
        for name in (*names[start:], *names[:start]):
            times[name].append(timers[name](count))
    return {
        "steps_per_round": count,
        "ms": {name: 1000 * median(values) for name, values in times.items()},
        "ratios": {f"{name} / {base}": ratio(times[name], times[base]) for name, base in pairs},
    }


def ratio(times: list[float], base: list[float]) -> dict[str, Any]:
    """Returns the median of the rounds' ratios, its interval, and their quartiles."""
    each = [t / b for t, b in zip(times, base, strict=True)]
    low, _, high = quantiles(each, n=4)
    return {**paired_ratio(times, base), "quartiles": [low, high]}
