"""The contents of a state: the path of each leaf, and its meaning, which no policy changes.

A policy changes the tree of a state: half parameters have masters or residuals, 8-bit moments have
scales, and each of them adds a node around the optimizer's state. So each leaf has a path, its
position in the tree, and a meaning, the path without the nodes that the policy added. Two states of
one program under two policies have leaves of the same meanings, except for masters, residuals,
scales and counts of random draws.
"""

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from mpjax._src.dtypes import FLOAT32
from mpjax._src.patterns import path_of
from mpjax._src.training.masters import MasterWeightsState
from mpjax._src.training.moments import EightBitMomentsState
from mpjax._src.training.rounding import StochasticRoundingState
from mpjax._src.trees import is_array, is_key

FORMAT, FORMAT_VERSION = "mpjax.checkpoint", 1
PARAMS, LOSS_SCALE = "params", "loss_scale"
# Prefixes of meanings: the float32 master of a parameter; the residual of a leaf (the rest of a
# split master, or the scales of codes).
MASTER, RESIDUAL = "master of ", "residual of "
DRAWS = "random draws"


class Leaf(NamedTuple):
    """One leaf of a state.

    Attributes:
        path: Its position in the tree, joined with "/".
        means: The path without the nodes that the policy added. For a master or residual, "master
            of" or "residual of" and the meaning of its leaf.
        value: The array, or its shape.
    """

    path: str
    means: str
    value: Any

    @property
    def part(self) -> str:
        """The part of the state that the leaf belongs to, such as "params"."""
        return self.path.split("/")[0]


def leaves_of(tree: Any) -> list[Leaf]:
    """Returns the leaves of a state, in the order of `jax.tree.leaves`.

    Args:
        tree: A `TrainState`, or any pytree of arrays or of their shapes. Its parameters are under
            "params".

    Raises:
        TypeError: If a leaf is not an array.
        ValueError: If two leaves have the same path.
    """
    found = list(_leaves(tree, (), ()))
    for leaf in found:
        value = leaf.value
        if not (is_array(value) or isinstance(value, (jax.ShapeDtypeStruct, int, float, complex))):
            raise TypeError(
                f"state[{leaf.path!r}] is {value!r}, not an array. Keep functions and settings out "
                "of the state. A checkpoint holds arrays, and plain data that is passed as data=."
            )
    for kind in ("path", "means"):
        twice = [name for name, n in Counter(getattr(x, kind) for x in found).items() if n > 1]
        if twice:
            raise ValueError(
                f"state: two leaves have the name {twice[0]!r}, so they cannot be told apart in a "
                "checkpoint. Usual causes: a key that contains '/', the keys 1 and '1' in one "
                "dict, or with_master_weights twice around the same parameters."
            )
    return found


def _leaves(tree: Any, path: tuple, means: tuple) -> Iterator[Leaf]:
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_of_policy)
    for keys, node in nodes:
        if not _is_of_policy(node):
            yield Leaf(path_of(path + keys), path_of(means + keys), node)
            continue
        here, inside = path + keys, (*path, *keys, GetAttrKey("inner_state"))
        if isinstance(node, EightBitMomentsState):
            yield from _leaves(node.inner_state, inside, means + keys)
            for of, scale in jax.tree_util.tree_leaves_with_path(node.scales):
                meaning = RESIDUAL + path_of((*means, *keys, *of))
                yield Leaf(path_of((*here, GetAttrKey("scales"), *of)), meaning, scale)
            rounded = path_of((*means, *keys, GetAttrKey("moments"), GetAttrKey(DRAWS)))
            yield Leaf(path_of((*here, GetAttrKey("rounded"))), rounded, node.rounded)
            continue
        if isinstance(node, StochasticRoundingState):
            draws = path_of((*means, *keys, GetAttrKey(DRAWS)))
            yield Leaf(path_of((*here, GetAttrKey("draws"))), draws, node.draws)
        else:
            for of, beside in jax.tree_util.tree_leaves_with_path(node.masters):
                is_master = getattr(beside, "dtype", FLOAT32) == FLOAT32
                meaning = (MASTER if is_master else RESIDUAL) + path_of((GetAttrKey(PARAMS), *of))
                yield Leaf(path_of((*here, GetAttrKey("masters"), *of)), meaning, beside)
        yield from _leaves(node.inner_state, inside, means + keys)


def beside_what(means: str) -> str:
    """Returns the meaning of the leaf that a master or residual belongs to, or its own meaning."""
    return means.removeprefix(MASTER).removeprefix(RESIDUAL)


def is_beside(means: str) -> bool:
    """Returns whether a leaf is a master or residual."""
    return means.startswith((MASTER, RESIDUAL))


def is_draws(means: str) -> bool:
    """Returns whether a leaf counts random draws, which exists under some policies only."""
    return means.endswith("/" + DRAWS)


def _is_of_policy(node: Any) -> bool:
    """Returns whether a node is one that a policy adds around the optimizer's state."""
    return isinstance(node, (MasterWeightsState, StochasticRoundingState, EightBitMomentsState))


def kinds_of(tree: Any) -> dict[str, str]:
    """Returns the class of each named tuple that has leaves, by its meaning.

    Leaves of two optimizers may have the same names and shapes but different meanings: the second
    moments of Adam and of AdaBelief are both "nu".
    """
    return dict(_kinds(tree, ()))


def _kinds(tree: Any, means: tuple) -> Iterator[tuple[str, str]]:
    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_named_tuple):
        here = means + keys
        if not _is_named_tuple(node) or not jax.tree.leaves(node):
            continue
        if _is_of_policy(node):
            yield from _kinds(node.inner_state, here)
            continue
        yield path_of(here), type(node).__name__
        for field, value in zip(node._fields, node, strict=True):
            yield from _kinds(value, (*here, GetAttrKey(field)))


def _is_named_tuple(node: Any) -> bool:
    return isinstance(node, tuple) and hasattr(node, "_fields")


def part_of(tree: Any, name: str) -> Any:
    """Returns a part of a state, such as its loss scale, or None if it has no such part."""
    return tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)


def settings_of(tree: Any) -> Any:
    """Returns the classes of a pytree and their static settings, as plain data."""

    def describe(structure):
        node = structure.node_data()
        if node is None:
            return "*"
        settings = re.sub(r" at 0x[0-9a-f]+", "", repr(node[1]))  # a function's address varies
        return [node[0].__name__, settings, *map(describe, structure.children())]

    return describe(jax.tree.structure(tree))


def is_held(dtype: Any) -> bool:
    """Returns whether JAX supports a dtype here; it supports float64 only if x64 is enabled."""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def shaped(value: Any) -> tuple[tuple[int, ...], str]:
    """Returns a leaf's shape and the name of its dtype."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value, jax.dtypes.canonicalize_dtype(type(value)))
    return tuple(value.shape), str(value.dtype)


def describe(tree: Any, policy: str | None, data: Any) -> dict[str, Any]:
    """Returns the description of a state that is written beside its arrays, as plain data."""
    table = {}
    for leaf in leaves_of(tree):
        shape, dtype = shaped(leaf.value)
        table[leaf.path] = {"means": leaf.means, "dtype": dtype, "shape": list(shape)}
        if is_key(leaf.value):
            table[leaf.path]["key"] = str(jax.random.key_impl(leaf.value))
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "mpjax": sys.modules[__name__.split(".")[0]].__version__,
        "jax": jax.__version__,
        "policy": policy,
        "leaves": table,
        "kinds": kinds_of(tree),
        "loss_scale": settings_of(part_of(tree, LOSS_SCALE)),
        "data": data,
    }
