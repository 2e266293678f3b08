"""Max pools that keep in a byte where each maximum was, in place of the array that they pool.

JAX's derivative looks for the maxima in the operand again. XLA:GPU finds four integers for each,
and adds the cotangents one by one to an array of zeros. From positions, the derivative is a sum of
padded arrays, in one kernel. PyTorch's max pools keep the positions too, in eight bytes. A TPU has
a kernel for JAX's derivative, which moves fewer bytes there.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.base import _jax
from mpjax._src.base.devices import current_facts
from mpjax._src.planner.equations import Equation, Value, opened

POOLED = "select_and_scatter_add"  # JAX's derivative; here it may read positions
POOLS = {"reduce_window_max": "ge", "reduce_window_min": "le"}
WINDOW = ("window_dimensions", "window_strides", "padding")
# The most entries of a window: the kernel has a term for each.
MOST = 64


def with_positions(
    early: Sequence[Equation], late: Sequence[Equation]
) -> tuple[list[Equation], list[Equation]]:
    """Returns both parts of a program whose pools keep positions."""
    if current_facts().platform == "tpu":
        return [*early], [*late]
    asked = {_key(e, e.ins[1]) for e in late if e.name == POOLED}
    where: dict[Any, Value] = {}
    first: list[Equation] = []
    for e in early:
        key = _key(e, e.ins[0]) if e.name in POOLS and _keeps_positions(e) else None
        if key in asked and key not in where:
            where[key] = _append(functools.partial(_pool, e), e.ins, e, first)[1]
        else:
            first.append(e)
    at = [(e, where.get(_key(e, e.ins[1])) if e.name == POOLED else None) for e in late]
    return first, [e.on([e.ins[0], place]) if place else e for e, place in at]


def unpooled(equations: Sequence[Equation]) -> list[Equation]:
    """Returns equations that read positions as operations of JAX."""
    written: list[Equation] = []
    for e in equations:
        if e.name == POOLED and e.ins[1].aval.dtype == jnp.uint8:
            _append(functools.partial(_unpool, e), e.ins, e, written)
        else:
            written.append(e)
    return written


def _key(e: Equation, operand: Value) -> Any:
    select = POOLS[e.name] if e.name in POOLS else e.params["select_prim"].name
    return (operand, select, *(tuple(e.params[name]) for name in WINDOW))


def _keeps_positions(e: Equation) -> bool:
    params, window = e.params, e.params["window_dimensions"]
    dense = all(d == 1 for d in (*params["base_dilation"], *params["window_dilation"]))
    pooled = [n for n, w in zip(e.ins[0].aval.shape, window, strict=True) if w > 1]
    counted = math.prod(window) <= MOST and all(isinstance(n, int) for n in pooled)
    return dense and counted and not e.region.dtype


def _append(run: Any, ins: Sequence[Value], e: Equation, into: list[Equation]) -> list[Value]:
    """Appends what computes the results of an equation, and perhaps more."""
    trace = _jax.trace(run, [v.aval for v in ins], "pool")
    start = len(into)
    outs = opened(trace, ins, into, again=e.again, stack=e.stack)
    own = dict(zip(outs, e.outs, strict=False))
    for new in into[start:]:
        new.outs = [own.get(v, v) for v in new.outs]
        new.ins = [own.get(v, v) for v in new.ins]
    return [own.get(v, v) for v in outs]


def _places(e: Equation) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, e.params["window_dimensions"]))


def _pool(e: Equation, x: Any) -> list[Any]:
    """Returns the maxima, and where they were. Of equal entries it is the first, as in JAX."""
    larger = jax.lax.gt if e.name == "reduce_window_max" else jax.lax.lt
    best, *others = _entries(e, x, -math.inf if larger is jax.lax.gt else math.inf)
    where = jnp.zeros(best.shape, jnp.uint8)
    for i, entry in enumerate(others, 1):
        where = jnp.where(larger(entry, best), jnp.uint8(i), where)
        best = jax.lax.max(best, entry) if larger is jax.lax.gt else jax.lax.min(best, entry)
    return [best, where]


def _entries(e: Equation, x: Any, outside: float) -> Iterator[Any]:
    """Yields the entries at each position of the windows, in order."""
    padding = [(low, high, 0) for low, high in e.params["padding"]]
    padded = jax.lax.pad(x, jnp.asarray(outside, x.dtype), padding)
    strides = e.params["window_strides"]
    for place in _places(e):
        dims = zip(padded.shape, e.params["window_dimensions"], place, strict=True)
        yield jax.lax.slice(padded, place, [n - (w - 1 - i) for n, w, i in dims], strides)


def _unpool(e: Equation, x: Any, where: Any) -> list[Any]:
    """Returns the sum of the cotangents, each at its position."""
    zero = jnp.zeros((), x.dtype)
    terms = []
    for i, place in enumerate(_places(e)):
        config = []
        dims = e.outs[0].aval.shape, x.shape, place, e.params["window_strides"], e.params["padding"]
        for size, count, at, stride, (low, _) in zip(*dims, strict=True):
            end = size - (at - low) - ((count - 1) * stride + 1)
            config.append((at - low, end, stride - 1))
        terms.append(jax.lax.pad(jnp.where(where == i, x, zero), zero, config))
    return [functools.reduce(jax.lax.add, terms)]
