"""Ratios of steps that were timed in turn, and how far they can be trusted."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


def paired_ratio(times: Sequence[float], base: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Returns the median of ``times / base``, round by round, and its bootstrap interval.

    Args:
        times: Seconds of one rival, a round each.
        base: Seconds of the other in the same rounds.
        seed: Of the bootstrap's draws.

    Returns:
        ``{"median": ..., "low": ..., "high": ..., "rounds": ...}``.

    Raises:
        ValueError: If the rounds differ in number, or there are none.

    Efron and Tibshirani, An Introduction to the Bootstrap, 1993: percentiles, of pairs.
    """
    if len(times) != len(base) or not len(times):
        raise ValueError(
            f"times and base must hold the same rounds, at least one: {len(times)}, {len(base)}."
        )
    ratios = np.divide(times, base)
    low = high = float(np.median(ratios))
    if len(ratios) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of ratios that are all the same
            found = stats.bootstrap(
                (ratios,),
                np.median,
                confidence_level=CONFIDENCE,
                n_resamples=2000,
                method="percentile",
                rng=np.random.default_rng(seed),
            ).confidence_interval
        low, high = float(found.low), float(found.high)
    return {"median": float(np.median(ratios)), "low": low, "high": high, "rounds": len(ratios)}


def faster(ratio: dict[str, Any], than: float = 1.0) -> bool:
    """Tells whether a ratio's whole interval lies below a bound: less time than the other takes."""
    return ratio["high"] < than


def not_slower(ratio: dict[str, Any], than: float = 1.0) -> bool:
    """Tells whether a ratio's interval reaches a bound: that it lies above has not been shown."""
    return ratio["low"] <= than


def quotient(ratio: dict[str, Any]) -> str:
    """Returns a ratio with its interval, as a table shows it."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
