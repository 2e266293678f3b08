"""A run that saves every step and resumes from the last checkpoint. Tests kill it.

python tests/helpers/resumed.py DIRECTORY STEPS runs it, and prints when the step is compiled.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax


def loss_fn(params, batch, rng):
    keep = jax.random.bernoulli(rng, 0.5, (4, 64))
    return jnp.mean((jnp.where(keep, batch @ params["w"], 0.0) - 1).astype(jnp.float32) ** 2)


@functools.cache
def program():
    """A run with dropout, accumulation and a float16 loss scale that changes: 2 MiB of state."""
    init, step = mpjax.build_train_step(
        loss_fn,
        optax.adamw(1e-2),
        "O2:float16",
        loss_scale=mpjax.DynamicLossScale(growth_interval=3),
        accumulate_steps=2,
    )
    params = {"w": np.full((2048, 64), np.float32(1e-2))}
    start = functools.partial(jax.jit(init), params, None, jax.random.key(5))
    return (
        start,
        jax.jit(step, donate_argnums=0),
        lambda n: np.full((8, 2048), np.float32(1e-2 * (n % 97))),
    )


def run(directory, steps, started=lambda: None, **options):
    """Trains up to a number of steps from the directory's last checkpoint; returns the state."""
    start, step, batch = program()
    state, position = start(), 0
    with mpjax.checkpoint.Manager(directory, **{"keep": 2, **options}) as manager:
        if manager.latest() is not None:
            state, position = manager.restore(like=state), manager.describe().data["batch"]
        first = position
        while position < steps and not manager.stopping:
            state, _ = step(state, batch(position))
            position += 1
            if position == first + 1:
                started()
            manager.save(position, state, data={"batch": position})
    return state


if __name__ == "__main__":
    run(sys.argv[1], int(sys.argv[2]), lambda: print("training", flush=True), catch_sigterm=True)
