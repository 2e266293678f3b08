"""Which forward values are rounded once for all their readers: rule F, for bytes moved.

A value that two kernels read is written to memory, in float32: the residual stream of a model. It
may be written in 16 bits if on every walk from it to the matmuls that read it, the error of that is
no larger than the errors that the roundings of matmuls make anyway (`walks`). What is rounded is
the rest of the value, without its levels (`levels`).
"""

from collections.abc import Collection, Sequence

import numpy as np

from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import Equation, Value
from mpjax._src.core.planner.kinds import ADDED, LAYOUT, MOVED, MULTIPLIED, SAME, SELECTED, is_zero
from mpjax._src.core.planner.levels import Facts
from mpjax._src.core.planner.prices import of_several, read_by_several
from mpjax._src.core.planner.walks import Walks


def streams(
    equations: Sequence[Equation],
    results: Collection[Value],
    half: np.dtype,
    small: int | None = None,
    ruled: Collection[Equation] = (),
) -> tuple[list[Value], Facts]:
    """Returns the values that are rounded once for all their readers, and what is known of all.

    Args:
        equations: The equations of a program, without derivatives.
        results: What the program returns.
        half: The 16-bit dtype.
        small: The least number of entries of such a value; `rounding.SMALL` if None.
        ruled: The equations whose author wrote their backward pass, of which nothing is known.
    """
    values = candidates(equations, results, half, rounding.SMALL if small is None else small)
    # Facts take a walk over all equations: none is needed without candidates.
    facts = Facts(equations if values else ())
    values = [v for v in values if not _is_scaled(v, facts)]
    if not values:
        return [], facts
    walks = Walks(equations, results, facts, ruled)
    # bfloat16 has the range of float32.
    if half == np.float16:
        in_range = _in_float16_range(equations, walks)
        values = [v for v in values if v in in_range]
    found: set[Value] = set()
    # Backwards: the walk from a value ends at the values behind it that are rounded already.
    for v in reversed(values):
        if walks.refused(v, found) is None:
            found.add(v)
    # What its readers can compute from one 16-bit array is not written, so nothing is gained.
    return of_several(equations, found), facts


def candidates(
    equations: Sequence[Equation], results: Collection[Value], half: np.dtype, small: int
) -> list[Value]:
    """Returns the large float32 values that two kernels read, in the order of their equations."""
    made = rounding.made(equations, (), half)
    several = read_by_several(equations, results)
    return [
        out
        for e in equations
        if not rounding.is_view(e)
        for out in e.outs
        if out in several and rounding.is_float32(out) and out not in made and out.size >= small
    ]


def _is_scaled(v: Value, facts: Facts) -> bool:
    """Returns whether a value is a product with a small array.

    A norm behind it takes the factor off again. Its gradient vanishes then, if the norm reads the
    product itself.
    """
    e = facts.maker[v]
    small = [x for x in e.ins if facts.constant_along(x, v) and not facts.is_known(x)]
    return facts.kinds[e] == MULTIPLIED and bool(small)


def _in_float16_range(equations: Sequence[Equation], walks: Walks) -> set[Value]:
    """Returns the values that float16 holds as well as it holds what matmuls make and read.

    Others may be too large for it, or too small, as temperatures are. A norm has no units.
    """
    facts, sources = walks.facts, walks.sources
    found: set[Value] = set()
    # First what matmuls make or read, then what is made of that without leaving its range.
    for e in reversed(equations):
        matmul = rounding.is_half_matmul(e)
        if matmul or (rounding.is_view(e) and not found.isdisjoint(e.outs)):
            found.update(v for v in e.ins[: 2 if matmul else None] if rounding.is_float32(v))
        found.update(e.outs if matmul else ())
    for e in equations:
        floats = [v for v in e.ins if rounding.is_float32(v) and not is_zero(v)]
        if facts.kinds[e] == ADDED:  # beside its terms
            floats = [v for v in floats if not facts.constant_along(v, e.outs[0])] or floats
        keeps = facts.kinds[e] in (ADDED, SAME, LAYOUT, MOVED, SELECTED) or e.name in ("neg", "abs")
        own = False
        if facts.kinds[e] == MULTIPLIED and e.outs[0] in facts.normed:  # by its own size, or scaled
            first, last = (sources.get(v, 0) for v in e.ins)
            own = bool(first & last) or any(v in found and v in facts.normed for v in e.ins)
        if own or (floats and keeps and found.issuperset(floats)):
            found.update(e.outs)
    return found
