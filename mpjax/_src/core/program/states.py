"""States: trees of arrays that a function gets as an argument and returns with new values.

Examples are batch statistics, caches and updated parameters. A returned tree with the structure and
shapes of an argument is taken as the next state of that argument, and keeps its dtypes.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.program.trace import Flat


def children(tree: Any, start: int = 0) -> Iterator[tuple[Any, int]]:
    """Yields the subtrees of a tree structure, each with the index of its first leaf."""
    child: Any
    for child in jax.tree_util.treedef_children(tree):
        yield child, start
        start += child.num_leaves


def nodes(tree: Any, start: int = 0) -> Iterator[tuple[Any, slice]]:
    """Yields every subtree of a tree structure that is not a leaf, with its range of leaves."""
    if not jax.tree_util.treedef_is_leaf(tree):
        yield tree, slice(start, start + tree.num_leaves)
        for child, first in children(tree, start):
            yield from nodes(child, first)


def _kinds(avals: Sequence[Any]) -> Any:
    return tuple((getattr(a, "shape", None), getattr(a, "dtype", None)) for a in avals)


Leaves = list[int | None]  # of a tree: the place of each array, and None for other leaves


def next_states(
    call: Flat,
    seen: Sequence[Any],
    out: Flat,
    results: Sequence[Any],
    is_state: Callable[[Leaves, Leaves], bool] = lambda argument, result: True,
) -> Iterator[tuple[Leaves, Leaves]]:
    """Yields the states among the arguments of a call, each with its next value.

    Args:
        call: The call.
        seen: The abstract value of each array among the arguments, as the function sees it.
        out: The result.
        results: The abstract value of each array in it.
        is_state: Says whether an argument of the same structure and shapes is a state.
    """
    avals, places = call.spread(seen), call.spread(range(len(seen)))
    subtrees: dict[Any, list[Any]] = {}
    for arguments, start in children(call.tree):
        for argument, first in children(arguments, start):
            for node, where in nodes(argument, first):
                subtrees.setdefault(_kinds(avals[where]), []).append((node, where))

    avals, after = out.spread(results), out.spread(range(len(results)))
    done = 0
    for node, where in nodes(out.tree):
        # A tree comes before those in it, which belong to its state once it is one.
        candidates = subtrees.get(_kinds(avals[where]), ()) if where.start >= done else ()
        for argument, leaves in candidates:
            pair = places[leaves], after[where]
            if _jax.Structure(argument) == _jax.Structure(node) and is_state(*pair):
                yield pair
                done = where.stop
