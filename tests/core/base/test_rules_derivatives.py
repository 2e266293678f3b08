"""The derivative columns of each rule: what derivatives read, and which roundings they tolerate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal
from primitives import (
    CASES,
    COLLECTIVES,
    ELEMENTWISE,
    NEWER,
    bind,
    case,
    equation,
    one_of_each,
    rule,
)

from mpjax._src.core.base import rules
from mpjax._src.core.base.rules import KINKED, MOVE, NOTHING, OTHERS, RESULT, SUMS_BACK

# ---- saves --------------------------------------------------------------------------------------


def is_float(value):
    return jnp.issubdtype(value.dtype, jnp.inexact)


def reads(eqn, place):
    """Returns which floats the tangent of an equation reads, differentiated by one operand."""
    avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars]

    def run(tangent, *primals):
        def along(x):
            return [*filter(is_float, bind(eqn, [*primals[:place], x, *primals[place + 1 :]]))]

        return jax.jvp(along, (primals[place],), (tangent,))

    jaxpr = jax.make_jaxpr(run)(avals[place], *avals).jaxpr
    results, tangents = np.split(np.array(jaxpr.outvars, object), 2)
    names = {v: "own" if i == place else "others" for i, v in enumerate(jaxpr.invars[1:])}
    names |= dict.fromkeys(results, "result")
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    found, seen, todo = set(), set(), [*tangents]
    while todo:
        value = todo.pop()
        if isinstance(value, Literal) or value in seen or not is_float(value.aval):
            continue  # a mask, a permutation
        seen.add(value)
        if value in names:
            found.add(names[value])
        elif value in makers:
            todo += makers[value].invars
    return found


def saves(key):
    """Returns what the derivative of a case reads, in the words of the table, or None."""
    eqn, found = equation(key), []
    for place, operand in enumerate(eqn.invars):
        if is_float(operand.aval):
            try:
                found.append(reads(eqn, place))
            except (NotImplementedError, TypeError, ValueError):
                continue  # not differentiable, or not by this operand
    if not found:
        return None
    if found[0] == {"others"}:  # of a quotient, the divisor's derivative reads itself as well
        return OTHERS
    names = set().union(*found)
    return NOTHING if not names else RESULT if names == {"result"} else rules.OPERANDS


UNLIKE = {"expm1": rules.OPERANDS if NEWER else RESULT}  # in this version
LEFT = [key for key in CASES if rule(key).need == rules.LEFT]
ALONE = [key for key in (*ELEMENTWISE, *CASES) if key not in COLLECTIVES and key not in LEFT]


# What JAX does not differentiate: the row says the most that a derivative can read.
UNDERIVED = {
    *("igamma_grad_a", "zeta", "cholesky_update", "eig", "geqrf", "hessenberg", "ormqr", "schur"),
    *("householder_product", "symmetric_product", "tridiagonal"),
}


@pytest.mark.parametrize("key", ALONE)
def test_saves_column_is_what_a_derivative_reads(key):
    found = saves(key)
    assert found == (None if key in UNDERIVED else UNLIKE.get(key, rule(key).saves))
    assert found or rule(key).saves == rules.OPERANDS


# ---- kinks and sums -----------------------------------------------------------------------------


def jacobians(fun, args):
    """Returns the derivatives of the float results, flat, by each operand."""

    def flat(*args):
        leaves = filter(is_float, jax.tree.leaves(fun(*args)))
        return jnp.concatenate([jnp.ravel(x) for x in leaves])

    return jax.jacfwd(flat, tuple(range(len(args))))(*args)


LINEAR = [
    key
    for key in (*ELEMENTWISE, *CASES)
    if (rule(key).saves == NOTHING or KINKED in rule(key).traits)
    and rule(key).need in (MOVE, rules.FOLLOW, rules.FULL)
    and key not in ("pmax", "pmin", "fft")  # not differentiable; complex
]


@pytest.mark.parametrize("key", one_of_each(LINEAR, "gain", KINKED))
def test_kinked_trait_is_of_derivatives_that_depend_on_the_side(key):
    fun, *args = case(key)
    args = [np.asarray(x) * (-1) ** i - 0.9 * (key == "abs") for i, x in enumerate(args)]
    slopes = jax.jit(lambda *args: jacobians(fun, args))
    here, near = slopes(*args), slopes(*[x * np.float32(1.001) for x in args])
    there = slopes(*[-x for x in args])
    assert jax.tree.all(jax.tree.map(np.array_equal, here, near))
    differs = not jax.tree.all(jax.tree.map(np.array_equal, here, there))
    assert differs == (KINKED in rule(key).traits)


MOVES = [key for key in LINEAR if rule(key).need == MOVE and KINKED not in rule(key).traits]


@pytest.mark.parametrize("key", one_of_each(MOVES, "cost", SUMS_BACK))
def test_sums_back_trait_is_of_moves_whose_transpose_sums(key):
    fun, *args = CASES[key]

    def transposed(*args):
        result, back = jax.vjp(fun, *args)
        return back(jax.tree.map(jnp.ones_like, result))[0]

    assert (np.max(jax.jit(transposed)(*args)) > 1) == (SUMS_BACK in rule(key).traits)


def test_rows_that_sum_back_are_moves():
    assert {rules.rule_of(name).need for name in rules.having(SUMS_BACK)} == {MOVE}
    assert {rules.rule_of(name).saves for name in rules.having(SUMS_BACK)} == {NOTHING}
