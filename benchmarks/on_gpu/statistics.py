"""Ratios of steps that were timed in turns, with their confidence intervals."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


def paired_ratio(times: Sequence[float], base: Sequence[float], seed: int = 0) -> dict[str, Any]:
    """Returns the median of ``times / base``, round by round, and its bootstrap interval.

    Args:
        times: The seconds of one rival in each round.
        base: The seconds of the other rival in the same rounds.
        seed: The seed of the bootstrap.

    Returns:
        ``{"median": ..., "low": ..., "high": ..., "rounds": ...}``.

    Raises:
        ValueError: If the rounds differ in number, or there are none.

    The interval is the percentile interval of the paired ratios: Efron and Tibshirani, An
    Introduction to the Bootstrap, 1993.
    """
    if len(times) != len(base) or not len(times):
        raise ValueError(
            f"times and base must hold the same rounds, at least one: {len(times)}, {len(base)}."
        )
    ratios = np.divide(times, base)
    low = high = float(np.median(ratios))
    if len(ratios) > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # all ratios may be equal
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
    """Returns whether the whole interval of a ratio lies below a bound: surely faster."""
    return ratio["high"] < than


def not_slower(ratio: dict[str, Any], than: float = 1.0) -> bool:
    """Returns whether the interval of a ratio reaches a bound: not shown to be slower."""
    return ratio["low"] <= than


def quotient(ratio: dict[str, Any]) -> str:
    """Returns a ratio with its interval, as tables show it."""
    return f"{ratio['median']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
