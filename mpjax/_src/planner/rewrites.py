"""What the backward part computes otherwise than JAX wrote it, from less that is kept.

The results are the same numbers, or as accurate. Each rewrite takes the equations of both parts and
returns them changed.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np

from mpjax._src.base.rules import MOVE, rule_of
from mpjax._src.planner import rounding
from mpjax._src.planner.equations import Equation, Value, readers_of

Parts = tuple[list[Equation], list[Equation]]
EXPONENTIALS = ("exp", "exp2")


def rewritten(
    early: Sequence[Equation],
    late: Sequence[Equation],
    results: Collection[Value],
    half: np.dtype,
) -> Parts:
    """Returns the forward and the backward part, changed where that needs less memory.

    Args:
        early: The equations of the forward part.
        late: The equations of the backward part.
        results: What the backward part returns.
        half: The 16-bit dtype.
    """
    both = [*early], [*late]
    for rewrite in REWRITES:
        both = rewrite(*both, results, half)
    return both


def weights_of_softmax(
    early: list[Equation],
    late: list[Equation],
    results: Collection[Value],
    half: np.dtype,
) -> Parts:
    """The backward part reads the 16-bit weights of a softmax that a matmul read, normalized.

    The rounded weights divided by their sums are exactly a softmax, of scores that have moved by at
    most a rounding unit: their rows sum to one, and the difference between a confident row's weight
    and one has a small relative error. Rounded weights alone have neither. So neither the scores
    nor float32 weights are kept.
    """
    maker = {out: e for e in early for out in e.outs}
    behind, read, read_late = readers_of(late), rounding.fed(early), rounding.fed(late)
    first: list[Equation] = []
    weights, exponentials = {}, {}
    for e in list(early):
        chain = _sums(e, maker)
        p = e.outs[0] if chain else None
        if p is None or not rounding.is_large(p):
            continue
        if p not in read or not (behind[p] or behind[e.ins[0]]):
            continue
        at = early.index(e) + 1
        into: list[Equation] = []
        q = rounding.append_rounded(p, half, into, like=e)
        early[at:at] = into
        y = q
        for link in chain:
            out = Value(link.outs[0].aval)
            first.append(link.on([y, *link.ins[1:]], outs=[out], again=True))
            y = out
        weights[p] = q, _appended(e, [q, y], first)
        exponentials[e.ins[0]] = weights[p][1], e.ins[1], e
    mul = next((e for e in (*early, *late) if e.name == "mul"), None)
    again = {
        v: _appended(mul, [y, s], first, like=e)
        for v, (y, s, e) in exponentials.items()
        if mul is not None
    }
    if mul is None:
        return early, late
    changed = []
    for e in late:
        moves = rounding.is_view(e) and not read_late.isdisjoint(e.outs)
        takes = rounding.is_half_matmul(e) or moves
        pick = {p: q if takes else y for p, (q, y) in weights.items()}
        changed.append(e.on(pick.get(v, again.get(v, v)) for v in e.ins))
    return early, [*first, *changed]


def _appended(e, ins, into, like=None):
    like = like or e
    out = Value(like.outs[0].aval)
    into.append(Equation(e.primitive, e.params, [*ins], [out], like.like, like.stack, True))
    return out


def _sums(e: Equation, maker) -> list[Equation]:
    """Returns the sum of exponentials by which an equation divides them, and its broadcasts."""
    if e.name != "div" or e.ins[0] not in maker or maker[e.ins[0]].name not in EXPONENTIALS:
        return []
    chain, v = [], e.ins[1]
    while v in maker and rule_of(maker[v].name).need == MOVE and maker[v].name != "reduce_max":
        chain.append(maker[v])
        v = maker[v].ins[0]
    if v not in maker or maker[v].name != "reduce_sum" or maker[v].ins[0] is not e.ins[0]:
        return []
    return [maker[v], *reversed(chain)]


REWRITES: Sequence[Callable[..., Parts]] = (weights_of_softmax,)
