"""Fully sharded training of the byte-level GPT on many hosts, which goes on after a process dies.

By hand, the first host being the coordinator:

    python examples/multihost.py --coordinator host0:1234 --processes 2 --process 0
    python examples/multihost.py --coordinator host0:1234 --processes 2 --process 1

With `--processes 1` it trains on the devices of one host. examples/launch starts it under SLURM and
Kubernetes, and docs/scaling.md explains it. All hosts must see the directory of the checkpoints.
"""

import sys
from typing import Any

import byte_gpt
import click
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax

STOPPED = 75  # the exit status of a run that was told to stop before its end: start it again


def place(param: Any, mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns where a parameter lies: in equal parts of its longest axis, or whole if small."""
    axis = int(np.argmax(param.shape))
    if param.size < 1024 or param.shape[axis] % mesh.size:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*[None] * axis, "data"))


def make_loss_fn(rows: NamedSharding) -> Any:
    """Returns the loss of a batch, each row of which stays on one device from layer to layer."""

    def keep_rows(layer: Any, args: Any, kwargs: Any, context: Any) -> Any:
        # Else XLA may leave the weights where they are, and send the activations around.
        x = layer(*args, **kwargs)
        return jax.lax.with_sharding_constraint(x, rows) if getattr(x, "ndim", 0) > 2 else x

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        tokens = batch["tokens"]
        with nn.intercept_methods(keep_rows):
            logits = byte_gpt.model.apply({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), tokens[:, 1:]
        )
        return jnp.sum(losses * batch["weights"]) / losses.size

    return loss_fn


def local_rows(text: np.ndarray, number: int, batch: int) -> dict[str, np.ndarray]:
    """Returns this process's rows of a step's batch.

    They follow from the step's number alone: a resumed run sees what it would have seen, on any
    number of processes.
    """
    starts = np.random.default_rng(number).integers(len(text) - byte_gpt.CONTEXT, size=(batch, 1))
    mine = np.split(starts, jax.process_count())[jax.process_index()]
    tokens = text[mine + np.arange(byte_gpt.CONTEXT + 1)]
    return {"tokens": tokens, "weights": np.ones((len(mine), 1), np.float32)}


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def train(
    steps: int,
    every: int,
    directory: str,
    policy: str,
    batch: int,
    log_every: int,
    nan_at: int | None,
    nan_on: int,
) -> tuple[Any, Any]:
    """Trains up to a step, from the last checkpoint; returns the state and the last metrics."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    if batch % mesh.size:
        raise click.BadParameter(f"--batch {batch} is no multiple of {mesh.size}, the devices.")
    text, _ = byte_gpt.load()
    init, step = mpjax.build_train_step(make_loss_fn(rows), byte_gpt.make_optimizer(steps), policy)
    shapes = jax.eval_shape(lambda: init(byte_gpt.initial(0)))
    places = mpjax.state_shardings(shapes, jax.tree.map(lambda p: place(p, mesh), shapes.params))
    step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))

    metrics = None
    # Several processes are stopped at the same step by JAX's own notice of SIGTERM.
    options = {"every": every, "policy": policy, "catch_sigterm": jax.process_count() == 1}
    with mpjax.checkpoint.Manager(directory, **options) as manager:
        first = manager.latest() or 0
        say(f"{mesh.size} devices of {jax.process_count()} processes, from step {first}")
        if first:
            like = jax.tree.map(lambda x, at: x.update(sharding=at), shapes, places)
            state = manager.restore(like)
        else:  # in parts from the start: no device ever holds the whole state
            state = jax.jit(lambda: init(byte_gpt.initial(0)), out_shardings=places)()
        for number in range(first + 1, steps + 1):
            data = local_rows(text, number, batch)
            if (number, jax.process_index()) == (nan_at, nan_on):
                data["weights"][0] = np.nan
            data = jax.tree.map(lambda x: jax.make_array_from_process_local_data(rows, x), data)
            state, metrics = step(state, data)
            if number % log_every == 0 or number == steps:
                loss, scale = metrics["loss"], metrics["loss_scale"]
                skipped = metrics["skipped_steps"]
                say(f"step {number}: loss {loss:.4f}, scale {scale:g}, skipped {skipped}")
            # By every process and at every step: each writes its parts, and all stop together.
            manager.save(number, state, force=number == steps)
            if manager.stopping and number < steps:
                say(f"stopped at step {number}")
                sys.exit(STOPPED)
    return state, metrics


@click.command()
@click.option("--coordinator", help="HOST:PORT of process 0. Unset: what SLURM, MPI or a TPU says.")
@click.option("--processes", type=int, help="How many there are; 1 needs no coordinator.")
# Kubernetes sets the variable in an Indexed Job.
@click.option("--process", type=int, envvar="JOB_COMPLETION_INDEX", help="Which of them this is.")
@click.option("--heartbeat-timeout", default=10, help="Seconds of silence, then a process is dead.")
@click.option("--steps", default=300, help="The step to train up to.")
@click.option("--every", default=50, help="Steps between checkpoints.")
@click.option("--directory", default="multihost_run", help="Of the checkpoints; all hosts see it.")
@click.option("--policy", default="mixed_bfloat16", help="As for mpjax.get_policy.")
@click.option("--batch", default=32, help="Rows of a batch, over all devices.")
@click.option("--log-every", default=10, help="Steps between lines.")
@click.option("--nan-at", type=int, help="A drill: the step whose data hold a NaN ...")
@click.option("--nan-on", default=0, help="... on this process alone.")
def main(coordinator: Any, processes: Any, process: Any, heartbeat_timeout: int, **options: Any):
    """Trains the byte-level GPT, fully sharded over the devices of all processes."""
    if processes != 1:
        how = "deactivate" if coordinator else None  # nothing is left to detect
        jax.distributed.initialize(
            *(coordinator, processes, process),
            cluster_detection_method=how,
            heartbeat_timeout_seconds=heartbeat_timeout,  # JAX's own is 100, with all devices idle
        )
    return train(**options)


if __name__ == "__main__":
    main()
