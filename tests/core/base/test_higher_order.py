"""Every primitive with programs inside has one row, and everything that reads rows knows it."""

import jax
import jax.numpy as jnp
import pytest

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import (
    CALL,
    FIRST_ORDER,
    HIGHER_ORDER,
    higher_order,
    turns_of,
)
from mpjax._src.core.program.interpret import ENTER
from mpjax._src.core.program.rebuild import REBUILD

X = jnp.ones((3, 2))


def eqn_of(fun, name):
    (eqn,) = [e for e in jax.make_jaxpr(fun)(X).jaxpr.eqns if e.primitive.name == name]
    return eqn


PROGRAMS = {
    "scan": lambda x: jax.lax.scan(lambda c, y: (c + y, c * 2), x[0], x),
    "while": lambda x: jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + x[0], x[1]),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "remat2": jax.checkpoint(jnp.sin),
    "jit": jax.jit(jnp.sin),
    "custom_jvp_call": jax.nn.relu,
}


def test_higher_order_rows_of_every_kind_are_entered_and_rebuilt():
    kinds = {row.kind for row in HIGHER_ORDER.values()}
    assert kinds == {*ENTER} == {*REBUILD}


@pytest.mark.parametrize("name", PROGRAMS)
def test_higher_order_row_finds_programs_in_parameters(name):
    fun = PROGRAMS[name]
    eqn = eqn_of(lambda x: jax.tree.leaves(fun(x)), name)
    row = higher_order(name)
    held = row.holding([inside.program for inside in row.wire(eqn)])
    assert held and held == {param: eqn.params[param] for param in held}


@pytest.mark.parametrize("name", PROGRAMS)
def test_higher_order_row_wires_programs_to_operands_and_results(name):
    fun = PROGRAMS[name]
    eqn = eqn_of(lambda x: jax.tree.leaves(fun(x)), name)
    for inside in higher_order(name).wire(eqn):
        inner, _ = _jax.open_jaxpr(inside.program)
        assert len(inside.ins) == len(inner.invars) and len(inside.outs) == len(inner.outvars)
        for var, index in zip(inner.invars, inside.ins, strict=True):
            assert var.aval.dtype == eqn.invars[index].aval.dtype
        for var, index in zip(inner.outvars, inside.outs, strict=True):
            assert index is None or var.aval.dtype == eqn.outvars[index].aval.dtype
        for result, argument in inside.carry:
            assert inner.outvars[result].aval.shape == inner.invars[argument].aval.shape


def test_turns_of_scan_is_its_length_and_of_while_one():
    assert turns_of(eqn_of(PROGRAMS["scan"], "scan")) == 3
    assert turns_of(eqn_of(PROGRAMS["while"], "while")) == 1  # nobody knows
    assert higher_order("tanh") is FIRST_ORDER and FIRST_ORDER.kind != CALL


def test_a_scan_without_a_state_is_planned_as_a_loop():
    import mpjax

    def fun(x):
        return jax.lax.scan(lambda c, y: (c, y * 2), None, x)[1]

    assert jnp.allclose(mpjax.autocast(fun, "mixed_bfloat16")(X), fun(X))
