"""Support of flax.serialization for training states: to_bytes, to_state_dict, and the inverses."""

import sys
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.core.base.patterns import name_of
from mpjax._src.core.base.trees import is_array, is_key

# The advice in each refusal.
CONVERT = "mpjax.checkpoint.save and restore convert between policies."


def known_to_flax(*classes: type) -> None:
    """Registers pytree classes with flax.serialization, if flax is imported.

    flax is not imported here, because that takes a second. A class may be registered twice. Its
    children have names.
    """
    flax = sys.modules.get("flax.serialization")
    for cls in classes if flax else ():
        flax.register_serialization_state(cls, _to_dict, _from_dict, override=True)  # type: ignore[union-attr]


def _children(node: Any) -> tuple[list[str], list[Any], Any]:
    """Returns the names and values of a node's children, and its structure."""
    # One level alone: flax serializes the children by their own rules.
    below = lambda child: child is not node  # noqa: E731
    named, structure = jax.tree_util.tree_flatten_with_path(node, is_leaf=below)
    return [keys[0].name for keys, _ in named], [child for _, child in named], structure


def _plain(tree: Any) -> Any:
    """Replaces typed keys by their data, because msgpack cannot store them."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree)


def _to_dict(node: Any) -> dict[str, Any]:
    from flax import serialization

    names, children, _ = _children(node)
    pairs = zip(names, children, strict=True)
    return {name: serialization.to_state_dict(_plain(child)) for name, child in pairs}


def _from_dict(node: Any, state: dict[str, Any]) -> Any:
    from flax import serialization

    names, children, structure = _children(node)
    if set(names) != set(state):
        raise ValueError(
            f"The bytes or dict of a {type(node).__name__} have the fields {sorted(state)}, but it "
            f"has {sorted(names)}. They were written under another policy or by another program; "
            + CONVERT
        )
    restored = []
    for name, child in zip(names, children, strict=True):
        try:
            restored.append(serialization.from_state_dict(_plain(child), state[name], name=name))
        except (KeyError, ValueError) as error:
            if CONVERT in str(error):
                raise
            # flax raises a KeyError where it expects a tuple and finds a dict.
            fault = f"lack {error}" if isinstance(error, KeyError) else f"do not fit: {error}"
            raise ValueError(
                f"The bytes or dict of a {type(node).__name__}, in {name!r}, {fault}. They were "
                "written under another policy, or for another optimizer or model; " + CONVERT
            ) from error
    return jax.tree_util.tree_map_with_path(_like, node, jax.tree.unflatten(structure, restored))


def _like(keys: Any, target: Any, leaf: Any) -> Any:
    """Returns a restored leaf as an array like the target's leaf, or refuses it."""
    if is_key(target) and not is_key(leaf):
        leaf = jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(target))
    if not is_array(target):
        return leaf
    leaf = leaf if is_array(leaf) else jnp.asarray(leaf)
    if (jnp.shape(leaf), leaf.dtype) != (jnp.shape(target), target.dtype):
        raise ValueError(
            f"{name_of('target', keys)} is {target.dtype}{jnp.shape(target)}, but the bytes or "
            f"dict have {leaf.dtype}{jnp.shape(leaf)} there. They were written under another "
            "policy or model; " + CONVERT
        )
    return leaf if is_key(leaf) else jnp.asarray(leaf)
