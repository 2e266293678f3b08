"""Case "gates": mpjax's step with its gate as a select and as a branch, relative to no gate."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import optax

from benchmarks.gates import BRANCH, GATES, NONE, SELECT, spelled
from benchmarks.on_cpu.overhead import mpjax_step
from benchmarks.on_cpu.paired import measure, timer
from benchmarks.on_cpu.tasks import Task, tasks

POLICIES = ("float32", "mixed_float16")
PAIRS = ((SELECT, NONE), (BRANCH, NONE), (BRANCH, SELECT))
WIDE = "an optimizer alone"
ROUNDS, SMOKE_ROUNDS = 81, 2


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    for name, make in {**tasks(smoke), **({} if smoke else {WIDE: wide})}.items():
        for policy in POLICIES[:1] if smoke else POLICIES:
            yield f"{name}, {policy}", functools.partial(paired, make, policy, smoke)


def paired(make: Callable[[], Task], policy: str, smoke: bool) -> dict[str, Any]:
    task = make()
    state, step = mpjax_step(task, policy)
    timers = {name: timer(state, spelled(step, name), task.batch) for name in GATES}
    return measure(timers, PAIRS, SMOKE_ROUNDS if smoke else ROUNDS)


def wide() -> Task:
    """A step that does little more than update four million parameters."""
    params = {f"w{i}": jnp.full((512, 512), 0.1) for i in range(16)}

    def loss(params, batch, model_state, rng):
        return sum(jnp.sum(w * w) for w in params.values()) * jnp.mean(batch), model_state

    return Task(loss, params, {}, jnp.ones(4), optax.adam(1e-3))
