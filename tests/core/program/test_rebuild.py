"""An equation is put back with other programs inside, whose further results come out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import higher_order
from mpjax._src.core.program.rebuild import Gains, rebuild

X = jnp.arange(6.0).reshape(3, 2)


def mapped(x):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P(), out_specs=P())(x)


ONE = jnp.float32(1)
# A function of one equation with programs inside, and what its gains are if each program gains a
# one: in loops the turns, written as the digits of a number.
PROGRAMS = {
    "scan": (lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x), 12),
    "scan from the end": (
        lambda x: jax.lax.scan(lambda c, y: (c + y, c * y), x[0], x, reverse=True),
        210,
    ),
    "while": (lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + x[0], x[1]), 123),
    "cond": (lambda x: jax.lax.cond(x[0, 1] > 0, jnp.sin, jnp.cos, x), 1),
    "remat of constants": (jax.checkpoint(lambda x: jnp.sin(x) * np.float32([1, 2])), 1),
    "jit that is more than a call": (jax.jit(jnp.sin, donate_argnums=0), 1),
    "call": (jax.nn.relu, 1),
    "shard_map": (mapped, 1),
}


def rebuilt(jaxpr, x, gains=None):
    """Returns the results of a program whose loops, branches and calls are rebuilt, and gains."""
    env, gained = dict(zip(jaxpr.jaxpr.invars, [x], strict=True)), []
    env |= zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True)
    for eqn in jaxpr.jaxpr.eqns:
        ins = [a.val if isinstance(a, _jax.Literal) else env[a] for a in eqn.invars]
        if inside := [*higher_order(eqn.primitive.name).wire(eqn)]:
            bodies = [functools.partial(run, each, gains) for each in inside]
            avals = [_jax.in_avals(each.program) for each in inside]
            outs = rebuild(eqn, bodies, avals, ins, gains)
            outs, gained = outs[: len(eqn.outvars)], outs[len(eqn.outvars) :]
        else:
            outs = _jax.bind(eqn, ins)
        env |= zip(eqn.outvars, outs, strict=True)
    return [env[v] for v in jaxpr.jaxpr.outvars], gained


def run(inside, gains, *args):
    gained = [ONE] if gains and inside.outs != [None] else []
    return [*_jax.eval_closed(inside.program, *args), *gained]


@pytest.mark.parametrize("name", PROGRAMS)
def test_rebuilt_keeps_results_and_adds_gains_in_turn(name):
    fun, digits = PROGRAMS[name]
    jaxpr = jax.make_jaxpr(lambda x: jax.tree.leaves(fun(x)))(X)
    gains = Gains([ONE * 0], lambda total, gained, turn: [total[0] * 10 + gained[0] * turn])
    plain, none = jax.jit(functools.partial(rebuilt, jaxpr))(X)
    more, gained = jax.jit(functools.partial(rebuilt, jaxpr, gains=gains))(X)
    want = jax.tree.leaves(fun(X + 0))
    jax.tree.map(np.testing.assert_array_equal, [plain, more], [want, want])
    assert none == [] and [*map(int, gained)] == [digits]
