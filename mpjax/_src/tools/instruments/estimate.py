"""Estimates the error of a set of float32 places from all measurements.

To first order, the error of a result is a sum of vectors, one for each place in 16 bits. Two
vectors may cancel; if they are independent, their squares add up. Moving one place changes the
rounding in others, so a part of each vector is new in every run. The errors are therefore modeled
as a Gaussian process over sets of places. The variance of each place starts at its suspected share,
and is fitted by expectation maximization (relevance vectors; Tipping, 2001).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

# The shares of a place's variance that may be new in each run. On small networks it was a third.
FRESH = (0.05, 0.4)

# A vector counts as this many independent entries, because the entries of a gradient correlate.
ENTRIES = 12

# The weight of the suspected variance, in entries.
TRUST = 3.0

# The iterations; what keeps the covariance of equal runs invertible, relative and absolute.
SWEEPS, ROUNDING, LEAST = 15, 1e-9, 1e-30


class Estimate:
    """The distribution of one result's error, relative to the tolerance."""

    def __init__(self, left: np.ndarray, errors: np.ndarray, suspected: np.ndarray):
        """
        Args:
            left: Which terms each run left in 16 bits, ``(runs, terms)``.
            errors: What came out, ``(runs, entries)``.
            suspected: How much of the squared error is expected of each term, 1 of all.
        """
        self._left, self._errors = left, errors
        self._products = errors @ errors.T
        self.entries = min(errors.shape[1], ENTRIES)
        start = suspected * max(self._products[0, 0], LEAST)
        fits = [(*self._fitted(start, fresh), fresh) for fresh in FRESH]
        _, variance, fresh = max(fits, key=lambda fit: fit[0])
        mean, covariance = self._terms(variance, fresh)
        self._means = mean @ mean.T
        self._spread = covariance + np.diag(fresh * variance)

    def expected(self, left: np.ndarray) -> np.ndarray:
        """Returns the expected square of the error of sets."""
        return _forms(self._means + self._spread, left.astype(np.float32))

    def chance(self, left: np.ndarray) -> np.ndarray:
        """Returns the probability of sets that the norm of the error is at most 1."""
        # The squares of `entries` Gaussians of the variance spread / entries are added.
        mean = np.maximum(_forms(self._means, left), 0)
        spread = np.maximum(_forms(self._spread, left), 1e-12 * (1 + mean))
        return _chi_squared(self.entries / spread, self.entries, self.entries * mean / spread)

    def _fitted(self, start: np.ndarray, fresh: float) -> tuple[float, np.ndarray]:
        """Returns the logarithm of the evidence, and the variance of each term."""
        variance = start
        for _ in range(SWEEPS):
            mean, covariance = self._terms(variance, fresh)
            # What is new in each run adds its share, which the runs together cannot tell.
            seen = ((mean**2).sum(1) + np.diag(covariance)) / (1 - fresh)
            variance = (TRUST * start + self.entries * seen) / (TRUST + self.entries)
        kernel = self._kernel(variance, fresh)
        fitting = np.trace(np.linalg.solve(kernel, self._products))
        return -float(np.linalg.slogdet(kernel)[1] + fitting), variance

    def _kernel(self, variance: np.ndarray, fresh: float) -> np.ndarray:
        kernel = (self._left * ((1 - fresh) * variance)) @ self._left.T
        alone = fresh * (self._left @ variance)
        kernel[np.diag_indices(len(kernel))] += alone + ROUNDING * np.diag(kernel) + LEAST
        return kernel

    def _terms(self, variance: np.ndarray, fresh: float) -> tuple[np.ndarray, np.ndarray]:
        """Returns the mean of each term, and the covariance of terms."""
        shared = self._left * ((1 - fresh) * variance)
        weights = np.linalg.solve(self._kernel(variance, fresh), shared)
        covariance = np.diag((1 - fresh) * variance) - shared.T @ weights
        return weights.T @ self._errors, covariance


def _forms(form: np.ndarray, left: np.ndarray) -> np.ndarray:
    return ((left @ form.astype(left.dtype)) * left).sum(1)


def _chi_squared(x: np.ndarray, degrees: int, offset: np.ndarray) -> np.ndarray:
    """Returns the distribution function of the noncentral chi-squared (Sankaran, 1959)."""
    from scipy.special import ndtr  # here, because it imports slowly

    if degrees == 1:  # it is exact there
        near, far = np.sqrt(x) - np.sqrt(offset), np.sqrt(x) + np.sqrt(offset)
        return ndtr(near) - ndtr(-far)
    mean: Any = degrees + offset
    power = 1 - 2 * mean * (degrees + 3 * offset) / (3 * (degrees + 2 * offset) ** 2)
    p = (degrees + 2 * offset) / mean**2
    m = (power - 1) * (1 - 3 * power)
    center = 1 + power * p * (power - 1 - 0.5 * (2 - power) * m * p)
    width = power * np.sqrt(2 * p) * (1 + 0.5 * m * p)
    return ndtr(((x / mean) ** power - center) / width)


def chances(estimates: Sequence[Estimate], left: np.ndarray) -> np.ndarray:
    """Returns the probability that sets are enough: that of the worst result of each set, because
    the errors of results correlate."""
    every = [estimate.chance(left) for estimate in estimates]
    return np.min(every, axis=0) if every else np.ones(len(left))


def excess(estimates: Sequence[Estimate], left: np.ndarray) -> np.ndarray:
    """Returns by how much the results of sets are expected to exceed the tolerance."""
    every = [np.log(np.maximum(estimate.expected(left), 1)) for estimate in estimates]
    return np.sum(every, axis=0) if every else np.zeros(len(left))
