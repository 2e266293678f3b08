"""How long a short matmul takes now, in the form that autocast's matmuls have."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32

LEAST = 5  # pairs


def matmul_size() -> int:
    """Returns the number of rows of the matmul: enough for the default device to be busy."""
    return 512 if jax.default_backend() == "cpu" else 4096


def matmul_time(dtype: np.dtype, seconds: float) -> float:
    """Returns the time of a matmul of two square matrices, relative to float32's.

    Both are timed in turn, for so many seconds but at least five times, and the median of the pairs
    is returned. It tells what the default device does at this moment: other programs change it.
    """
    run = jax.jit(_multiply)
    operands = [jnp.ones((matmul_size(),) * 2, each) for each in (FLOAT32, dtype)]
    # The first call compiles, which must not be timed.
    for x in operands:
        jax.block_until_ready(run(x, x))
    ratios: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(ratios) < LEAST:
        base, half = (_seconds(run, x) for x in operands)
        ratios.append(half / base)
    return statistics.median(ratios)


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    # autocast marks its matmuls, and the lowering of marked ones chooses a form for the device.
    with _jax.marked():
        return jax.lax.dot(x, y)


def _seconds(run, x) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(x, x))
    return time.perf_counter() - start
