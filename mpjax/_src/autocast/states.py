"""Trees of arrays that go into a function and come out of it again: states.

Batch statistics, a cache, parameters that are updated: a tree with the structure and the shapes of
one among the arguments is that one's next state, and keeps its dtypes.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mpjax._src.dtypes import FLOAT32


def children(tree: Any, start: int = 0) -> Iterator[tuple[Any, int]]:
    """Yields the parts of a tree structure, each with the number of its first leaf."""
    child: Any
    for child in jax.tree_util.treedef_children(tree):
        yield child, start
        start += child.num_leaves


def nodes(tree: Any, start: int = 0) -> Iterator[tuple[Any, slice]]:
    """Yields every subtree of a tree structure that is no leaf, and which leaves it holds."""
    if not jax.tree_util.treedef_is_leaf(tree):
        yield tree, slice(start, start + tree.num_leaves)
        for child, first in children(tree, start):
            yield from nodes(child, first)


def _kinds(avals: Sequence[Any]) -> Any:
    return tuple((getattr(a, "shape", None), getattr(a, "dtype", None)) for a in avals)


def states(tree: Any, seen: Sequence[Any], dtypes: Sequence[Any]) -> dict[Any, list[Any]]:
    """Returns the trees among the arguments, and in them: structures and dtypes by their arrays.

    Args:
        tree: The structure of ``(args, kwargs)``.
        seen: What the function sees of each leaf.
        dtypes: What each leaf arrives in.
    """
    found: dict[Any, list[Any]] = {}
    for arguments, start in children(tree):
        for argument, first in children(arguments, start):
            for node, where in nodes(argument, first):
                found.setdefault(_kinds(seen[where]), []).append((node, dtypes[where]))
    return found


def handed_out(tree: Any, results: Sequence[Any], known: Any, dtype: Any) -> list[Any]:
    """Returns what each float32 result is handed out in; None where it is no float32.

    A tree like one among the arguments is that one's next state, and keeps its dtypes.
    """
    chosen: list[Any] = [dtype] * len(results)
    done = 0
    for node, where in nodes(tree):
        if where.start >= done:
            for argument, dtypes in known.get(_kinds(results[where]), ()):
                if argument == node:
                    chosen[where], done = dtypes, where.stop
                    break
    return [
        to if getattr(aval, "dtype", None) == FLOAT32 else None
        for to, aval in zip(chosen, results, strict=True)
    ]
