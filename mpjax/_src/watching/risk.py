"""The rules that decide whether a tensor is at risk, from its figures now and in earlier samples.

1. Gone: it holds NaN, or Inf together with values near the dtype's largest number, or nothing
   finite. (An Inf without large values belongs to a mask.)
2. Edge: its headroom is less than its largest rise between two samples, or less than one power of
   two, by which a loss scale grows. The next sample may overflow.
3. Growing: the regression line of the logarithms of its largest magnitudes reaches the dtype's
   largest number. It is extrapolated no further ahead than the samples reach back.
4. Fading: the rounding noise is more than eight times that of the dtype's normal range. Three bits
   are lost, because the values are subnormal or flushed.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._src.base.dtypes import FLOAT16, canonical
from mpjax._src.base.lines import short
from mpjax._src.base.public import public
from mpjax._src.watching.figures import NEAR

LEAST_MARGIN = 1.0  # rule 2, in powers of two
ENOUGH = 3  # rule 3, in samples, because two points are always on a line
BITS_LOST = 3  # rule 4


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Risk:
    """A risk of a watched tensor.

    Attributes:
        kind: "gone" (NaN or Inf), "edge" (may overflow by the next sample), "growing" (grows
            towards overflow) or "fading" (too small for its dtype).
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
    """Returns the growth of a magnitude in powers of two per step, or None for too few samples.

    Args:
        steps: The numbers of the sampled steps.
        past: The largest magnitudes in these steps.
    """
    seen = [(s, math.log2(x)) for s, x in zip(steps, past, strict=False) if x > 0]
    if len(seen) < ENOUGH:
        return None
    at, logs = np.asarray(seen, np.float64).T
    at = at - at.mean()
    return float(at @ (logs - logs.mean()) / (at @ at))


def usual_noise(dtype: Any) -> float:
    """Returns the largest relative rounding noise in a dtype's normal range."""
    return float(jnp.finfo(dtype).eps) / math.sqrt(12)


def risk_of(row: Any, steps: Sequence[int], past: Sequence[float]) -> Risk | None:
    """Returns the risk of a `PrecisionRow` by the first rule that applies, or None."""
    dtype = canonical(row.dtype, "dtype")
    high = float(jnp.finfo(dtype).max)
    end = f"{row.dtype}'s {high:g}" if dtype == FLOAT16 else f"{row.dtype}'s {high:.1e}"
    name = _name(row)
    room = math.inf if row.headroom is None else row.headroom
    if row.nan or (row.overflowed and (room < NEAR or row.overflowed == 1)):
        found = f"{row.overflowed:.2%} Inf{' and NaN' if row.nan else ''}"
        return Risk("gone", -1, f"{name} holds {found}. {_smaller(row)}")
    if row.headroom is None:
        return None
    largest = f"2^{math.log2(row.largest):.1f}"
    rises = [math.log2(b / a) for a, b in itertools.pairwise(past) if a > 0 and b > 0]
    margin = max([LEAST_MARGIN, *rises])
    if room < margin:
        why = (
            f"it rose by {margin:.1f} between two samples"
            if margin > LEAST_MARGIN
            else (
                "a loss scale grows by one"
                if row.direction == "backward"
                else "less than one is a risk"
            )
        )
        seen = f"{name} reaches {largest}, {max(room, 0):.1f} powers of two below {end}, and {why}"
        return Risk("edge", room, f"{seen}. {_smaller(row)}", 0.0)
    span = steps[-1] - steps[0] if len(steps) > 1 else 0
    if row.growth and row.growth > 0 and room / row.growth <= span:
        left = room / row.growth
        return Risk(
            "growing",
            100 + left / span,
            f"{name} reaches {largest} and grew by 2^{row.growth * span:.1f} in {span} steps. At "
            f"this rate it passes {end} in about {max(1, round(left))} steps. {_smaller(row)}",
            left,
        )
    if row.noise is not None and row.noise > 2**BITS_LOST * usual_noise(dtype):
        bits = math.log2(row.noise / usual_noise(dtype))
        seen = f"{name} is so small that rounding takes {bits:.0f} more bits than usual"
        lost = [
            f"{x:.1%} {w}" for x, w in ((row.flushed, "flushed"), (row.subnormal, "small")) if x
        ]
        counts = f" ({', '.join(lost)})" if lost else ""
        return Risk("fading", 200 - bits, f"{seen}{counts}. {_larger(row)}")
    return None


def _name(row: Any) -> str:
    at = f" ({short(row.source)})" if row.source and row.scope else ""
    turn = "" if row.turn is None else f", turn {row.turn},"
    return f"{row.name}{at}{turn}"


def _smaller(row: Any) -> str:
    if row.direction == "backward" and row.dtype == "float16":
        return f"Use a lower loss scale (a dynamic one falls by itself), or {_wider(row)}."
    other = " or bfloat16" if row.dtype == "float16" else ""
    return f"Keep it in float32{other}: {_wider(row)}."


def _larger(row: Any) -> str:
    if row.direction == "backward":
        return f"Raise the loss scale, see mpjax.debug.recommend_loss_scale, or {_wider(row)}."
    return f"Keep it in float32: {_wider(row)}."


def _wider(row: Any) -> str:
    if not row.scope:
        return 'mpjax.precision("float32") around that line'
    pattern = "*" + "/".join(row.scope.split("/")[-2:]) + "*"
    return f'policy.override({{"{pattern}": "float32"}})'
