"""A jaxpr opened into equations and closed again is the same program."""

import jax
import jax.numpy as jnp
from jax import lax

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building
from mpjax._src.core.planner.dependence import between, deduplicated, dependents, in_order
from mpjax._src.core.planner.equations import Value, closed, needed, opened, parts


def opened_of(fun, *args, **flags):
    program = jax.make_jaxpr(fun)(*args)
    ins = [Value(aval) for aval in _jax.in_avals(program)]
    equations = []
    outs = opened(program, ins, equations, **flags)
    return program, ins, equations, outs


def names(equations):
    return [e.name for e in equations]


def test_calls_are_inlined_and_their_scopes_stay():
    @jax.jit
    def inner(x):
        with jax.named_scope("deep"):
            return jnp.sin(x)

    def fun(x):
        with jax.named_scope("outer"):
            return inner(x) * 2

    _, _, equations, _ = opened_of(fun, 1.0)
    assert names(equations) == ["sin", "mul"]
    assert str(equations[0].stack) == "outer/deep"


def test_closing_gives_the_program_again():
    table = jnp.arange(3.0)

    def fun(x):
        return jnp.sin(x) * table, lax.fori_loop(0, 3, lambda i, y: y * x, x)

    program, ins, equations, outs = opened_of(fun, 2.0)
    again = closed(ins, equations, outs, building.anonymous(program))
    for a, b in zip(_jax.eval_closed(again, 2.0), fun(2.0), strict=True):
        assert (a == b).all()


def test_closing_leaves_out_what_nothing_needs_but_effects():
    def fun(x):
        jax.debug.callback(lambda y: None, x)
        return jnp.sin(x), jnp.cos(x)

    program, ins, equations, outs = opened_of(fun, 2.0)
    assert names(needed(equations, outs[:1])) == ["debug_callback", "sin"]
    one = closed(ins, equations, outs[:1], building.anonymous(program))
    assert [e.primitive.name for e in one.eqns] == ["debug_callback", "sin"]
    assert one.effects


def test_custom_rules_are_inlined_only_where_nobody_differentiates():
    @jax.custom_jvp
    def ruled(x):
        return jnp.sin(x)

    ruled.defjvp(lambda p, t: (ruled(*p), 3 * t[0]))
    assert names(opened_of(ruled, 1.0)[2]) == ["custom_jvp_call"]
    assert names(opened_of(ruled, 1.0, rules=True)[2]) == ["sin"]


def test_a_recomputation_waits_behind_its_barrier():
    def pulled(x, ct):
        return jax.vjp(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x))), x)[1](ct)

    _, _, equations, _ = opened_of(pulled, 1.0, 1.0)
    again = [e for e in equations if e.again]
    assert names(again)[0] == "optimization_barrier" and "sin" in names(again)


def test_what_depends_on_what():
    def fun(x, y):
        a = jnp.sin(x)
        return lax.optimization_barrier((a, y)), jnp.cos(a) + y

    _, (x, _), equations, outs = opened_of(fun, 1.0, 2.0)
    moved = dependents(equations, [x])
    # A result of a barrier depends on its own operand alone.
    assert [out in moved for out in outs] == [True, False, True]
    first = equations[0].outs[0]
    assert names(between(equations, [outs[2]], {first})) == ["cos", "add"]


def test_equal_equations_are_one():
    def fun(x):
        signs = jnp.copysign(x, -0.0), jnp.copysign(x, 0.0)
        return jnp.exp(x) / jnp.exp(x).sum(), signs

    _, equations, outs = parts(jax.make_jaxpr(fun)(jnp.ones(4)))
    left, results = deduplicated(equations, outs)
    assert [e.name for e in left].count("exp") == 1
    assert len({*results}) == 3


def test_what_is_computed_again_is_no_repetition():
    x, equations = Value(jax.typeof(jnp.ones(4))), []
    program = jax.make_jaxpr(jnp.sin)(jnp.ones(4))
    outs = [opened(program, [x], equations, again=again)[0] for again in (False, True)]
    assert deduplicated(equations, outs) == (equations, outs)


def test_equations_run_in_the_order_of_what_they_read():
    equations = opened_of(lambda x: jnp.sin(jnp.cos(x) * x) + jnp.exp(x), 1.0)[2]
    assert in_order(equations) == equations
    assert names(in_order(equations[::-1])) == ["exp", "cos", "mul", "sin", "add"]
