"""Fully sharded training of the byte-level GPT on many hosts, with restarts after a process dies.

To start it by hand, with the first host as the coordinator:

    python examples/multihost.py --coordinator host0:1234 --processes 2 --process 0
    python examples/multihost.py --coordinator host0:1234 --processes 2 --process 1

With `--processes 1` it trains on the devices of one host. The files in examples/launch start it
under SLURM and Kubernetes, and docs/scaling.md explains it. All hosts need access to the directory
of the checkpoints.
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

STOPPED = 75  # exit status of a run that was stopped before its end: start it again


def place(param: Any, mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns a parameter's sharding: split along its longest axis, or replicated if small."""
    axis = int(np.argmax(param.shape))
    if param.size < 1024 or param.shape[axis] % mesh.size:
        return NamedSharding(mesh, P())
    return NamedSharding(mesh, P(*[None] * axis, "data"))


def make_loss_fn(rows: NamedSharding) -> Any:
    """Returns a loss function that keeps each row of the batch on one device in all layers."""

    def keep_rows(layer: Any, args: Any, kwargs: Any, context: Any) -> Any:
        # Otherwise XLA may leave the weights where they are and send the activations.
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

    They depend only on the number of the step, so a resumed run sees the same batches on any
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
    places = mpjax.optim.state_shardings(
        shapes, jax.tree.map(lambda p: place(p, mesh), shapes.params)
    )
    step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))

    metrics = None
    # With several processes, JAX's own SIGTERM notice stops all of them at the same step.
    options = {"every": every, "policy": policy, "catch_sigterm": jax.process_count() == 1}
    with mpjax.checkpoint.Manager(directory, **options) as manager:
        first = manager.latest() or 0
        say(f"{mesh.size} devices of {jax.process_count()} processes, from step {first}")
        if first:
            like = jax.tree.map(lambda x, at: x.update(sharding=at), shapes, places)
            state = manager.restore(like)
        else:  # sharded from the start: no device ever holds the whole state
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
            # Called by every process at every step: each writes its shards, and all stop together.
            manager.save(number, state, force=number == steps)
            if manager.stopping and number < steps:
                say(f"stopped at step {number}")
                sys.exit(STOPPED)
    return state, metrics


@click.command()
@click.option("--coordinator", help="HOST:PORT of process 0. Default: from SLURM, MPI or the TPU.")
@click.option("--processes", type=int, help="Number of processes; 1 needs no coordinator.")
# Kubernetes sets the variable in an Indexed Job.
@click.option("--process", type=int, envvar="JOB_COMPLETION_INDEX", help="Index of this process.")
@click.option("--heartbeat-timeout", default=10, help="Seconds until a silent process is dead.")
@click.option("--steps", default=300, help="The step to train up to.")
@click.option("--every", default=50, help="Steps between checkpoints.")
@click.option("--directory", default="multihost_run", help="For checkpoints, shared by all hosts.")
@click.option("--policy", default="mixed_bfloat16", help="A policy of mpjax.get_policy.")
@click.option("--batch", default=32, help="Rows of a batch, over all devices.")
@click.option("--log-every", default=10, help="Steps between log lines.")
@click.option("--nan-at", type=int, help="For tests: the step whose data contain a NaN ...")
@click.option("--nan-on", default=0, help="... on this process only.")
def main(coordinator: Any, processes: Any, process: Any, heartbeat_timeout: int, **options: Any):
    """Trains the byte-level GPT, fully sharded over the devices of all processes."""
    if processes != 1:
        how = "deactivate" if coordinator else None  # no cluster to detect
        jax.distributed.initialize(
            *(coordinator, processes, process),
            cluster_detection_method=how,
            heartbeat_timeout_seconds=heartbeat_timeout,  # JAX's default, 100, leaves devices idle
        )
    return train(**options)


if __name__ == "__main__":
    main()
