"""Flax NNX modules as arguments: what a function changes of them is kept.

A module is an object that a function may change: the statistics of a BatchNorm, the counts of its
random keys, a cache. A trace sees copies. So the function is run as one of their arrays, which
returns the new ones, and the caller's objects get these, as `nnx.jit` has it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

TAG = "mpjax"


def modules_in(tree: Any) -> list[Any]:
    """Returns the modules and variables of Flax NNX in a tree, but for those of a state."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:  # nobody has made one
        return []
    kinds = nnx.Pytree, nnx.Variable
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, (*kinds, nnx.State)))
    return [leaf for leaf in leaves if isinstance(leaf, kinds)]


def leaves_trained(tree: Any) -> list[tuple[Any, bool]]:
    """Returns the leaves of a tree, and whether ``nnx.value_and_grad`` would differentiate by them.

    It does by all, but of variables of Flax NNX by parameters alone: not by statistics or caches.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return [(leaf, True) for leaf in jax.tree.leaves(tree)]
    nodes = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    return [
        (leaf, isinstance(node, nnx.Param) or not isinstance(node, nnx.Variable))
        for node in nodes
        for leaf in jax.tree.leaves(node)
    ]


def has_modules(tree: Any) -> bool:
    """Tells whether `modules_in` would find something in a tree."""
    return are_there(*jax.tree_util.tree_flatten(tree))


def are_there(leaves: list[Any], structure: Any) -> bool:
    """As `has_modules`, of a tree that has been flattened.

    Of a structure this is known after the first call: to look at each node takes as long as the
    rest of a call.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    kinds = nnx.Pytree, nnx.Variable  # one that is no pytree is a leaf
    return _have_nodes(structure) or any(issubclass(kind, kinds) for kind in {*map(type, leaves)})


@functools.lru_cache(1024)
def _have_nodes(structure: Any) -> bool:
    from flax import nnx

    node = structure.node_data()
    if node is None or issubclass(node[0], nnx.State):
        return False
    return issubclass(node[0], (nnx.Pytree, nnx.Variable)) or any(
        map(_have_nodes, structure.children())
    )


def on_arrays(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of what `call_on_arrays` makes of arguments, which changes nothing."""
    from flax import nnx

    @functools.wraps(fun)
    def run(graph, *args, **kwargs):
        state = nnx.State({0: dict(enumerate(args)), 1: kwargs})
        with nnx.merge_context(TAG, inner=True) as context:
            args, kwargs = context.merge(graph, state)
        before = _contents((args, kwargs))
        out = fun(*args, **kwargs)
        returned = out if has_modules(out) else None
        if returned is None and _are_same(before, _contents((args, kwargs))):
            return None, None, out
        with nnx.split_context(TAG) as context:
            graph, state = context.split((modules_in((args, kwargs)), returned))
        return graph, state, None if returned is not None else out

    return run


def _contents(tree: Any) -> tuple[Any, list[Any]]:
    """Returns the structure of modules, and the arrays that they hold."""
    from flax import nnx

    graph, state = nnx.split(tree)
    return graph, jax.tree.leaves(state)


def _are_same(contents: Any, others: Any) -> bool:
    (graph, arrays), (other_graph, other_arrays) = contents, others
    same = graph == other_graph and len(arrays) == len(other_arrays)
    return same and all(a is b for a, b in zip(arrays, other_arrays, strict=True))


def call_on_arrays(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls what `on_arrays` returned; modules among the arguments get their new arrays.

    Args:
        run: The function, transformed at will.
        args: The arguments of the function that ``run`` was made of.
        kwargs: Its keyword arguments.

    Returns:
        What the function returns.
    """
    from flax import nnx

    with nnx.update_context(TAG):
        with nnx.split_context(TAG) as context:
            graph, state = context.split((args, kwargs))
        given = [state.get(0, {}).get(i, {}) for i in range(len(args))]
        graph, state, out = run(graph, *given, **state.get(1, {}))
        if graph is None:  # nothing was changed: modules of an outer trace may be read
            return out
        with nnx.merge_context(TAG, inner=False) as context:
            _, made = context.merge(graph, state)
    return out if made is None else made
