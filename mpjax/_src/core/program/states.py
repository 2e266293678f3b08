"""States: trees of arrays that a function gets as an argument and returns with new values.

Examples are batch statistics, caches and updated parameters. A returned tree with the structure and
shapes of an argument is taken as the next state of that argument, and keeps its dtypes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32


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


def states(tree: Any, seen: Sequence[Any], dtypes: Sequence[Any]) -> dict[Any, list[Any]]:
    """Returns all subtrees of the arguments, as a mapping from structure and shapes to dtypes.

    ``tree`` is the structure of ``(args, kwargs)``, ``seen`` the abstract value of each leaf as the
    function sees it, and ``dtypes`` those in which they arrive.
    """
    subtrees: dict[Any, list[Any]] = {}
    for arguments, start in children(tree):
        for argument, first in children(arguments, start):
            for node, where in nodes(argument, first):
                subtrees.setdefault(_kinds(seen[where]), []).append((node, dtypes[where]))
    return subtrees


def handed_out(tree: Any, results: Sequence[Any], subtrees: Any, dtype: Any) -> list[Any]:
    """Returns the dtype in which each float32 result is returned; None for other results.

    A tree with the structure and shapes of an argument is its next state, and keeps its dtypes.
    """
    chosen: list[Any] = [dtype] * len(results)
    done = 0
    for node, where in nodes(tree):
        # A tree comes before those in it, which belong to its state once it is one.
        if where.start >= done:
            for argument, dtypes in subtrees.get(_kinds(results[where]), ()):
                if _jax.Structure(argument) == _jax.Structure(node):
                    chosen[where], done = dtypes, where.stop
                    break
    return [
        to if getattr(aval, "dtype", None) == FLOAT32 else None
        for to, aval in zip(chosen, results, strict=True)
    ]
