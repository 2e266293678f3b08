"""What is computed a second time stays behind barriers, so that compilers do it then, and again.

XLA would find that it has been computed before, or compute it early, and would keep that in place
of what is handed over, if that is no smaller. It finds nothing in loops, and nothing that
cotangents are part of. There a barrier would only ask for the default layout, which costs a copy.

Dear values that two kernels read are computed in each of them (`for_matmuls`). A compiler repeats a
sum or a product in every kernel that reads it. A special function it computes once, and writes it
in float32 if the kernels cannot be one: one makes the operand of a matmul, and another reads
cotangents that come later. Each can compute it from one array that was handed over, which is fewer
bytes. To read two again, as the parts of a gate, is more: XLA makes one kernel then.
"""

from collections.abc import Collection, Iterable, Sequence

import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.base._jax.gpu_matmuls import ALIGNED
from mpjax._src.core.base.rules import DEAR
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.accumulators import adds_or_moves
from mpjax._src.core.planner.dependence import between, dependents, in_order, readers_of
from mpjax._src.core.planner.equations import Equation, Value, appended, barred, needed
from mpjax._src.core.planner.partition import from_one_array, runs_again


def held_apart(
    saved: Sequence[Value],
    padded: Collection[Value],
    before: Sequence[Equation],
    equations: Sequence[Equation],
    results: Sequence[Value],
    cotangents: Sequence[Value],
    in_turns: bool,
) -> tuple[list[Equation], list[Value]]:
    """Puts what something is recomputed from behind a barrier.

    Values ``in_turns`` wait for the cotangents that are read beside them, so that not all is
    computed again at once. It costs bytes: what reads those is another kernel.

    Args:
        saved: What was handed over.
        padded: What of that would be copied behind a barrier, as `stored` returns it.
        before: Equations that recompute values first, which others read as if handed over.
        equations: The other equations.
        results: What they return.
        cotangents: The cotangents.
        in_turns: Whether values wait.

    Returns:
        All equations in order, and the results.
    """
    if not equations:  # a branch that hands on its cotangents
        return [], [*results]
    late = dependents(equations, cotangents)
    # All backward passes share it, and without some cotangents less of it is read.
    before = needed(before, [v for e in equations for v in e.ins])
    recomputed = [v for e in before for v in e.outs]
    both = [*before, *equations]

    def behind_barriers(values: Sequence[Value], readers: Sequence[Equation]) -> dict[Value, Value]:
        groups = _in_turns(values, readers, late, results) if in_turns else {None: values}
        fresh: dict[Value, Value] = {}
        for ahead, those in groups.items():
            # No result of a barrier exists before all its operands do, so the values wait for the
            # cotangent.
            held = those if ahead is None else [*those, ahead]
            first = both[0]
            outs = barred(held, into, like=first.like, stack=first.stack) if those else held
            fresh.update(zip(held, outs, strict=True))
        return fresh

    into: list[Equation] = []
    ready = _read_by([*saved, *_of_arguments(before, saved)], before)
    for_before = behind_barriers(ready, both) if before else {}
    for_before = {v: x for v, x in for_before.items() if v not in late}
    held = dict.fromkeys(v for v in (*saved, *recomputed) if v not in padded)
    # A barrier would copy padded rows (`stored`), so it holds none.
    copies, equations = for_matmuls(equations, results, late, held)
    values = _sources_of_recomputation([*saved, *recomputed], equations, late)
    for_rest = behind_barriers([v for v in values if v not in padded], equations)
    read = _read_by(held, copies)
    for_copies = behind_barriers(read, [*copies, *equations]) if copies else {}
    # Padded rows are multiplied by a one instead.
    times = _times_one([v for v in values if v in padded], cotangents, both[0], into)
    if not into and not copies:
        return [*equations], [*results]
    again = (e.reading(times) if late.isdisjoint(e.outs) else e for e in equations)
    body = [
        *(e.reading(for_before) for e in before),
        *(e.reading(for_rest) for e in again),
        *(e.reading(for_copies) for e in copies),
    ]
    # A group stands where its cotangent is made, which may be behind its readers' old places.
    return in_order([*into, *body]), [for_rest.get(v, v) for v in results]


def _times_one(
    values: Sequence[Value], cotangents: Sequence[Value], like: Equation, into: list[Equation]
) -> dict[Value, Value]:
    """Multiplies values by a one that is behind a barrier, which copies nothing."""
    if not values:
        return {}
    number = Value(_jax.aval_of(np.float32(1)), np.float32(1), literal=True)
    # The one exists when a cotangent does. The smallest is the cheapest to write.
    given = [min(cotangents, key=lambda v: v.size), number]
    *_, one = barred(given, into, like=like.like, stack=like.stack)
    times = lambda x, one: [x * one]  # noqa: E731
    return {v: appended(times, [v, one], into, like, again=True)[0] for v in values}


def _sources_of_recomputation(
    values: Sequence[Value], equations: Sequence[Equation], late: set[Value]
) -> list[Value]:
    """Returns the values from which something as large is computed again, before cotangents."""
    again = [e for e in equations if late.isdisjoint(e.outs) and not e.row.loops]
    # A mask has a byte an entry: were it kept in place of a 16-bit array, nothing would be lost.
    read = {v for e in again for v in e.ins if sum(_jax.bytes_of(x.aval) for x in e.outs) > v.size}
    return [v for v in values if v in read]


def stored(
    early: Sequence[Equation],
    saved: Sequence[Value],
    later: Sequence[Equation],
    cotangents: Sequence[Value],
) -> tuple[list[Equation], set[Value]]:
    """Marks the matmuls whose results will be behind a barrier as they are: a GPU pads no row.

    Returns:
        The equations of the forward part; and what is handed over in rows that are padded, so that
        a barrier would copy it.
    """
    apart = _sources_of_recomputation(saved, later, dependents(later, cotangents))
    made: dict[Value, Value] = {}
    for e in early:
        if rounding.is_half_matmul(e):
            # On a GPU, whoever reads a matmul's padded result slices it: a barrier would copy the
            # slice.
            made.update((v, v) for v in e.outs)
        elif rounding.is_view(e) and e.ins[0] in made:
            made[e.outs[0]] = made[e.ins[0]]
    rows = ((v, made[v]) for v in apart if v in made and rounding.is_large(v))
    padded = {v for v, result in rows if result.shape[-1] % ALIGNED}
    behind = [v for e in later if e.is_barrier for v in e.ins]  # by the user's checkpoints
    asked = {made[v] for v in [*apart, *behind] if v in made and v not in padded}
    return [
        e if asked.isdisjoint(e.outs) else e.on(e.ins, like=building.stored(e.like)) for e in early
    ], padded


def _read_by(values: Iterable[Value], equations: Sequence[Equation]) -> list[Value]:
    read = {v for e in equations for v in e.ins}
    return [v for v in values if v in read]


def _of_arguments(equations: Sequence[Equation], saved: Sequence[Value]) -> list[Value]:
    """Returns an operand of each matmul that is computed again from arguments alone.

    None is computed from another one, nor from what is saved: all wait behind one barrier.
    """
    readers = readers_of(equations)
    found: dict[Value, None] = {}
    behind: set[Value] = set()

    def put(values: Iterable[Value]) -> None:
        todo = [*values]
        while todo:
            v = todo.pop()
            found.pop(v, None)
            if v not in behind:
                behind.add(v)
                todo += (out for e in readers[v] for out in e.outs)

    put(saved)
    for e in equations:
        operands = [v for v in e.ins if v.const is None]
        if operands and not runs_again(e) and behind.isdisjoint(operands):
            # One operand behind a barrier is enough to hold the matmul, and the smallest is the
            # cheapest.
            least = min(operands, key=lambda v: v.size)
            put([least])
            found[least] = None
    return [*found]


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
        # Such a matmul returns its accumulator: to wait for it would have it written in 16 bits as
        # well.
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
