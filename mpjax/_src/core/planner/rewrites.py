"""What the backward part computes otherwise than JAX wrote it, from less that is kept.

The results are the same numbers, or as accurate.

- *Softmaxes*: exponentials are those of their rounded weights (`softmax`).
- *Maxima*: positions and masks in the place of operands (`maxima`).
- *Picks*: JAX adds the cotangents of entries that are picked one a row, as the logits of labels are
  in a cross entropy, to zeros at their places: two arrays of float32, written for one number a row.
  A comparison of places with an index is the same, and fuses into whatever reads it.
- *Sums* that differ by a factor are one sum, which a kernel makes beside others of the same array.
  The derivative of a norm sums a cotangent twice: as it is, for the bias, and times the scale over
  the deviation, for the mean. ``sum(c x) = c sum(x)`` where ``c`` is constant along the axes. XLA
  makes no kernel of three sums: it would write the array in float32 for another one.
- *Copies* in 16 bits.
"""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.rules import CAST, SELECT, SPREAD
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import Makers, Order, deferred, dependents, in_order
from mpjax._src.core.planner.equations import Equation, Value, appended, needed
from mpjax._src.core.planner.kinds import SUMMED, constant_along, kind_of
from mpjax._src.core.planner.maxima import masks, with_positions
from mpjax._src.core.planner.partition import Parts
from mpjax._src.core.planner.rounding import is_zero
from mpjax._src.core.planner.softmax import allowed, softmaxes, takes_half


def rewritten(both: Parts) -> Parts:
    """Returns the forward and the backward part, changed where that keeps less."""
    both = weights_of_softmax(with_positions(both))
    # A checkpoint's softmax has weights of its own.
    late = compared(needed(_weights_again(both), both.results), both.early)
    # Copies are last: only then is it known what the backward part still reads, and in which dtype.
    return copies(masks(both._replace(late=joined_sums(late))))


def copies(both: Parts) -> Parts:
    """What the backward part reads in 16 bits alone is a value of its own: a 16-bit copy.

    So it may be kept without the float32 value, and that be computed again for other readers.
    """
    early, late, _, results, _, half = both
    low = rounding.wanted(late, results, ()) - rounding.made(early, (), half) - {*results}
    values = low.intersection(out for e in early for out in e.outs)
    if not values or half == FLOAT32:
        return both
    # In the forward part nobody reads the copy: its matmuls round the value to the same numbers.
    early = rounding.with_rounded(early, values, half, lambda e: False)
    made = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    copy = {v: made[v] for v in values}
    return both._replace(early=early, late=[e.reading(copy) for e in late])


def weights_of_softmax(both: Parts) -> Parts:
    """The backward part reads the 16-bit weights of softmaxes that matmuls read (`softmax`)."""
    early, late, outs, results, _, half = both
    forward = needed(early, outs)
    low = rounding.wanted(forward, outs, ())
    read = {v for v in rounding.fed(forward) if rounding.is_large(v)}
    found = softmaxes(forward, read, low)
    if not found:
        return both
    values = [v for softmax in found.values() for v in softmax.values]
    # JAX computes parts of the derivative, such as factors, in the forward part. They read the
    # softmax as well, so they move to the backward part.
    order, ends = Order([*deferred(early, outs, values)[1], *late]), {*results}
    found = {weights: allowed(softmax, order, ends) for weights, softmax in found.items()}
    first: list[Equation] = []
    early = rounding.with_rounded(early, found, half, lambda e: takes_half(e, low))
    written = {e.ins[0]: e.outs[0] for e in early if rounding.is_rounding(e)}
    instead: dict[Value, Value] = {}
    for weights, softmax in found.items():
        instead |= softmax.again(written[weights], first)
    early, later = deferred(early, outs, instead)
    behind = [*later, *late]
    # Matmuls read the weights as they were rounded: normalized, they would be rounded once more.
    low, either = rounding.wanted(behind, (), ()), instead | written
    changed = [e.reading(either if takes_half(e, low) else instead) for e in behind]
    read = {v for e in changed for v in e.ins}
    return both._replace(early=early, late=[*needed(first, read), *changed])


def _weights_again(both: Parts) -> list[Equation]:
    """Changes the softmaxes that a checkpoint computes again; its matmuls are what it computes."""
    waiting = dependents(both.late, both.cotangents)
    again: list[Equation] = []
    rest: list[Equation] = []
    for e in both.late:  # a barrier holds cotangents too
        (again if e.is_barrier or waiting.isdisjoint(e.outs) else rest).append(e)
    matmuls = [v for e in again if rounding.is_half_matmul(e) for v in e.outs]
    parts = both._replace(early=again, late=rest, outs=matmuls)
    first, second, *_ = changed = weights_of_softmax(parts)
    if changed is parts:
        return both.late
    return in_order([*(dataclasses.replace(e, again=True) for e in first), *second])


def compared(equations: Sequence[Equation], early: Sequence[Equation]) -> list[Equation]:
    """Returns equations in which what is added to zeros, one entry a row, is compared instead.

    They read values of ``early`` ones.
    """
    left: list[Equation] = []
    zeros: set[Value] = set()
    maker = {out: e for e in (*early, *equations) for out in e.outs}
    for e in equations:
        # The transpose of a gather adds to zeros that JAX spreads. Sums into other arrays stay.
        zeros.update(e.outs if e.name == SPREAD and is_zero(e.ins[0]) else ())
        adds = e.name == "scatter-add" and e.ins[0] in zeros
        found = _picked(e, maker) if adds else None
        if found is None:
            left.append(e)
            continue
        axis, indices = found
        shape = e.outs[0].aval.shape
        clips = e.params["mode"] == lax.GatherScatterMode.CLIP

        def run(indices, updates, axis=axis, shape=shape, clips=clips):
            row = [1 if d == axis else n for d, n in enumerate(shape)]
            indices, updates = lax.reshape(indices, row), lax.reshape(updates, row)
            # In so few bits, the places beyond the largest number would start again.
            small = indices.dtype.itemsize < np.dtype(np.int32).itemsize
            indices = indices.astype(np.int32) if small else indices
            # An index that is out of bounds equals no place, so its update is dropped, as by JAX;
            # `clip` moves it inside.
            indices = jnp.clip(indices, 0, shape[axis] - 1) if clips else indices
            places = lax.broadcasted_iota(indices.dtype, shape, axis)
            return [jnp.where(places == indices, updates, 0)]

        appended(run, [indices, e.ins[2]], left, e, e.outs)
    return left


def _picked(e: Equation, maker: Makers) -> tuple[int, Value] | None:
    """Returns the axis of which one entry a row is added to, and which, if that is all."""
    (operand, indices, updates), numbers = e.ins, e.params["dimension_numbers"]
    shape, axes = operand.aval.shape, numbers.scatter_dims_to_operand_dims
    if is_sharded(operand):
        return None
    if len(axes) == 1:
        rest = tuple(d for d in range(len(shape)) if d not in axes)
        places = numbers.scatter_indices_batching_dims
        # As many indices and updates as rows: no windows, and no row with two entries to add.
        sizes = {_jax.size_of(v.aval.shape) for v in (indices, updates)}
        alone = sizes == {_jax.size_of([shape[d] for d in rest])}
        # They are reshaped, not transposed, so their rows have the operand's order.
        if alone and numbers.operand_batching_dims == rest and sorted(places) == [*places]:
            return axes[0], indices
    # In ``x[jnp.arange(rows), labels]``, rows are counted: where an array indexes each axis,
    # `jax.numpy` concatenates the indices into one array.
    each = maker.get(indices)
    whole = axes == tuple(range(len(shape))) and not numbers.update_window_dims
    if each is None or each.name != "concatenate" or not whole or len(each.ins) != len(shape):
        return None
    counts = [_counts(v, maker) for v in each.ins]
    picked = [axis for axis, count in enumerate(counts) if count is None]
    rows = [count for count in counts if count is not None]
    # Each count runs along its own axis of the index array, in the order of the operand's axes, and
    # one axis is left to be picked from.
    if len(picked) != 1 or rows != [*range(len(rows))]:
        return None
    left = [n for axis, n in enumerate(shape) if axis not in picked]
    index = each.ins[picked[0]]
    # There is an index for every row: ``jnp.arange(3)`` may count some of them only.
    counted = left == [*updates.aval.shape] and [*index.aval.shape] == [*left, 1]
    return (picked[0], index) if counted else None


def _counts(v: Value, maker: Makers) -> int | None:
    """Returns the axis along which an array counts from zero."""
    e = maker.get(v)
    if e is None:
        return None
    if e.name == "iota":
        return e.params["dimension"]
    if e.name == SELECT:  # negative ones count from the end
        test, v, _ = e.ins
        below = maker.get(test)
        negative = below is not None and below.name == "lt" and is_zero(below.ins[1])
        return _counts(v, maker) if below and negative and below.ins[0] is v else None
    if e.name not in (SPREAD, CAST):
        return None
    count = _counts(e.ins[0], maker)
    return count if count is None or e.name != SPREAD else e.params["broadcast_dimensions"][count]


def is_sharded(v: Value) -> bool:
    """Returns whether an array is divided among devices along an explicit axis."""
    return any(_jax.is_sharded_along(v.aval, d) for d in range(len(v.aval.shape)))


class Factor(NamedTuple):
    """What a value is multiplied with, or divided by, that is constant along axes."""

    divides: bool = False
    value: Value | None = None  # a small array; None negates
    dims: Sequence[int] = ()  # the axis of each of its own


class Product(NamedTuple):
    """A value times factors."""

    of: Value
    factors: tuple[Factor, ...] = ()


def joined_sums(equations: Sequence[Equation]) -> list[Equation]:
    """Returns equations in which sums that differ by factors are computed once."""
    makers = {out: e for e in equations for out in e.outs}
    groups: dict[Any, dict[Equation, Product]] = collections.defaultdict(dict)
    for e in equations:
        if kind_of(e) == SUMMED and rounding.is_large(e.ins[0]) and not is_sharded(e.ins[0]):
            product = _product(e.ins[0], e.params["axes"], makers)
            groups[product.of, e.params["axes"]][e] = product
    changed: list[Equation] = []
    gone: set[Equation] = set()
    for (value, _), sums in groups.items():
        scaled = {e: product for e, product in sums.items() if product.factors}
        if len(sums) < 2 or not scaled:
            continue
        whole = next((e for e in sums if e not in scaled), None)
        # All of them have factors: a sum without any is computed in addition.
        if whole is None:
            first = next(iter(sums))
            whole = first.on([value], [Value(first.outs[0].aval)])
            changed.append(whole)
        for e, product in scaled.items():
            _from(whole.outs[0], product, e, changed)
        gone |= {*scaled}
    # A multiple may be read ahead of the place where the sum stood from which it is computed now.
    return in_order([*(e for e in equations if e not in gone), *changed]) if gone else [*equations]


def _product(v: Value, axes: Sequence[int], makers: Mapping[Value, Equation]) -> Product:
    """Returns a value without the factors that are constant along axes."""
    factors: list[Factor] = []
    while (e := makers.get(v)) is not None:
        if e.name == "neg":
            factors.append(Factor())
            v = e.ins[0]
            continue
        # A divisor is the second operand, a factor either one.
        for place in ((1,) if e.inverts else (1, 0)) if e.rule.multiplies else ():
            rest, found = e.ins[1 - place], constant_along(e.ins[place], axes, makers)
            # A smaller array is spread by the product, so that its own sum has fewer terms.
            if found is not None and rest.aval.shape == v.aval.shape:
                factors.append(Factor(e.inverts, *found))
                v = rest
                break
        else:
            break
    return Product(v, tuple(factors))


def _from(whole: Value, product: Product, e: Equation, into: list[Equation]) -> None:
    """Appends a sum as a multiple of another one."""
    axes = e.params["axes"]
    left = [d for d in range(len(e.ins[0].aval.shape)) if d not in axes]

    def run(x: jax.Array, *given: jax.Array) -> list[jax.Array]:
        arrays = iter(given)
        for factor in product.factors:
            if factor.value is None:
                x = -x
                continue
            dims = factor.dims
            small = lax.squeeze(next(arrays), [i for i, d in enumerate(dims) if d in axes])
            places = [left.index(d) for d in dims if d not in axes]
            small = lax.broadcast_in_dim(small, x.shape, places)
            x = x / small if factor.divides else x * small
        return [x]

    arrays = [factor.value for factor in product.factors if factor.value is not None]
    appended(run, [whole, *arrays], into, e, e.outs)
