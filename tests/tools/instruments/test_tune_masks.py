"""The program that rounds by a mask has the error of the plan, compiled as it trains."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import PROGRAMS, W, X

from mpjax._src.core.planner import rounding
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.tools.hardware.targets import find_target
from mpjax._src.tools.instruments.places import overridden
from mpjax._src.tools.instruments.programs import make_program
from mpjax._src.tools.instruments.tune import Trial, worst
from tests.helpers.support import fresh_rng

ON_DEVICES = {"shard_mapped", "pmapped"}  # need several devices


@pytest.fixture(autouse=True)
def small_matmuls_round(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def trial(fun, policy, *args):
    make = functools.partial(
        make_program, "tune", fun, args=args, kwargs={}, argnums=(0, 1), has_aux=False
    )
    return Trial(make, get_policy(policy), 1000, "auto", find_target("h100"))


def chain(w, x):
    for i, name in enumerate(("a", "b", "c", "d")):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w[i])
    return jnp.mean(x**2)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - ON_DEVICES))
def test_the_mask_of_ones_has_the_error_of_the_plan(name, policy):
    tried = trial(PROGRAMS[name], policy, W, X)
    planned = worst(tried.trained(tried.policy)[0])
    assert worst(tried.masked(frozenset())[0]) == pytest.approx(planned, rel=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("moved", ["ab", "c", "bd", "bcd"])
def test_with_places_in_float32_the_mask_has_the_error_of_the_plan(moved, policy):
    numbers = fresh_rng()
    w = jnp.asarray(numbers.normal(size=(4, 64, 64)) / 8, jnp.float32)
    tried = trial(chain, policy, w, jnp.asarray(numbers.normal(size=(64, 64)), jnp.float32))
    places = [p for p in tried.places.finest() if p.pattern.split("/")[0] in moved]
    assert len(places) == len(moved)
    errors = tried.masked(frozenset().union(*(p.ops for p in places)))[0]
    planned = tried.trained(overridden(tried.policy, places))[0]
    assert np.hypot.reduce([*errors.values()]) == pytest.approx(
        np.hypot.reduce([*planned.values()]), rel=0.1
    )


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - ON_DEVICES))
def test_the_tuned_policy_has_the_error_of_its_mask(name, policy):
    tried = trial(PROGRAMS[name], policy, W, X)
    told = tried.report(worst(tried.trained(tried.policy)[0]) / 3)
    moved = frozenset[int]().union(*(tried.places.place(step.pattern).ops for step in told.steps))
    assert told.met
    assert worst(tried.masked(moved)[0]) == pytest.approx(told.error, rel=0.1, abs=1e-6)
