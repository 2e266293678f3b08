"""Searches for the fewest places that must be float32, in few measurements.

The error of a set of places is estimated from all measurements (`estimate`). While no set is known
to be enough, the smallest set that probably is enough is measured next. Then smaller sets are
measured, as long as the probability that one of them is enough is worth a run.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpjax._src.tools.instruments.estimate import Estimate, chances, excess

# Larger errors, relative to the tolerance, are cut to this.
BEYOND = 1e5

# The prior share of the squared error of all unsuspected places, and of the part that no place
# removes.
UNSUSPECTED, NOBODY = 1e-3, 1e-6

# After this many failures all places together are tried, to see the error that no place removes.
PATIENCE = 3

# A set is worth a run if its probability to be enough is LIKELY, while no set is known; later, if
# it saves GAIN places on average; at last, the likeliest set, if DOUBT sets with at least two
# places fewer are expected to be enough.
LIKELY, GAIN, DOUBT = 0.5, 0.25, 0.25

# The search ends after this many guesses at smaller sets that are not enough.
GUESSES = 16

# Of sets whose probabilities are within this ratio, the cheapest is taken.
AS_GOOD = 0.98

# The number of sets considered per size is WIDTH over the cube of the number of places; all sets
# for up to 12 places.
WIDTH, NARROWEST = 924 * 12**3, 8


class Search:
    """Measures sets of places, and records which are enough.

    Attributes:
        best: The smallest set known to be enough, or None.
        least: Whether every set with one of its places left out was found not to be enough.
        tried: The largest error of each set that was measured.
    """

    def __init__(
        self,
        measure: Callable[[frozenset[int]], Sequence[Any]],
        suspicion: Callable[[], Sequence[float]],
        costs: Sequence[Any],
        tolerance: float,
        inside: Sequence[Sequence[int]] | None = None,
    ):
        """
        Args:
            measure: Returns the error of each result with a set of places in float32: a vector, or
                a projection of it, of the error's norm. What it raises ends the search.
            suspicion: Returns how much of the squared error is expected of each place, in any unit;
                not called before it is needed.
            costs: What moving each place costs, numbers or tuples: of as many places, the cheaper
                ones are taken.
            tolerance: What the norm of no error may exceed.
            inside: Of each place, the others that are within it: they are in float32 with it.
        """
        self._measure, self.tolerance = measure, tolerance
        self.count = len(costs)
        order = sorted(range(self.count), key=lambda i: costs[i])
        self._cost = np.argsort(order)  # the cheapest place has 0
        self.tried: dict[frozenset[int], float] = {}
        self.best: frozenset[int] | None = None
        self.least = False
        self._guessed: list[frozenset[int]] = []  # smaller sets than the best one was
        self._runs: list[tuple[np.ndarray, list[np.ndarray]]] = []  # what was in 16 bits, errors
        self._inside = np.eye(self.count, dtype=bool)
        for place, others in enumerate(inside or ()):
            self._inside[place, list(others)] = True
        self._suspicion = suspicion
        self._suspected: np.ndarray | None = None

    def run(self) -> None:
        """Searches until no smaller set is worth a run, or a measurement raises."""
        everything = frozenset(range(self.count))
        if self.is_enough(frozenset()):
            self.least = True
            return
        while candidates := self._candidates():
            any(map(self.is_enough, candidates))  # up to the first that is
            if self.best is None and len(self.tried) > PATIENCE and not self.is_enough(everything):
                return
        self.least = self.best is not None and not self._open_parts()

    def is_enough(self, places: frozenset[int]) -> bool:
        """Returns whether a set of places meets the tolerance; measures it if needed."""
        if places not in self.tried:
            errors = [_bounded(np.asarray(e) / self.tolerance) for e in self._measure(places)]
            self.tried[places] = max(map(_norm, errors), default=0.0) * self.tolerance
            self._runs.append((self._left([places])[0], errors))
        enough = self.tried[places] <= self.tolerance
        if enough and (self.best is None or self._rank(places) < self._rank(self.best)):
            self.best = places
        return enough

    def needed(self) -> int:
        """Returns a lower bound of the places, assuming less float32 never reduces the error.

        Every set that is enough has a place outside of each set that failed. The smallest set with
        that property is a lower bound (minimum hitting set; Reiter, 1987).
        """
        from scipy.optimize import Bounds, LinearConstraint, milp  # here, because it imports slowly

        failed = [s for s, error in self.tried.items() if error > self.tolerance]
        if not failed or self.best is None:
            return 0
        outside, one = self._left(failed)[:, :-1], np.ones(self.count)
        solution = milp(
            one, constraints=LinearConstraint(outside, 1), integrality=one, bounds=Bounds(0, 1)
        )
        return round(solution.fun)

    # ---- what to try next -----------------------------------------------------------------------

    def _candidates(self) -> list[frozenset[int]]:
        """Returns the sets to try next, one after the other until one is enough."""
        estimates = self._estimates()
        if self.best is None:
            return self._first(estimates)
        parts = self._open_parts()
        wrong = sum(self.tried[places] > self.tolerance for places in self._guessed)
        guess = self._guess(estimates, bool(parts)) if wrong < GUESSES else None
        if guess is not None:
            self._guessed.append(guess)
            return [guess]
        # Leaves out one place at a time, beginning with the one that is probably least needed.
        odds = chances(estimates, self._left(parts))
        return [parts[i] for i in np.argsort(-odds)]

    def _first(self, estimates: Sequence[Estimate]) -> list[frozenset[int]]:
        """Returns the fewest places that are likely to be enough, or else the likeliest set."""
        candidates: list[tuple[float, frozenset[int]]] = []
        for sets, odds in self._by_size(estimates, self.count):
            candidates.append((odds.max(), self._likeliest(sets, odds)))
            if odds.max() >= LIKELY:
                break
        return [max(candidates, key=lambda each: each[0])[1]] if candidates else []

    def _guess(self, estimates: Sequence[Estimate], has_parts: bool) -> frozenset[int] | None:
        """Returns a smaller set than the best one, if one is worth a run."""
        size, doubt = len(self.best or ()), 0.0
        # The expected saving, the probability, the set.
        guesses: list[tuple[float, float, frozenset[int]]] = []
        for sets, odds in self._by_size(estimates, size - 1):
            fewer = size - int(sets[0].sum())
            doubt += odds.sum() * (fewer > 1)
            guesses.append((fewer * odds.max(), odds.max(), self._likeliest(sets, odds)))
        worth = max(guesses, key=lambda guess: guess[0], default=None)
        if worth is not None and worth[0] >= GAIN:
            return worth[2]
        two = [guess for guess in guesses if len(guess[2]) < size - 1]
        if has_parts or doubt < DOUBT:
            return None
        return max(two, key=lambda guess: guess[1])[2]

    def _by_size(
        self, estimates: Sequence[Estimate], largest: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the best untried sets of each size, and their probabilities to be enough."""
        # A beam search: the sets of each size grow from the most promising smaller ones.
        tried = {np.packbits(~self._left([s])[0, :-1].astype(bool)).tobytes() for s in self.tried}
        width = max(WIDTH // self.count**3, NARROWEST)
        sizes = {0: np.zeros((1, self.count), bool)}
        for size in range(largest + 1):
            sets = sizes.pop(size, None)
            if sets is None:
                continue
            if len(sets) > width:
                sets = sets[np.argsort(excess(estimates, _terms(sets)))[:width]]
            more = (sets[:, None] | self._inside)[~sets]  # each with each place that it lacks
            counts = more.sum(1)
            for count in np.unique(counts[counts <= largest]):
                parts = [more[counts == count], *(sizes[count] for _ in range(count in sizes))]
                sizes[count] = np.unique(np.concatenate(parts), axis=0)
            sets = sets[[np.packbits(s).tobytes() not in tried for s in sets]]
            if len(sets):
                yield sets, chances(estimates, _terms(sets))

    def _likeliest(self, sets: np.ndarray, odds: np.ndarray) -> frozenset[int]:
        """Returns the likeliest set, or the cheapest of those that are about as likely."""
        good = sets[odds >= AS_GOOD * odds.max()]
        return frozenset(np.flatnonzero(good[np.argmin(good @ self._cost)]).tolist())

    def _open_parts(self) -> list[frozenset[int]]:
        """Returns the best set without one of its places, for each place not known as needed."""
        failed = [s for s, error in self.tried.items() if error > self.tolerance]
        parts = [(self.best or frozenset()) - self._around(i) for i in self.best or ()]
        return [part for part in parts if not any(part <= other for other in failed)]

    def _around(self, place: int) -> frozenset[int]:
        """Returns the places that contain a place, itself included."""
        return frozenset(np.flatnonzero(self._inside[:, place]).tolist())

    def _estimates(self) -> list[Estimate]:
        """Returns the estimate of each result's error, from all measurements."""
        if self._suspected is None:
            prior = np.maximum(np.asarray(self._suspicion(), float), 0)
            prior = prior / (prior.sum() or 1) + UNSUSPECTED / self.count
            self._suspected = np.array([*prior, NOBODY])
        left = np.array([left for left, _ in self._runs])
        results = zip(*(errors for _, errors in self._runs), strict=True)
        return [Estimate(left, np.array(errors), self._suspected) for errors in results]

    def _left(self, sets: Sequence[frozenset[int]]) -> np.ndarray:
        """Returns the terms that sets of places leave in 16 bits; the last term always stays."""
        chosen = np.zeros((len(sets), self.count), bool)
        for row, places in zip(chosen, sets, strict=True):
            row[list(places)] = True
        return _terms(chosen)

    def _rank(self, places: frozenset[int]) -> tuple[int, float]:
        return len(places), float(self._cost[list(places)].sum())


def _terms(chosen: np.ndarray) -> np.ndarray:
    return np.column_stack([~chosen, np.ones(len(chosen), bool)]).astype(float)


def _norm(error: np.ndarray) -> float:
    return float(np.linalg.norm(error))


def _bounded(error: np.ndarray) -> np.ndarray:
    """Returns an error vector whose norm is at most `BEYOND`."""
    error = np.asarray(error, float).ravel()
    size = _norm(error)
    if size < BEYOND:
        return error
    # An infinite error has no direction; one of the greatest norm represents it.
    whole = np.isfinite(size)
    return error * (BEYOND / size) if whole else np.full_like(error, BEYOND / len(error) ** 0.5)
