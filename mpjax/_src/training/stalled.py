"""Which weights stand still because rounding takes their updates.

Computed on the device, within the step. Reading it waits; the step never does.
"""

import dataclasses
import functools
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.errors import brief
from mpjax._src.reports import Report, table
from mpjax._src.training.loss_scale import finite_number
from mpjax._src.trees import is_half

MOST_ROWS, NAMED = 20, 5  # of parameters, in a report and in a warning


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["shares"], meta_fields=["paths", "by_lot"]
)
@dataclasses.dataclass(frozen=True)
class Stalled(Report):
    """Which parameters' updates were rounded away, in one step. ``print`` it.

    Of each parameter, the share of its non-zero updates that left it, and what the optimizer keeps
    beside it, as they were: the update was less than half a unit in the last place. A bfloat16
    weight of 1 does not move by less than 1/512 (downwards); a float32 one by less than 3e-8. Zero
    for a parameter without non-zero updates, and of a step that was skipped.

    Attributes:
        shares: A float32 array of one entry for each parameter.
        paths: The paths of all parameters.
        by_lot: Whether half parameters are rounded at random: then most small updates leave them
            as they are, and on average none is lost.
    """

    shares: jax.Array
    paths: tuple[str, ...]
    by_lot: bool = False

    def to_dict(self) -> dict[str, float]:
        """Returns the share by path, the largest first; waits for the device."""
        if np.ndim(self.shares) != 1:
            raise ValueError(
                f"stalled holds those of several steps or members, of shape "
                f"{np.shape(self.shares)}. Pass one, such as jax.tree.map(lambda x: x[-1], stalled)"
            )
        pairs = zip(self.paths, np.asarray(self.shares).tolist(), strict=True)
        return dict(sorted(pairs, key=lambda pair: -pair[1]))

    def __str__(self) -> str:
        if isinstance(self.shares, jax.core.Tracer) or np.ndim(self.shares) != 1:
            return repr(self)
        found = {path: share for path, share in self.to_dict().items() if share}
        if not found:
            return "No update was rounded away."
        rows = [(f"{share:.2%}", path) for path, share in [*found.items()][:MOST_ROWS]]
        more = f"\nand {len(found) - MOST_ROWS} more" if len(found) > MOST_ROWS else ""
        return "\n".join(table(("stalled", "parameter"), rows, words=("parameter",))) + more


def warn_if_stalled(metrics: Any, limit: float = 0.5) -> None:
    """Warns of parameters that stand still because rounding takes their updates.

    Under stochastic rounding it never does. Reading the shares waits for the device: ask every few
    hundred steps.

    Args:
        metrics: What a step returned that was built with ``report_stalled=True``.
        limit: Of a parameter's non-zero updates, the share from which on to warn: above 0, at
            most 1.

    Raises:
        TypeError: If ``metrics`` holds no `Stalled`.
        ValueError: If ``limit`` is not legal.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> stalled = mpjax.Stalled(jnp.array([0.0, 0.1]), ("w", "norm/scale"))
        >>> mpjax.warn_if_stalled({"stalled": stalled}, limit=0.5)
    """
    share = finite_number(limit)
    if share is None or not 0 < share <= 1:
        raise ValueError(f"limit={brief(limit)} must be a share, above 0 and at most 1.")
    stalled = metrics.get("stalled") if isinstance(metrics, dict) else None
    if not isinstance(stalled, Stalled):
        raise TypeError(
            f"metrics={brief(metrics)} must be those of a training step that was built with "
            "report_stalled=True."
        )
    found = [f"{path} ({part:.0%})" for path, part in stalled.to_dict().items() if part >= share]
    if stalled.by_lot or not found:
        return
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    warnings.warn(
        f"Rounding takes the updates of {', '.join(found[:NAMED])}{more}: they are less than half "
        "a unit in the last place of the stored weights, which stand still. Keep what is lost: "
        "masters (a policy of O2, with masters=split for 4 bytes a weight), rounding=stochastic or "
        "rounding=kahan; or store these weights in float32, by an override.",
        stacklevel=2,
    )


def stalled(
    updates: Any,
    before: Sequence[tuple[jax.Array, ...]],
    after: Sequence[tuple[jax.Array, ...]],
) -> jax.Array:
    """Returns the share of each parameter's non-zero updates that changed nothing that is stored.

    Args:
        updates: Those of the optimizer, in float32.
        before: Of each parameter, the arrays that hold it.
        after: The same after the update.
    """

    def share(update, old, new):
        if update is None:
            return jnp.float32(0)
        same = functools.reduce(jnp.logical_and, map(_unchanged, old, new))
        moved = update != 0
        counts = [jnp.sum(x, dtype=jnp.uint32).astype(jnp.float32) for x in (moved & same, moved)]
        return counts[0] / jnp.maximum(counts[1], 1)

    leaves = jax.tree.leaves(updates, is_leaf=lambda x: x is None)
    return jnp.stack([share(*row) for row in zip(leaves, before, after, strict=True)])


def _unchanged(old: jax.Array, new: jax.Array) -> jax.Array:
    # Half ones as bits: XLA may compare what they were before they were rounded.
    as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16) if is_half(x) else x  # noqa: E731
    return as_bits(old) == as_bits(new)
