"""Which places must be float32: as few as are enough, found in few measurements.

The roundings of different places are independent of each other, so their squared errors add up:
what a run measures is a sum over the places that were left in half. How much of it is each place's
is fitted to all that was measured, beginning with what is suspected, by multiplicative algebraic
reconstruction (Gordon, Bender and Herman, 1970). The fewest places that are enough by the fit are
tried next, and what comes out is one more measurement.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

# So many times the tolerance, an error is beyond measure.
BEYOND = 1e9

SWEEPS, LEAST = 10, 1e-30

# What is expected of all places that are not suspected, and what no place takes away.
UNSUSPECTED, NOBODY = 1e-3, 1e-6

# So many failures in a row end the search.
THOROUGH = 8

# What is left of the allowed squared error, by the fit, after each failure that ends in no set.
CAUTION = 0.7

# After so many failures all places together are tried: what remains then is nobody's.
PATIENCE = 4


class Search:
    """Measures sets of places, and remembers what is enough.

    Attributes:
        best: The smallest set known to be enough, or None.
        least: Whether leaving out any one of its places was found to be too much.
        tried: The largest error of each set that was measured.
    """

    def __init__(
        self,
        measure: Callable[[frozenset[int]], Sequence[float]],
        suspicion: Callable[[], Sequence[float]],
        costs: Sequence[Any],
        tolerance: float,
        inside: Sequence[Sequence[int]] | None = None,
    ):
        """
        Args:
            measure: Returns the error of each result with a set of places in float32. What it
                raises ends the search.
            suspicion: Returns how much of the squared error is expected of each place, in any unit;
                not called before it is needed.
            costs: What moving each place costs, numbers or tuples: of as many places, the cheaper
                ones are taken.
            tolerance: What no error may exceed.
            inside: Of each place, the others that lie within it: they are in float32 with it.
        """
        self._measure, self.tolerance = measure, tolerance
        self.count = len(costs)
        order = sorted(range(self.count), key=lambda i: costs[i])
        self._cost = np.argsort(order)  # the cheapest place has 0
        self.tried: dict[frozenset[int], float] = {}
        self.best: frozenset[int] | None = None
        self.least = False
        self.streak = 0  # of sets that were tried since the best one, and are none
        self._seen: list[tuple[np.ndarray, np.ndarray]] = []  # what was in half, squared errors
        self._inside = np.eye(self.count, dtype=bool)
        for place, others in enumerate(inside or ()):
            self._inside[place, list(others)] = True
        self._suspicion = suspicion
        self._shares: Any = None

    def run(self) -> None:
        """Searches until no smaller set is in sight, or a measurement is refused."""
        everything = frozenset(range(self.count))
        candidate: frozenset[int] | None = frozenset()
        while candidate is not None and self.streak < THOROUGH:
            before = self.best
            if self.is_enough(candidate) and not candidate:
                self.least = True
                return
            if self.best is None and len(self.tried) == PATIENCE and not self.is_enough(everything):
                return
            self.streak = self.streak + 1 if self.best == before else 0
            candidate = self._candidate()
        self.least = self.best is not None and not any(map(self._may_do, self._parts()))

    def is_enough(self, places: frozenset[int]) -> bool:
        """Tells whether a set of places meets the tolerance, measuring it if need be."""
        if places not in self.tried:
            errors = np.asarray(self._measure(places), float)
            errors = np.where(errors < BEYOND * self.tolerance, errors, BEYOND * self.tolerance)
            self.tried[places] = float(errors.max(initial=0))
            left = np.array([i not in places for i in range(self.count)] + [True])
            self._seen.append((left, (errors / self.tolerance) ** 2))
        enough = self.tried[places] <= self.tolerance
        if enough and (self.best is None or self._rank(places) < self._rank(self.best)):
            self.best = places
        return enough

    # ---- what to try next -----------------------------------------------------------------------

    def _candidate(self) -> frozenset[int] | None:
        """Returns the next set to try, or None where none is worth it."""
        self._fit()
        if self.best is None or len(self.best) == self.count:
            # What failed tells that the fit expects too little: leave it more and more room.
            found = self._fewest(CAUTION**self.streak)
            if self.best is None or found not in self.tried:
                return None if found in self.tried else found
        found = self._fewest(1.0)
        if len(found) < len(self.best):
            return found
        # Is each of its places needed? Those first that are least so by the fit.
        part = next(filter(self._may_do, self._parts()), None)
        return part or next((s for s in self._probes() if s not in self.tried), None)

    def _parts(self) -> list[frozenset[int]]:
        """Returns the best set without one of its places, the least needed one first."""
        best = self.best or frozenset()
        order = sorted(best, key=lambda i: self._shares[i].max())
        return [best - self._around(i) for i in order]

    def _around(self, place: int) -> frozenset[int]:
        """Returns the places that a place lies within, itself too."""
        return frozenset(np.flatnonzero(self._inside[:, place]).tolist())

    def _probes(self) -> Iterator[frozenset[int]]:
        """Yields sets that tell how large the shares of the places outside the best set are.

        Each takes those in whose number a bit is set. Nothing that they tell can make the set much
        smaller, unless three of its places could be exchanged for one outside.
        """
        best = self.best or frozenset()
        least = sorted(best, key=lambda i: self._shares[i].max())[:THOROUGH]
        threes = itertools.combinations(least, 3)
        if any((self._shares[list(three)].sum(0) <= 1).all() for three in threes):
            outside = [i for i in range(self.count) if i not in best]
            for bit in range(len(outside).bit_length()):
                some = (i for n, i in enumerate(outside, 1) if n >> bit & 1)
                yield self._closed(best.union(some))

    def _closed(self, places: frozenset[int]) -> frozenset[int]:
        """Returns places with all that lie within them."""
        return frozenset(np.flatnonzero(self._inside[list(places)].any(0)).tolist())

    def _may_do(self, places: frozenset[int]) -> bool:
        """Tells whether a set is no part of one that failed: less float32 does not do better."""
        return not any(places <= other for other in self._failed())

    def _failed(self) -> Iterator[frozenset[int]]:
        return (places for places, error in self.tried.items() if error > self.tolerance)

    def _fewest(self, allowed: float) -> frozenset[int]:
        """Returns as few places as are enough by the fit, the cheaper ones of as many."""
        shares = self._shares / allowed
        need, rest = shares.max(1), shares[:-1]
        failed = list(self._failed())
        left = shares.sum(0)
        places: frozenset[int] = frozenset()
        while len(places) < self.count:
            fresh = self._inside.copy()
            fresh[:, list(places)] = False
            gain = np.minimum(fresh @ rest, np.maximum(left - 1, 0)).sum(1)
            if (left <= 1).all():
                same = next((f for f in failed if places <= f), None)
                if same is None:
                    break
                gain = fresh @ rest.sum(1)  # enough by the fit, and yet it failed
                gain[~np.delete(fresh, list(same), 1).any(1)] = -1
            count = fresh.sum(1)
            worth = np.where(count, gain / np.maximum(count, 1), -1)
            chosen = np.lexsort((self._cost, -worth, count == 0))[0]
            places |= frozenset(np.flatnonzero(fresh[chosen]).tolist())
            left = left - fresh[chosen] @ rest
        for place in sorted(places, key=lambda i: (need[i], -self._cost[i])):
            gone = self._around(place) & places
            again = left + rest[list(gone)].sum(0)
            if gone and (again <= 1).all() and not any(places - gone <= f for f in failed):
                places, left = places - gone, again
        return places

    def _fit(self) -> None:
        """Fits the share of each place in each squared error, of which 1 is allowed."""
        if self._shares is None:
            prior = np.maximum(np.asarray(self._suspicion(), float), 0)
            prior = prior / (prior.sum() or 1) + UNSUSPECTED / self.count
            self._shares = np.outer([*prior, NOBODY], self._seen[0][1])
        for _ in range(SWEEPS):
            for left, squares in self._seen:
                sums = np.maximum(self._shares[left].sum(0), LEAST)
                self._shares[left] *= squares / sums

    def _rank(self, places: frozenset[int]) -> tuple[int, float]:
        return len(places), float(self._cost[list(places)].sum())
