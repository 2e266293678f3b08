"""What derivatives of maxima read: positions of a max pool's, and the masks of ReLUs.

A pool keeps in a byte where each maximum was, in place of the array that it pools.
JAX's derivative looks for the maxima in the operand again. XLA:GPU finds four integers for each,
and adds the cotangents one by one to an array of zeros. From positions, the derivative is a sum of
padded arrays, in one kernel. PyTorch's max pools keep the positions too, in eight bytes. A TPU has
a kernel for JAX's derivative, which moves fewer bytes there.
"""

import functools
import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.core.base.devices import current_facts
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import deferred
from mpjax._src.core.planner.equations import Equation, Value, appended, needed
from mpjax._src.core.planner.partition import Handed, Parts, Placed, from_one_array
from mpjax._src.core.planner.rounding import is_zero
from mpjax._src.core.program.respellings import WINDOWS, entries_of

# ---- positions ----------------------------------------------------------------------------------

POOLED = "select_and_scatter_add"  # JAX's derivative; here it may read positions
POOLS = {"reduce_window_max": "ge", "reduce_window_min": "le"}
WINDOW = ("window_dimensions", "window_strides", "padding")
# The most entries of a window: the kernel has a term for each.
MOST = 64


def with_positions(both: Parts) -> Parts:
    """Returns both parts of a program whose pools keep positions."""
    if current_facts().platform == "tpu":
        return both
    # A derivative does not name its pool: both have the same operand and window.
    asked = {_key(e, e.ins[1]) for e in both.late if e.name == POOLED}
    where: dict[Any, Value] = {}
    first: list[Equation] = []
    for e in both.early:
        key = _key(e, e.ins[0]) if e.name in POOLS and _keeps_positions(e) else None
        if key in asked and key not in where:
            _, where[key] = appended(functools.partial(_pool, e), e.ins, first, e, e.outs)
        else:
            first.append(e)
    at = [(e, where.get(_key(e, e.ins[1])) if e.name == POOLED else None) for e in both.late]
    late = [e.on([e.ins[0], place]) if place else e for e, place in at]
    return both._replace(early=first, late=late)


def unpooled(equations: Sequence[Equation]) -> list[Equation]:
    """Returns equations that read positions as operations of JAX."""
    written: list[Equation] = []
    for e in equations:
        if e.name == POOLED and e.ins[1].aval.dtype == jnp.uint8:
            appended(functools.partial(_unpool, e), e.ins, written, e, e.outs)
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
    # `_unpool` has no form for dilated windows and symbolic sizes, nor for a region's dtype.
    return dense and counted and not e.region.dtype


def _places(e: Equation) -> Iterator[tuple[int, ...]]:
    return itertools.product(*map(range, e.params["window_dimensions"]))


def _pool(e: Equation, x: Any) -> list[Any]:
    """Returns the maxima, and where they were. Of equal entries it is the first, as in JAX."""
    larger = jax.lax.gt if POOLS[e.name] == "ge" else jax.lax.lt
    edge = -math.inf if larger is jax.lax.gt else math.inf
    # Padding loses against every finite number.
    best, *others = entries_of(x, edge, *(e.params[name] for name in WINDOWS))
    where = jnp.zeros(best.shape, jnp.uint8)
    for i, entry in enumerate(others, 1):
        where = jnp.where(larger(entry, best), jnp.uint8(i), where)
        best = jax.lax.max(best, entry) if larger is jax.lax.gt else jax.lax.min(best, entry)
    return [best, where]


def _unpool(e: Equation, x: Any, where: Any) -> list[Any]:
    """Returns the sum of the cotangents, each at its position."""
    zero = jnp.zeros((), x.dtype)
    terms = []
    for i, place in enumerate(_places(e)):
        config = []
        dims = e.outs[0].aval.shape, x.shape, place, e.params["window_strides"], e.params["padding"]
        for size, count, at, stride, (low, _) in zip(*dims, strict=True):
            # The entry at a place of window ``w`` came from ``w * stride + at - low``.
            end = size - (at - low) - ((count - 1) * stride + 1)
            config.append((at - low, end, stride - 1))
        terms.append(jax.lax.pad(jnp.where(where == i, x, zero), zero, config))
    return [functools.reduce(jax.lax.add, terms)]


# ---- masks --------------------------------------------------------------------------------------


def masks(both: Parts) -> Parts:
    """The backward part finds the mask of a ReLU in its result, where it reads that anyway."""
    early, late, outs, *_ = both
    forward, read = needed(early, outs), {v for e in late for v in e.ins}
    either = [e for e in forward if not read.isdisjoint(e.outs)]
    results = {v: e.outs[0] for e in either if (v := _rectified(e)) is not None}
    ahead = {*forward}
    # A mask that the forward part reads itself exists anyway.
    prepared = [e for e in early if e not in ahead and rounding.is_mask(e) and e.ins[0] in results]
    found = {e.outs[0]: results[e.ins[0]] for e in prepared}
    first, second = deferred(early, outs, found)
    masked = [e.on([found[e.outs[0]], e.ins[1]]) if e.outs[0] in found else e for e in second]
    return both._replace(early=first, late=[*masked, *late])


def with_operands(
    early: Sequence[Equation], late: Sequence[Equation], hand: Handed, free: Collection[Value]
) -> tuple[list[Equation], list[Equation]]:
    """A mask is that of the ReLU's operand where this is computed from one array that is kept.

    Whoever reads the mask reads the array, as the derivative of a norm does. Returns what runs
    again, and the backward part.
    """
    again = [*hand.again]
    known = {*hand.saved, *free, *(v for e in again for v in e.outs)}
    maker = {out: (i, e) for i, e in enumerate(early) for out in e.outs}
    changed = []
    for e in late:
        v = _operand(e.ins[0], maker) if e.again and rounding.is_mask(e) else None
        steps = from_one_array(v, maker, known) if v is not None else None
        # From several arrays, the mask would read more than the result does.
        if v is None or steps is None:
            changed.append(e)
            continue
        again += steps
        known.update(out for x in steps for out in x.outs)
        changed.append(e.on([v, e.ins[1]]))
    return again, changed


def _operand(v: Value, maker: Placed) -> Value | None:
    """Returns the operand of the ReLU that a value is the result of, or its 16-bit copy."""
    while v in maker and rounding.is_rounding(maker[v][1]):
        v = maker[v][1].ins[0]
    return _rectified(maker[v][1]) if v in maker else None


def _rectified(e: Equation) -> Value | None:
    """Returns the value of which an equation gives the entries above zero, and zeros."""
    if e.name == "max":
        zeros = [is_zero(v) for v in e.ins]
        return e.ins[zeros.index(False)] if zeros.count(True) == 1 else None
    ruled = e.is_custom and len(e.ins) == 1 and len(e.outs) == 1
    return e.ins[0] if ruled and all(rounding.inside(e, _is_relu)[0]) else None


def _is_relu(ins: Any, equations: Any, outs: Any) -> list[bool]:
    return [
        len(equations) == 1 and equations[0].outs == outs and _rectified(equations[0]) is ins[0]
    ]
