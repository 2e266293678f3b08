"""The facts about a value that comes from several values, or from rows of one."""

import numpy as np
import pytest
from planned import H, W, fact

from mpjax._src.autocast.tables import BEYOND, BOUNDED, FITS, NOTHING, Fact, argument, join

# What is true of a value if it is true of one of those that it comes from; and if of all.
ANY = ("half", "exact", "scaled", "counts", "linear", "solved", "shifted", "block", "huge")
ALL = ("mask", "spread", "negative", "data")
SETS = ("made", "peak", "chain", "offset", "level", "mean")
OTHERS = ("span", "writes", "factor", "norm", "weights", "centered")  # with tests of their own


def test_every_fact_is_joined_in_a_known_way():
    assert {*ANY, *ALL, *SETS, *OTHERS} == {*Fact._fields}


@pytest.mark.parametrize("name", [*ANY, *ALL])
def test_join_of_facts_takes_a_property_of_any_or_of_all(name):
    one, other = Fact(**{name: True}), Fact()
    assert getattr(join([one, one]), name)
    assert not getattr(join([other, other]), name)
    assert getattr(join([one, other]), name) == getattr(join([other, one]), name) == (name in ANY)


def test_a_join_of_one_is_itself_and_of_none_is_nothing():
    some = Fact(half=True, writes=3, norm="unit")
    assert join([some]) is some
    assert join([]) == NOTHING == Fact()
    assert not any(NOTHING._replace(factor=0))


def test_join_of_facts_takes_the_larger_span_and_more_writes():
    assert BOUNDED < FITS < BEYOND
    joined = join([Fact(span=FITS, writes=3), Fact(span=BEYOND, writes=1)])
    assert (joined.span, joined.writes) == (BEYOND, 3)


def test_join_of_facts_takes_the_largest_factor_and_is_not_centered():
    joined = join([Fact(factor=0.5, centered=True), Fact(factor=0.25, centered=True)])
    assert (joined.factor, joined.centered) == (0.5, False)


def test_join_of_facts_keeps_a_norm_where_all_agree():
    assert join([Fact(norm="unit"), Fact(norm="unit")]).norm == "unit"
    assert join([Fact(norm="unit"), Fact(norm="scale")]).norm == ""
    assert join([Fact(norm="unit"), Fact()]).norm == ""


@pytest.mark.parametrize("name", SETS)
def test_join_of_facts_unites_sets(name):
    joined = join([Fact(**{name: 0b011}), Fact(**{name: 0b110})])
    assert getattr(joined, name) == 0b111


def test_join_of_facts_keeps_the_weights_behind_made_values():
    """An argument beside a matmul's result is no weight that the matmul multiplied by."""
    made, given = Fact(made=0b1, weights=0b01), Fact(weights=0b10)
    assert join([made, given]).weights == 0b01
    assert join([given, given._replace(weights=0b100)]).weights == 0b110
    assert join([made, made._replace(weights=0b1000)]).weights == 0b1001


def test_fact_of_an_argument_is_given_unless_half():
    assert argument(1).given and argument(1).weights == 1 and argument(1).span == FITS
    assert not argument(1, half=True).given and argument(1, half=True).half
    assert argument(1, linear=True).linear and not argument(1).linear and not argument(1).half
    assert not Fact(made=1).given


ROWS = np.arange(4)
FROM_ARGUMENTS = {
    "rows of an argument": (lambda x, w: w[ROWS], True),
    "rows of rows, beside an argument": (lambda x, w: w[ROWS][:, ROWS] * x[:4, :4], True),
    "rows of a matmul": (lambda x, w: (x @ w)[ROWS], False),
    "rows beside a matmul": (lambda x, w: w[ROWS] + (x @ w)[:4], False),
}


@pytest.mark.parametrize("name", FROM_ARGUMENTS)
def test_rows_that_were_looked_up_are_data_and_no_argument(name):
    fun, data = FROM_ARGUMENTS[name]
    found = fact(fun, H, W)
    assert (found.data, found.given) == (data, False)
