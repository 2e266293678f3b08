"""Case "overhead": the cost of the gate, the loss scale and the masters of a step, timed in pairs.

mpjax's step is compared with a step in plain optax around the same loss with the same casts, which
has no loss scale and does not check whether gradients are finite. It is also compared with jmp's
float16 step, which does both.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax

import mpjax
from benchmarks.on_cpu.paired import measure, timer
from benchmarks.on_cpu.tasks import Task, tasks

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16", "O2:float16")
JMP = "jmp mixed_float16"
ROUNDS, SMOKE_ROUNDS = 81, 2

State = tuple[Any, Callable[..., Any]]  # the first state, and the step


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    for name, make in tasks(smoke).items():
        if smoke:
            yield name, functools.partial(paired, make, POLICIES[2:], SMOKE_ROUNDS)
        else:
            yield name, functools.partial(paired, make, POLICIES, ROUNDS)


def paired(make: Callable[[], Task], policies: tuple[str, ...], rounds: int) -> dict[str, Any]:
    task = make()
    built = {f"mpjax {policy}": mpjax_step(task, policy) for policy in policies}
    built |= {f"optax {policy}": optax_step(task, policy) for policy in policies}
    built[JMP] = jmp_step(task)
    timers = {name: timer(*pair, task.batch) for name, pair in built.items()}
    pairs = [(f"mpjax {policy}", f"optax {policy}") for policy in policies]
    return measure(timers, [*pairs, ("mpjax mixed_float16", JMP)], rounds)


def mpjax_step(task: Task, policy: str, **options: Any) -> State:
    def loss_fn(params, batch, model_state, rng):
        return task.loss(params, batch, model_state, rng)

    init, step = mpjax.build_train_step(loss_fn, task.optimizer, policy, **options)
    return init(task.params, task.model_state, jax.random.key(0)), step


def optax_step(task: Task, policy: str) -> State:
    """Returns the state and the step as written by hand, with the policy's casts around the loss.

    If the policy keeps half parameters, the optimizer updates their float32 masters.
    """
    loss = mpjax.autocast(task.loss, policy)
    stored = jax.tree.map(lambda p: p.dtype, mpjax_step(task, policy)[0].params)

    def step(state, batch):
        masters, opt_state, model_state, rng = state
        rng, step_rng = jax.random.split(rng)
        params = jax.tree.map(lambda p, dtype: p.astype(dtype), masters, stored)
        grad_fn = jax.value_and_grad(loss, has_aux=True)
        (value, model_state), grads = grad_fn(params, batch, model_state, step_rng)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, opt_state = task.optimizer.update(grads, opt_state, masters)
        return (optax.apply_updates(masters, updates), opt_state, model_state, rng), value

    opt_state = task.optimizer.init(task.params)
    return (task.params, opt_state, task.model_state, jax.random.key(0)), step


def jmp_step(task: Task) -> State:
    """Returns the state and the step of jmp's README: float16 with dynamic loss scaling."""
    policy = jmp.get_policy("params=float32,compute=float16,output=float32")

    def step(state, batch):
        params, opt_state, model_state, rng, loss_scale = state
        rng, step_rng = jax.random.split(rng)

        def scaled(params):
            params, inputs = policy.cast_to_compute((params, batch))
            loss, new_model_state = task.loss(params, inputs, model_state, step_rng)
            return loss_scale.scale(loss), (loss, new_model_state)

        grads, (loss, new_model_state) = jax.grad(scaled, has_aux=True)(params)
        grads = loss_scale.unscale(policy.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, new_opt_state = task.optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_model_state
        old = params, opt_state, model_state
        return (*jmp.select_tree(finite, new, old), rng, loss_scale.adjust(finite)), loss

    loss_scale = jmp.DynamicLossScale(jnp.float32(2**16))
    opt_state = task.optimizer.init(task.params)
    state = task.params, opt_state, task.model_state, jax.random.key(0), loss_scale
    return state, step
