"""Flax NNX modules as arguments: changes that a function makes to them are kept.

A module is an object that a function may change: the statistics of a BatchNorm, the counters of its
random keys, a cache. A traced function changes copies. Therefore, as in `nnx.jit`, a pure function
of the modules' arrays is traced; it returns the new arrays, and the caller's objects are updated.
An object that the function only reads stays as it is, because an outer trace may own it.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax

from mpjax._src.core.base import _jax

TAG = "mpjax"


def leaves_trained(tree: Any) -> list[tuple[Any, bool]]:
    """Returns the leaves of a tree, and whether ``nnx.value_and_grad`` differentiates them.

    It differentiates all leaves, but of Flax NNX variables only parameters: no statistics, no
    caches.
    """
    # Without an import of Flax there are no modules of it, and to import it takes a second.
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
    """Returns whether a tree contains Flax NNX modules or variables."""
    return flat_has_modules(*jax.tree_util.tree_flatten(tree))


def flat_has_modules(leaves: list[Any], structure: Any) -> bool:
    """Returns whether a flattened tree contains Flax NNX modules or variables.

    The answer is cached by structure: a search of all nodes takes as long as the rest of a call.
    """
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return False
    kinds = nnx.Pytree, nnx.Variable  # a module that is not a pytree is a leaf
    return _have_nodes(_jax.Structure(structure)) or any(
        issubclass(kind, kinds) for kind in {*map(type, leaves)}
    )


@functools.lru_cache(1024)
def _have_nodes(structure: Any) -> bool:
    return _has_node(structure.tree)


def _has_node(tree: Any) -> bool:
    from flax import nnx

    node = tree.node_data()
    if node is None or issubclass(node[0], nnx.State):
        return False
    return issubclass(node[0], (nnx.Pytree, nnx.Variable)) or any(map(_has_node, tree.children()))


def changed_by(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that also returns its arguments, as the original leaves them."""

    @functools.wraps(fun)
    def run(*args, **kwargs):
        return fun(*args, **kwargs), (args, kwargs)

    return run


def on_arrays(fun: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a pure function of the arguments that `call_on_arrays` passes."""
    from flax import nnx

    @functools.wraps(fun)
    def run(graph, *args, **kwargs):
        state = nnx.State({0: dict(enumerate(args)), 1: kwargs})
        with nnx.merge_context(TAG, inner=True) as context:
            args, kwargs = context.merge(graph, state)
            nodes = dict(context.index_ref)
        # Flax does not say what a function changes, so objects are compared before and after.
        before = {i: _held(node) for i, node in nodes.items()}
        out = fun(*args, **kwargs)
        returned = out if has_modules(out) else None
        same = [i for i, node in nodes.items() if _are_same(before[i], _held(node))]
        unchanged = {*same}
        changed = [i for i in nodes if i not in unchanged]
        if returned is None and not changed:
            return None, None, out
        with nnx.split_context(TAG) as context:
            for place, i in enumerate(same):  # they are referred to, not split
                context.ref_index[nodes[i]] = place
            graph, state = context.split(([nodes[i] for i in changed], returned))
        return (graph, same, changed), state, None if returned is not None else out

    return run


def _held(node: Any) -> list[tuple[Any, Any]]:
    """Returns the names and objects that a module or variable holds itself.

    Modules and variables in it represent themselves. Containers are entered: they may be changed.
    """
    from flax import nnx

    kinds = nnx.Pytree, nnx.Variable
    if isinstance(node, nnx.Variable):
        values = {**node.get_metadata(), "": node.get_raw_value()}
    else:
        values = vars(node) if isinstance(node, nnx.Pytree) else {}
    items: list[tuple[Any, Any]] = []
    for name, value in values.items():
        items.append((name, value))
        with contextlib.suppress(TypeError, ValueError):  # no pytree: its keys have no order
            inside = jax.tree_util.tree_leaves_with_path(
                value, is_leaf=lambda x: isinstance(x, kinds)
            )
            items += [((name, path), x) for path, x in inside]
    return items


def _are_same(before: list[tuple[Any, Any]], now: list[tuple[Any, Any]]) -> bool:
    """Compares objects by identity: arrays of a trace have no other equality."""
    return len(before) == len(now) and all(
        name == other and a is b for (name, a), (other, b) in zip(before, now, strict=True)
    )


def call_on_arrays(run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Calls a function that `on_arrays` returned, perhaps transformed, with the original arguments.

    It updates the modules among them, and returns the result of the original function.
    """
    from flax import nnx

    with nnx.update_context(TAG):
        with nnx.split_context(TAG) as context:
            graph, state = context.split((args, kwargs))
            nodes = {i: node for node, i in context.ref_index.items()}
        states = [state.get(0, {}).get(i, {}) for i in range(len(args))]
        changes, state, out = run(graph, *states, **state.get(1, {}))
        if changes is None:  # nothing changed; modules of an outer trace may be read
            return out
        graph, same, changed = changes
        _check_may_change([nodes[i] for i in changed])
        with nnx.merge_context(TAG, inner=False) as context:
            # What the function only read stays as it is: an outer trace may own it.
            for place, i in enumerate(same):
                context.index_ref[place] = nodes[i]
            _, merged = context.merge(graph, state)
    return out if merged is None else merged


def _check_may_change(nodes: list[Any]) -> None:
    """Lets Flax raise for a module or variable of an outer trace, before any is changed."""
    from flax import nnx

    for node in nodes:
        if isinstance(node, nnx.Variable):
            node.set_raw_value(node.get_raw_value())
        elif isinstance(node, nnx.Pytree):
            # Flax checks the trace when an attribute is set, whichever it is.
            setattr(node, TAG, None)
            delattr(node, TAG)
