"""Linear recurrences that `jax.lax.associative_scan` computes, as in state space models.

JAX writes an associative scan out: slices, products and sums at each level, which its derivative
keeps or computes again. What computes a value is compared with what JAX writes for a linear
recurrence of its shape, in the version of JAX that is used. It is one operation then, whose
derivative is a recurrence in the other direction, which reads its factors and its result.

The derivative multiplies with the result, as that of a matmul does with its operand. So it reads
the 16-bit copy of the result if nothing but matmuls reads the result: an error of at most the
rounding unit of each product, as in a matmul's derivative.
"""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax.rounded import rounded_p
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.rules import ADDITIONS
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import Makers
from mpjax._src.core.planner.equations import Equation, Value, opened, parts
from mpjax._src.core.planner.recall import Opened

COMMUTE = (*ADDITIONS, "mul")


def recurrent(program: Any, half: np.dtype = FLOAT32) -> Any:
    """Returns a closed jaxpr whose linear recurrences are operations; the same if it has none.

    With a 16-bit dtype, derivatives read 16-bit copies of results that only matmuls read.
    """
    if not _interleaves(_jax.open_jaxpr(program)[0]):
        return program
    # To take a program apart costs time, and few have such scans.
    whole = Opened(program)
    maker = {out: e for e in whole.equations for out in e.outs}
    found = {h: of for h, of in _recurrences(whole, maker) if not whole.is_fixed(h)}
    alias: dict[Value, Value] = {}
    low = rounding.wanted(whole.equations, whole.outs, ()) if half != FLOAT32 else ()

    def write(v: Value, e: Equation, into: list[Equation]) -> None:
        if v in found:
            *operands, axis = found[v]
            traced = _traced(v.aval, axis, half if v in low else None)
            ins = [alias.get(x, x) for x in operands]
            (alias[v],) = opened(traced, ins, into, stack=e.stack, region=e.region)

    inside = whole.inside(functools.partial(recurrent, half=half))
    return whole.changed([*found, *inside], alias, write) if found or inside else program


def _interleaves(jaxpr: Any) -> bool:
    """Returns whether a program puts the entries of arrays in turns anywhere."""

    def gaps(eqn):
        return eqn.primitive.name == "pad" and any(g for *_, g in eqn.params["padding_config"])

    return any(
        gaps(eqn) or any(_interleaves(_jax.open_jaxpr(p)[0]) for p in _jax.inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def _recurrences(whole: Opened, maker: Makers) -> Iterator[tuple[Value, tuple[Any, ...]]]:
    """Yields results of recurrences, with their factors, what is added, and the axis."""
    taken: set[Value] = set()
    # From the end: the levels of a scan are shorter recurrences, which belong to the longest.
    for e in reversed(whole.equations):
        axis = _interleaved(e, maker)
        if axis is None or e.outs[0] in taken:
            continue
        bound: dict[Value, Value] = {}
        (h,) = e.outs
        (a, b), our_makers, result = _as_jax_writes_it(h.aval.shape, axis)
        # An argument matches a value of any shape, so that of the factors is asked for here.
        if _is_same(result, h, our_makers, maker, bound) and bound[a].aval.shape == h.aval.shape:
            taken.update(bound.values())
            yield h, (bound[a], bound[b], axis)


def _interleaved(e: Equation, maker: Makers) -> int | None:
    """Returns the axis along which an equation puts the entries of two arrays in turns."""
    makers = [maker.get(v) for v in e.ins] if e.name == "add" else []
    pads = [x.params["padding_config"] for x in makers if x is not None and x.name == "pad"]
    if len(pads) < 2 or not e.outs[0].is_float32:
        return None
    # JAX puts entries in turns by padding both arrays with gaps of one, and adding them.
    gaps = [axis for axis, (*_, inner) in enumerate(pads[0]) if inner == 1]
    return gaps[0] if len(gaps) == 1 else None


@functools.lru_cache(maxsize=64)
def _as_jax_writes_it(shape: tuple[int, ...], axis: int) -> tuple[list[Value], Makers, Value]:
    """Returns a linear recurrence of a shape as JAX writes it."""
    x = jax.ShapeDtypeStruct(shape, FLOAT32)
    ins, equations, (out,) = parts(jax.make_jaxpr(functools.partial(_jax.scanned, axis=axis))(x, x))
    return ins, {v: e for e in equations for v in e.outs}, out


@functools.lru_cache(maxsize=64)
def _traced(aval: Any, axis: int, half: Any) -> Any:
    def run(a: jax.Array, b: jax.Array) -> list[jax.Array]:
        h = _jax.recurrence(a, b, axis, half)
        return [h if half is None else rounded_p.bind(h, half=half)]

    return _jax.trace(run, [aval, aval], "recurrence")


def _is_same(
    ours: Value, theirs: Value, our_makers: Makers, their_makers: Makers, bound: dict[Value, Value]
) -> bool:
    """Returns whether a value is computed as ours is, and notes which values correspond."""
    if ours.literal or ours in bound:
        same = ours.literal and theirs.literal and np.array_equal(ours.const, theirs.const)
        return same or bound.get(ours) is theirs
    # Noted before it is compared: levels share operands, which are compared once.
    bound[ours] = theirs
    e, other = our_makers.get(ours), their_makers.get(theirs)
    if e is None:  # an argument
        return theirs.is_float32
    if other is None or _kind(e) != _kind(other):
        return False
    ins = other.ins
    # A user's function may write its sums and products in either order.
    if e.name in COMMUTE and not _begins_alike(e.ins[0], ins[0], our_makers, their_makers):
        ins = ins[::-1]
    pairs = zip(e.ins, ins, strict=True)
    return all(_is_same(x, y, our_makers, their_makers, bound) for x, y in pairs)


def _begins_alike(ours: Value, theirs: Value, our_makers: Makers, their_makers: Makers) -> bool:
    one, other = our_makers.get(ours), their_makers.get(theirs)
    return one is None or (other is not None and _kind(one) == _kind(other))


def _kind(e: Equation) -> tuple[Any, ...]:
    """Returns what two equations that compute the same have in common, but for their operands."""
    return e.name, e.outs[0].aval.shape, str(e.params)
