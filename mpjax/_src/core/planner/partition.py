"""What a program hands from its forward part to its backward part.

The lightest set of values is chosen from which the backward part can compute what it reads: a
minimum cut, as in functorch's partitioner and in "Rematerialization via min-cut" (Chen et al.,
AOTAutograd). Only what is cheap to compute is computed again.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mpjax._src.core.base._jax import held
from mpjax._src.core.base._jax.rounded import ROUNDED
from mpjax._src.core.base.rules import COMPARE, EQUALITIES, JUMPS, LOGIC, MOVE
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.dependence import dependents, recomputation
from mpjax._src.core.planner.equations import Equation, Value

# SciPy computes flow in 32 bits.
MOST = 2**31 - 1


def cheapest_cut(
    weights: Sequence[int],
    edges: Iterable[tuple[int, int]],
    given: Iterable[int],
    needed: Iterable[int],
    costs: Mapping[int, int] = MappingProxyType({}),
) -> set[int]:
    """Returns the lightest set of nodes that every path from given to needed nodes passes through.

    This is a minimum vertex cut, found by maximum flow (Ford and Fulkerson, 1956): each node is an
    edge with its weight as capacity, and all other edges are unbounded. functorch's partitioner
    chooses the values for a backward pass in the same way. If several sets are lightest, the one
    nearest to the needed nodes is returned, so that the least is recomputed and the result is
    deterministic.

    Args:
        weights: The weight of each node.
        edges: Pairs of nodes; the first is an operand of the second.
        given: The nodes that cannot be recomputed.
        needed: The nodes that must be in the set, or be computed from it.
        costs: The cost of computing a node, for those that are not free to compute.

    Returns:
        The set.
    """
    from scipy.sparse import csgraph  # slow to import, and needed only to plan

    # A flow bounds edges and not nodes, so node i is the edge from vertex 2i to vertex 2i + 1: the
    # cut goes through it if the node is kept.
    count = len(weights)
    source, sink = 2 * count, 2 * count + 1
    # Rounded up, so that only weight 0 is free; the sum of all weights represents "unbounded". The
    # unit is a power of two, so that an array weighs as much as its parts, of any batch size.
    total = sum(weights) + sum(costs.values())
    unit = 1 << (total // (MOST // 2 - 2 * count)).bit_length()
    capacity = [-(-w // unit) for w in weights]
    # Nodes on the sink's side are computed again. Where that has a price, it is the capacity of an
    # edge from the source, which is then cut.
    paid = {(source, 2 * i): -(-cost // unit) for i, cost in costs.items()}
    unbounded = sum(capacity) + sum(paid.values()) + 1
    arcs = {(2 * i, 2 * i + 1): c for i, c in enumerate(capacity)}
    arcs |= {(2 * i + 1, 2 * j): unbounded for i, j in edges}
    arcs |= paid
    arcs |= {(source, 2 * i): unbounded for i in given}
    arcs |= {(2 * i + 1, sink): unbounded for i in needed}
    if not arcs:
        return set()
    graph = _matrix(arcs, sink + 1)
    left = graph - csgraph.maximum_flow(graph, source, sink, method="dinic").flow
    # A search of SciPy follows stored zeros as if they were edges.
    left.eliminate_zeros()
    # Nodes that can still reach the sink lie behind the cut.
    reached = csgraph.breadth_first_order(left.T.tocsr(), sink, return_predecessors=False)
    behind = {*reached.tolist()}
    return {i for i in range(count) if 2 * i + 1 in behind and 2 * i not in behind}


def _matrix(arcs: dict[tuple[int, int], int], size: int) -> Any:
    from scipy.sparse import coo_array

    rows, columns = zip(*arcs, strict=True)
    data = np.fromiter(arcs.values(), np.int32, len(arcs))
    return coo_array((data, (rows, columns)), shape=(size, size)).tocsr()


# Operations that a table of memory traffic calls dear, but that are computed where they are read.
VIEWS = frozenset(
    (*LOGIC, ROUNDED, "bitcast_convert_type", "name", "pad", "polynomial", "pvary", "pcast", "rev")
    + ("reduce_precision", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor")
)

# The price of a value that is handed over, in bytes.
Pricing = Callable[[Value], int]
# What it costs to compute values again, by their places.
Costs = Callable[[Sequence[Value]], Mapping[int, int]]


class Parts(NamedTuple):
    """A program and its derivative, in two parts.

    Attributes:
        early: The equations of the forward part, with what prepares the backward part.
        late: The equations of the backward part.
        outs: What the forward part returns.
        results: What the backward part returns.
        cotangents: The arguments of the backward part alone.
        half: The 16-bit dtype.
    """

    early: list[Equation]
    late: list[Equation]
    outs: Sequence[Value]
    results: Sequence[Value]
    cotangents: Collection[Value]
    half: np.dtype


class Handed(NamedTuple):
    """What the backward part gets, and how it finds the rest."""

    saved: list[Value]  # what the forward part computes and hands over
    again: Sequence[Equation]  # what the backward part computes a second time


def parted(
    equations: Sequence[Equation], cotangents: Iterable[Value]
) -> tuple[list[Equation], list[Equation]]:
    """Returns the equations that can run before there are cotangents, and the others.

    A checkpoint's recomputation waits for them: that it runs late is what its author asked for.
    """
    waiting = [out for e in equations if e.again for out in e.outs]
    late = dependents(equations, [*cotangents, *waiting])
    # Judged by operands, since an effect on a cotangent has no results that could be late.
    early = [e for e in equations if not e.again and late.isdisjoint(e.ins)]
    first = {*early}
    return early, [e for e in equations if e not in first]


def handed(
    early: Sequence[Equation],
    late: Sequence[Equation],
    results: Iterable[Value],
    price: Pricing,
    given: Collection[Value] = (),
    free: Collection[Value] = (),
    costs: Costs = lambda values: {},
) -> Handed:
    """Returns what to hand over from equations to later ones, which return ``results`` too.

    Args:
        early: The equations of the forward part.
        late: The equations of the backward part.
        results: What the backward part returns.
        price: The price of handing over a value.
        given: Arguments of the forward part that have a price as well, as the slices of a loop.
        free: Arguments that the backward part has anyway.
        costs: The price of computing values again, by their places, beyond what is free.
    """
    crossing = read_of([*given, *(out for e in early for out in e.outs)], late, results)
    saved = next(lightest_of(early, crossing, price, given, costs=costs))
    return Handed(saved, recomputation(early, crossing, {*saved, *free}))


def read_of(
    values: Iterable[Value], late: Sequence[Equation], results: Iterable[Value]
) -> list[Value]:
    """Returns those of some values that later equations read, or return."""
    made, read = {*values}, dict.fromkeys([*(v for e in late for v in e.ins), *results])
    return [v for v in read if v in made]


def lightest_of(
    equations: Sequence[Equation],
    crossing: Sequence[Value],
    price: Pricing,
    given: Collection[Value] = (),
    dear: Mapping[Equation, int] = MappingProxyType({}),
    rates: Sequence[float] = (1,),
    costs: Costs = lambda values: {},
) -> Iterator[list[Value]]:
    """Yields the lightest set of values from which the crossing ones are computed, at each rate.

    ``dear`` are equations that may run again although that is not free, and their prices at rate 1.
    """
    nodes = [*given, *(out for e in equations for out in e.outs)]
    number = {v: i for i, v in enumerate(nodes)}
    edges, sources = [], [number[v] for v in given]
    known, same = _constants(equations), {*given}
    for e in equations:
        outs = [number[out] for out in e.outs]
        # A number that is made of constants is computed again, even by a matmul of constants.
        constant = known.issuperset(e.outs) and all(out.aval.shape == () for out in e.outs)
        computed = [v for v in e.ins if v in number and v not in known]
        # What does not run again is a source of the flow, as an argument is: it is handed over, or
        # something that is computed from it.
        if not (constant or runs_again(e) or e in dear) or _jumps(e, computed, known, same):
            sources += outs
            same.update(e.outs)
            continue
        # Both parts compute these from the same bits, and without rounding: see `_jumps`.
        if e not in dear and _is_exact(e) and same.issuperset(computed):
            same.update(e.outs)
        ins = [number[v] for v in dict.fromkeys(e.ins) if v in number]
        edges += [(i, out) for i in ins for out in outs]
    weights = [price(v) for v in nodes]
    needed, free = [number[v] for v in crossing], costs(nodes)
    for rate in rates:
        paid = {number[out]: int(rate * cost) for e, cost in dear.items() for out in e.outs}
        cut = cheapest_cut(weights, edges, sources, needed, {**free, **paid}) if needed else ()
        yield [nodes[i] for i in sorted(cut)]


def runs_again(e: Equation) -> bool:
    """Returns whether an equation may run a second time in the backward part."""
    if e.is_custom:
        return all(all(each) for each in rounding.inside(e, _run_again))
    return (e.rule.runs_again or e.name in VIEWS) and not e.is_barrier and not e.acts


# The equation that makes a value, and its place among others.
Placed = Mapping[Value, tuple[int, Equation]]
# More equations are not run again for one value.
LONGEST = 32


def from_one_array(v: Value, maker: Placed, known: Collection[Value]) -> list[Equation] | None:
    """Returns what computes a value from known ones, if one of them is large and the others not.

    None if there is no such, or if something does not run again.
    """
    found: dict[int, Equation] = {}
    arrays: dict[Value, bool] = {}
    todo = [v]
    while todo:
        x = todo.pop()
        if x in known:
            # What has fewer entries, as the statistics of a norm, is read almost for free.
            arrays[x] = 4 * x.size >= v.size
        elif x in maker:
            i, e = maker[x]
            if not runs_again(e) or len(found) == LONGEST:
                return None
            todo += e.ins if i not in found else []
            found[i] = e
    return [e for _, e in sorted(found.items())] if sum(arrays.values()) == 1 else None


def _run_again(ins: Any, equations: Iterable[Equation], outs: Any) -> list[bool]:
    return [*map(runs_again, equations)]


def _is_exact(e: Equation) -> bool:
    """Returns whether an equation rounds nothing, so that compilers cannot compute it otherwise."""
    return e.name in rounding.EXACT or e.rule.need in (COMPARE, MOVE)


def _jumps(e: Equation, computed: list[Value], known: set[Value], same: set[Value]) -> bool:
    """Returns whether another last bit of a computed operand changes the result by much.

    Compilers may compute a value otherwise when it is computed again. Then ``x == max(x)`` fails,
    or a number is rounded to another integer. A comparison with a constant, as in a ReLU, may run
    again: its branches meet there. So may one that asks whether numbers are equal that stay the
    ``same``, because they are handed over, or whether a number is infinite or NaN.
    """
    floats = [v for v in computed if held.is_inexact(v.aval)]
    if e.rule.need == COMPARE and e.name not in EQUALITIES:
        return bool(floats) and known.isdisjoint(e.ins)
    if same.issuperset(floats):
        return False
    if e.rule.need != COMPARE:
        return JUMPS in e.rule.traits
    infinite = any(v.const is not None and np.all(np.isinf(v.const)) for v in e.ins)
    # ``x != x`` is how JAX asks whether x is NaN.
    return not infinite and e.ins[0] is not e.ins[1]


def _constants(equations: Iterable[Equation]) -> set[Value]:
    """Returns the values that are computed from constants alone."""
    found: set[Value] = set()
    for e in equations:
        found.update(v for v in e.ins if v.const is not None)
        if found.issuperset(e.ins) and not e.acts:
            found.update(e.outs)
    return found
