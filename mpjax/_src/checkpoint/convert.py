"""Converts restored arrays to the dtypes and devices of ``like``; refuses overflow to infinity."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.checkpoint.contents import Leaf, is_companion, is_draws, is_held, shaped
from mpjax._src.checkpoint.match import Source
from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import first_of
from mpjax._src.core.training import residuals
from mpjax._src.optim import codes


def converted(sources: list[Source], arrays: Mapping[str, jax.Array], like: Any, where: str) -> Any:
    """Returns a tree like ``like``, made of the arrays that were read, by path.

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
        if source.companion is not None:
            read = _whole(jnp.asarray(read), jnp.asarray(arrays[source.companion]))
        leaf = read
        if source.kind is not None:
            # Residuals and codes are made anew, because those of another policy do not fit.
            leaf = _part(source, jnp.asarray(read, FLOAT32))
        elif str(leaf.dtype) != dtype:
            # NumPy would warn of an overflow, which is refused below by the name of the leaf.
            with np.errstate(over="ignore"):
                leaf = jnp.asarray(leaf.astype(np.dtype(dtype)))
        # A residual is no value by itself: what overflows shows in its parameter.
        if not is_companion(target.means) and leaf is not read and overflows(read, leaf):
            overflown.append(f"{target.path} ({read.dtype} to {dtype})")
        place = place_of(target.value)
        leaves.append(leaf if place is None else jax.device_put(leaf, place))
    if overflown:
        raise ValueError(
            f"like: the checkpoint {where} has finite values that would become infinite in "
            f"{first_of(overflown)}. Restore these leaves in bfloat16 or float32, by another "
            "policy or an override."
        )
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def _whole(leaf: jax.Array, companion: jax.Array) -> jax.Array:
    """Returns the float32 value of a 16-bit parameter and its residual, or of codes and scales."""
    code = codes.by_dtype(leaf.dtype)
    return codes.decode(leaf, companion, code) if code else residuals.full(leaf, companion)


def _part(source: Source, value: jax.Array) -> jax.Array:
    """Returns one of the two arrays that represent a value: the leaf, or its residual or scales."""
    assert source.kind is not None
    dtype, kind = map(np.dtype, source.kind)
    if code := codes.by_dtype(dtype):
        first = jnp.int32(0)  # the count of draws
        scales = codes.scales_of(value, code, first)
        parts = codes.encode(value, scales, code, first), scales
    else:
        parts = residuals.split(value, dtype, kind)
    # The bool is the index: first the leaf, then what belongs to it.
    return parts[is_companion(source.target.means)]


def place_of(value: Any) -> Any:
    """Returns the sharding that a leaf of ``like`` is committed to, or None."""
    if isinstance(value, jax.ShapeDtypeStruct) or getattr(value, "committed", False):
        return value.sharding
    return None


def _own(target: Leaf, where: str) -> jax.Array:
    """Copies a leaf of ``like`` that is not in the checkpoint, such as that of a new loss scale.

    The copy protects the caller's array from donation.
    """
    if isinstance(target.value, jax.ShapeDtypeStruct):
        if is_draws(target.means):
            return jnp.zeros(target.value.shape, target.value.dtype)
        raise ValueError(
            f"like[{target.path!r}] is only a shape, but the checkpoint {where} was saved with "
            "another loss scale, so the values of this one must come from like. Pass "
            "like=init(params), or an eval_shape of it with the loss_scale of init(params)."
        )
    return jnp.array(target.value)


def held(value: Any) -> Any:
    """Returns a JAX array, or the NumPy array if JAX would narrow it."""
    if isinstance(value, jax.Array):
        return value
    return jnp.array(value) if is_held(value.dtype) else value


def overflows(wide: Any, narrow: jax.Array) -> bool:
    """Returns whether a cast from ``wide`` to ``narrow`` made a finite value infinite."""
    if not jnp.issubdtype(narrow.dtype, jnp.inexact):
        return False
    # JAX would narrow such an array (`held`), so it is compared on the host.
    if isinstance(wide, np.ndarray):
        return bool(np.any(np.isfinite(wide) & ~np.isfinite(np.asarray(narrow))))
    return bool(_overflows(wide, narrow))


@jax.jit
def _overflows(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    return jnp.any(jnp.isfinite(wide) & ~jnp.isfinite(narrow))
