"""Cases "reports" and "histogram": the cost of reports on gradients for a step, timed in pairs."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
import optax

import mpjax
from benchmarks.on_cpu.overhead import mpjax_step
from benchmarks.on_cpu.paired import measure, timer
from benchmarks.on_cpu.tasks import Task, tasks

WITHOUT = "without"
REPORTS: dict[str, dict[str, bool]] = {
    WITHOUT: {},
    "report_overflow": {"report_overflow": True},
    "report_underflow": {"report_underflow": True},
    "both": {"report_overflow": True, "report_underflow": True},
}
POLICY, EVERY = "mixed_float16", 10
ROUNDS, SMOKE_ROUNDS = 41, 2


def reports(smoke: bool) -> Iterator[tuple[str, Any]]:
    for name, make in tasks(smoke).items():
        yield name, functools.partial(paired, reporting, make, smoke)


def histogram(smoke: bool) -> Iterator[tuple[str, Any]]:
    name, make = next(iter(tasks(smoke).items()))
    yield name, functools.partial(paired, counting, make, smoke)


def paired(forms: Callable[[Task], dict[str, Any]], make: Callable[[], Task], smoke: bool):
    task = make()
    timers = {name: timer(*pair, task.batch) for name, pair in forms(task).items()}
    pairs = [(name, WITHOUT) for name in timers if name != WITHOUT]
    return measure(timers, pairs, SMOKE_ROUNDS if smoke else ROUNDS)


def reporting(task: Task) -> dict[str, Any]:
    """Returns float16 training steps: one without reports, and one with each report."""
    return {name: mpjax_step(task, POLICY, **options) for name, options in REPORTS.items()}


def counting(task: Task) -> dict[str, Any]:
    """Returns float32 steps that count no gradients, all of them, or those of some steps."""
    empty = mpjax.debug.gradient_histogram(jax.tree.map(np.zeros_like, task.params))

    def step_with(count):
        def step(state, batch):
            params, opt_state, model_state, histogram, index = state
            grad_fn = jax.value_and_grad(task.loss, has_aux=True)
            (loss, model_state), grads = grad_fn(params, batch, model_state, jax.random.key(0))
            updates, opt_state = task.optimizer.update(grads, opt_state, params)
            params = optax.apply_updates(params, updates)
            histogram = count(index, grads, histogram)
            return (params, opt_state, model_state, histogram, index + 1), loss

        return step

    def always(index, grads, histogram):
        return mpjax.debug.gradient_histogram(grads, histogram)

    def sometimes(index, grads, histogram):
        turn = index % EVERY == 0
        return jax.lax.cond(turn, always, lambda i, g, h: h, index, grads, histogram)

    state = task.params, task.optimizer.init(task.params), task.model_state, empty, np.int32(0)
    forms = {
        WITHOUT: lambda index, grads, histogram: histogram,
        "with a histogram": always,
        f"with one every {EVERY} steps": sometimes,
    }
    return {name: (state, step_with(count)) for name, count in forms.items()}
