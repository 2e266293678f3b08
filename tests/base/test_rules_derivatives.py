"""The derivative columns of each rule: what derivatives read, and which roundings they tolerate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from evaluation import Way, evaluate
from evaluation import bind as bind_equation
from jax.extend.core import Literal
from primitives import (
    BFLOAT16,
    CASES,
    COLLECTIVES,
    ELEMENTWISE,
    FLOAT16,
    LARGEST,
    NEWER,
    OPERANDS,
    bind,
    case,
    equation,
    one_of_each,
    rule,
)

from mpjax._src.base import rules
from mpjax._src.base.rules import KINKED, MOVE, NOTHING, OTHERS, RESULT, SUMS_BACK

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


# ---- steady -------------------------------------------------------------------------------------

A_FEW = 4


def numbers(count):
    """Returns points of float32 operands, up to the largest float16."""
    near = 2.0 ** -np.arange(1.0, 25)
    if count == 1:
        x = [np.geomspace(1e-30, LARGEST, 2000), np.linspace(0, 40, 8000), 1 + near, 1 - near]
    else:
        x = [np.geomspace(1e-12, LARGEST, 100), [0, 1]]
    x = np.concatenate(x).astype(np.float32).astype(np.float64)
    x = np.unique(np.concatenate([-x, x]))
    return [axis.ravel() for axis in np.meshgrid(*[x] * count)]


def rounded(x, half):
    return np.asarray(x).astype(half).astype(np.float64)


def slope(fun, place):
    """Returns a function that gives the result of another, and its derivative by one operand."""

    def both(*operands):
        def along(x):
            return fun(*operands[:place], x, *operands[place + 1 :])

        return jax.jvp(along, (operands[place],), (jnp.ones_like(operands[place]),))

    compiled = jax.jit(both)
    return lambda operands: map(np.asarray, compiled(*operands))


def is_steady(key, place):
    """Returns whether a derivative tolerates a rounding of the operands to each 16-bit dtype.

    It may change by a few roundoffs of the largest of it, the result and one; and it is not larger
    than a few times the largest of the result, the operands that it reads and one.
    """
    at, operands = slope(ELEMENTWISE[key], place), numbers(OPERANDS[key])
    result, exact = at(operands)
    held = np.isfinite(exact) & (np.abs(result) <= np.finfo(np.float32).max)
    read = [x for i, x in enumerate(operands) if rule(key).saves != OTHERS or i != place]
    size, least = np.abs(exact), np.maximum(1, np.abs(result))
    stands = size <= A_FEW * np.maximum.reduce([least, *map(np.abs, read)])
    for half in (BFLOAT16, FLOAT16):
        _, got = at([rounded(x, half) for x in operands])
        few = A_FEW * float(jnp.finfo(half).eps) / 2
        stands &= np.abs(got - exact) <= few * np.maximum(least, size)  # which a NaN does not
    return np.all(stands[held])


SPECIAL = ("igamma", "igammac", "igamma_grad_a", "zeta", "polygamma", "regularized_incomplete_beta")
CURVED = [key for key in ELEMENTWISE if rule(key).saves != NOTHING and key not in SPECIAL]


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("key", CURVED)
def test_steady_column_is_whether_a_derivative_tolerates_rounding(key):
    params = {"y": int(key.split()[1])} if " " in key else {}
    found = all(is_steady(key, place) for place in range(OPERANDS[key]))
    assert found == rule(key).steady_of(params)


@pytest.mark.parametrize("key", ["log", "div", "sqrt", "sin", "integer_pow -1"])
def test_derivative_that_is_not_steady_is_lost_by_rounding(key):
    fun = {"div": lambda x: 1 / x}.get(key) or ELEMENTWISE[key]
    x = 1e-9 if key != "sin" else 1000.3
    exact, got = (float(jax.grad(fun)(jnp.float32(y))) for y in (x, rounded(x, FLOAT16)))
    assert not np.isfinite(got) or abs(got - exact) > 0.1


# ---- flattens -----------------------------------------------------------------------------------

LOST = 10  # roundings; where parts do not cancel it is at most four, and fifty where they do
NEAR = np.unique(np.geomspace(1 / 4, 64, 400).astype(BFLOAT16)).astype(np.float64)
TOGETHER = {1: [(0,)], 2: [(0, 1), (1, 0)]}  # by how much operands that move together differ


def roundings(fun, shifts):
    """Returns how far off a derivative is whose every part is rounded, in roundings.

    By the size of the derivative, or of what a rounding of the operands makes of it.
    """

    def along(t):
        return jax.jvp(fun, [t + s for s in shifts], [jnp.ones_like(t)] * len(shifts))[1]

    def value(x, aval):
        return rounded(x, BFLOAT16) if aval.dtype == np.float64 else x

    t = NEAR[np.all([rounded(NEAR + s, BFLOAT16) == NEAR + s for s in shifts], axis=0)]
    exact, second = map(np.asarray, jax.jvp(along, (t,), (np.ones_like(t),)))
    way = Way(lambda eqn, ins, amplified: bind_equation(eqn, ins), value, derived=True)
    (got,) = evaluate(jax.make_jaxpr(along)(t), [t], way)
    off = np.abs(got - exact) / (np.abs(exact) + np.abs(t * second))
    held = np.isfinite(off) & (np.abs(exact) > 1e-30)
    return np.max(off[held], initial=0) / (float(jnp.finfo(BFLOAT16).eps) / 2)


@pytest.mark.usefixtures("x64")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("key", one_of_each(CURVED, "saves", rules.FLATTENS))
def test_flattens_trait_is_of_derivatives_lost_by_rounding_their_parts(key):
    off = max(roundings(ELEMENTWISE[key], shifts) for shifts in TOGETHER[OPERANDS[key]])
    assert (off > LOST) == (rules.FLATTENS in rule(key).traits), off


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


WITHIN = [key for key in CASES if rule(key).need == MOVE and key not in COLLECTIVES]


@pytest.mark.parametrize("key", one_of_each(WITHIN, "saves", rules.SCATTERS_BACK))
def test_scatters_back_trait_is_of_moves_whose_transpose_selects(key):
    fun, *args = CASES[key]
    differentiated = jax.grad(lambda x: sum(map(jnp.sum, jax.tree.leaves(fun(x, *args[1:])))))
    names = {e.primitive.name for e in jax.make_jaxpr(differentiated)(args[0]).eqns}
    assert ("select_and_scatter_add" in names) == (rules.SCATTERS_BACK in rule(key).traits)


def test_rows_that_sum_back_are_moves():
    assert {rules.rule_of(name).need for name in rules.having(SUMS_BACK)} == {MOVE}
    assert {rules.rule_of(name).saves for name in rules.having(SUMS_BACK)} == {NOTHING}
