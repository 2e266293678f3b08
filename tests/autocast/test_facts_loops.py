"""The facts of loops are found in a few turns: they only grow, up to a bound of each field."""

import jax
import jax.numpy as jnp
import measure
import pytest
import random_loops
from jax import lax
from planned import carries, know
from support import HALVES, normal

import mpjax
from mpjax._src.autocast import demand, facts, plan
from mpjax._src.autocast.tables import ADDED, BEYOND, SUBTRACTED

E = normal(0, 6, 2, 5)
lse = jax.nn.logsumexp


class Watched(facts.Sweep):
    last = None

    def __init__(self, *args):
        super().__init__(*args)
        Watched.last = self


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(plan, "Sweep", Watched)


def planned(fun, *args, half="bfloat16"):
    closed = jax.make_jaxpr(fun)(*args)
    dtypes = [v.dtype for v in closed.in_avals]
    made = plan.make_plan(closed.jaxpr, closed.consts, mpjax.get_policy(f"mixed_{half}"), dtypes)
    know(made.analysis)
    return made.block, Watched.last


def shifted(a):
    return jnp.pad(a, ((0, 0), (1, 0)), constant_values=-9.0)[:, :-1]


# As people write alignments, lattices and stencils.
BODIES = {
    "reversed": lambda a, e: lse(jnp.stack([a, a[:, ::-1]]), 0) + e,
    "ctc": lambda a, e: lse(jnp.stack([a, shifted(a), shifted(shifted(a))]), 0) + e,
    "last axis": lambda a, e: lse(jnp.stack([a, e], -1), -1) + e,
    "middle axis": lambda a, e: lse(jnp.stack([a, shifted(a)], 1), 1) + e,
    "sums": lambda a, e: jnp.sum(jnp.stack([a, e]), 0) + e.mean(-1, keepdims=True),
    "means": lambda a, e: jnp.mean(jnp.stack([a - a.mean(0), e], 2), 2) + e[0],
    "injected": lambda a, e: jnp.tanh((e + a) + a @ jnp.ones((5, 5))),
}


@pytest.mark.parametrize("name", BODIES)
def test_facts_of_a_loop_are_found_in_a_few_turns(name):
    body = BODIES[name]

    def twice(e):
        inner = lambda a, e: lax.scan(lambda a, _: (body(a, e), a), a, None, length=2)  # noqa: E731
        return lax.scan(inner, e[0], e[1:])

    for fun in (lambda e: lax.scan(lambda a, e: (body(a, e), a), e[0], e[1:]), twice):
        planned(fun, E)
        assert Watched.last.most < 8 < facts.TURNS


def check(seed):
    """Plans a random loop. Of all facts that were found, each is within its bound."""
    block, sweep = planned(
        random_loops.drawn(seed), *random_loops.arguments(), half=HALVES[seed % 2]
    )
    bits = 1 << len(sweep.numbers)
    for value, fact in sweep.facts.items():
        assert 0 <= fact.level < 1 << len(value.aval.shape), (seed, value.aval, fact)
        masks = (fact.made, fact.chain, fact.peak, fact.mean, fact.weights)
        assert all(0 <= mask < bits for mask in masks) and 0 <= fact.factor <= 1
        assert fact.offset <= ADDED | SUBTRACTED
        assert fact.span <= BEYOND and fact.writes <= facts.WRITES + 1
    values = sum(
        len(b.invars) + len(b.consts) + sum(len(op.outs) for op in b.ops) for b in block.blocks()
    )
    assert len(sweep.numbers) <= 2 * values  # one of each value, one of each part of a weight
    assert sweep.most < facts.TURNS / 2


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 5])
def test_random_loop_is_planned(seed):
    check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_random_loops_are_planned(first):
    for seed in range(first, first + 100):
        check(seed)


def layers(ws, x):
    return jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] @ ws[0])


@pytest.mark.parametrize("half", HALVES)
def test_a_loop_whose_facts_are_forgotten_keeps_float32_carries(half, monkeypatch):
    args = normal(1, 3, 8, 8, scale=0.4), normal(2, 4, 8)
    (scan,) = (op for op in planned(layers, *args)[0].ops if op.subs)
    body = scan.subs[0].program
    assert any(carries(body))
    for module in (facts, demand):
        monkeypatch.setattr(module, "TURNS", -9)
    (scan,) = (op for op in planned(layers, *args)[0].ops if op.subs)
    body = scan.subs[0].program
    assert not any(carries(body))
    measure.check(layers, args, half, seeds=(0,))
    for seed in range(6):
        planned(random_loops.drawn(seed), *random_loops.arguments(), half=half)
