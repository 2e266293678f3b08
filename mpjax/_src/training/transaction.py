"""Applies a step or skips it: either all of the state is updated, or none of it.

The choice is a `select` or a conditional, depending on the platform. On a GPU and a TPU a `select`
costs nothing: XLA fuses it into the pass that updates parameters and moments together. A
conditional keeps its operands and results in separate buffers there, so the state is copied. On a
CPU each pass writes one array: with a `select` the new moments are computed once to be stored and
again for the parameters; a conditional computes them once or not at all.

Within shard_map and pmap each replica decides for itself. A collective in a branch that only some
replicas take would wait forever, so the choice is a `select` there on every platform.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from mpjax._src.base.trees import cast_like, select
from mpjax._src.training.loss_scale import adjust_shared

T = TypeVar("T")


def by_select(finite: jax.Array, new: Callable[..., T], before: T, *args: Any) -> T:
    """Always computes the new state, and selects one of the two."""
    return select(finite, new(before, *args), before)


def by_cond(finite: jax.Array, new: Callable[..., T], before: T, *args: Any) -> T:
    """Computes the new state only if it is used."""

    def applied(before, *args):
        return select(True, new(before, *args), before)  # refuses what `select` refuses

    def skipped(before, *_):
        return before

    return jax.lax.cond(finite, applied, skipped, before, *args)


def gated(finite: jax.Array, new: Callable[..., T], before: T, *args: Any) -> T:
    """Returns ``new(before, *args)`` where ``finite`` is true, else ``before``, bit for bit.

    Raises:
        ValueError: If the two differ in structure, or two leaves in shape or dtype.
    """
    if _is_chosen(finite):
        return by_select(finite, new, before, *args)
    new = jax.jit(new, inline=True)  # traced once for both
    return jax.lax.platform_dependent(
        finite,
        before,
        *args,
        cpu=lambda finite, *args: by_cond(finite, new, *args),
        default=lambda finite, *args: by_select(finite, new, *args),
    )


def gated_update(finite: jax.Array, update: Callable[..., Any], state: T, *args: Any) -> Any:
    """Returns ``update(state, *args)``, a pair (updates, new state), or (zeros, ``state``)."""

    def zeros(updates):
        # -0.0, because adding 0.0 would turn a parameter of -0.0 into 0.0.
        return jax.tree.map(lambda u: jnp.full(u.shape, -0.0, u.dtype), updates)

    def run(before, *args):
        updates, new = update(before[1], *args)
        return updates, cast_like(new, before[1])

    if _is_chosen(finite):
        updates, new = run((None, state), *args)
        return select(finite, updates, zeros(updates)), select(finite, new, state)
    run = jax.jit(run, inline=True)
    shapes, _ = jax.eval_shape(run, (None, state), *args)
    return gated(finite, run, (zeros(shapes), state), *args)


def _is_chosen(finite: jax.Array) -> bool:
    """Returns whether every platform uses a `select`: in a replica, and outside of jit."""
    traced = isinstance(finite, jax.core.Tracer)
    return not traced or bool(jax.sharding.get_abstract_mesh().manual_axes)


def counted(before: Any, finite: Any) -> dict[str, jax.Array]:
    """Returns the skip counters after one more step, applied or skipped."""
    skipped = jnp.logical_not(finite).astype(jnp.int32)
    return {
        "skipped_steps": before.skipped_steps + skipped,
        "consecutive_skips": (before.consecutive_skips + 1) * skipped,
    }


def adjusted(
    loss_scale: T, grads_finite: Any, loss_finite: Any, state_finite: Any, used: Any = None
) -> T:
    """Returns the next loss scale, after a gradient that was scaled by it, or by ``used``.

    No loss scale changes the forward pass, so the scale is adjusted only if the loss is finite. If
    gradients and model state both failed, it is unknown which failed first; the scale is lowered
    then, because it may be too high.
    """
    speaks = loss_finite & (state_finite | ~grads_finite)
    used = loss_scale if used is None else used
    return select(speaks, adjust_shared(loss_scale, grads_finite, used), loss_scale)
