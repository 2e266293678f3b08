"""What a state holds, leaf by leaf: where it lies in the tree, and what it is whatever the policy.

A policy changes the tree of a state: half parameters bring masters or residuals, moments of 8 bits
bring scales, and each of them a node around the optimizer's state. So each leaf has a path, which
says where it lies, and a meaning, which is the path without what the policy put there. Two states
of one program under two policies have the same meanings, except for what they hold beside leaves,
and for counts of random draws.
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
# What lies beside a leaf: a float32 master of a parameter, or what the leaf lacks of its value (the
# rest of a split master, the scales of codes).
MASTER, RESIDUAL = "master of ", "residual of "
DRAWS = "random draws"


class Leaf(NamedTuple):
    """One leaf of a state.

    Attributes:
        path: Where it lies in the tree, joined with "/".
        means: The same without what only the policy put there; of what lies beside another leaf,
            "master of" or "residual of" what that one means.
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
        tree: A `TrainState`, or any pytree of arrays or of their shapes. Parameters are what lies
            under "params".

    Raises:
        TypeError: If a leaf is no array.
        ValueError: If two leaves have one path.
    """
    found = list(_leaves(tree, (), ()))
    for leaf in found:
        value = leaf.value
        if not (is_array(value) or isinstance(value, (jax.ShapeDtypeStruct, int, float, complex))):
            raise TypeError(
                f"state[{leaf.path!r}] is {value!r}, not an array. Keep functions and settings out "
                "of the state; a checkpoint holds arrays, and beside them what is passed as data=."
            )
    for kind in ("path", "means"):
        twice = [name for name, n in Counter(getattr(x, kind) for x in found).items() if n > 1]
        if twice:
            raise ValueError(
                f"state: two leaves are named {twice[0]!r}, and a checkpoint could not tell them "
                "apart. Usual causes: a key that contains '/', the keys 1 and '1' in one dict, or "
                "with_master_weights twice around the same parameters."
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
    """Returns the meaning of the leaf that a leaf lies beside, or its own."""
    return means.removeprefix(MASTER).removeprefix(RESIDUAL)


def is_beside(means: str) -> bool:
    """Tells whether a leaf lies beside another."""
    return means.startswith((MASTER, RESIDUAL))


def is_draws(means: str) -> bool:
    """Tells whether a leaf counts random draws, which only some policies do."""
    return means.endswith("/" + DRAWS)


def _is_of_policy(node: Any) -> bool:
    """Tells whether a node is one that a policy puts around the optimizer's state."""
    return isinstance(node, (MasterWeightsState, StochasticRoundingState, EightBitMomentsState))


def kinds_of(tree: Any) -> dict[str, str]:
    """Returns the class of each named tuple that holds leaves, by its meaning.

    Two optimizers may keep leaves of the same names and shapes that mean something else: the second
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
    """Returns a part of a state, such as its loss scale; None where it has none."""
    return tree.get(name) if isinstance(tree, Mapping) else getattr(tree, name, None)


def settings_of(tree: Any) -> Any:
    """Describes what of a pytree is no leaf: classes and their static settings, as plain data."""

    def describe(structure):
        node = structure.node_data()
        if node is None:
            return "*"
        settings = re.sub(r" at 0x[0-9a-f]+", "", repr(node[1]))  # of a function, in one process
        return [node[0].__name__, settings, *map(describe, structure.children())]

    return describe(jax.tree.structure(tree))


def is_held(dtype: Any) -> bool:
    """Tells whether JAX holds arrays of a dtype as they are; float64 only where it is enabled."""
    return jax.dtypes.canonicalize_dtype(dtype) == dtype


def shaped(value: Any) -> tuple[tuple[int, ...], str]:
    """Returns a leaf's shape, and its dtype by name."""
    if not hasattr(value, "dtype"):
        value = np.asarray(value, jax.dtypes.canonicalize_dtype(type(value)))
    return tuple(value.shape), str(value.dtype)


def describe(tree: Any, policy: str | None, data: Any) -> dict[str, Any]:
    """Returns what is written beside the arrays of a state, as plain data."""
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
