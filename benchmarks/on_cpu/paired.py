"""Times steps in turns, round after round, so that a busy machine slows all of them alike.

Each ratio is taken within a round. The median of the rounds is reported, with its 95% bootstrap
interval and the quartiles of the rounds.
"""

import time
from collections.abc import Callable, Iterable
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.on_gpu.statistics import paired_ratio

Timer = Callable[[int], float]  # runs this number of steps, and returns the seconds per step

TURN = 0.08  # seconds that the slowest step runs in each turn


def timer(state: Any, step: Callable[..., Any], batch: Any) -> Timer:
    """Returns a timer of a step, from the start of the first to the end of the last."""
    # A copy of its own: all steps start from the same parameters, and donate their state.
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
        run(2)  # compiles, twice if the first step returns other layouts or weak types
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
    """Returns the median of the rounds' ratios, its interval and the rounds' quartiles."""
    each = [t / b for t, b in zip(times, base, strict=True)]
    low, _, high = quantiles(each, n=4)
    return {**paired_ratio(times, base), "quartiles": [low, high]}
