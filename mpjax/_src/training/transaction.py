"""The gate of a step: all that it may change is new, or all is as before.

How it is spelled depends on what it is lowered for. On a GPU and a TPU a `select` is free: XLA puts
it into the pass that updates parameters and moments together, whereas what goes into a conditional
and what comes out are kept apart, and the state is copied. On a CPU a pass writes one array: under
a `select` new moments are computed once to be kept and again for the parameters, whereas a
conditional computes them once or not at all.

Within shard_map and pmap each replica judges for itself, and a collective in a branch that only
some of them take would wait for the others forever: there it is a `select` everywhere.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from mpjax._src.trees import select

T = TypeVar("T")


def by_select(finite: jax.Array, new: Callable[..., T], before: T, *args: Any) -> T:
    """Computes the new state always, and chooses."""
    return select(finite, new(before, *args), before)


def by_cond(finite: jax.Array, new: Callable[..., T], before: T, *args: Any) -> T:
    """Computes the new state only where it is taken."""

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
    if jax.sharding.get_abstract_mesh().manual_axes:
        return by_select(finite, new, before, *args)
    new = jax.jit(new, inline=True)  # traced once for both
    return jax.lax.platform_dependent(
        finite,
        before,
        *args,
        cpu=lambda finite, *args: by_cond(finite, new, *args),
        default=lambda finite, *args: by_select(finite, new, *args),
    )
