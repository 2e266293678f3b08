"""Case "dispatch": how long the host takes to dispatch an almost empty step to the device.

mpjax's jitted step is compared with a jitted step of plain optax that takes and returns the same
number of arrays, in dicts and tuples. It is also compared with mpjax's own program with its state
as a flat list, which separates the cost of containers from the cost of the program.
"""

import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

import mpjax
from benchmarks.on_cpu.paired import Timer, measure

LEAVES = {"8 parameters": 8, "128 parameters": 128}
OURS, BARE, SAME = "mpjax", "bare step", "mpjax's program, a flat state"
PAIRS = ((OURS, BARE), (OURS, SAME), (SAME, BARE))
POLICIES = ("float32", "mixed_float16")
ROUNDS, SMOKE_ROUNDS = 201, 2


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    for name, leaves in LEAVES.items():
        for policy in POLICIES:
            if not smoke or (leaves, policy) == (8, "float32"):
                rounds = SMOKE_ROUNDS if smoke else ROUNDS
                yield f"{name}, {policy}", functools.partial(paired, leaves, policy, rounds)


def paired(leaves: int, policy: str, rounds: int) -> dict[str, Any]:
    params = {f"w{i}": jnp.ones((2,)) for i in range(leaves)}
    optimizer = optax.sgd(1e-3, momentum=0.9)
    init, step = mpjax.build_train_step(loss, optimizer, policy)
    state, batch = init(params), jnp.float32(1)
    _, metrics = jax.eval_shape(step, state, batch)
    flat = jax.tree.leaves(state)
    timers = {
        OURS: host_timer(state, step, batch),
        SAME: host_timer(flat, flattened(step, jax.tree.structure(state)), batch),
        BARE: host_timer(
            *bare(params, optimizer, len(flat), len(jax.tree.leaves(metrics))),
            batch,
        ),
    }
    row = measure(timers, PAIRS, rounds, turn=0.02)
    return {**row, "arrays": len(flat)}


def loss(params: Any, batch: jax.Array) -> jax.Array:
    return batch * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))


def flattened(step: Callable, treedef: Any) -> Callable:
    """Returns a step whose state is a list of arrays."""

    def flat_step(leaves, batch):
        state, metrics = step(jax.tree.unflatten(treedef, leaves), batch)
        return jax.tree.leaves(state), metrics

    return flat_step


def bare(params: Any, optimizer: optax.GradientTransformation, arrays: int, metrics: int):
    """Returns the state and the step of plain optax, with the same number of arrays in and out."""

    def bare_step(state, batch):
        params, opt_state, others = state
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        others = tuple(leaf + 1 for leaf in others)
        return (params, opt_state, others), [value + i for i in range(metrics)]

    state = params, optimizer.init(params)
    others = (jnp.int32(0),) * (arrays - len(jax.tree.leaves(state)))
    return (*state, others), bare_step


def host_timer(state: Any, step: Callable, batch: jax.Array) -> Timer:
    """Returns a timer of the calls alone. It waits for the computation between them, untimed."""
    state = jax.tree.map(jnp.copy, state)
    jitted = jax.jit(step, donate_argnums=0)

    def seconds_per_call(count):
        nonlocal state
        seconds = 0.0
        for _ in range(count):
            start = time.perf_counter()
            state, metrics = jitted(state, batch)
            seconds += time.perf_counter() - start
            jax.block_until_ready((state, metrics))
        return seconds / count

    return seconds_per_call
