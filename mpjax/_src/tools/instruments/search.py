"""Searches the cheapest places to run in float32 so that no error exceeds a tolerance.

To first order the error of a result is the sum of one vector for each place that rounds, which is
measured with that place alone in 16 bits. A part of it is another one in each run, because other
places change what is rounded: its squares add up. So the square of an error is a quadratic form of
the places that round (`Model`). What is cheapest under it is a knapsack whose items interact: an
integer program takes the squares alone (HiGHS), and exchanges of places the products too. Each
proposal is measured, and corrects the budget of the next one. Many places are also left out one by
one, from all, with a measurement each: where errors do not add up, that ends elsewhere.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# The shares of a place's squared error that may be new in each run. On small networks it was a
# third.
FRESH = (0.0, 0.05, 0.15, 0.33, 0.6)

# So many places are searched exhaustively under the model.
FEW = 14

# Proposals that are measured, and how near two budgets are that need none between them.
PROPOSALS, NEAR = 12, 1.03

# Then so many cheaper sets are measured, whose squared error is predicted within this factor.
MORE, DOUBT = 24, 2.0


class Model:
    """The squared errors of results by which places round, relative to the tolerance."""

    def __init__(self, vectors: Sequence[np.ndarray], rest: Sequence[np.ndarray]):
        """
        Args:
            vectors: Of each result, the error vectors of the places, ``(places, entries)``, in
                units of the tolerance.
            rest: Of each result, the error vector of what no place moves, ``(entries,)``.
        """
        self.products: list[np.ndarray] = []
        self.squares: list[np.ndarray] = []
        self.fresh = FRESH[-2]
        self._measured: list[tuple[float, list[Any]]] = []
        for each, other in zip(vectors, rest, strict=True):
            terms = np.vstack([each, other])
            products = np.nan_to_num(terms @ terms.T, nan=1e30, posinf=1e30, neginf=-1e30)
            self.products.append(products)
            self.squares.append(np.diag(products))

    def predicted(self, rounds: np.ndarray) -> np.ndarray:
        """Returns the largest squared error of each row: 1 for the places that round."""
        z = np.column_stack([rounds, np.ones(len(rounds))]).astype(float)
        return np.max([self._squared(form, z) for form in self.products], 0, initial=0)

    def within(self, rounds: np.ndarray, budget: float) -> np.ndarray:
        """Returns which rows have no squared error above a budget."""
        z = np.column_stack([rounds, np.ones(len(rounds))]).astype(float)
        left = np.arange(len(z))
        # The largest results first: most rows end there.
        for form in sorted(self.products, key=np.trace, reverse=True):
            left = left[self._squared(form, z[left]) <= budget]
        return np.isin(np.arange(len(z)), left)

    def _squared(self, form: np.ndarray, z: np.ndarray) -> np.ndarray:
        mixed = (1 - self.fresh) * form + self.fresh * np.diag(np.diag(form))
        return np.einsum("ij,ij->i", z @ mixed, z)

    def learn(self, rounds: np.ndarray, square: float) -> None:
        """Takes the share of new errors with which all measured squares are predicted best."""
        z = np.append(rounds, 1.0)
        forms = zip(self.products, self.squares, strict=True)
        self._measured.append((square, [(z @ form @ z, z @ own) for form, own in forms]))
        squares = np.array([square for square, _ in self._measured])
        old, new = np.moveaxis(np.array([terms for _, terms in self._measured]), -1, 0)

        def doubt(fresh: float) -> float:
            predicted = np.max((1 - fresh) * old + fresh * new, 1, initial=0)
            return float(np.median(np.abs(np.log((predicted + 1e-12) / (squares + 1e-12)))))

        self.fresh = min(FRESH, key=doubt)


class Search:
    """Searches sets of places to run in float32, and measures them.

    Attributes:
        best: The cheapest set that was measured to be enough, or None.
        tried: The error of each set that was measured.
        bound: No set that is enough costs less than this, if the model of errors holds as well as
            where it was measured to be worst.
    """

    def __init__(
        self,
        measure: Callable[[frozenset[int]], float],
        model: Model,
        costs: Sequence[float] | np.ndarray,
        tolerance: float,
        inside: Sequence[Sequence[int]] | None = None,
        shared: tuple[np.ndarray, np.ndarray] | None = None,
    ):
        """
        Args:
            measure: Returns the largest error with a set of places in float32. What it raises ends
                the search.
            model: The model of the errors.
            costs: What each place costs in float32 by itself.
            tolerance: What no error may exceed.
            inside: Of each place, the others that are within it: they are in float32 with it.
            shared: Which arrays each place has in float32, ``(places, arrays)``, and what each of
                them costs, once for all the places that have it.
        """
        self._measure, self.model, self.tolerance = measure, model, tolerance
        self.costs = np.asarray(costs, float)
        self.count = len(costs)
        self._has: np.ndarray = shared[0] if shared else np.zeros((self.count, 0))
        self._arrays: np.ndarray = shared[1] if shared else np.zeros(0)
        self._inside = np.eye(self.count, dtype=bool)
        for place, others in enumerate(inside or ()):
            self._inside[place, list(others)] = True
        self.tried: dict[frozenset[int], float] = {}
        self.best: frozenset[int] | None = None
        self.bound = 0.0
        self._all = self._every() if self.count <= FEW else None

    def run(self) -> None:
        """Searches until nothing cheaper is found, or a measurement raises."""
        if self.is_enough(frozenset()):
            return
        self._propose()
        self._improve()
        if self._all is None:
            before = self.best
            self._descend()
            if self.best != before:
                self._improve()
        self.bound = self._cost(self._proposed(self._most()))

    def _propose(self) -> None:
        """Measures the cheapest sets under the model, until one repeats."""
        everything = frozenset(range(self.count))
        low, high, budget = 0.0, math.inf, 1.0
        for _ in range(PROPOSALS):
            chosen = self._proposed(budget)
            known = chosen in self.tried
            if self.is_enough(chosen):
                low = max(low, budget)
            elif chosen == everything:
                return
            else:
                high = min(high, budget)
            if high <= NEAR * low or (known and low and high < math.inf):
                break
            off = (self.tolerance / max(self.tried[chosen], 1e-30)) ** 2
            if low and high < math.inf:
                budget = math.sqrt(low * high)
            else:  # what the measurement says of the model, and a little more
                budget *= min(max(off, 1 / 64), 64) * (1.02 if off > 1 else 0.98)
        if self.best is None:
            self.is_enough(everything)

    def is_enough(self, places: frozenset[int]) -> bool:
        """Returns whether a set of places meets the tolerance; measures it if needed."""
        if places not in self.tried:
            error = self._measure(places)
            self.tried[places] = error if error == error else math.inf
            if 0 < error < math.inf:
                rounds = ~np.isin(np.arange(self.count), [*places])
                self.model.learn(rounds, (error / self.tolerance) ** 2)
        enough = self.tried[places] <= self.tolerance
        if enough and (self.best is None or self._cost(places) < self._cost(self.best)):
            self.best = places
        return enough

    # ---- proposals ------------------------------------------------------------------------------

    def _proposed(self, budget: float) -> frozenset[int]:
        """Returns the cheapest set whose squared error is within a budget under the model."""
        if self._all is not None:
            enough = self._all[self.model.within(~self._all, budget)]
            rows = enough if len(enough) else np.ones((1, self.count), bool)
        else:
            rows = self._exchanged(self._knapsack(budget), budget)[None]
        best = rows[np.lexsort((rows.sum(1), self._prices(rows)))[0]]
        return _set(best)

    def _every(self) -> np.ndarray:
        """Returns all sets that contain what is within their places."""
        sets = np.array([*itertools.product([False, True], repeat=self.count)], bool)
        sets = sets.reshape(-1, self.count)
        return sets[((sets.astype(int) @ self._inside > 0) == sets).all(1)]

    def _knapsack(self, budget: float) -> np.ndarray:
        """Returns the cheapest set if squares alone added up."""
        # Here, because they import slowly.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import coo_array

        squares = np.array([each[:-1] for each in self.model.squares])
        rest = np.array([each[-1] for each in self.model.squares])
        needed = squares.sum(1) + rest - budget  # what float32 has to take away
        # Very large squares would hide the others.
        limits = np.minimum(needed, squares.sum(1))
        scale = np.maximum(squares.max(1, initial=0), 1e-30)
        arrays = len(self._arrays)
        # A place in float32 has those inside it there, and its arrays: variables of their own.
        outer, inner = np.nonzero(self._inside & ~np.eye(self.count, dtype=bool))
        place, array = np.nonzero(self._has)
        first, then = np.r_[outer, place], np.r_[inner, self.count + array]
        pairs = np.arange(len(first))
        shape = len(pairs), self.count + arrays
        implied = coo_array(
            (
                np.r_[-np.ones(len(pairs)), np.ones(len(pairs))],
                (np.r_[pairs, pairs], np.r_[first, then]),
            ),
            shape,
        )
        solution = milp(
            np.r_[self.costs + 1e-9 * (self.costs.max(initial=0) or 1), self._arrays],
            constraints=[
                LinearConstraint(
                    np.pad(squares / scale[:, None], ((0, 0), (0, arrays))), limits / scale
                ),
                *([LinearConstraint(implied, 0)] if len(pairs) else []),
            ],
            integrality=np.r_[np.ones(self.count), np.zeros(arrays)],
            bounds=Bounds(0, 1),
            options={"time_limit": 5, "mip_rel_gap": 1e-3},
        )
        if solution.x is None:
            return np.ones(self.count, bool)
        return solution.x[: self.count] > 0.5

    def _exchanged(self, chosen: np.ndarray, budget: float) -> np.ndarray:
        """Returns a set that is within the budget under the model, improved place by place."""
        while self.model.predicted(~chosen[None])[0] > budget and not chosen.all():
            more = np.array([chosen | self._inside[i] for i in np.flatnonzero(~chosen)])
            gain = self.model.predicted(~chosen[None])[0] - self.model.predicted(~more)
            price = self._prices(more) - self._prices(chosen[None])
            chosen = more[np.argmax(gain / np.maximum(price, 1e-30))]
        for _ in range(4 * self.count):
            near = self._neighbors(chosen)
            cheaper = near[self._prices(near) < self._prices(chosen[None]) * (1 - 1e-9)]
            if not len(cheaper):
                break
            enough = cheaper[self.model.within(~cheaper, budget)]
            if not len(enough):
                break
            chosen = enough[np.argmin(self._prices(enough))]
        return chosen

    def _neighbors(self, chosen: np.ndarray) -> np.ndarray:
        """Returns the sets without a place, and with another one in its place."""
        without = [chosen & ~self._inside[:, i] for i in np.flatnonzero(chosen)]
        instead = [each | self._inside[i] for each in without for i in np.flatnonzero(~chosen)]
        return np.array([*without, *instead]).reshape(-1, self.count)

    # ---- measured improvements ------------------------------------------------------------------

    def _descend(self) -> None:
        """Leaves out one place after the other: what gains most for the error that it adds.

        What is predicted next is corrected by each measurement.
        """
        kept = left = np.ones(self.count, bool)
        while left.any() and self.is_enough(_set(kept)):
            rows = kept & ~self._inside[:, left].T
            now, then = self.model.predicted(~kept[None]), self.model.predicted(~rows)
            corrected = (self.tried[_set(kept)] / self.tolerance) ** 2 / np.maximum(now, 1e-30)
            gains = self._prices(kept[None]) - self._prices(rows)
            gains /= np.maximum(corrected * (then - now), 1e-4)
            gains[corrected * then > DOUBT] = 0
            if gains.max() <= 0:
                return
            best = np.argmax(gains)
            place, without = np.flatnonzero(left)[best], rows[best]
            left = left & (np.arange(self.count) != place)
            if self.is_enough(_set(without)):
                kept, left = without, left & without

    def _improve(self) -> None:
        self._trim()
        self._retry()

    def _trim(self) -> None:
        """Leaves out of the best set, one after the other, what need not be in it."""
        for place in sorted(self.best or (), key=lambda i: -self._cost(frozenset([i]))):
            around = _set(self._inside[:, place])
            if self.best and place in self.best:
                self.is_enough(self.best - around)

    def _retry(self) -> None:
        """Measures cheaper sets that the model holds for too wrong by a little."""
        for _ in range(MORE):
            if self.best is None:
                return
            best = np.isin(np.arange(self.count), [*self.best])
            rows = self._neighbors(best) if self._all is None else self._all
            rows = rows[self._prices(rows) < 0.99 * self._cost(self.best)]
            rows = rows[[_set(row) not in self.tried for row in rows]]
            predicted = self.model.predicted(~rows)
            if not len(rows) or predicted.min() > DOUBT:
                return
            self.is_enough(_set(rows[np.argmin(predicted)]))

    def _most(self) -> float:
        """Returns the largest budget at which a measured error was within the tolerance's."""
        rows, errors = self._measured()
        return max([1.0, *(self.model.predicted(rows) * (self.tolerance / errors) ** 2)])

    def _measured(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns which places rounded in each measurement, and its error."""
        sets = [(s, e) for s, e in self.tried.items() if 0 < e < math.inf]
        rows = [[i not in s for i in range(self.count)] for s, _ in sets]
        return np.array(rows, bool).reshape(-1, self.count), np.array([e for _, e in sets])

    def _cost(self, places: frozenset[int]) -> float:
        return float(self._prices(np.isin(np.arange(self.count), [*places])[None])[0])

    def _prices(self, rows: np.ndarray) -> np.ndarray:
        """Returns what each row costs: 1 for the places in float32."""
        return rows @ self.costs + (rows.astype(float) @ self._has > 0) @ self._arrays


def _set(chosen: np.ndarray) -> frozenset[int]:
    """Returns the places that a row is true for."""
    return frozenset(np.flatnonzero(chosen).tolist())
