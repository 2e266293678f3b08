"""Sums that differ by a factor are one sum, which a kernel makes beside others of the same array.

The derivative of a norm sums a cotangent twice: as it is, for the bias, and times the scale over
the deviation, for the mean. ``sum(c x) = c sum(x)`` where ``c`` is constant along the axes. XLA
makes no kernel of three sums: it would write the array in float32 for another one.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax

from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import Equation, Value, appended, in_order
from mpjax._src.core.planner.kinds import constant_along
from mpjax._src.core.planner.picks import is_sharded

SUM = "reduce_sum"


class Factor(NamedTuple):
    """What a value is multiplied with, or divided by, that is constant along axes."""

    name: str  # "mul", "div", or "neg" of nothing
    value: Value | None = None  # a small array
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
        if e.name == SUM and rounding.is_large(e.ins[0]) and not is_sharded(e.ins[0]):
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
            factors.append(Factor("neg"))
            v = e.ins[0]
            continue
        for place in PLACES.get(e.name, ()):
            rest, found = e.ins[1 - place], constant_along(e.ins[place], axes, makers)
            # A smaller array is spread by the product, so that its own sum has fewer terms.
            if found is not None and rest.aval.shape == v.aval.shape:
                factors.append(Factor(e.name, *found))
                v = rest
                break
        else:
            break
    return Product(v, tuple(factors))


# Where factors are.
PLACES = {"mul": (1, 0), "div": (1,)}


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
            x = x * small if factor.name == "mul" else x / small
        return [x]

    arrays = [factor.value for factor in product.factors if factor.value is not None]
    appended(run, [whole, *arrays], into, e, e.outs)
