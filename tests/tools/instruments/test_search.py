import itertools

import numpy as np
import pytest

from benchmarks.on_cpu.searching import KINDS, SEEDS
from benchmarks.on_cpu.searching import Sums as Case
from mpjax._src.tools.instruments import search
from mpjax._src.tools.instruments.search import FEW, Search


@pytest.mark.thorough
def test_the_search_is_within_5_percent_of_the_best_of_all_sets_in_210_of_220_cases():
    good = 0
    for kind, seed in itertools.product(KINDS, SEEDS):
        case = Case(seed, 9, *kind)
        search = case.search()
        search.run()
        assert case.error(search.best) <= case.tolerance
        good += case.cost(search.best) <= 1.05 * case.cheapest() + 1e-12
    assert good >= 210


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_set_was_measured_and_costs_no_more_than_another_that_was(kind):
    case = Case(1, 7, *kind)
    search = case.search()
    search.run()
    assert len(case.measured) == len({*case.measured}) == len(search.tried)
    enough = [places for places in case.measured if case.error(places) <= case.tolerance]
    assert case.cost(search.best) == min(map(case.cost, enough))
    assert case.cost(search.best) <= 1.2 * case.cheapest()


@pytest.mark.parametrize("few", [FEW, 0])  # exhaustive under the model, and by the integer program
def test_arrays_that_places_share_cost_once(few, monkeypatch):
    monkeypatch.setattr(search, "FEW", few)
    ratios = []
    for seed in range(8):
        case = Case(seed, 8, shared=6)
        found = case.search()
        found.run()
        assert case.error(found.best) <= case.tolerance
        ratios.append(case.cost(found.best) / (case.cheapest() or 1.0))
    assert np.mean(np.array(ratios) <= 1.05) >= 7 / 8


def test_many_places_are_searched_by_an_integer_program():
    case = Case(3, 3 * FEW)
    search = case.search()
    search.run()
    assert case.error(search.best) <= case.tolerance
    assert len(search.tried) < 80
    # The bound holds where the model does.
    assert 0 < search.bound <= case.cost(search.best) * (1 + 1e-9)
    # No single place can be left out.
    assert all(case.error(search.best - {i}) > case.tolerance for i in search.best)


def test_many_places_are_also_left_out_one_by_one(monkeypatch):
    def cost(seed):
        case = Case(seed, 40, fresh=0.5)
        found = case.search()
        found.run()
        assert case.error(found.best) <= case.tolerance
        return case.cost(found.best)

    with_it = np.array([cost(seed) for seed in (1, 3)])
    monkeypatch.setattr(Search, "_descend", lambda self: None)
    without = np.array([cost(seed) for seed in (1, 3)])
    assert np.all(with_it < 0.99 * without)


def test_a_place_brings_those_inside_it():
    case = Case(2, 5)
    search = case.search(inside=[[1, 2], [], [], [], []])
    search.run()
    assert all({1, 2} <= places for places in search.tried if 0 in places)
    assert search.best is not None


def test_nothing_is_moved_if_nothing_has_to_be_and_all_is_tried_if_all_has_to_be():
    case = Case(0, 5)
    case.tolerance *= 100
    search = case.search()
    search.run()
    assert search.best == frozenset() and len(search.tried) == 1

    case = Case(0, 5)
    never = Search(lambda places: 1.0, case.search().model, case.costs, 0.5)
    never.run()
    assert never.best is None and frozenset(range(5)) in never.tried


def test_what_a_measurement_raises_ends_the_search_with_what_was_found():
    case = Case(5, 9)

    def measure(places):
        if len(case.measured) == 2:
            raise RuntimeError
        return case.measure(places)

    search = Search(measure, case.search().model, case.costs, case.tolerance)
    with pytest.raises(RuntimeError):
        search.run()
    assert len(search.tried) == 2


def test_an_error_that_is_not_a_number_is_not_enough():
    case = Case(4, 5)
    search = Search(
        lambda places: float("nan") if len(places) < 3 else case.error(places),
        *(case.search().model, case.costs, case.tolerance),
    )
    search.run()
    assert search.best is None or len(search.best) >= 3
