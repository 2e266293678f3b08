"""Gradient histograms: the distribution of log2|g| per parameter, and its losses in 16 bits.

They show whether float16 needs a loss scale, and which, as in figure 3 of Micikevicius et al.,
Mixed Precision Training (2018).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.contexts import unchecked
from mpjax._src.core.base.dtypes import FLOAT16, HALVES, DTypeLike, Limits, canonical, limits_of
from mpjax._src.core.base.errors import brief, finite_number
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_floating, pytree_of
from mpjax._src.tools.document import model, plots
from mpjax._src.tools.document.report import Report

# The exponents of float32, subnormals included. Bin 0 counts zeros, the last bin Inf and NaN.
SMALLEST, LARGEST = -149, 127
EXPONENTS = np.arange(SMALLEST, LARGEST + 1)
BINS = len(EXPONENTS) + 2

COLUMNS = ("parameter", "min", "median", "max", "zero", "Inf, NaN", "flushed", "overflow")
LEGEND = "min, median, max: of log2|g|. flushed to zero, overflow: in float16, at scale 1."

FLUSHED = model.WORST(
    "flushed",
    "The share of a parameter's gradients that float16 flushes to zero at scale 1.",
)
OVERFLOWED = model.WORST(
    "overflow",
    "The share of a parameter's gradients that overflows to infinity in float16 at scale 1.",
)
ZEROS = model.Color(
    "zero", "The share of a parameter's gradients that is zero.", unit="share", of_box=max
)

EMPTY = "histogram has no finite nonzero gradient"
RECOUNT = (
    "If they were computed in float16 without a loss scale, it may have flushed them, and no count "
    "of them tells which scale would keep them: count gradients under policy 'float32', or those "
    "of a scaled loss, unscaled."
)


@public("mpjax.reports")
@pytree_of("counts")
@dataclasses.dataclass(frozen=True)
class GradientHistogram(Report):
    """Counts of the entries of each gradient between powers of two. ``print`` it.

    It is a pytree of one array, so it can be carried by `jax.lax.scan` and be part of the state of
    a jitted step.

    Attributes:
        counts: ``uint32[2, parameters, 279]``, the low and high words of 64-bit counts. Along the
            last axis: zeros; ``2**e <= |g| < 2**(e + 1)`` for e from -149 to 127; Inf and NaN.
        paths: The paths of the parameters.
        sizes: The number of entries of each parameter.
        narrow: The paths of the parameters whose first gradients were float16.
    """

    counts: jax.Array
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    narrow: tuple[str, ...] = ()

    _array = ("histogram", "counts", 3)

    def numbers(self) -> np.ndarray:
        """Returns the counts as ``int64[parameters, 279]``. Waits for the device."""
        low, high = np.asarray(self.counts).astype(np.int64)
        return (high << 32) + low

    def rows(self, dtype: DTypeLike = "float16", scale: float = 1.0) -> "list[HistogramRow]":
        """Returns one `HistogramRow` per parameter, and a last one for all parameters together.

        Args:
            dtype: "float16" or "bfloat16", the dtype that would store the gradients.
            scale: The loss scale that would multiply them. It must be a power of two, because the
                bins are powers of two.

        Raises:
            ValueError: If ``dtype`` or ``scale`` is invalid.
        """
        limits, shift = _limits(dtype), exponent_of(scale)
        named = zip(self.paths, self.numbers(), strict=True)
        rows = [_row(path, each, limits, shift) for path, each in named]
        return [*rows, self.total(dtype, scale)]

    def total(self, dtype: DTypeLike = "float16", scale: float = 1.0) -> "HistogramRow":
        """Returns the `HistogramRow` of all parameters together, the last one of ``rows``."""
        return _row("all", self.numbers().sum(0), _limits(dtype), exponent_of(scale))

    def to_dict(self, dtype: DTypeLike = "float16", scale: float = 1.0) -> dict[str, Any]:
        """Returns the rows and the counts of nonempty bins as plain data, ready for JSON."""
        numbers = self.numbers()
        bins = {
            path: {str(e): int(n) for e, n in zip(EXPONENTS, each[1:-1], strict=True) if n}
            for path, each in zip(self.paths, numbers, strict=True)
        }
        return {"rows": [dataclasses.asdict(r) for r in self.rows(dtype, scale)], "log2": bins}

    def logged(self, loss_scale: float = 1.0) -> Mapping[str, float | str]:
        figures: dict[str, float | str] = {}
        for dtype in HALVES:
            row = self.total(dtype, loss_scale)
            figures |= {"zeros": row.zeros, "nonfinite": row.nonfinite}
            for name in ("flushed", "subnormal", "overflowed"):
                figures[f"{dtype.name}/{name}"] = getattr(row, name)
        return figures

    def plot(
        self, path: str | Path | None = None, dtype: DTypeLike = "float16", scale: float = 1.0
    ) -> Any:
        """Plots the distribution of all gradients, and below it that of each parameter's gradient.

        Args:
            path: The path of a PNG file to write, or None.
            dtype: The dtype whose range is marked: "float16" or "bfloat16".
            scale: The loss scale at which the range is marked, a power of two.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: If matplotlib is not installed (the extra ``plot``).
            ValueError: If ``dtype`` or ``scale`` is invalid, or there is nothing to plot.

        Example:
            >>> import jax.numpy as jnp, mpjax
            >>> histogram = mpjax.debug.gradient_histogram({"w": jnp.array([1e-9, 1e-3, 0.5])})
            >>> figure = histogram.plot(scale=2.0**10)
        """
        _limits(dtype)
        return plots.plot_gradient_histogram(self, EXPONENTS, path, dtype, exponent_of(scale))

    def document(self) -> model.Document:
        rows = self.rows()
        whole = rows[-1]
        return model.Document(
            "Gradient magnitudes",
            f"float16 flushes {whole.flushed:.2%} of the gradients to zero without a loss "
            f"scale; {whole.zeros:.2%} are zero already, {whole.nonfinite:.2%} are Inf or NaN.",
            tables=(
                model.Table(
                    "By parameter", COLUMNS, tuple(map(_cells, rows)), COLUMNS[:1], folded=0
                ),
            ),
            notes=(LEGEND,),
            drawing=lambda: self._drawing(rows[:-1]),
        )

    def _drawing(self, rows: "Sequence[HistogramRow]") -> model.Drawing:
        counts = self.numbers().sum(0)[1:-1]
        used = np.flatnonzero(counts)
        inside = range(used[0], used[-1] + 1) if used.size else ()
        bins = tuple((int(EXPONENTS[i]), int(counts[i])) for i in inside)
        limits = limits_of(FLOAT16)
        marks = (
            (limits.flush, "float16 flushes below"),
            (limits.overflow, "float16 overflows from here"),
        )
        whole = model.Histogram("All gradients, by magnitude", bins, "log2|g|", marks)
        return model.Drawing(
            histograms=(whole,) if bins else (),
            operations=tuple(map(_parameter, rows)),
            colors=(FLUSHED, ZEROS, OVERFLOWED),
            things="parameters",
        )


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class HistogramRow:
    """The gradients of one parameter. Shares are of all counted entries, from 0 to 1.

    Attributes:
        path: The path of the parameter.
        entries: The number of counted entries, over all steps.
        zeros: The share that is exactly zero.
        nonfinite: The share that is Inf or NaN.
        smallest: The least exponent e with ``2**e <= |g| < 2**(e + 1)``, of finite nonzero entries;
            None if there are none.
        median: The median exponent of these entries, or None.
        largest: The greatest exponent of these entries, or None.
        flushed: The share that the 16-bit dtype flushes to zero at the given scale.
        subnormal: The share that is subnormal in the 16-bit dtype, with fewer bits.
        overflowed: The share that overflows to infinity in the 16-bit dtype.
    """

    path: str
    entries: int
    zeros: float
    nonfinite: float
    smallest: int | None
    median: int | None
    largest: int | None
    flushed: float
    subnormal: float
    overflowed: float


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class LossScaleAdvice(Report):
    """The result of `recommend_loss_scale`. ``print`` it.

    Attributes:
        loss_scale: The recommended scale, a power of two.
        flushed_without: The share of entries that the 16-bit dtype flushes to zero without a scale.
        flushed_with: The share that it flushes to zero with this scale.
        reasons: The reasons, as sentences.
    """

    loss_scale: float
    flushed_without: float
    flushed_with: float
    reasons: tuple[str, ...]

    def document(self) -> model.Document:
        scale = f"loss scale 2^{int(math.log2(self.loss_scale))} = {self.loss_scale:g}"
        return model.Document("A loss scale", scale, self.reasons)


@unchecked()
def gradient_histogram(grads: Any, histogram: GradientHistogram | None = None) -> GradientHistogram:
    """Counts the entries of gradients by powers of two. Works inside jit.

    Args:
        grads: A pytree of unscaled gradients. Its floating leaves are counted.
        histogram: The histogram of earlier steps, to add to; None for the first step. To start a
            jitted loop with an empty histogram, use
            ``jax.tree.map(jnp.zeros_like, gradient_histogram(params))``.

    Returns:
        A `GradientHistogram`.

    Raises:
        TypeError: If ``histogram`` is not a `GradientHistogram`.
        ValueError: If ``grads`` has no floating leaf, or ``histogram`` belongs to other parameters.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> histogram = mpjax.debug.gradient_histogram({"w": jnp.array([0.0, 1e-9, 0.5, jnp.inf])})
        >>> row = histogram.rows("float16")[0]
        >>> row.zeros, row.nonfinite, row.flushed, row.largest
        (0.25, 0.25, 0.25, -1)
    """
    pairs = [
        (path_of(keys), leaf)
        for keys, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if is_floating(leaf)
    ]
    if not pairs:
        raise ValueError(
            f"grads={brief(grads)} has no floating array leaf: there is nothing to count."
        )
    paths, leaves = zip(*pairs, strict=True)
    low = jnp.stack([_count(jnp.asarray(leaf)) for leaf in leaves])
    sizes = tuple(int(np.prod(np.shape(leaf))) for leaf in leaves)
    if histogram is None:
        narrow = tuple(path for path, leaf in pairs if leaf.dtype == FLOAT16)
        return GradientHistogram(jnp.stack([low, jnp.zeros_like(low)]), paths, sizes, narrow)
    check_histogram(histogram)
    if (histogram.paths, histogram.sizes) != (paths, sizes):
        raise ValueError(
            f"histogram belongs to other parameters than grads: {histogram.paths} with "
            f"{histogram.sizes} entries, not {paths} with {sizes}. Start a new one."
        )
    # `narrow` stays that of the first gradients: a loop's carry may not change its structure.
    return dataclasses.replace(histogram, counts=_added(histogram.counts, low))


def _added(counts: jax.Array, low: jax.Array) -> jax.Array:
    """Adds to counts of 64 bits, which are kept as two of 32: JAX has no wider ones by default."""
    total = counts[0] + low
    carry = (total < low).astype(jnp.uint32)  # unsigned sums wrap around
    return jnp.stack([total, counts[1] + carry])


def recommend_loss_scale(
    histogram: GradientHistogram, dtype: DTypeLike = "float16", headroom: float = 16.0
) -> LossScaleAdvice:
    """Returns the largest power of two by which gradients can safely be multiplied.

    Args:
        histogram: The histogram of unscaled gradients, preferably over many steps.
        dtype: "float16" or "bfloat16".
        headroom: A factor, 1 or more, by which later gradients and cotangents inside the backward
            pass may exceed the largest gradient in the histogram.

    Returns:
        A `LossScaleAdvice`.

    Raises:
        TypeError: If ``histogram`` is not a `GradientHistogram`.
        ValueError: If an argument is invalid, or no gradient is finite and nonzero.

    Example:
        >>> import jax.numpy as jnp, mpjax
        >>> histogram = mpjax.debug.gradient_histogram(jnp.array([1e-8, 1e-3]))
        >>> mpjax.debug.recommend_loss_scale(histogram).loss_scale
        2097152.0
    """
    check_histogram(histogram)
    if (finite_number(headroom) or 0.0) < 1:
        raise ValueError(f"headroom={brief(headroom)} must be a number, 1 or more.")
    limits = _limits(dtype)
    whole = histogram.total(dtype)
    if whole.largest is None:
        flushed = f" All are zero. {RECOUNT}" if whole.zeros == 1 else ""
        raise ValueError(f"{EMPTY}, so there is nothing to scale.{flushed}")
    name = canonical(dtype, "dtype").name
    reserve = math.ceil(math.log2(headroom))
    # Entries at 2**e are less than 2**(e + 1), which must not reach the overflow.
    power = limits.overflow - 1 - reserve - whole.largest
    reasons = [
        f"The largest gradient is at 2^{whole.largest}; {name} overflows at 2^{limits.overflow}, "
        f"and a factor of {headroom:g} is left as headroom."
    ]
    if whole.smallest is not None and whole.smallest >= limits.normal and power >= 0:
        which = "No gradient that is not zero" if whole.zeros else "No gradient"
        reasons.append(f"{which} is lost in {name} without a scale: 1 would be enough.")
    if whole.zeros:
        reasons.append(f"{whole.zeros:.2%} of the entries are zero already. {RECOUNT}")
    if histogram.narrow:
        reasons.append(
            f"{', '.join(histogram.narrow[:3])} came in float16, which has no number below 2^-24: "
            "count gradients before they are cast to it."
        )
    # Within these limits, the scale and its inverse are normal float32 numbers.
    scale = 2.0 ** max(-126, min(power, 126))
    scaled = histogram.total(dtype, scale)
    reasons.append(
        f"{name} flushes {whole.flushed:.2%} of the entries to zero without a scale, "
        f"{scaled.flushed:.2%} with this one."
    )
    if whole.nonfinite:
        reasons.append(
            f"{whole.nonfinite:.2%} of the entries are Inf or NaN. They were left out: no loss "
            "scale helps if a gradient is non-finite in float32."
        )
    return LossScaleAdvice(scale, whole.flushed, scaled.flushed, tuple(reasons))


def check_histogram(histogram: Any) -> None:
    """Raises a TypeError if an argument is not a `GradientHistogram`."""
    if not isinstance(histogram, GradientHistogram):
        raise TypeError(
            f"histogram={brief(histogram)} must be a GradientHistogram, which "
            "mpjax.debug.gradient_histogram(grads) returns."
        )


# ---- one leaf, one row --------------------------------------------------------------------------


def _count(leaf: jax.Array) -> jax.Array:
    """Counts the entries of an array by their exponents, from their bits."""
    # A device that flushes subnormal numbers would count them as zeros; their bits stay.
    bits = jax.lax.bitcast_convert_type(jnp.abs(leaf.astype(jnp.float32)), jnp.uint32).ravel()
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    subnormal = 32 - jax.lax.clz(mantissa)  # 0 if the value is zero
    # The subnormal numbers have bins 1 to 23, each biased exponent the next one, and 255, which is
    # Inf and NaN, the last.
    place = jnp.where(exponent > 0, exponent + 23, subnormal).astype(jnp.int32)
    return jnp.zeros(BINS, jnp.uint32).at[place].add(jnp.uint32(1))


def _limits(dtype: DTypeLike) -> Limits:
    half = canonical(dtype, "dtype")
    if half not in HALVES:
        raise ValueError(f"dtype={brief(dtype)} must be 'float16' or 'bfloat16'.")
    return limits_of(half)


def exponent_of(scale: float) -> int:
    mantissa, exponent = math.frexp(finite_number(scale) or 0.0)
    if mantissa != 0.5:
        raise ValueError(
            f"scale={brief(scale)} must be a power of two such as 2.0**16, because the histogram "
            "counts by powers of two."
        )
    return exponent - 1


def _cells(row: HistogramRow) -> tuple[str, ...]:
    ends = ("-" if e is None else str(e) for e in (row.smallest, row.median, row.largest))
    parts = (f"{x:.2%}" for x in (row.zeros, row.nonfinite, row.flushed, row.overflowed))
    return (row.path, *ends, *parts)


def _parameter(row: HistogramRow) -> model.Operation:
    scope, _, label = row.path.rpartition("/")
    return model.Operation(
        label=label or "gradient",
        scope=scope or "all parameters",
        facts=(*zip(COLUMNS, _cells(row), strict=True), ("entries", f"{row.entries:,}")),
        colors={"flushed": row.flushed, "zero": row.zeros, "overflow": row.overflowed},
    )


def _row(path: str, numbers: np.ndarray, limits: Limits, shift: int) -> HistogramRow:
    finite = numbers[1:-1]
    entries = int(numbers.sum())
    used = np.flatnonzero(finite)
    middle = np.searchsorted(np.cumsum(finite), (finite.sum() + 1) // 2)
    ends = (used[0], middle, used[-1]) if used.size else ()
    exponents: list[int | None] = [int(EXPONENTS[i]) for i in ends] or [None, None, None]
    smallest, median, largest = exponents
    at = EXPONENTS + shift

    def share(counted: np.ndarray) -> float:
        return float(counted.sum() / max(entries, 1))

    return HistogramRow(
        path=path,
        entries=entries,
        zeros=share(numbers[0]),
        nonfinite=share(numbers[-1]),
        smallest=smallest,
        median=median,
        largest=largest,
        flushed=share(finite[at < limits.flush]),
        subnormal=share(finite[(at >= limits.flush) & (at < limits.normal)]),
        overflowed=share(finite[at >= limits.overflow]),
    )
