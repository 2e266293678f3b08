"""What the error of a value is judged against: its size, or that of its terms where these cancel.

A gradient may be zero in exact arithmetic: that of a bias before BatchNorm, of a key's bias in
attention, of a loss whose advantages sum to zero. What float32 gives is its own rounding error, and
no error is small beside that. Which values are of that kind shows when the arguments move by a last
bit: such a value changes altogether (stochastic arithmetic; Vignes, 1993). Its rounding error tells
how large the terms are that cancelled.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# What float32 rounds, relative to the terms of a sum.
ROUNDING = 2.0**-23

# A value that this share of changes with the last bits of the arguments has no digit to lose.
CHANGES = 2.0**-6

# Half does that to what is noise in float32, and to little else: who errs less needs no test.
SUSPICIOUS = 1.0


def moved(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns arrays whose floating entries are moved by a last bit, up or down at random."""
    return [_moved(x, i) for i, x in enumerate(arrays)]


def size_of_terms(wanted: Any, again: Any) -> float:
    """Returns the size of the terms of a value that is rounding error alone, and 0 of any other.

    Args:
        wanted: The value in float32.
        again: The same of `moved` arguments.
    """
    noise, size = (float(jnp.linalg.norm(jnp.ravel(x))) for x in (again - wanted, wanted))
    return noise / ROUNDING if noise > CHANGES * size else 0.0


def _moved(x: jax.Array, seed: int) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    # By NumPy: nothing is compiled for each shape.
    up = np.random.default_rng(seed).integers(0, 2, x.shape, bool)
    factor = np.where(up, 1 + 2 * ROUNDING, 1 - 2 * ROUNDING)
    return jnp.asarray((np.asarray(x, np.float64) * factor).astype(x.dtype))
