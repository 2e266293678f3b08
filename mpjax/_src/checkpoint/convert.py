"""Arrays in the dtypes and on the devices that are wanted, never a finite value made infinite."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.checkpoint.contents import (
    Leaf,
    is_beside,
    is_draws,
    is_held,
    shaped,
)
from mpjax._src.checkpoint.match import NAMED, Source
from mpjax._src.dtypes import FLOAT32
from mpjax._src.training import codes, residuals


def converted(sources: list[Source], arrays: Mapping[str, jax.Array], like: Any, where: str) -> Any:
    """Returns a tree like ``like``, of what was read.

    Args:
        sources: Where each leaf comes from, in the order of the leaves of ``like``.
        arrays: What was read, by path.
        like: The state that is wanted.
        where: The name of the checkpoint, for messages.

    Raises:
        ValueError: If a finite value would become infinite, or a leaf would be narrowed by JAX.
    """
    leaves, overflown = [], []
    for source in sources:
        target, path = source.target, source.path
        if path is None:
            leaves.append(_own(target, where))
            continue
        read, dtype = arrays[path], shaped(target.value)[1]
        if source.beside is not None:
            read = _whole(jnp.asarray(read), jnp.asarray(arrays[source.beside]))
        leaf = read
        if source.kind is not None:
            leaf = _part(source, jnp.asarray(read, FLOAT32))
        elif str(leaf.dtype) != dtype:
            with np.errstate(over="ignore"):
                leaf = jnp.asarray(leaf.astype(np.dtype(dtype)))
        if not is_beside(target.means) and leaf is not read and overflows(read, leaf):
            overflown.append(f"{target.path} ({read.dtype} to {dtype})")
        place = place_of(target.value)
        leaves.append(leaf if place is None else jax.device_put(leaf, place))
    if overflown:
        raise ValueError(
            f"like: the checkpoint {where} holds finite values that would become infinite in "
            + ", ".join(overflown[:NAMED])
            + ". Restore these leaves in bfloat16 or float32: by the policy, or an override."
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _whole(leaf: jax.Array, beside: jax.Array) -> jax.Array:
    """Returns the float32 value of a half parameter and its residual, or of codes and scales."""
    code = codes.by_dtype(leaf.dtype)
    return codes.decode(leaf, beside, code) if code else residuals.full(leaf, beside)


def _part(source: Source, value: jax.Array) -> jax.Array:
    """Returns what holds a value with what lies beside it, or that."""
    assert source.kind is not None
    dtype, kind = map(np.dtype, source.kind)
    if code := codes.by_dtype(dtype):
        first = jnp.int32(0)  # of the draws
        scales = codes.scales_of(value, code, first)
        parts = codes.encode(value, scales, code, first), scales
    else:
        parts = residuals.split(value, dtype, kind)
    return parts[is_beside(source.target.means)]


def place_of(value: Any) -> Any:
    """Returns where a leaf of ``like`` is committed to, or None."""
    if isinstance(value, jax.ShapeDtypeStruct) or getattr(value, "committed", False):
        return value.sharding
    return None


def _own(target: Leaf, where: str) -> jax.Array:
    """Copies a leaf of ``like`` that nothing saved stands for: of a fresh loss scale.

    A copy, so that donation never eats what the caller still has.
    """
    if isinstance(target.value, jax.ShapeDtypeStruct):
        if is_draws(target.means):
            return jnp.zeros(target.value.shape, target.value.dtype)
        raise ValueError(
            f"like[{target.path!r}] is only a shape, but the checkpoint {where} was saved with "
            "another loss scale, so that this one starts as it is in like. Pass the values: "
            "like=init(params), or an eval_shape of it whose loss_scale is that of init(params)."
        )
    return jnp.array(target.value)


def held(value: Any) -> Any:
    """Returns an array as one of JAX's; what JAX would narrow stays NumPy's."""
    if isinstance(value, jax.Array):
        return value
    return jnp.array(value) if is_held(value.dtype) else value


def overflows(wide: Any, narrow: jax.Array) -> bool:
    """Tells whether a finite value of an array is infinite in another one, which was cast of it."""
    if not jnp.issubdtype(narrow.dtype, jnp.inexact):
        return False
    if isinstance(wide, np.ndarray):
        return bool(np.any(np.isfinite(wide) & ~np.isfinite(np.asarray(narrow))))
    return bool(_overflows(wide, narrow))


@jax.jit
def _overflows(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    return jnp.any(jnp.isfinite(wide) & ~jnp.isfinite(narrow))
