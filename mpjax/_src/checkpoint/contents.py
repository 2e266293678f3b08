"""The contents of a state: the path of each leaf, and its meaning, which no policy changes.

A policy changes the tree of a state: 16-bit parameters have masters or residuals, 8-bit moments
have scales, and each of them adds a node around the optimizer's state. So each leaf has a path, its
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

from mpjax._src.core.base.dtypes import FLOAT32, is_narrow
from mpjax._src.core.base.errors import brief, misplaced
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.trees import NUMBER, is_array_or_shape, is_key
from mpjax._src.core.training.loss_scale import has_protocol
from mpjax._src.core.training.masters import MasterWeightsState
from mpjax._src.optim.moments import EightBitMomentsState
from mpjax._src.optim.rounding import StochasticRoundingState

FORMAT, FORMAT_VERSION = "mpjax.checkpoint", 1
PARAMS, LOSS_SCALE = "params", "loss_scale"
# Prefixes of meanings: the float32 master of a parameter; the residual of a leaf (the rest of a
# split master, or the scales of codes).
MASTER, RESIDUAL = "master of ", "residual of "
DRAWS = "random draws"
# The nodes that a policy adds, and their field for what they are around.
OF_POLICY = MasterWeightsState, StochasticRoundingState, EightBitMomentsState
INNER = "inner_state"
# The fields next to a loss scale, in the states of a step and of `mixed_precision`.
COUNTS = "skipped_steps", "consecutive_skips"


class Leaf(NamedTuple):
    """One leaf of a state."""

    path: str  # its position in the tree, joined with "/"
    # The path without the nodes that the policy added. For a master or residual, "master of" or
    # "residual of" and the meaning of its leaf.
    means: str
    value: Any  # the array, or its shape


def leaves_of(tree: Any, argument: str = "state") -> list[Leaf]:
    """Returns the leaves of a state (arrays or their shapes), in the order of `jax.tree.leaves`.

    Errors call the state ``argument``.

    Raises:
        TypeError: If a leaf is not an array.
        ValueError: If two leaves have the same path.
    """
    # What masters belong to is looked for among all 16-bit arrays, so these are found first.
    plain = (leaf for leaf in _leaves(tree, (), (), {}) if not is_companion(leaf.means))
    halves = {leaf.path: leaf.value.shape for leaf in plain if is_narrow(leaf.value)}
    leaves = [*_leaves(tree, (), (), halves)]
    for leaf in leaves:
        if not is_stored(leaf.value):
            where = f"{argument}[{leaf.path!r}] is " if leaf.path else f"{argument}="
            raise TypeError(
                f"{where}{brief(leaf.value)}, not an array that JAX supports. Leave functions and "
                "settings out of the state. A checkpoint stores arrays, and plain data that is "
                f"passed as data=.{'' if leaf.path else misplaced(tree)}"
            )
    for kind in ("path", "means"):
        # tensorstore takes "a/" for "a".
        names = Counter(getattr(x, kind).removesuffix("/") for x in leaves)
        twice = [name for name, n in names.items() if n > 1]
        if twice:
            raise ValueError(
                f"{argument}: two leaves have the name {twice[0]!r}, so they cannot be told apart "
                "in a checkpoint. Usual causes: a key that contains '/', the keys 1 and '1' in one "
                "dict, or with_master_weights twice around the same parameters."
            )
    return leaves


def is_stored(value: Any) -> bool:
    """Returns whether a leaf is an array without a mask, its shape, or a number that JAX holds."""
    if isinstance(value, NUMBER):
        try:
            with np.errstate(over="ignore"):
                held = np.asarray(value, shaped(value)[1])
        except OverflowError:
            return False
        # A finite number must not become infinite in the dtype that JAX gives it.
        return bool(np.isfinite(held)) or not np.isfinite(value)
    is_plain = not isinstance(value, np.ma.MaskedArray) and is_array_or_shape(value)
    return is_plain and value.dtype != jax.dtypes.float0


def no_values(value: Any) -> str | None:
    """Returns in words why an array has no values that could be saved, or None."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"is only a shape, {value}. Save the state, not its eval_shape."
    if isinstance(value, jax.core.Tracer):
        return "is traced: jit, grad or vmap calls this without its values. Save outside of them."
    if isinstance(value, jax.Array) and value.is_deleted():
        return (
            "has been deleted, probably because it was donated to a step. Save the state that the "
            "step returned, before you donate it in turn."
        )
    return None


def _leaves(tree: Any, path: tuple, means: tuple, halves: dict[str, Any]) -> Iterator[Leaf]:
    """Yields the leaves of a tree; ``halves`` are the shapes of 16-bit parameters by path."""
    nodes = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda node: _of_policy(node) is not None
    )
    for keys, node in nodes:
        here, meaning, kind = (*path, *keys), (*means, *keys), _of_policy(node)
        if not kind:
            yield Leaf(path_of(here), path_of(meaning), node)
            continue
        fields: Any = _fields(node)
        for key, field in fields:
            name, at = path_of((key,)), (*here, key)
            if name == INNER:
                yield from _leaves(field, at, meaning, halves)
                continue
            below = jax.tree_util.tree_leaves_with_path(field)
            home = _home_of(path_of(here), below, halves) if kind is MasterWeightsState else ""
            for of, leaf in below:
                place = path_of((*at, *of))
                if kind is MasterWeightsState:
                    is_master = getattr(leaf, "dtype", FLOAT32) == FLOAT32
                    prefix = MASTER if is_master else RESIDUAL
                    yield Leaf(place, prefix + (home + path_of(of)).removesuffix("/"), leaf)
                elif name == "scales":  # of codes, which mean what the moments mean
                    yield Leaf(place, RESIDUAL + path_of((*meaning, *of)), leaf)
                else:  # how many updates drew random bits
                    moments = (GetAttrKey("moments"),) if kind is EightBitMomentsState else ()
                    counts = path_of((*meaning, *moments, GetAttrKey(DRAWS)))
                    yield Leaf(place, counts, leaf)


def _of_policy(node: Any) -> type | None:
    """Returns the class of a node that a policy adds around the optimizer's state, or None.

    States of NNX and dicts of `flax.serialization` have dicts in place of named tuples. Those of
    NNX lack the empty fields.
    """
    for kind in OF_POLICY:
        if isinstance(node, kind):
            return kind
        if isinstance(node, Mapping) and INNER in node and {*node} <= {*kind._fields}:
            return kind
    return None


def _fields(node: Any) -> list[tuple[Any, Any]]:
    """Returns the keys and children of a node, in the order of `jax.tree.leaves`."""
    below = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda child: child is not node)
    return [(keys[0], child) for keys, child in below]


def _home_of(node: str, masters: Any, halves: dict[str, Any]) -> str:
    """Returns the path of the parameters that the masters of a node belong to.

    It is where all of them meet a 16-bit array of their path and shape. "params" is preferred, and
    assumed if nothing fits; of several others none, so the node is its own home. If the parameters
    are not in the tree, no other state has these meanings, or only another part.
    """
    its = {path_of(of): leaf.shape for of, leaf in masters}
    first = next(iter(its), "")
    places = {path.removesuffix(first) for path in halves if f"/{path}".endswith(f"/{first}")}
    fit = [
        place
        for place in places
        if not f"/{place}".startswith(f"/{node}/")
        and all(halves.get(place + of) == shape for of, shape in its.items())
    ]
    default = f"{PARAMS}/"
    several = f"{node}/" if fit else default
    return default if default in fit else fit[0] if len(fit) == 1 else several


def owner_of(means: str) -> str:
    """Returns the meaning of the leaf that a master or residual belongs to, or its own meaning."""
    return means.removeprefix(MASTER).removeprefix(RESIDUAL)


def is_companion(means: str) -> bool:
    """Returns whether a leaf is a master or residual."""
    return means.startswith((MASTER, RESIDUAL))


def is_draws(means: str) -> bool:
    """Returns whether a leaf counts random draws, which exists under some policies only."""
    return means.endswith("/" + DRAWS)


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
        if isinstance(node, OF_POLICY):
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


def scales_of(tree: Any) -> dict[str, Any]:
    """Returns the loss scales of a state by their paths: its own, and those of its optimizers."""
    scales = {LOSS_SCALE: part_of(tree, LOSS_SCALE)}
    for keys, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_has_scale):
        if has_protocol(node):
            scales[path_of(keys)] = node
        elif _has_scale(node):
            at = path_of((*keys, GetAttrKey(LOSS_SCALE)))
            scales[at] = node.get(LOSS_SCALE, {})
    return {path: scale for path, scale in scales.items() if scale is not None}


def _has_scale(node: Any) -> bool:
    """Returns whether a node is a loss scale, or the dict of a state that has one and counts."""
    return has_protocol(node) or (isinstance(node, Mapping) and {*COUNTS} <= {*node})


def never_changes(scale: Any) -> bool:
    """Returns whether a loss scale is a setting of the program."""
    if isinstance(scale, Mapping):
        return {*scale} == {LOSS_SCALE}  # without a tracker
    # One that returns itself after an overflow has nothing to restore.
    return has_protocol(scale) and scale.adjust(False) is scale


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
        return (), jax.dtypes.canonicalize_dtype(type(value)).name
    dtype = value.dtype
    # Not the order of a NumPy array's bytes, which is not stored.
    return tuple(value.shape), dtype.name if isinstance(dtype, np.dtype) else str(dtype)


def describe(tree: Any, policy: str | None, data: Any) -> dict[str, Any]:
    """Returns the description of a state that is written next to its arrays, as plain data."""
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
        "loss_scales": {path: settings_of(scale) for path, scale in scales_of(tree).items()},
        "data": data,
    }
