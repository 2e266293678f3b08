"""Reports of a training step on its gradients: which overflowed first, and how much underflows.

They are computed on the device, within the step. Only reading them waits for the device.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import HALVES, limits_of
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import pytree_of
from mpjax._src.tools.document.model import Document
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.watching.order import Place, backward_order

FORWARD = (
    "The loss itself is NaN or Inf: the forward pass overflowed, or its input had NaN or Inf. No "
    "loss scale prevents that. mpjax.find_nonfinite(loss_fn, policy)(params, batch) names the "
    "operation."
)

LOST = ("zeros", "flushed", "subnormal")
NEVER = np.int32(np.iinfo(np.int32).max)  # the place of a gradient that is finite


@public("mpjax.reports")
@pytree_of("index", "layer", "nonfinite", "largest", "loss_scale", "loss_finite")
@dataclasses.dataclass(frozen=True)
class Overflow(Report):
    """A report on which parameter's gradient overflowed first in a step. ``print`` it.

    It is a pytree of device scalars; ``path`` and ``print`` wait for the device. If several
    gradients are non-finite, the one nearest to the loss is named, because an infinity in the
    backward pass spreads away from the loss. If the loss itself is non-finite, the forward pass
    overflowed and no parameter is named; `find_nonfinite` names the operation. A non-finite model
    state is not covered; see ``metrics["state_finite"]``.

    Attributes:
        index: The index of the parameter in ``paths``, an int32 scalar; -1 if every gradient is
            finite, or the loss is not.
        layer: The layer, an int32 scalar, if the parameters of layers are stacked along their first
            axis and scanned over; else -1.
        nonfinite: The share of that parameter's gradient that is Inf or NaN, a float32 scalar from
            0 to 1.
        largest: The largest finite magnitude in that parameter's scaled gradient, a float32 scalar.
            Compare it with 65504, float16's maximum. If no parameter is named, the largest of all
            gradients.
        loss_scale: The scale that this step's loss was multiplied by, a float32 scalar.
        paths: The paths of all parameters.
        loss_finite: Whether the loss was finite, a bool scalar.
    """

    index: jax.Array
    layer: jax.Array
    nonfinite: jax.Array
    largest: jax.Array
    loss_scale: jax.Array
    paths: tuple[str, ...]
    loss_finite: jax.Array | bool = True

    _array = ("overflow", "index", 0)

    @property
    def path(self) -> str | None:
        """The path of the named parameter, or None. Waits for the device."""
        self._check_one()
        index = int(self.index)
        return self.paths[index] if index >= 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, ready for JSON. Waits for the device."""
        return {
            "path": self.path,
            "layer": int(self.layer) if int(self.layer) >= 0 else None,
            "nonfinite": float(self.nonfinite),
            "largest": float(self.largest),
            "loss_scale": float(self.loss_scale),
            "loss_finite": bool(self.loss_finite),
        }

    def logged(self, loss_scale: float = 1.0) -> Mapping[str, float | str]:
        facts = {"index": int(self.index), **self.to_dict()}
        return {name: value for name, value in facts.items() if value is not None}

    def document(self) -> Document:
        return Document("The first gradient that overflowed", self._sentence())

    def _sentence(self) -> str:
        facts = self.to_dict()
        scale = f"loss scale {_power(facts['loss_scale'])}"
        if not facts["loss_finite"]:
            return FORWARD
        if facts["path"] is None:
            return (
                f"No gradient overflowed at {scale}. The largest scaled entry is "
                f"{facts['largest']:g}."
            )
        layer = "" if facts["layer"] is None else f", layer {facts['layer']},"
        rest = f", and its largest finite entry, scaled, is {facts['largest']:g}"
        return (
            f"{facts['path']}{layer} overflowed first, at {scale}: {facts['nonfinite']:.2%} of its "
            f"gradient is Inf or NaN{rest if facts['nonfinite'] < 1 else ''}."
        )


@public("mpjax.reports")
@pytree_of(*LOST)
@dataclasses.dataclass(frozen=True)
class Underflow(Report):
    """A report on how much of a step's gradients is too small for a 16-bit dtype. ``print`` it.

    The numbers are shares of all entries of the scaled gradients as they leave the backward pass:
    float32 device scalars from 0 to 1.

    Attributes:
        zeros: The share that is exactly zero. It includes entries that are zero in float32 too (a
            token that did not occur, an inactive unit), so compare it with that of a float32 run.
        flushed: The share that is not zero in float32, but would be zero in the 16-bit dtype.
        subnormal: The share that is subnormal in the 16-bit dtype, so that it has fewer bits.
        dtype: The name of the 16-bit dtype.
    """

    zeros: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    dtype: str

    _array = ("underflow", "zeros", 0)

    def logged(self, loss_scale: float = 1.0) -> Mapping[str, float | str]:
        return {name: float(getattr(self, name)) for name in LOST}

    def document(self) -> Document:
        lost = self.logged()
        sentence = (
            f"{lost['zeros']:.2%} of the gradient is zero. {self.dtype} flushes another "
            f"{lost['flushed']:.2%} to zero, and {lost['subnormal']:.2%} is subnormal in it."
        )
        return Document("Gradients that are too small", sentence)


# ---- within the step ----------------------------------------------------------------------------


@pytree_of("largest", *LOST)
@dataclasses.dataclass(frozen=True)
class Seen:
    """Shares of the scaled gradients: float32 arrays with one entry per parameter."""

    largest: jax.Array
    zeros: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    places: tuple[Place, ...]

    def over(self, highest: Callable[[jax.Array], jax.Array], mean: Callable[..., Any]) -> "Seen":
        """Returns the shares over several micro-batches or replicas."""
        shares = {name: mean(getattr(self, name)) for name in LOST}
        return Seen(highest(self.largest), **shares, places=self.places)


def observer(dtype: Any, ordered: bool) -> Callable[[Any, Any], Seen]:
    """Returns the ``observe`` function for `observed_value_and_grad`."""
    least, normal = _limits(dtype)

    def shares(leaf: jax.Array) -> tuple[jax.Array, ...]:
        size = jnp.abs(leaf).astype(jnp.float32)
        tiny, small, zero = size <= least, size < normal, size == 0
        # NaN is not less than anything.
        largest = jnp.max(jnp.where(size < jnp.inf, size, 0), initial=0)
        return largest, *map(_share, (zero, tiny & ~zero, small & ~tiny))

    def observe(grads: Any, program: Callable[[], Any]) -> Seen:
        columns = map(jnp.stack, zip(*map(shares, jax.tree.leaves(grads)), strict=True))
        seen = dict(zip(("largest", *LOST), columns, strict=True))
        return Seen(**seen, places=backward_order(program()) if ordered else ())

    return observe


def _first_layer(bad: jax.Array, place: Place) -> tuple[jax.Array, jax.Array]:
    """Returns the first bad layer of stacked ones, and how many the backward pass did before it."""
    layer, done = jnp.int32(-1), jnp.int32(0)
    if place.stride:
        hit = jnp.any(bad, axis=range(1, bad.ndim))
        # The backward pass of a scan runs from the last layer to the first.
        done = jnp.argmax(hit[::-1] if place.descending else hit).astype(jnp.int32)
        layer = len(hit) - 1 - done if place.descending else done
    return layer, done


def first_overflow(
    grads: Any, seen: Seen, loss_scale: Any, loss_finite: jax.Array, paths: Sequence[str]
) -> Overflow:
    """Returns the report on which of the final gradients overflowed first."""
    rows = []
    for leaf, place in zip(jax.tree.leaves(grads), seen.places, strict=True):
        bad = ~jnp.isfinite(leaf)
        share = _share(bad)
        layer, done = _first_layer(bad, place)
        rows.append((jnp.where(share > 0, place.first + place.stride * done, NEVER), share, layer))
    places, nonfinite, layers = map(jnp.stack, zip(*rows, strict=True))
    index = jnp.argmin(places).astype(jnp.int32)
    # A non-finite loss makes every gradient non-finite: then none of them is to blame.
    named = loss_finite & (places[index] != NEVER)
    return Overflow(
        index=jnp.where(named, index, -1),
        layer=jnp.where(named, layers[index], -1),
        nonfinite=jnp.where(named, nonfinite[index], 0),
        largest=jnp.where(named, seen.largest[index], jnp.max(seen.largest)),
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        paths=tuple(paths),
        loss_finite=loss_finite,
    )


def underflow(seen: Seen, sizes: Sequence[int], dtype: Any) -> Underflow:
    """Returns the report on all parameters together."""
    weights = np.asarray(sizes, np.float32) / max(sum(sizes), 1)
    shares = {name: jnp.sum(getattr(seen, name) * weights) for name in LOST}
    return Underflow(**shares, dtype=_half(dtype).name)


def _power(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _share(which: jax.Array) -> jax.Array:
    # Counted in integers, because adding 1 to a float32 count has no effect from 2**24 on.
    return jnp.sum(which, dtype=jnp.uint32).astype(jnp.float32) / np.float32(max(which.size, 1))


def _half(dtype: Any) -> np.dtype:
    return dtype if dtype in HALVES else HALVES[0]


def _limits(dtype: Any) -> tuple[np.float32, np.float32]:
    """Returns the largest magnitude that a 16-bit dtype rounds to 0, and its least normal one."""
    limits = limits_of(_half(dtype))
    return np.float32(2.0**limits.flush), np.float32(2.0**limits.normal)
