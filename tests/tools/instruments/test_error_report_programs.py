"""What `explain` reports of errors, held against measurements, on programs of other tests."""

import functools
import itertools

import jax.numpy as jnp
import models
import people
import programs
import pytest

from benchmarks.errors import checked
from mpjax._src.core.planner import rounding
from tests.helpers.support import HALVES, thorough_but

PROBES = 64  # the standard error of an estimate is 9%
ENOUGH = 12  # the order of fewer rows is that of two that are nearly equal


@pytest.fixture(autouse=True)
def small_matmuls_round(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def model(name):
    loss, params = models.MODELS[name]()
    return loss, (params,)


def written(seed):
    """Returns a random program as people write them, and its arguments."""
    steps = people.generate(seed)
    fun = people.build(steps)
    return lambda *args: jnp.mean(fun(*args) ** 2), people.arguments(steps, seed)


# One rounding alone may turn a sign that all together do not: no estimate of it adds up.
SMOOTH = [
    seed
    for seed in range(22)
    if not any(people.PARTS[step.name].kinks for step in people.generate(seed))
]
PROGRAMS = {
    **{
        name: lambda fun=fun: (fun, (programs.W, programs.X))
        for name, fun in programs.PROGRAMS.items()
    },
    **{name: functools.partial(model, name) for name in models.MODELS},
    **{f"people {seed}": functools.partial(written, seed) for seed in SMOOTH},
}
CASES = [*itertools.product(PROGRAMS, HALVES)]
QUICK = ("custom_vjp", "bfloat16"), ("jitted", "float16")


@pytest.mark.parametrize(("name", "half"), thorough_but(CASES, *QUICK))
def test_the_report_is_what_measurements_say(name, half):
    fun, args = PROGRAMS[name]()
    row, _ = checked(fun, f"mixed_{half}", args, probes=PROBES)
    assert 0.9 < row["to_compare"] < 1.1
    assert row["shown"] < 1.5
    if row["first_order"] and row["estimated"] >= ENOUGH:
        assert row[f"rank_{PROBES}"] > 0.9
