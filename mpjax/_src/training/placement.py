"""Where arrays live: their devices, and the mesh axes that they vary over."""

from typing import Any, TypeVar

import jax
from jax.sharding import NamedSharding, PartitionSpec

T = TypeVar("T")


def vary_like(leaf: jax.Array, like: Any) -> jax.Array:
    """Marks an array as varying over the manual mesh axes that another one varies over."""
    varying = [getattr(getattr(jax.typeof(x), "mat", None), "varying", ()) for x in (leaf, like)]
    missing = tuple(axis for axis in varying[1] if axis not in varying[0])
    return jax.lax.pcast(leaf, missing, to="varying") if missing else leaf


def commit_like(tree: T, like: Any) -> T:
    """Commits uncommitted arrays to the devices of another tree's arrays, replicated.

    A step returns committed arrays as soon as one of its inputs is; an uncommitted input would make
    it compile once more. Under a trace nothing is committed, and nothing is done.
    """
    if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((tree, like))):
        return tree
    leaves = [x for x in jax.tree.leaves(like) if x.committed]
    if not leaves:
        return tree
    place = leaves[0].sharding
    if isinstance(place, NamedSharding):
        place = NamedSharding(place.mesh, PartitionSpec(), memory_kind=place.memory_kind)
    return jax.tree.map(lambda x: x if x.committed else jax.device_put(x, place), tree)
