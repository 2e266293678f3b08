"""Dear values that two kernels read are computed in each of them.

A compiler repeats a sum or a product in every kernel that reads it. A special function it computes
once, and writes it in float32 if the kernels cannot be one: one makes the operand of a matmul, and
another reads cotangents that come later. Each can compute it from one array that was handed over,
which is fewer bytes. To read two again, as the parts of a gate, is more: XLA makes one kernel then.
"""

from collections.abc import Collection, Iterable, Sequence

from mpjax._src.core.base.rules import DEAR
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import Equation, Value, between
from mpjax._src.core.planner.partition import from_one_array


def for_matmuls(
    equations: Sequence[Equation],
    results: Collection[Value],
    late: set[Value],
    known: Collection[Value],
) -> tuple[list[Equation], list[Equation]]:
    """Computes operands of matmuls apart from what is read beside cotangents.

    Args:
        equations: The equations of a backward part.
        results: What it returns.
        late: What depends on cotangents.
        known: What was handed over.

    Returns:
        The equations that compute operands, and the others, whose matmuls read these.
    """
    recomputed = [e for e in equations if late.isdisjoint(e.outs)]
    if not any(map(_is_dear, recomputed)):
        return [], [*equations]
    maker = {out: (i, e) for i, e in enumerate(recomputed) for out in e.outs}
    read_in_half, ours = rounding.wanted(equations, results, ()), {*recomputed}
    read = dict.fromkeys(v for e in equations if e not in ours for v in e.ins if v in maker)
    others = [v for v in [*read, *results] if v not in read_in_half]
    for_others = {*between(recomputed, others, known)}
    chains = {v: from_one_array(v, maker, known) or [] for v in read if v in read_in_half}
    # A chain of which others need nothing dear is computed by one kernel as it is.
    shared = {v: c for v, c in chains.items() if any(_is_dear(e) and e in for_others for e in c)}
    needed = {e for chain in shared.values() for e in chain}
    # Whole chains are copied, so that no value inside of one is written for both kernels.
    copies, instead = _copied([e for e in recomputed if e in needed], shared)
    return copies, [e if e in ours else e.reading(instead) for e in equations]


def _copied(
    equations: Sequence[Equation], wanted: Iterable[Value]
) -> tuple[list[Equation], dict[Value, Value]]:
    """Returns copies of equations, and what they compute in place of wanted values."""
    same: dict[Value, Value] = {}
    copies = []
    for e in equations:
        outs = [Value(v.aval) for v in e.outs]
        copies.append(e.on([same.get(v, v) for v in e.ins], outs))
        same.update(zip(e.outs, outs, strict=True))
    return copies, {v: same[v] for v in wanted}


def _is_dear(e: Equation) -> bool:
    return e.rule.cost == DEAR and rounding.is_large(e.outs[0])
