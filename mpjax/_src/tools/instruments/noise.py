"""Results that are only rounding error in float32, and the scale to measure their errors by.

Some gradients are zero in exact arithmetic: those of a bias before BatchNorm, of the key bias in
attention, of a loss whose advantages sum to zero. In float32 they are only rounding error, so an
error relative to their size means nothing. Such a value changes completely if the last bits of the
arguments change (stochastic arithmetic; Vignes, 1993), and the change tells how large the canceled
terms are. Its error is measured relative to the size of these terms.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.program.interpret import Wide, interpret, widen

# The relative rounding error of float32.
ROUNDING = 2.0**-23

# A value that changes by more than this share with the last bits of the arguments is noise. Zeros
# change by about their own size; float32 still knows what is only ill-conditioned to a few percent.
CHANGES = 2.0**-3

# Only results with a larger relative error are tested for noise. Two roundings of zero differ by
# about their own size: a quarter of it leaves room for those that agree in part.
SUSPICIOUS = 0.25


def perturbed(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns arrays whose floating entries are changed in the last bit, up or down at random."""
    return [_perturbed(x, i) for i, x in enumerate(arrays)]


def results_of_perturbed(jaxpr: Any, arrays: Sequence[jax.Array], *more: Any) -> list[Any] | None:
    """Returns the float32 results for `perturbed` arrays, or None without a float32 form."""
    try:
        return interpret(jaxpr, [*perturbed([widen(x) for x in arrays]), *more], Wide())
    except NotImplementedError:
        return None


def size_of_terms(wanted: Any, result: Any) -> float:
    """Returns the size of the terms of a value that is only rounding error, and 0 for any other.

    ``wanted`` is the value in float32, ``result`` that for `perturbed` arguments.
    """
    noise, size = (float(jnp.linalg.norm(jnp.ravel(x))) for x in (result - wanted, wanted))
    return noise / ROUNDING if noise > CHANGES * size else 0.0


def _perturbed(x: jax.Array, seed: int) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # In NumPy, because JAX would compile for each shape.
    up = np.random.default_rng(seed).integers(0, 2, x.shape, bool)
    factor = np.where(up, 1 + 2 * ROUNDING, 1 - 2 * ROUNDING)
    return jnp.asarray((np.asarray(x, np.float64) * factor).astype(x.dtype))
