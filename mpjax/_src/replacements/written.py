"""A plain description of a loss that a program writes out, and that runs without its logits."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.replacements.chunked import Form, Operands, anywhere, each, weighted_sum
from mpjax._src.replacements.derivatives import cast


class Written(NamedTuple):
    """A loss as it runs. Plain data, equal for equal losses."""

    form: Form  # the loss of a row, and its blocks
    dtype: Any  # the dtype of the operands of its matmuls
    features: int  # the axis of the hidden values that is summed over
    # Changes of the rows: ("reshape", shape) and ("slice", starts, limits, strides).
    moves: tuple[Any, ...]
    clipped: bool  # whether labels are clipped to the words
    has_bias: bool  # whether a bias follows the labels
    factor: float  # what the result is multiplied by
    # How arrays that follow are read, and the shape that they are broadcast to: "times" them,
    # losses are "kept" where they are true, or "dropped" there.
    weights: tuple[tuple[str, tuple[int, ...]], ...]
    shape: tuple[int, ...]  # the shape of the result
    is_sum: bool  # whether that is the weighted sum of the losses, or else each of them
    by_rows: bool  # whether blocks are rows

    def describe(self) -> str:
        """Returns its blocks in words."""
        return self.form.describe(self.by_rows)


def run(written: Written, arrays: Sequence[Any]) -> list[Any]:
    """Runs a loss, in float32.

    The arrays are hidden values, weight, labels, the bias if there is one, and weights of losses.
    """
    hidden, weight, labels, *rest = arrays
    form = written.form
    hidden = cast(_moved(jnp.moveaxis(hidden, written.features, -1), written), written.dtype)
    lead = hidden.shape[:-1]
    labels = jnp.reshape(cast(labels, np.int32), lead)
    labels = jnp.clip(labels, 0, form.words - 1) if written.clipped else labels
    bias = rest.pop(0) if written.has_bias else None
    operands = Operands(hidden, weight, labels, bias)
    weights = jnp.ones(lead, operands.wide)
    for (how, shape), x in zip(written.weights, rest, strict=True):
        x = jnp.logical_not(x) if how == "dropped" else x
        weights *= cast(jnp.reshape(jnp.broadcast_to(x, shape), lead), weights.dtype)

    loss = functools.partial(each, form=form)
    if written.is_sum:
        loss = functools.partial(weighted_sum, form=form, by_rows=written.by_rows)
        operands = operands._replace(weights=weights)
    out = anywhere(loss, operands, per_row=not written.is_sum)
    return [jnp.reshape(out * written.factor, written.shape)]


def _moved(hidden: Any, written: Written) -> Any:
    """Returns hidden values after the changes of rows that the program makes of the logits."""
    for how, *what in written.moves:
        if how == "reshape":
            hidden = jnp.reshape(hidden, (*what[0], hidden.shape[-1]))
        else:
            starts, limits, strides = what
            steps = strides or [1] * len(starts)
            hidden = hidden[tuple(map(slice, starts, limits, steps))]
    return hidden
