"""Results that leave a program as the float32 accumulators of matmuls.

A matmul's result that a program returns, in another layout or in a sum too, is the accumulator.
What else reads it gets it rounded, the same bits as if it were not returned. So gradients of
parameters are accumulators.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from mpjax._src.core.base.rules import ALL_SUMS, CAST, HAS_WIDE_FORM, SUMS_OF_TWO
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import readers_of
from mpjax._src.core.planner.equations import Equation, Value

# Sums over an axis are not among them: they average the roundings of their terms, and the matmul
# would write all of these in float32, as it would for the gradient of a bias.
SUMS = SUMS_OF_TWO | ALL_SUMS | {CAST}


class Sent(NamedTuple):
    """What devices send each other in 16 bits: the policy's settings ``gather`` and ``reduce``.

    Attributes:
        gathered: Parameters that are used in 16 bits, and rows of tables.
        sums: Parts of gradients of parameters.
    """

    gathered: bool = True
    sums: bool = False


SENT = Sent()


class Returned(NamedTuple):
    """What a program returns unrounded.

    Attributes:
        equations: Its equations, with the moves and sums of accumulators.
        outs: Its results.
        accumulators: The accumulator of each matmul's result that is needed unrounded.
        inside: For each loop, branch or map, which of its results are unrounded inside.
    """

    equations: list[Equation]
    outs: list[Value]
    accumulators: dict[Value, Value]
    inside: dict[Equation, list[bool]]


def unrounded(
    equations: Sequence[Equation],
    outs: Sequence[Value],
    returned: Sequence[bool],
    sent: Sent = SENT,
) -> Returned:
    """Finds the accumulators that a program returns; ``returned`` says which results may be."""
    asked = {v for v, yes in zip(outs, returned, strict=True) if yes and v.is_float32}
    # With ``reduce="half"``, devices send gradients in 16 bits, which accumulators are not.
    wide = {e for e in equations if _accumulates(e) and not (sent.sums and e.region.back)}
    cone, inside = _cone(equations, wide, asked, {*outs} - asked)
    found = Returned([], [], {}, inside)
    twins: dict[Value, Value] = {}
    for e in equations:
        found.equations.append(e)
        if e not in cone or e in inside:
            continue
        # Moves and sums run on both forms, for other readers get the rounded bits. What nobody
        # reads of the first form is dropped when the program is closed.
        ins = [twins.get(v, v) for v in e.ins]
        if e in wide:
            found.accumulators[e.outs[0]] = twins[e.outs[0]] = Value(e.outs[0].aval)
        elif ins != e.ins:
            fresh = [Value(v.aval) for v in e.outs]
            found.equations.append(e.on(ins, outs=fresh))
            twins.update(zip(e.outs, fresh, strict=True))
    found.outs.extend(twins.get(v, v) if v in asked else v for v in outs)
    return found


def _cone(
    equations: Sequence[Equation],
    wide: Collection[Equation],
    asked: Collection[Value],
    others: Collection[Value],
) -> tuple[set[Equation], dict[Equation, list[bool]]]:
    """Returns the equations that lead from matmuls to results, and those of them with programs.

    A sum or a move in between is read on the way alone; a matmul's result may have other readers.
    """
    readers = readers_of(equations)
    cone: set[Equation] = set()
    inside: dict[Equation, list[bool]] = {}

    def leads(e):  # a matmul reads 16 bits: it begins a way
        return e in cone and e not in inside and e not in wide

    def alone(v):
        on_the_way = all(map(leads, readers[v])) and v not in others
        return on_the_way and (v in asked or bool(readers[v]))

    for e in reversed(equations):
        if e in wide:
            (out,) = e.outs
            if out in asked or any(map(leads, readers[out])):
                cone.add(e)
        elif rounding.programs(e):
            _, start, end = rounding.places(e)
            carries = end - start  # a sum over turns averages the roundings of its terms
            # A loop returns one form of each result: another reader would get unrounded numbers.
            flags = [i >= carries and v.is_float32 and alone(v) for i, v in enumerate(e.outs)]
            if any(flags):
                inside[e] = flags
                cone.add(e)
        elif adds_or_moves(e) and all(v in asked or alone(v) for v in e.outs):
            cone.add(e)
    return cone, inside


def _accumulates(e: Equation) -> bool:
    """Returns whether an equation is a matmul in 16 bits that can return its accumulator."""
    wide = HAS_WIDE_FORM in e.rule.traits or bool(e.params.get("sums"))
    return rounding.is_half_matmul(e) and wide


def adds_or_moves(e: Equation) -> bool:
    """Returns whether an equation adds, moves or scales what it reads."""
    if rounding.is_half_operation(e) or e.is_barrier or not any(v.is_float32 for v in e.outs):
        return False
    # A scalar divisor scales, as the count of a mean; a scalar divided by an array does not.
    factors = e.ins[1 if e.inverts else 0 :] if e.rule.multiplies else ()
    scaled = any(v.const is not None and not v.aval.shape for v in factors)
    return scaled or e.name in SUMS or (rounding.is_view(e) and rounding.commutes(e))
