"""What a step of mpjax's costs: paired against hand-written steps, on both examples.

    python benchmarks/step_overhead.py

Against a plain optax step in float32, and against a float16 step written with jmp.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from paired import measure, report, timer
from tqdm import tqdm

import mpjax

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "examples"))

import byte_gpt
import digits_cnn

# (what is measured, what it is measured against)
RATIOS = (
    ("mpjax float32", "optax float32"),
    ("mpjax mixed_float16", "jmp mixed_float16"),
    ("mpjax mixed_float16", "optax float32"),
    ("mpjax mixed_bfloat16", "optax float32"),
)


class Task(NamedTuple):
    """An example, its loss in the form ``loss(params, batch, model_state, rng)``."""

    module: Any
    loss: Callable[..., tuple[jax.Array, Any]]
    params: Any
    model_state: Any


def tasks() -> list[Task]:
    def gpt_loss(params, batch, model_state, rng):
        return byte_gpt.loss_fn(params, batch), model_state

    return [
        Task(digits_cnn, digits_cnn.loss_fn, *digits_cnn.initial(0)),
        Task(byte_gpt, gpt_loss, byte_gpt.initial(0), {}),
    ]


def optax_step(task: Task, optimizer: optax.GradientTransformation) -> tuple[Any, Callable]:
    """Returns state and step as one writes them by hand, in float32."""

    def step(state, batch):
        params, opt_state, model_state, rng = state
        rng, step_rng = jax.random.split(rng)
        grad_fn = jax.value_and_grad(task.loss, has_aux=True)
        (loss, model_state), grads = grad_fn(params, batch, model_state, step_rng)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, model_state, rng), loss

    return (task.params, optimizer.init(task.params), task.model_state, jax.random.key(0)), step


def jmp_step(task: Task, optimizer: optax.GradientTransformation) -> tuple[Any, Callable]:
    """Returns state and step as jmp's README has them, in float16 with dynamic loss scaling."""
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
        updates, new_opt_state = optimizer.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_model_state
        old = params, opt_state, model_state
        return (*jmp.select_tree(finite, new, old), rng, loss_scale.adjust(finite)), loss

    loss_scale = jmp.DynamicLossScale(jnp.float32(2**16))
    state = task.params, optimizer.init(task.params), task.model_state, jax.random.key(0)
    return (*state, loss_scale), step


def mpjax_step(
    task: Task, optimizer: optax.GradientTransformation, policy: str
) -> tuple[Any, Callable]:
    def loss_fn(params, batch, model_state, rng):
        return task.loss(params, batch, model_state, rng)

    init, step = mpjax.build_train_step(loss_fn, optimizer, policy)
    return init(task.params, task.model_state, jax.random.key(0)), step


def timers(task: Task) -> dict[str, Callable[[int], float]]:
    data, _ = task.module.load()
    batch = task.module.sample(data, np.random.default_rng(0))
    optimizer = task.module.make_optimizer(task.module.STEPS)
    built = {
        "optax float32": optax_step(task, optimizer),
        "jmp mixed_float16": jmp_step(task, optimizer),
        **{
            f"mpjax {policy}": mpjax_step(task, optimizer, policy)
            for policy in ("float32", "mixed_float16", "mixed_bfloat16")
        },
    }
    return {name: timer(*pair, batch) for name, pair in built.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--steps", type=int, default=8, help="per measurement")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "step_overhead_cpu.json")
    args = parser.parse_args(argv)

    todo = tasks()
    with tqdm(total=args.rounds * len(todo), unit="round") as bar:
        found = {
            task.module.__name__: measure(timers(task), RATIOS, args.rounds, args.steps, bar)
            for task in todo
        }
    command = "python benchmarks/step_overhead.py"
    report(found, args.out, command=command, rounds=args.rounds, steps_per_round=args.steps)


if __name__ == "__main__":
    main()
