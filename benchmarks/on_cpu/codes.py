"""Case "codes": the error of gradients by what the backward pass reads, for each model.

The gradient of each model of `benchmarks.models`, at small size and random parameters, under each
storage: its error relative to the float32 gradient's size. Codes are read by the backward pass
alone, so this is all that they change.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import mpjax
from benchmarks.models import MODELS, SMALL

STORAGES = ("fast", "lean", "8bit")
BATCH = 64  # smaller arrays are not coded
INTEGERS = 8  # labels and tokens below this number
# Models whose scale or size is another's, that are slow to compile here, or that have no batch.
LEFT_OUT = ("gpt2_medium", "ode", "graph")


def case(smoke: bool) -> Iterator[tuple[str, Any]]:
    names = [name for name in MODELS if name not in LEFT_OUT]
    for name in names[:1] if smoke else names:
        yield name, functools.partial(row, name, 2 if smoke else BATCH)


def row(name: str, batch: int) -> dict[str, Any]:
    """Returns the error of each storage's gradient, and that of codes relative to "fast"."""
    loss, params, rest, inputs, _ = MODELS[name](**SMALL[name] | {"batch": batch})
    args = drawn(params, 0), drawn(rest, 1), drawn(inputs, 2, data=True)

    def gradient(policy: str) -> Any:
        grad = jax.grad(mpjax.autocast(loss, policy), has_aux=True)
        return ravel_pytree(jax.jit(grad)(*args)[0])[0]

    exact = gradient("float32")
    errors = {
        storage: float(
            jnp.linalg.norm(gradient(f"mixed_bfloat16,storage={storage}") - exact)
            / jnp.linalg.norm(exact)
        )
        for storage in STORAGES
    }
    return {**errors, "ratio": errors["8bit"] / errors["fast"]}


def drawn(tree: Any, seed: int, data: bool = False) -> Any:
    """Returns random arrays: weights of layers that keep the size of their input, or data."""
    leaves, structure = jax.tree.flatten(tree)
    rng = np.random.default_rng(seed)
    arrays = []
    for leaf in leaves:
        normal = rng.standard_normal(leaf.shape)
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            array = rng.integers(0, INTEGERS, leaf.shape)
        elif data:
            array = normal
        elif len(leaf.shape) < 2:  # the scale of a norm, or a bias
            array = 1 + normal / 10
        else:
            array = normal / np.sqrt(np.prod(leaf.shape[:-1]))
        arrays.append(jnp.asarray(array, leaf.dtype))
    return jax.tree.unflatten(structure, arrays)
