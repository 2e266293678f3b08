"""Max pools that keep in one byte where each maximum was, and not the array that they pool.

JAX's derivative reads the whole operand again. XLA:GPU finds in it four integers for each maximum,
and adds the cotangents one by one to an array of zeros. From positions, the derivative is a sum of
padded arrays, in one kernel. PyTorch's max pools keep the positions too, in eight bytes. A TPU has
a kernel for JAX's derivative, which moves fewer bytes there.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.autocast.derivatives import keep
from mpjax._src.base import _jax
from mpjax._src.base.devices import current_facts
from mpjax._src.program.respellings import WINDOWS, entries_of
from mpjax._src.replacements.derivatives import with_tangent

# The most entries of a window: the kernel has a term for each.
MOST = 64


def keeps_positions(eqn: Any) -> bool:
    """Returns whether a pool keeps positions; if not, its derivative is JAX's."""
    if current_facts().platform == "tpu":
        return False
    params, window = eqn.params, eqn.params["window_dimensions"]
    dense = all(d == 1 for d in params["base_dilation"])
    pooled = [n for n, w in zip(eqn.invars[0].aval.shape, window, strict=True) if w > 1]
    return dense and math.prod(window) <= MOST and all(isinstance(n, int) for n in pooled)


def pool(eqn: Any, x: Any) -> Any:
    """Runs a max or min pool. Of equal entries, the first has the derivative, as in JAX."""
    smallest = eqn.primitive.name == "reduce_window_min"
    edge = math.inf if smallest else -math.inf

    def call(x):
        return _jax.bind(eqn, [x])[0]

    def jvp(primals, tangents):
        (x,), (tangent,) = primals, tangents
        best, *others = _entries(eqn, x, edge)
        where = jnp.zeros(best.shape, jnp.uint8)
        for i, entry in enumerate(others, 1):
            better = entry < best if smallest else entry > best
            best = jnp.where(better, entry, best)
            where = jnp.where(better, jnp.uint8(i), where)
        return ruled(x), through(keep(where), tangent)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def through(where, tangent):
        zero = jnp.zeros((), tangent.dtype)
        entries = enumerate(_entries(eqn, tangent, zero))
        return functools.reduce(jax.lax.add, (jnp.where(where == i, x, zero) for i, x in entries))

    ruled = with_tangent(call, jvp)
    return ruled(x)


def _entries(eqn: Any, x: Any, outside: Any) -> Iterator[Any]:
    """Yields the entries at each position of the windows, in order."""
    return entries_of(x, outside, *map(eqn.params.get, WINDOWS))
