"""A report on weights that do not change because their updates are rounded away.

It is computed on the device, within the step. Only reading it waits for the device.
"""

import dataclasses
import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.errors import brief, finite_number, first_of
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_narrow_array, pytree_of
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.report import Report

MOST_ROWS = 20  # the most parameters in a report


@public("mpjax.reports")
@pytree_of("shares")
@dataclasses.dataclass(frozen=True)
class Stalled(Report):
    """A report on which parameters' updates were rounded away in a step. ``print`` it.

    For each parameter it has the share of non-zero updates that changed neither the stored weight
    nor its master or residual, because they were less than half a unit in the last place. A
    bfloat16 weight of 1 ignores a decrease of less than 1/512, a float32 weight one of less than
    3e-8. The share is 0 for a parameter without non-zero updates, and in a skipped step.

    Attributes:
        shares: The shares, a float32 array of one entry per parameter, from 0 to 1.
        paths: The paths of all parameters.
        by_lot: Whether 16-bit parameters are rounded stochastically. Then most small updates change
            nothing in a single step, but none is lost on average.
    """

    shares: jax.Array
    paths: tuple[str, ...]
    by_lot: bool = False

    _array = ("stalled", "shares", 1)

    def to_dict(self) -> dict[str, float]:
        """Returns the share of each path, the largest first. Waits for the device."""
        self._check_one()
        pairs = zip(self.paths, np.asarray(self.shares).tolist(), strict=True)
        return dict(sorted(pairs, key=lambda pair: -pair[1]))

    def logged(self, loss_scale: float = 1.0) -> Mapping[str, float | str]:
        return self.to_dict()

    def document(self) -> Document:
        rows = tuple((f"{share:.2%}", path) for path, share in self.to_dict().items() if share)
        lost = f"Rounding removed updates of {len(rows)} of {len(self.paths)} parameters."
        columns = ("stalled", "parameter")
        return Document(
            "Updates that rounding removed",
            lost if rows else "No update was rounded away.",
            tables=(Table("Shares of the updates", columns, rows, columns[1:], MOST_ROWS),),
        )


def warn_if_stalled(metrics: Any, limit: float = 0.5) -> None:
    """Warns about parameters that do not change because their updates are rounded away.

    It never warns under stochastic rounding. Reading the shares waits for the device, so call this
    every few hundred steps.

    Args:
        metrics: The metrics of a step that was built with ``report_stalled=True``.
        limit: The share of a parameter's non-zero updates, rounded away, at which to warn: above 0
            and at most 1.

    Raises:
        TypeError: If ``metrics`` holds no `Stalled`.
        ValueError: If ``limit`` is invalid.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> stalled = mpjax.reports.Stalled(jnp.array([0.0, 0.1]), ("w", "norm/scale"))
        >>> mpjax.debug.warn_if_stalled({"stalled": stalled}, limit=0.5)
    """
    share = finite_number(limit)
    if share is None or not 0 < share <= 1:
        raise ValueError(f"limit={brief(limit)} must be a share, above 0 and at most 1.")
    stalled = metrics.get("stalled") if isinstance(metrics, dict) else None
    if not isinstance(stalled, Stalled):
        raise TypeError(
            f"metrics={brief(metrics)} must be the metrics of a training step that was built with "
            "report_stalled=True."
        )
    weights = [f"{path} ({part:.0%})" for path, part in stalled.to_dict().items() if part >= share]
    if stalled.by_lot or not weights:
        return
    warnings.warn(
        f"These weights are not training: {first_of(weights)}. Their updates are "
        "below half an ulp (unit in the last place) of the stored weight, and round to zero. Use "
        "master weights (a policy of O2, with masters=split for 4 bytes a weight), "
        "rounding=stochastic or rounding=kahan; or store these weights in float32 by an override.",
        stacklevel=2,
    )


def stalled(
    updates: Any,
    before: Sequence[tuple[jax.Array, ...]],
    after: Sequence[tuple[jax.Array, ...]],
) -> jax.Array:
    """Returns for each parameter the share of non-zero updates that changed no stored array.

    ``before`` and ``after`` have the arrays that hold each parameter. The updates are in float32.
    """

    def share(update, old, new):
        if update is None:
            return jnp.float32(0)
        # A weight moves if one of its arrays does, such as a residual that collects small updates.
        same = functools.reduce(jnp.logical_and, map(_unchanged, old, new))
        moved = update != 0
        counts = [jnp.sum(x, dtype=jnp.uint32).astype(jnp.float32) for x in (moved & same, moved)]
        return counts[0] / jnp.maximum(counts[1], 1)

    leaves = jax.tree.leaves(updates, is_leaf=lambda x: x is None)
    return jnp.stack([share(*row) for row in zip(leaves, before, after, strict=True)])


def _unchanged(old: jax.Array, new: jax.Array) -> jax.Array:
    # 16-bit arrays are compared as bits, because XLA may compare their values before rounding.
    as_bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.uint16) if is_narrow_array(x) else x  # noqa: E731
    return as_bits(old) == as_bits(new)
