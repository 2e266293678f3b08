"""What is computed a second time stays behind barriers, so that compilers do it then, and again.

XLA would find that it has been computed before, or compute it early, and would keep that in place
of what is handed over, if that is no smaller. It finds nothing in loops, and nothing that
cotangents are part of. There a barrier would only ask for the default layout, which costs a copy.
"""

from collections.abc import Iterable, Sequence

from mpjax._src.base import _jax
from mpjax._src.planner import rounding
from mpjax._src.planner.accumulators import adds_or_moves
from mpjax._src.planner.equations import Equation, Value, barred, dependents, in_order, needed
from mpjax._src.planner.partition import runs_again


def held_apart(
    saved: Sequence[Value],
    before: Sequence[Equation],
    equations: Sequence[Equation],
    results: Sequence[Value],
    cotangents: Sequence[Value],
    in_turns: bool,
) -> tuple[list[Equation], list[Value]]:
    """Puts what something is computed from again behind a barrier.

    Values ``in_turns`` wait for the cotangents that are read beside them, so that not all is
    computed again at once. It costs bytes: what reads those is another kernel.

    Args:
        saved: What was handed over.
        before: What computes more of what is then at hand as if it had been handed over.
        equations: The other equations.
        results: What they return.
        cotangents: The cotangents.
        in_turns: Whether values wait.

    Returns:
        All equations in order, and the results.
    """
    late = dependents(equations, cotangents)
    again = [e for e in equations if late.isdisjoint(e.outs) and not e.row.loops]
    before = needed(before, [v for e in equations for v in e.ins])
    remade = [v for e in before for v in e.outs]
    read = {v for e in again for v in e.ins if sum(_jax.bytes_of(x.aval) for x in e.outs) > v.size}
    both = [*before, *equations]

    def apart(values: Sequence[Value], readers: Sequence[Equation]) -> dict[Value, Value]:
        groups = _in_turns(values, readers, late, results) if in_turns else {None: values}
        fresh: dict[Value, Value] = {}
        for ahead, those in groups.items():
            held = those if ahead is None else [*those, ahead]
            first = both[0]
            outs = barred(held, into, like=first.like, stack=first.stack) if those else held
            fresh.update(zip(held, outs, strict=True))
        return fresh

    into: list[Equation] = []
    first = apart(_read([*saved, *_of_arguments(before, saved)], before), both) if before else {}
    first = {v: x for v, x in first.items() if v not in late}
    second = apart([v for v in (*saved, *remade) if v in read], equations)
    if not into:
        return [*equations], [*results]
    body = [*(e.reading(first) for e in before), *(e.reading(second) for e in equations)]
    return in_order([*into, *body]), [second.get(v, v) for v in results]


def _read(values: Iterable[Value], equations: Sequence[Equation]) -> list[Value]:
    read = {v for e in equations for v in e.ins}
    return [v for v in values if v in read]


def _of_arguments(equations: Sequence[Equation], saved: Sequence[Value]) -> list[Value]:
    """Returns an operand of each matmul that is computed again from arguments alone."""
    found: list[Value] = []
    hidden = dependents(equations, saved)
    for e in equations:
        operands = [v for v in e.ins if v.const is None]
        if operands and not runs_again(e) and hidden.isdisjoint(operands):
            found.append(min(operands, key=lambda v: v.size))
            hidden |= dependents(equations, found[-1:])
    return found


def _in_turns(
    apart: Sequence[Value],
    equations: Sequence[Equation],
    late: set[Value],
    results: Sequence[Value],
) -> dict[Value | None, list[Value]]:
    """Groups values by the cotangent after which something made of them is read first.

    It is the last one that a matmul has made by then, and that is returned by no sum.
    """
    summed = {*results}
    for e in reversed(equations):
        summed.update(e.ins if adds_or_moves(e) and not summed.isdisjoint(e.outs) else ())
    ahead: list[Value | None] = [None]
    for e in equations:
        own = rounding.returns_half(e) and e.outs[0] in late and e.outs[0] not in summed
        ahead.append(e.outs[0] if own else ahead[-1])
    first: dict[Value, int] = {}  # where something made of a value is read beside cotangents
    for i, e in reversed([*enumerate(equations)]):
        waits = late.isdisjoint(e.outs)
        at = min((first.get(v, len(equations)) for v in e.outs), default=i) if waits else i
        first.update((v, min(at, first.get(v, at))) for v in e.ins)
    groups: dict[Value | None, list[Value]] = {}
    for v in apart:
        groups.setdefault(ahead[min(first[v], len(equations))], []).append(v)
    return groups
