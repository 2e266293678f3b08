"""The cheapest set of values from which all needed values can be computed."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

# SciPy computes flow in 32 bits.
MOST = 2**31 - 1


def cheapest_cut(
    weights: Sequence[int],
    edges: Iterable[tuple[int, int]],
    given: Iterable[int],
    needed: Iterable[int],
    costs: Mapping[int, int] = MappingProxyType({}),
    ties: Mapping[int, int] = MappingProxyType({}),
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
        ties: What a node that weighs something weighs beyond that, to choose among sets that are
            as light: small numbers.

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
    unit = 1 << (total // (MOST // 2 - 2 * count - sum(ties.values()))).bit_length()
    capacity = [-(-w // unit) + (ties.get(i, 0) if w else 0) for i, w in enumerate(weights)]
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
    behind = {
        *csgraph.breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist()
    }
    return {i for i in range(count) if 2 * i + 1 in behind and 2 * i not in behind}


def _matrix(arcs: dict[tuple[int, int], int], size: int) -> Any:
    from scipy.sparse import coo_array

    rows, columns = zip(*arcs, strict=True)
    data = np.fromiter(arcs.values(), np.int32, len(arcs))
    return coo_array((data, (rows, columns)), shape=(size, size)).tocsr()
