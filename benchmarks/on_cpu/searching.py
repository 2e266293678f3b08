"""Searches of the cheapest float32 places: ours, those of others, and sums of errors to search in.

Each search is a function ``(count, enough, cost)`` that returns a set of places. ``enough(places)``
measures whether a set meets the tolerance, and ``cost(places)`` is what it costs. The rivals are
written here from their papers.
"""

import itertools
from collections.abc import Callable

import numpy as np

from mpjax._src.tools.instruments.search import Model, Search

Places = frozenset[int]
Enough, Cost = Callable[[Places], bool], Callable[[Places], float]


def precimonious(count: int, enough: Enough, cost: Cost) -> Places:
    """Returns places by delta debugging, as Precimonious does (Rubio-Gonzalez et al., SC 2013).

    What is in float32 is cut into parts. Each part and what is without it are tried, and the
    cheapest of those that are enough is searched on; if none is, the parts become smaller.
    """
    kept, parts = frozenset(range(count)), 2
    if enough(frozenset()):
        return frozenset()
    while len(kept) > 1:
        pieces = [frozenset(p.tolist()) for p in np.array_split(sorted(kept), parts)]
        tried = dict.fromkeys((*pieces, *(kept - piece for piece in pieces)))
        found = [places for places in tried if enough(places)]
        if found:
            kept, parts = min(found, key=cost), 2
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            break
    return kept


def campo(count: int, enough: Enough, cost: Cost) -> Places:
    """Returns places by gain, as Campo chooses operations for 16 bits (He et al., ATC 2022).

    Place after place goes to 16 bits where it gains most, less what the casts at its borders cost,
    and stays in float32 where it gains nothing. Campo measures no errors: here a place goes back
    where it is found to be too much.
    """
    kept = left = frozenset(range(count))
    while left:
        gains = {i: cost(kept) - cost(kept - {i}) for i in left}
        best = max(gains, key=lambda i: gains[i])
        if gains[best] <= 0:
            break
        left -= {best}
        if enough(kept - {best}):
            kept -= {best}
    return kept


RIVALS = {"precimonious": precimonious, "campo": campo}


# ---- sums of errors ------------------------------------------------------------------------------


class Sums:
    """Places whose errors of several results add up, and what each costs in float32.

    Errors of one entry have a sign, and may cancel; those of many hardly do. ``fresh`` is the share
    of the squared error that is another one in each run, as roundings are. So many ``shared``
    arrays cost something once for all the places that have them.
    """

    def __init__(
        self,
        seed: int,
        count: int = 9,
        results: int = 4,
        entries: int = 64,
        fresh: float = 0.0,
        shared: int = 0,
    ):
        rng = np.random.default_rng(seed)
        own = np.exp(1.5 * rng.normal(size=(count, 1)) + 0.7 * rng.normal(size=(count, results)))
        own *= rng.random((count, results)) < 0.7
        directions = rng.normal(size=(count, results, entries))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        self.terms = directions * np.sqrt(own)[..., None]
        self.costs = np.exp(rng.normal(size=count))
        self.seed, self.fresh = seed, fresh
        self.tolerance = self.error(frozenset()) * rng.choice([0.8, 0.5, 0.25, 0.1])
        self.has = (rng.random((count, shared)) < 0.4).astype(float)
        self.arrays = np.exp(rng.normal(size=shared))
        self.measured: list[Places] = []

    def errors(self, places: Places) -> np.ndarray:
        """Returns the error of each result, a vector, with some places in float32."""
        left = [i for i in range(len(self.terms)) if i not in places]
        total = self.terms[left].sum(0)
        rng = np.random.default_rng([self.seed, *sorted(places)])
        size = np.sqrt((self.terms[left] ** 2).sum((0, 2)) / total.shape[-1])
        new = size[:, None] * rng.normal(size=total.shape)
        return (1 - self.fresh) ** 0.5 * total + self.fresh**0.5 * new

    def error(self, places: Places) -> float:
        return float(np.linalg.norm(self.errors(places), axis=-1).max())

    def measure(self, places: Places) -> float:
        self.measured.append(places)
        return self.error(places)

    def enough(self, places: Places) -> bool:
        return self.measure(places) <= self.tolerance

    def search(self, inside: list[list[int]] | None = None) -> Search:
        """Returns our search."""
        everything = frozenset(range(len(self.terms)))
        alone = np.array([self.errors(everything - {i}) for i in everything]) / self.tolerance
        model = Model([*alone.swapaxes(0, 1)], [*np.zeros(alone.shape[1:])])
        shared = (self.has, self.arrays)
        return Search(self.measure, model, self.costs, self.tolerance, inside, shared)

    def cost(self, places: Places) -> float:
        own = self.costs[[*places]].sum()
        return float(own + self.arrays[self.has[[*places]].any(0)].sum())

    def cheapest(self) -> float:
        """Returns what the cheapest set that is enough costs, by trying all sets."""
        sets = (
            frozenset(some)
            for count in range(len(self.terms) + 1)
            for some in itertools.combinations(range(len(self.terms)), count)
        )
        return min(self.cost(some) for some in sets if self.error(some) <= self.tolerance)


KINDS = [  # results, entries, fresh
    (4, 64, 0.0),
    (1, 64, 0.0),
    (4, 4, 0.0),
    (1, 1, 0.0),
    (4, 64, 0.3),
]
SEEDS = range(44)
