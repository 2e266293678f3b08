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
from mpjax._src.dtypes import BFLOAT16, FLOAT32
from mpjax._src.training import residuals


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
            read = residuals.full(jnp.asarray(read), jnp.asarray(arrays[source.beside]))
        leaf = read
        if source.kind is not None:
            leaf = _split(source, read)
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


def _split(source: Source, value: Any) -> jax.Array:
    """Returns a half parameter that holds a value with its residual, or the residual."""
    kind = np.dtype(source.kind)
    dtype = BFLOAT16 if kind.kind == "u" else kind
    param, residual = residuals.split(jnp.asarray(value, FLOAT32), dtype, kind)
    return residual if is_beside(source.target.means) else param


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
