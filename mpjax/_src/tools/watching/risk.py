"""The rules that decide whether a tensor is at risk, from its statistics now and before.

1. Overflowed ("gone"): it has NaN, or Inf together with values near the dtype's largest number, or
   nothing finite. (An Inf without large values belongs to a mask.)
2. Near overflow ("edge"): its headroom is less than its largest rise between two samples, or less
   than one power of two, by which a loss scale grows. The next sample may overflow.
3. Growing: the regression line of the logarithms of its largest magnitudes reaches the dtype's
   largest number. It is extrapolated no further ahead than the samples reach back.
4. Losing precision ("fading"): the rounding noise is more than eight times that of the dtype's
   normal range. Three bits are lost, because the values are subnormal or flushed.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import FLOAT16, canonical
from mpjax._src.core.base.lines import short
from mpjax._src.core.base.public import public
from mpjax._src.tools.watching.figures import NEAR

LEAST_MARGIN = 1.0  # rule 2, in powers of two
ENOUGH = 3  # rule 3, in samples, because two points are always on a line
BITS_LOST = 3  # rule 4


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Risk:
    """A risk of a watched tensor.

    Attributes:
        kind: "gone" (NaN or Inf, printed as "overflowed"), "edge" (may overflow by the next sample,
            printed as "near overflow"), "growing" (grows toward overflow) or "fading" (too small
            for its dtype, printed as "losing precision").
        urgency: A number to sort by; the least is the most urgent.
        text: One sentence on what was measured, and one on what to do.
        steps_left: For "growing", the number of steps until it overflows at the present rate; for
            "edge" 0; else None.
    """

    kind: str
    urgency: float
    text: str
    steps_left: float | None = None


def growth_of(steps: Sequence[int], past: Sequence[float]) -> float | None:
    """Returns the growth of a magnitude in powers of two per step, or None for too few samples."""
    seen = [(s, math.log2(x)) for s, x in zip(steps, past, strict=False) if x > 0]
    if len(seen) < ENOUGH:
        return None
    at, logs = np.asarray(seen, np.float64).T
    # Centered, the slope of the regression line is one quotient.
    at = at - at.mean()
    return float(at @ (logs - logs.mean()) / (at @ at))


def usual_noise(dtype: Any) -> float:
    """Returns the largest relative rounding noise in a dtype's normal range."""
    # An error that is uniform over one unit in the last place has a standard deviation of
    # 1 / sqrt(12) of it, and the unit is the largest, relative to the number, at a power of two.
    return float(jnp.finfo(dtype).eps) / math.sqrt(12)


def risk_of(row: Any, steps: Sequence[int], past: Sequence[float]) -> Risk | None:
    """Returns the risk of a `PrecisionRow` by the first rule that applies, or None."""
    if gone := _gone(row):
        return gone
    if row.headroom is None:  # nothing in it is finite but zeros
        return None
    return _edge(row, past) or _growing(row, steps) or _fading(row)


# Urgencies sort the rules: overflowed has -1, near overflow its headroom (a few powers of two),
# growing from 100 on, losing precision up to 200.


def _gone(row: Any) -> Risk | None:
    near = row.headroom is not None and row.headroom < NEAR
    if not (row.nan or (row.overflowed and (near or row.overflowed == 1))):
        return None
    entries = f"{row.overflowed:.2%} Inf{' and NaN' if row.nan else ''}"
    return Risk("gone", -1, f"{_name(row)} has {entries}. {_smaller(row)}")


def _edge(row: Any, past: Sequence[float]) -> Risk | None:
    rises = [math.log2(b / a) for a, b in itertools.pairwise(past) if a > 0 and b > 0]
    margin = max([LEAST_MARGIN, *rises])
    if row.headroom >= margin:
        return None
    why = "a loss scale grows by one" if row.direction == "backward" else "less than one is a risk"
    if margin > LEAST_MARGIN:
        why = f"it rose by {margin:.1f} between two samples"
    room = f"{max(row.headroom, 0):.1f} powers of two below {_end_of(row)}"
    seen = f"{_name(row)} reaches {_largest(row)}, {room}, and {why}"
    return Risk("edge", row.headroom, f"{seen}. {_smaller(row)}", 0.0)


def _growing(row: Any, steps: Sequence[int]) -> Risk | None:
    span = steps[-1] - steps[0] if len(steps) > 1 else 0
    if not (row.growth and row.growth > 0 and row.headroom / row.growth <= span):
        return None
    left = row.headroom / row.growth
    return Risk(
        "growing",
        100 + left / span,
        f"{_name(row)} reaches {_largest(row)} and grew by 2^{row.growth * span:.1f} in {span} "
        f"steps. At this rate it passes {_end_of(row)} in about {max(1, round(left))} steps. "
        f"{_smaller(row)}",
        left,
    )


def _fading(row: Any) -> Risk | None:
    usual = usual_noise(canonical(row.dtype, "dtype"))
    if row.noise is None or row.noise <= 2**BITS_LOST * usual:
        return None
    bits = math.log2(row.noise / usual)
    seen = f"{_name(row)} is so small that rounding loses {bits:.0f} more bits than usual"
    shares = ((row.flushed, "flushed"), (row.subnormal, "small"))
    lost = [f"{share:.1%} {what}" for share, what in shares if share]
    counts = f" ({', '.join(lost)})" if lost else ""
    return Risk("fading", 200 - bits, f"{seen}{counts}. {_larger(row)}")


def _largest(row: Any) -> str:
    return f"2^{math.log2(row.largest):.1f}"


def _end_of(row: Any) -> str:
    """Names the largest number of a tensor's dtype."""
    dtype = canonical(row.dtype, "dtype")
    high = float(jnp.finfo(dtype).max)
    # 65504 is well known; 3.4e+38 is shorter than its digits.
    return f"{row.dtype}'s {high:g}" if dtype == FLOAT16 else f"{row.dtype}'s {high:.1e}"


def _name(row: Any) -> str:
    at = f" ({short(row.source)})" if row.source and row.scope else ""
    turn = "" if row.turn is None else f", turn {row.turn},"
    return f"{row.name}{at}{turn}"


def _smaller(row: Any) -> str:
    if row.direction == "backward" and row.dtype == "float16":
        return f"Use a lower loss scale (a dynamic one falls by itself), or {_wider(row)}."
    other = " or bfloat16" if row.dtype == "float16" else ""
    return f"Use float32{other} for it: {_wider(row)}."


def _larger(row: Any) -> str:
    if row.direction == "backward":
        return f"Raise the loss scale, see mpjax.debug.recommend_loss_scale, or {_wider(row)}."
    return f"Use float32 for it: {_wider(row)}."


def _wider(row: Any) -> str:
    if not row.scope:
        return 'mpjax.precision("float32") around that line'
    pattern = "*" + "/".join(row.scope.split("/")[-2:]) + "*"
    return f'policy.override({{"{pattern}": "float32"}})'
