"""The program that rounds by a mask has the error of the plan, compiled as it trains."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import PROGRAMS, W, X

import mpjax
from mpjax._src.core.planner import rounding
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.tools.hardware.targets import find_target
from mpjax._src.tools.instruments.places import overridden
from mpjax._src.tools.instruments.programs import make_program
from mpjax._src.tools.instruments.trials import worst
from mpjax._src.tools.instruments.tune import Tuner
from tests.helpers.support import fresh_rng, normal

ON_DEVICES = {"shard_mapped", "pmapped"}  # need several devices


@pytest.fixture(autouse=True)
def small_matmuls_round(monkeypatch):
    monkeypatch.setattr(rounding, "SMALL", 1)


def trial(fun, policy, *args):
    make = functools.partial(
        make_program, "tune", fun, args=args, kwargs={}, argnums=(0, 1), has_aux=False
    )
    return Tuner(make, get_policy(policy), 1000, "auto", find_target("h100"))


def chain(w, x):
    for i, name in enumerate(("a", "b", "c", "d")):
        with jax.named_scope(name):
            x = jnp.tanh(x @ w[i])
    return jnp.mean(x**2)


def solved(w, x):
    with jax.named_scope("a"):
        x = jnp.tanh(x @ w[0])

    def turn(carry):
        with jax.named_scope("b"):
            return jnp.tanh(carry[0] @ w[1] + x), carry[1] + 1

    found, _ = jax.lax.while_loop(lambda carry: carry[1] < 9, turn, (x, 0))
    with jax.named_scope("c"):
        return jnp.mean((jax.lax.stop_gradient(found) @ w[2]) ** 2)


def test_a_policy_runs_once():
    tried = trial(chain, "mixed_bfloat16", normal(0, 4, 8, 8), normal(1, 8, 8))
    error, _ = tried.trained(tried.policy)
    runs = tried.runs
    assert tried.trained(tried.policy)[0] == error and tried.runs == runs
    tried.trained(tried.policy.override({"a": "float32"}))
    assert tried.runs == runs + 1


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - ON_DEVICES))
def test_the_mask_of_ones_has_the_error_of_the_plan(name, policy):
    tried = trial(PROGRAMS[name], policy, W, X)
    planned = worst(tried.trained(tried.policy)[0])
    assert worst(tried.masked(frozenset())[0]) == pytest.approx(planned, rel=0.1)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
@pytest.mark.parametrize(
    ("fun", "moved"),
    [*itertools.product([chain], ["ab", "c", "bd", "bcd"]), (solved, "b"), (solved, "ac")],
)
def test_with_places_in_float32_the_mask_has_the_error_of_the_plan(fun, moved, policy):
    numbers = fresh_rng()
    w = jnp.asarray(numbers.normal(size=(4, 64, 64)) / 8, jnp.float32)
    tried = trial(fun, policy, w, jnp.asarray(numbers.normal(size=(64, 64)), jnp.float32))
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


# ---- places -------------------------------------------------------------------------------------


def test_an_operation_whose_derivative_is_in_16_bits_is_a_place():
    def loss(w, x):
        with jax.named_scope("act"):
            h = jax.nn.sigmoid(x @ w)  # its derivative subtracts
        return jnp.mean(h**2)

    policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("sub",))
    tried = trial(loss, policy, normal(0, 32, 32, scale=0.2), normal(1, 16, 32))
    places = {p.pattern: p for p in tried.places.finest()}
    assert "act/logistic" in places
    moved = [p for pattern, p in places.items() if pattern != "act/logistic"]
    by_mask = worst(tried.masked(frozenset().union(*(p.ops for p in moved)))[0])
    planned = worst(tried.trained(overridden(policy, moved))[0])
    assert planned > 1e-4 and by_mask == pytest.approx(planned, rel=0.1)


def test_what_places_cost_together_does_not_depend_on_their_order():
    def loss(w, x):
        with jax.named_scope("first"):
            h = x @ w
        with jax.named_scope("second"):  # reads a larger view of the array
            return jnp.mean((jnp.broadcast_to(h, (4, 64, 32)) @ w) ** 2)

    tried = trial(loss, "mixed_bfloat16", normal(0, 32, 32), normal(1, 64, 32))
    sets = [place.ops for place in tried.places.finest()]
    for order in (sets, sets[::-1]):
        costs, _, arrays = tried.places.prices(order, tried.target)
        together = tried.places.seconds(frozenset().union(*sets), tried.target)
        assert costs.sum() + arrays.sum() == pytest.approx(together)


def test_containers_are_no_places():
    def loss(w, x):
        return jnp.sum(jax.lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: -a @ w, x))

    tried = trial(loss, "mixed_bfloat16", normal(0, 32, 32), normal(1, 16, 32))
    assert [p.pattern for p in tried.places.finest()] == ["dot_general"]


def test_an_operation_is_a_place_by_its_derivative_even_if_others_read_it_in_16_bits():
    def loss(w, x):
        with jax.named_scope("act"):
            h = jax.nn.sigmoid(x @ w)
        return jnp.mean((h + x) ** 2)

    policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("sub", "add"))
    tried = trial(loss, policy, normal(0, 32, 32, scale=0.2), normal(1, 16, 32))
    assert "act/logistic" in {p.pattern for p in tried.places.finest()}


def test_a_policy_that_casts_at_the_boundary_has_no_places():
    tried = trial(PROGRAMS["nested_scans"], "bfloat16", W, X)
    assert not tried.places.finest() and "boundary" in tried.unfollowed


def test_a_mask_rounds_the_constants_of_16_bit_operations():
    policy = mpjax.get_policy("mixed_bfloat16").with_ops(half=("mul",))
    args = normal(0, 32, 32), normal(1, 16, 32)
    tried = trial(lambda w, x: jnp.mean((x @ w * 0.7971) ** 2), policy, *args)
    planned = tried.trained(policy)[0]["loss"]
    assert tried.masked(frozenset())[0]["loss"] == pytest.approx(planned, rel=0.1)
    assert tried.masked(tried.places.owners(None))[0]["loss"] < 1e-5 < planned
