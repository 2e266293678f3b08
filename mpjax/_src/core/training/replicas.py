"""Replicas in shard_map and pmap: arrays local to each replica, and averages over all replicas."""

from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.core.base.dtypes import HALVES
from mpjax._src.core.base.errors import brief, did_you_mean
from mpjax._src.core.base.trees import cast_like, is_key, widen
from mpjax._src.core.policy.policy import Policy


def axes_of(axis_name: Any) -> tuple[str, ...]:
    """Returns the names of the mapped axes of a user's ``axis_name`` argument."""
    names = axis_name if isinstance(axis_name, (tuple, list)) else (axis_name,)
    if axis_name is None:
        return ()
    valid = all(isinstance(name, str) and name for name in names)
    if not (names and valid and len({*names}) == len(names)):
        raise ValueError(
            f"axis_name={brief(axis_name)} must be the name of a mapped axis, such as 'data', a "
            "tuple of several, or None under plain jit."
        )
    return tuple(names)


def check_axis(name: str, axis_name: Any) -> None:
    """Raises a ValueError if no axis of this name is mapped here."""
    try:
        jax.lax.axis_size(name)
    except NameError:
        mapped = jax.sharding.get_abstract_mesh().manual_axes
        raise ValueError(
            f"axis_name={axis_name!r}: no axis {name!r} is mapped here. Mapped axes: "
            f"{', '.join(map(repr, mapped)) or 'none'}.{did_you_mean(name, mapped)} Make the call "
            "within jax.shard_map, jax.pmap or jax.vmap over an axis of that name. Under plain jit "
            "with sharded arrays, leave axis_name out."
        ) from None


def local_to(axes: tuple[str, ...], axis_name: Any, tree: Any) -> Any:
    """Checks that these axes of ``axis_name`` are mapped, and marks arrays as local to them."""
    for name in axes:
        check_axis(name, axis_name)
    manual = jax.sharding.get_abstract_mesh().manual_axes  # others are those of vmap
    if not (local := tuple(name for name in axes if name in manual)):
        return tree
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, local, to="varying"), tree)


def averaged(tree: Any, axis_name: Any) -> Any:
    """Averages floating leaves over replicas in float32 or wider; copies others from the first."""

    def from_first(leaf):
        # By a sum with zeros, whose result shard_map knows to be the same on all replicas.
        first = jax.lax.axis_index(axis_name) == 0
        return jax.lax.psum(jnp.where(first, leaf, jnp.zeros_like(leaf)), axis_name)

    def average(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jax.lax.pmean(leaf, axis_name)
        if is_key(leaf):
            key = from_first(jax.random.key_data(leaf))
            return jax.random.wrap_key_data(key, impl=jax.random.key_impl(leaf))
        return from_first(leaf).astype(leaf.dtype)  # bools are summed as integers

    return jax.tree.map(average, widen(tree))


def averaged_state(new: Any, local: Any, before: Any, axis_name: Any) -> Any:
    """Averages what has changed of a state, in its dtypes; the rest is as before it was local."""

    def average(x, y, old):
        return old if x is y else cast_like(averaged(x, axis_name), x)

    return jax.tree.map(average, new, local, before)


def average_gradients(grads: Any, axis_name: Any, policy: Policy, loss_scale: Any) -> Any:
    """Averages gradients over replicas in float32, or in 16 bits if the policy has reduce=half."""
    half = policy.compute_dtype if policy.reduce == "half" else None
    if half not in HALVES:
        return averaged(grads, axis_name)
    # Scaled again, because float16 would flush unscaled gradients to zero.
    scale = jnp.asarray(loss_scale.loss_scale, jnp.float32)
    sent = jax.tree.map(lambda g: (g.astype(jnp.float32) * scale).astype(half), grads)
    sums = jax.lax.pmean(sent, axis_name)
    return jax.tree.map(lambda g: g.astype(jnp.float32) / scale, sums)
