"""Case "underflow": the error of float16 gradients by loss scale and batch size.

Trains the byte-level GPT in float32 for some steps. Then it takes one gradient in float16 and
compares it with float32's. A mean over n examples divides every cotangent by n, so larger batches
underflow. A loss scale of 1/n on a small batch makes its cotangents just as small. That gradient
is less accurate, because the sum over examples, which makes weight gradients larger again, has
only the examples of the small batch.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import mpjax
from benchmarks.on_cpu.tasks import example

STEPS = 100  # steps of training before the measurement
TIMES = 256  # the ratio of the large batch to the small one
# The number of small batches in a batch, and the loss scale.
HOW = ((1, 1.0), (1, 1 / TIMES), (1, 2.0**16), (TIMES, 1.0), (TIMES, 2.0**16))


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    prepared = functools.cache(functools.partial(prepare, 0 if smoke else STEPS))
    for times, scale in HOW[1:2] if smoke else HOW:
        name = f"batch x {times}, loss scale {scale:g}"
        yield name, functools.partial(row, prepared, times, scale)


def row(prepared: Callable[[], Any], times: int, scale: float) -> dict[str, Any]:
    """Returns the error of a float16 gradient relative to float32's."""
    params, sample, gradient = prepared()
    batch = sample(times)
    exact, half = gradient(params, batch, "float32", 1.0), gradient(params, batch, "float16", scale)
    return {
        "batch": len(batch),
        "loss_scale": scale,
        "relative_error": float(jnp.linalg.norm(half - exact) / jnp.linalg.norm(exact)),
        "entries_lost": float(jnp.mean((half == 0)[exact != 0])),
    }


def prepare(steps: int) -> tuple[Any, Callable, Callable]:
    """Returns trained parameters, a function that draws batches, and a function of the gradient."""
    module = example("byte_gpt")
    data, _ = module.load()
    rng = np.random.default_rng(0)
    init, step = mpjax.build_train_step(
        module.loss_fn, module.make_optimizer(module.STEPS), "float32"
    )
    state, step = init(module.initial(0)), jax.jit(step, donate_argnums=0)
    for _ in range(steps):
        state, _ = step(state, module.sample(data, rng))

    @functools.cache
    def sample(times):
        rng = np.random.default_rng(times)
        return np.concatenate([module.sample(data, rng) for _ in range(times)])

    @functools.partial(jax.jit, static_argnames="dtype")
    def gradient(params, batch, dtype, scale):
        def loss(params):
            return module.loss_fn(mpjax.cast(params, dtype), batch)

        grad_fn = mpjax.scaled_value_and_grad(loss, mpjax.StaticLossScale(scale))
        return ravel_pytree(grad_fn(params)[1])[0]

    return state.params, sample, gradient
