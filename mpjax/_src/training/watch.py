"""What a training step tells of its gradients: which overflowed first, and how much underflows.

Everything here is computed on the device, within the step. Reading it waits; the step never does.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.dtypes import HALVES
from mpjax._src.reports import Report, wrapped
from mpjax._src.training.order import Place, backward_order

FORWARD = (
    "The loss itself is NaN or Inf: the forward pass overflowed (or was given NaN), and no loss "
    "scale cures that. mpjax.find_nonfinite(loss_fn, policy)(params, batch) names the operation."
)

LOST = ("zeros", "flushed", "subnormal")
NEVER = np.int32(np.iinfo(np.int32).max)  # the place of a gradient that is finite


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["index", "layer", "nonfinite", "largest", "loss_scale", "loss_finite"],
    meta_fields=["paths"],
)
@dataclasses.dataclass(frozen=True)
class Overflow(Report):
    """Which parameter's gradient overflowed first, in one step. ``print`` it.

    A pytree of device scalars; `path` and ``print`` wait for the device. Of several gradients that
    are not finite the first is the one nearest to the loss, because in the backward pass an
    infinity spreads away from it. Where the loss itself is not finite the forward pass overflowed,
    and no parameter is named: `find_nonfinite` tells the operation. It says nothing of a model
    state that is not finite (``state_finite``).

    Attributes:
        index: Of the parameter in `paths`, an int32 scalar; -1 if every gradient is finite, or the
            loss is not.
        layer: For parameters stacked along their first axis and scanned over, the layer; else -1.
        nonfinite: The share of that parameter's gradient that is Inf or NaN.
        largest: Its largest finite magnitude as the backward pass saw it, scaled, which is to be
            compared with float16's 65504; of all parameters, if none is named.
        loss_scale: The scale that this step's loss was multiplied by.
        paths: The paths of all parameters.
        loss_finite: Whether the loss was finite.
    """

    index: jax.Array
    layer: jax.Array
    nonfinite: jax.Array
    largest: jax.Array
    loss_scale: jax.Array
    paths: tuple[str, ...]
    loss_finite: jax.Array | bool = True

    @property
    def path(self) -> str | None:
        """The path of the parameter, or None; waits for the device."""
        if np.ndim(self.index):
            raise ValueError(
                f"overflow holds those of several steps or members, of shape "
                f"{np.shape(self.index)}. Pass one, such as jax.tree.map(lambda x: x[-1], overflow)"
            )
        index = int(self.index)
        return self.paths[index] if index >= 0 else None

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, ready for JSON; waits for the device."""
        return {
            "path": self.path,
            "layer": int(self.layer) if int(self.layer) >= 0 else None,
            "nonfinite": float(self.nonfinite),
            "largest": float(self.largest),
            "loss_scale": float(self.loss_scale),
            "loss_finite": bool(self.loss_finite),
        }

    def __str__(self) -> str:
        if isinstance(self.index, jax.core.Tracer) or np.ndim(self.index):
            return repr(self)
        found = self.to_dict()
        scale = f"loss scale {_power(found['loss_scale'])}"
        if not found["loss_finite"]:
            return wrapped(FORWARD)
        if found["path"] is None:
            return wrapped(
                f"No gradient overflowed at {scale}: the largest, scaled, is {found['largest']:g}."
            )
        layer = "" if found["layer"] is None else f", layer {found['layer']},"
        rest = f", the largest other entry, scaled, is {found['largest']:g}"
        return wrapped(
            f"{found['path']}{layer} overflowed first, at {scale}: {found['nonfinite']:.2%} of its "
            f"gradient is Inf or NaN{rest if found['nonfinite'] < 1 else ''}."
        )


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[*LOST],
    meta_fields=["dtype"],
)
@dataclasses.dataclass(frozen=True)
class Underflow(Report):
    """How much of one step's gradients is too small for a half dtype. ``print`` it.

    Shares of all entries of the scaled gradients as they leave the backward pass; float32 device
    scalars.

    Attributes:
        zeros: Exactly zero: those that half arithmetic lost, and those that are zero in float32
            too (a token that did not occur, a unit that is off). The share of a float32 run is what
            to compare with.
        flushed: Not zero, because kept in float32, but the half dtype would make it zero.
        subnormal: Held by the half dtype with fewer bits than usual.
        dtype: The half dtype.
    """

    zeros: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    dtype: str

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, ready for JSON; waits for the device."""
        return {
            name: getattr(self, name) if name == "dtype" else float(getattr(self, name))
            for name in (field.name for field in dataclasses.fields(self))
        }

    def __str__(self) -> str:
        if isinstance(self.zeros, jax.core.Tracer) or np.ndim(self.zeros):
            return repr(self)
        found = self.to_dict()
        return wrapped(
            f"{found['zeros']:.2%} of the gradient is zero, {self.dtype} flushes "
            f"{found['flushed']:.2%} more and holds {found['subnormal']:.2%} with fewer bits."
        )


# ---- within the step ----------------------------------------------------------------------------


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["largest", *LOST],
    meta_fields=["places"],
)
@dataclasses.dataclass(frozen=True)
class Seen:
    """What was seen of each scaled gradient: float32 arrays of one entry per parameter."""

    largest: jax.Array
    zeros: jax.Array
    flushed: jax.Array
    subnormal: jax.Array
    places: tuple[Place, ...]

    def over(self, highest: Callable[[jax.Array], jax.Array], mean: Callable[..., Any]) -> "Seen":
        """Returns what was seen over several micro-batches or replicas."""
        shares = {name: mean(getattr(self, name)) for name in LOST}
        return Seen(highest(self.largest), **shares, places=self.places)


def observer(dtype: Any, ordered: bool) -> Callable[[Any, Any], Seen]:
    """Returns what looks at scaled gradients as `observed_value_and_grad` hands them out."""
    least, normal = _limits(dtype)

    def observe(grads: Any, program: Callable[[], Any]) -> Seen:
        rows = []
        for leaf in jax.tree.leaves(grads):
            size = jnp.abs(leaf).astype(jnp.float32)
            tiny, small, zero = size <= least, size < normal, size == 0
            rows.append(
                {
                    # NaN is not less than anything.
                    "largest": jnp.max(jnp.where(size < jnp.inf, size, 0), initial=0),
                    "zeros": _share(zero),
                    "flushed": _share(tiny & ~zero),
                    "subnormal": _share(small & ~tiny),
                }
            )
        columns = {name: jnp.stack([row[name] for row in rows]) for name in rows[0]}
        return Seen(**columns, places=backward_order(program()) if ordered else ())

    return observe


def first_overflow(
    grads: Any, seen: Seen, loss_scale: Any, loss_finite: jax.Array, paths: Sequence[str]
) -> Overflow:
    """Returns which of the final gradients overflowed first."""
    shares, keys, layers = [], [], []
    for leaf, place in zip(jax.tree.leaves(grads), seen.places, strict=True):
        bad = ~jnp.isfinite(leaf)
        share = _share(bad)
        layer, done = jnp.int32(-1), jnp.int32(0)
        if place.stride:
            hit = jnp.any(bad, axis=range(1, bad.ndim))
            done = jnp.argmax(hit[::-1] if place.descending else hit).astype(jnp.int32)
            layer = len(hit) - 1 - done if place.descending else done
        keys.append(jnp.where(share > 0, place.first + place.stride * done, NEVER))
        shares.append(share)
        layers.append(layer)
    places, nonfinite = jnp.stack(keys), jnp.stack(shares)
    index = jnp.argmin(places).astype(jnp.int32)
    named = loss_finite & (places[index] != NEVER)
    return Overflow(
        index=jnp.where(named, index, -1),
        layer=jnp.where(named, jnp.stack(layers)[index], -1),
        nonfinite=jnp.where(named, nonfinite[index], 0),
        largest=jnp.where(named, seen.largest[index], jnp.max(seen.largest)),
        loss_scale=jnp.asarray(loss_scale, jnp.float32),
        paths=tuple(paths),
        loss_finite=loss_finite,
    )


def underflow(seen: Seen, sizes: Sequence[int], dtype: Any) -> Underflow:
    """Returns the shares of all parameters together."""
    weights = np.asarray(sizes, np.float32) / max(sum(sizes), 1)
    shares = {name: jnp.sum(getattr(seen, name) * weights) for name in LOST}
    return Underflow(**shares, dtype=_half(dtype).name)


def _power(scale: float) -> str:
    mantissa, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if mantissa == 0.5 else f"{scale:g}"


def _share(which: jax.Array) -> jax.Array:
    # Counted in integers: float32 stops counting at 2**24.
    return jnp.sum(which, dtype=jnp.uint32).astype(jnp.float32) / np.float32(max(which.size, 1))


def _half(dtype: Any) -> np.dtype:
    return dtype if dtype in HALVES else HALVES[0]


def _limits(dtype: Any) -> tuple[np.float32, np.float32]:
    """Returns the largest magnitude that a half dtype rounds to zero, and its least normal one."""
    info = jnp.finfo(_half(dtype))
    return np.float32(float(info.smallest_subnormal) / 2), np.float32(info.smallest_normal)
