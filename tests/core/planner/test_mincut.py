"""The cheapest cut: least weight, nearest to what is needed, whatever the size of weights."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax._src.core.planner.partition import cheapest_cut


def computed(kept, edges, needed):
    """Returns the nodes that are computed from kept ones to get the needed ones."""
    again, todo = set(), [i for i in needed if i not in kept]
    while todo:
        node = todo.pop()
        if node not in again:
            again.add(node)
            todo += [a for a, b in edges if b == node and a not in kept]
    return again


def separates(kept, edges, given, needed):
    """Returns whether every path from given to needed nodes goes through a kept one."""
    return not computed(kept, edges, needed) & {*given}


def subsets(weights):
    """Yields all sets of nodes."""
    for n in range(len(weights) + 1):
        yield from itertools.combinations(range(len(weights)), n)


@st.composite
def graphs(draw):
    size = draw(st.integers(1, 7))
    weights = draw(st.lists(st.integers(0, 9), min_size=size, max_size=size))
    pairs = [(a, b) for a in range(size) for b in range(a + 1, size)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True)) if pairs else []
    some = st.lists(st.integers(0, size - 1), unique=True)
    return weights, edges, draw(some), draw(some)


def cost_with(kept, weights, edges, given, needed, costs):
    """Returns the weight of a set and the cost of what is computed from it, or infinity."""
    if not separates(kept, edges, given, needed):
        return math.inf
    again = computed(kept, edges, needed)
    return sum(weights[i] for i in kept) + sum(costs.get(i, 0) for i in again)


@st.composite
def priced(draw):
    graph = draw(graphs())
    nodes = st.integers(0, len(graph[0]) - 1)
    return *graph, draw(st.dictionaries(nodes, st.integers(0, 9)))


@given(priced())
@settings(max_examples=150)
def test_cheapest_cut_weighs_nodes_against_the_cost_of_computing_them(case):
    weights, edges, fixed, needed, costs = case
    kept = cheapest_cut(*case)
    sets = subsets(weights)
    best = min(cost_with({*s}, weights, edges, fixed, needed, costs) for s in sets)
    assert cost_with(kept, weights, edges, fixed, needed, costs) == best


def cheapest(weights, edges, given, needed):
    """Returns the weight of the cheapest set, by trying all."""
    sets = subsets(weights)
    found = [sum(weights[i] for i in s) for s in sets if separates({*s}, edges, given, needed)]
    return min(found)


@given(graphs())
@settings(max_examples=150)
def test_cheapest_cut_is_the_cheapest_of_all(graph):
    kept = cheapest_cut(*graph)
    assert separates(kept, *graph[1:])
    assert sum(graph[0][i] for i in kept) == cheapest(*graph)


@given(graphs(), st.integers(2**31, 2**40))
def test_cheapest_cut_takes_weights_beyond_32_bits(graph, scale):
    weights, edges, given, needed = graph
    kept = cheapest_cut([w * scale for w in weights], edges, given, needed)
    assert separates(kept, edges, given, needed)
    assert sum(weights[i] for i in kept) == cheapest(*graph)


def test_cheapest_cut_counts_small_weights_beside_large_ones():
    # Gigabytes on one path; on another two bytes before one byte.
    edges = [(0, 1), (2, 3)]
    kept = cheapest_cut([2**40, 2**40 + 2**34, 2, 1], edges, [0, 2], [1, 3])
    assert 0 in kept and separates(kept, edges, [0, 2], [1, 3])


def test_cheapest_cut_counts_a_byte_more():
    assert cheapest_cut([1, 2], [(0, 1)], [0], [1]) == {0}


@given(graphs())
def test_cheapest_cut_is_the_same_each_time(graph):
    assert cheapest_cut(*graph) == cheapest_cut(*graph)


@pytest.mark.parametrize("length", [2, 5, 40])
def test_cheapest_cut_takes_the_equal_nearest_to_what_is_needed(length):
    chain = [(i, i + 1) for i in range(length - 1)]
    assert cheapest_cut([7] * length, chain, [0], [length - 1]) == {length - 1}
