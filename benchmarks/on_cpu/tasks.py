"""The training tasks: the examples, or for a smoke test a network of two layers."""

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import HERE

EXAMPLES = ("byte_gpt", "digits_cnn")


class Task(NamedTuple):
    """A training task: ``loss(params, batch, model_state, rng)`` returns loss and model state."""

    loss: Callable[..., tuple[jax.Array, Any]]
    params: Any
    model_state: Any
    batch: Any
    optimizer: optax.GradientTransformation


def tasks(smoke: bool) -> dict[str, Callable[[], Task]]:
    """Returns the functions that create the tasks, by name."""
    return {"tiny": tiny} if smoke else {"byte_gpt": byte_gpt, "digits_cnn": digits_cnn}


def example(name: str) -> Any:
    """Imports one of the repository's examples."""
    folder = str(HERE.parent / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(name)


def byte_gpt() -> Task:
    module = example("byte_gpt")

    def loss(params, batch, model_state, rng):
        return module.loss_fn(params, batch), model_state

    return Task(loss, module.initial(0), {}, *_batch_and_optimizer(module))


def digits_cnn() -> Task:
    module = example("digits_cnn")
    return Task(module.loss_fn, *module.initial(0), *_batch_and_optimizer(module))


def tiny() -> Task:
    def loss(params, batch, model_state, rng):
        hidden = jnp.tanh(batch @ params["up"])
        return jnp.mean((hidden @ params["down"] - 1) ** 2), model_state

    params = {"up": jnp.full((8, 16), 0.1), "down": jnp.full((16, 1), 0.1)}
    return Task(loss, params, {}, jnp.ones((4, 8)), optax.adam(1e-3))


def _batch_and_optimizer(module: Any) -> tuple[Any, optax.GradientTransformation]:
    batch = module.sample(module.load()[0], np.random.default_rng(0))
    return batch, module.make_optimizer(module.STEPS)
