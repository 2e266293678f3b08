"""Floats that are integers: counts, positions and indices, which 16 bits may merge."""

from collections.abc import Sequence

import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.rules import CAST, FOLLOW, MOVE, SELECT
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.kinds import SUMMED, SUMS, kind_of

# Whether an array is integers: not, as far as one can tell; of up to 8 bits, as masks; or larger.
NONE, SMALL, LARGE = range(3)
MOST = 256  # bfloat16 tells all integers up to this one apart

SOURCES = ("iota", CAST)  # these make integers of what are none


def _of_constant(v: Value) -> int:
    """Returns whether a number that the program contains is an integer."""
    if isinstance(v.const, _jax.Tracer) or np.ndim(v.const) or not _is_real(v):
        return NONE
    size = abs(float(v.const))
    return NONE if size != np.floor(size) else SMALL if size <= MOST else LARGE


def of_equation(e: Equation, out: Value, ins: Sequence[int]) -> int:
    """Returns whether a result of an equation is integers, if its operands are or are not."""
    if not _is_real(out):
        return NONE
    if out.aval.dtype.kind != "f" and out.aval.dtype.itemsize == 1:
        return SMALL
    if e.name == "iota":
        size = out.aval.shape[e.params["dimension"]]
        return SMALL if _jax.size_of((size,)) <= MOST else LARGE
    known = zip(e.ins, ins, strict=True)
    pairs = [(v, kind if v.const is None else _of_constant(v)) for v, kind in known]
    if e.name in ("mul", CAST) or (e.rule.need == FOLLOW and e.rule.linear):
        # The predicate of a select chooses numbers, and is none of them.
        numbers = pairs[1:] if e.name == SELECT else pairs
        kinds = [_as_float(v, kind) for v, kind in numbers if _is_real(v)]
        return max(kinds) if kinds and NONE not in kinds else NONE
    if kind_of(e) in (SUMMED, SUMS):
        # A sum of masks is a count, which soon exceeds 256.
        return LARGE if _as_float(*pairs[0]) else NONE
    if e.rule.need == MOVE:
        moved = [_as_float(v, kind) for v, kind in pairs if v.aval.dtype == out.aval.dtype]
        return max(moved) if moved and NONE not in moved else NONE
    return NONE


def _as_float(v: Value, kind: int) -> int:
    """Returns the kind of an operand: integers of an unknown size are large."""
    if v.aval.dtype.kind == "f":
        return kind
    # Bytes hold masks, classes and pixels, all of which bfloat16 represents.
    return kind or (SMALL if v.aval.dtype.itemsize == 1 else LARGE)


def _is_real(v: Value) -> bool:
    """Returns whether a value is an array of numbers with an order."""
    return _jax.is_array(v.aval) and getattr(v.aval.dtype, "kind", "") in ("b", "i", "u", "f")
