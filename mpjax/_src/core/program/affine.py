"""One reading of arithmetic: what a result is a weighted sum of, or a product of powers of.

    x / 4 - y        is 1/4 x - y:                  `terms` of "div" and "sub"
    e * rsqrt(s)     is e s**-1/2:                  `powers` of "mul" and "rsqrt"
    exp2(x)          is exp(x ln 2):                `RATES`

Each function reads one operation, whoever walks: backwards from a result, or on to its readers.
A walk has the sums themselves as mappings from what is added to its weight, which `total` adds up.
"""

import collections
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from mpjax._src.core.base.rules import PRODUCTS
from mpjax._src.core.program.views import is_view

# The places of operands, with their weights in a sum or their powers in a product.
Parts = tuple[tuple[int, float], ...]

WEIGHTS = {"add": (1.0, 1.0), "add_any": (1.0, 1.0), "sub": (1.0, -1.0), "neg": (-1.0,)}
POWERS = {"mul": (1.0, 1.0), "div": (1.0, -1.0), "square": (2.0,), "sqrt": (0.5,), "rsqrt": (-0.5,)}
# The rate r of an exponential exp(r x); a logarithm of the same base is log(x) / r.
RATES = {"exp": 1.0, "exp2": math.log(2), "log": 1.0, "log2": math.log(2)}


def number(value: Any) -> float | None:
    """Returns the number that fills a value, or None if it is not known."""
    if value.const is None or np.size(value.const) != 1:
        return None
    return float(np.asarray(value.const).reshape(()))


def terms(op: Any, known: Callable[[Any], float | None] = number) -> Parts:
    """Returns the operands that a result is the weighted sum of; none if it is another function.

    A change of layout has one term. ``known`` says which number an operand is.
    """
    if is_view(op):
        return ((0, 1.0),)
    if op.name in PRODUCTS:
        for place, other in ((1, 0), (0, 1)):
            by = known(op.ins[other])
            if by is not None and op.name == "mul":
                return ((place, by),)
            # A number divided by an operand is no multiple of it, nor is anything divided by 0.
            if by and place == 0:
                return ((0, 1 / by),)
    return tuple(enumerate(WEIGHTS.get(op.name, ())))


def factor(op: Any, value: Any) -> float | None:
    """Returns the number by which an op multiplies a value, or None if it does something else."""
    parts = () if is_view(op) else terms(op)
    return parts[0][1] if len(parts) == 1 and op.ins[parts[0][0]] is value else None


def powers(op: Any) -> Parts:
    """Returns the operands that a result is the product of powers of; none if it is none."""
    if is_view(op):
        return ((0, 1.0),)
    if op.name == "integer_pow":
        return ((0, float(op.params["y"])),)
    return tuple(enumerate(POWERS.get(op.name, ())))


def total(parts: Iterable[tuple[Mapping[Any, float], float]]) -> dict[Any, float]:
    """Returns the sum of some sums, each multiplied by a number. What cancels is left out."""
    found: dict[Any, float] = collections.defaultdict(float)
    sizes: dict[Any, float] = collections.defaultdict(float)
    for form, weight in parts:
        for name, count in form.items():
            found[name] += weight * count
            sizes[name] = max(sizes[name], abs(weight * count))
    # A relative tolerance: factors such as 1/3 do not cancel to the last bit. Infinity never does.
    return {n: count for n, count in found.items() if count and not abs(count) < 1e-6 * sizes[n]}
