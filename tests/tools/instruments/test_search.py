import itertools

import numpy as np
import pytest

from mpjax._src.tools.instruments.search import GUESSES, Search


class Model:
    """Places whose errors of several results add up, and what is suspected of them.

    Errors of one entry have a sign, and may cancel; those of many hardly do. ``fresh`` is the share
    of the squared error that is another one in each run, as roundings are.
    """

    def __init__(self, seed, count=12, results=4, entries=64, fresh=0.0):
        rng = np.random.default_rng(seed)
        own = np.exp(1.5 * rng.normal(size=(count, 1)) + 0.7 * rng.normal(size=(count, results)))
        own *= rng.random((count, results)) < 0.7
        directions = rng.normal(size=(count, results, entries))
        directions /= np.linalg.norm(directions, axis=-1, keepdims=True)
        self.terms = directions * np.sqrt(own)[..., None]
        self.suspicion = own.mean(1) * np.exp(2 * rng.normal(size=count))
        self.costs = rng.random(count)
        self.seed, self.fresh = seed, fresh
        self.tolerance = self.error(()) * rng.choice([0.8, 0.5, 0.25, 0.1])
        self.measured = []

    def errors(self, places):
        """Returns the error of each result, a vector, with some places in float32."""
        left = [i for i in range(len(self.terms)) if i not in places]
        total = self.terms[left].sum(0)
        rng = np.random.default_rng([self.seed, *sorted(places)])
        size = np.sqrt((self.terms[left] ** 2).sum((0, 2)) / total.shape[-1])
        new = size[:, None] * rng.normal(size=total.shape)
        return (1 - self.fresh) ** 0.5 * total + self.fresh**0.5 * new

    def error(self, places):
        return np.linalg.norm(self.errors(places), axis=-1).max()

    def measure(self, places):
        self.measured.append(places)
        return self.errors(places)

    def search(self, inside=None):
        return Search(
            self.measure, lambda: self.suspicion, self.costs, self.tolerance, inside=inside
        )

    def fewest(self):
        """Returns how many places are needed, by trying all sets."""
        for count in range(len(self.terms) + 1):
            for some in itertools.combinations(range(len(self.terms)), count):
                if self.error(some) <= self.tolerance:
                    return count
        raise AssertionError


@pytest.mark.parametrize("results", [1, 4])
@pytest.mark.parametrize("count", [3, 7, pytest.param(12, marks=pytest.mark.thorough)])
def test_search_needs_at_most_one_place_more_than_exhaustive(count, results):
    for seed in range(12 if count < 12 else 4):
        model = Model(seed, count, results)
        found = model.search()
        found.run()
        assert model.error(found.best) <= model.tolerance
        fewest = model.fewest()
        assert found.needed() <= fewest and len(found.best) <= fewest + 1
        assert len(model.measured) == len(set(model.measured)) <= 2 * count + 3


@pytest.mark.parametrize("results", [1, 4])
def test_search_learns_signs_of_errors_that_cancel(results):
    """Of one number the sign is learned too: what cancels needs no float32."""
    for seed in range(8):
        model = Model(seed, 8, results, entries=1)
        found = model.search()
        found.run()
        assert model.error(found.best) <= model.tolerance
        assert len(found.best) <= model.fewest() + 1


def test_guesses_that_fail_end_the_search():
    """Where a part of each error is new in every run, sets are enough by luck too."""
    models = [Model(seed, 8, entries=1, fresh=0.5) for seed in range(8)]
    searches = [model.search() for model in models]
    for found in searches:
        found.run()
        assert len(found.tried) <= 3 * len(models) + GUESSES
    more = [len(s.best) - m.fewest() for s, m in zip(searches, models, strict=True)]
    assert sum(some <= 1 for some in more) >= 6


def test_search_of_many_places_takes_few_measurements():
    model = Model(0, 24, 2)
    found = model.search()
    found.run()
    assert model.error(found.best) <= model.tolerance
    # One for each place that cannot be left out, and the guesses.
    assert found.least and len(model.measured) <= len(found.best) + 2 * GUESSES


def test_search_finds_places_of_which_none_can_be_left_out():
    model = Model(5)
    found = model.search()
    found.run()
    assert found.least and 1 <= found.needed() <= len(found.best)
    for place in found.best:
        assert model.error(found.best - {place}) > model.tolerance


def test_search_needed_counts_places_by_what_failed():
    found = Search(lambda places: [np.ones(1) * (3 - len(places))], list, range(3), 1.0)
    for places, needed in (({0, 1}, 0), ({0}, 1), ({1}, 1), ({2}, 2)):
        found.is_enough(frozenset(places))
        assert found.needed() == needed


def test_search_without_a_solution_finds_no_best():
    model = Model(0)
    found = Search(
        lambda places: model.errors(places) + 1.0, lambda: model.suspicion, model.costs, 0.5
    )
    found.run()
    assert found.best is None and not found.least
    assert frozenset(range(12)) in found.tried and len(found.tried) <= 6


def test_search_takes_the_places_within_a_place_with_it():
    """The last one holds all others: it counts as many, and is not taken to save a few."""
    model = Model(3)
    found = model.search(inside=[()] * 11 + [range(11)])
    found.run()
    assert all(11 not in places or len(places) == 12 for places in model.measured)
    assert len(found.best) < 12


@pytest.mark.parametrize("limit", [1, 2, 4, 7])
def test_what_a_measurement_raises_ends_the_search(limit):
    class Out(Exception):
        pass

    def measure(places):
        if len(model.measured) == limit:
            raise Out
        return model.measure(places)

    model = Model(1)
    found = Search(measure, lambda: model.suspicion, model.costs, model.tolerance)
    with pytest.raises(Out):
        found.run()
    assert len(found.tried) == limit
    enough = [s for s, error in found.tried.items() if error <= model.tolerance]
    assert found.best == min(enough, key=len, default=None)


def test_search_takes_nonfinite_errors_as_too_large():
    model = Model(2)

    def measure(places):
        errors = model.errors(places)
        if 0 not in places:
            errors[:2], errors[2:] = np.nan, np.inf
        return errors

    found = Search(measure, lambda: model.suspicion, model.costs, model.tolerance)
    found.run()
    assert 0 in found.best


def test_search_guesses_the_cheapest_of_hopeless_sets():
    search = Search(lambda places: [], list, [2, 1, 3], 1.0)
    assert search._likeliest(np.eye(3, dtype=bool), np.zeros(3)) == {1}
