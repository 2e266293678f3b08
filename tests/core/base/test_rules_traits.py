"""The span, the cost and the traits of each row."""

import collections
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import linalg
from primitives import (
    BFLOAT16,
    CASES,
    COLLECTIVES,
    ELEMENTWISE,
    FLOAT16,
    LARGEST,
    NEWER,
    OPERANDS,
    SLOW,
    SMALLEST,
    UNARY,
    bind,
    case,
    equation,
    halves,
    one_of_each,
    rule,
    some_halves,
)
from support import thorough_but

from mpjax._src.core.base import rules
from mpjax._src.core.base.rules import BOUNDED, DEAR, FUSED, GROWS, KEEPS, NEVER

ROWS = [k for k in (*ELEMENTWISE, *CASES) if rule(k).need not in (rules.LEFT, rules.PROGRAM)]


def floats(fun, args):
    """Returns the sizes of the float results of a function, as one vector."""
    leaves = [x for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return np.concatenate([np.ravel(np.abs(np.asarray(x, complex))) for x in leaves])


# ---- span ---------------------------------------------------------------------------------------

SMALL = 4.0  # half a turn, and a little
# Of float32, in the range of float16: next to one, and next to a quarter of a turn.
BETWEEN = np.array([1 - 2.0**-24, 1 + 2.0**-23, float(np.float32(np.pi / 2)), 0.0])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("key", one_of_each(ELEMENTWISE, "span"))
def test_span_of_elementwise_rules_agrees_with_results(key):
    operands = halves()[None] if key in UNARY else some_halves(OPERANDS[key])
    if key in SLOW:
        operands = operands[:, ::7][:, np.all(np.abs(operands[:, ::7]) < 1e3, axis=0)]
    if key in UNARY:
        operands = np.concatenate([operands, [BETWEEN], [-BETWEEN]], axis=1)
    result = np.abs(np.asarray(jax.jit(ELEMENTWISE[key])(*operands)))
    inside = ((np.abs(operands) >= SMALLEST) & (np.abs(operands) <= LARGEST)).all(0)
    inside &= np.isfinite(result)  # but for poles
    largest, in_float16 = np.nanmax(result), np.max(result[inside])
    bounded = largest <= SMALL
    if rule(key).span == KEEPS:
        assert not bounded and in_float16 <= 2 * LARGEST
    else:
        assert bounded == (rule(key).span == BOUNDED)
        assert (in_float16 > 2 * LARGEST) == (rule(key).span == GROWS)


# Operands in the range of float16 whose result is not; of others, the largest float16 will do.
ALL = np.full((5, 5), LARGEST)
SIGNS = np.random.default_rng(0).standard_normal((16, 16))
LARGE = {
    "scatter-sub": (np.full(5, LARGEST), np.full(2, -LARGEST)),
    "select_and_scatter_add": (np.array([0.0, 0, 1, 0, 0]), np.full(3, LARGEST)),
    "cholesky": (np.eye(3) * LARGEST,),
    "cholesky_update": (np.triu(np.sign(SIGNS)) * LARGEST, np.full(16, LARGEST)),
    **dict.fromkeys(["eig", "eigh", "geqrf", "hessenberg"], (ALL,)),
    **dict.fromkeys(["qr", "schur", "svd", "tridiagonal"], (ALL,)),
    "lu": (LARGEST * (np.eye(5) - np.tril(np.ones((5, 5)), -1) + np.eye(5, 5, 4)),),
    "tridiagonal_solve": (np.zeros(3), np.full(3, SMALLEST), np.zeros(3), np.ones((3, 1))),
    "triangular_solve": (np.eye(3) * SMALLEST, np.ones((3, 2))),
    "random_gamma": (np.full(4, SMALLEST),),
    "rng_uniform": (np.float32(0), np.float32(LARGEST)),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "key", one_of_each((k for k in ROWS if k in CASES and k not in COLLECTIVES), "span")
)
def test_span_of_other_rules_agrees_with_results(key):
    fun, *args = CASES[key]
    args = LARGE.get(key) or [np.full(np.shape(x), LARGEST) for x in args]
    if rule(key).need != rules.COMPARE:
        assert (np.max(floats(fun, args)) > 2 * LARGEST) == (rule(key).span == GROWS)


# ---- cost ---------------------------------------------------------------------------------------

# Instructions that a vector unit has, or nearly so.
PLAIN = {
    *("abs", "add", "and", "ceil", "clamp", "compare", "convert", "divide", "floor", "is-finite"),
    *("maximum", "minimum", "multiply", "negate", "not", "or", "round-nearest-afz", "rsqrt"),
    *("round-nearest-even", "select", "sign", "sqrt", "subtract"),
}
SHAPES = {"broadcast", "broadcast-in-dim", "reduce", "reshape", "transpose"}
NOT_WORK = {"bitcast", "call", "constant", "copy", "fusion", "parameter", "iota", "return", *SHAPES}
HEAVY = 10  # instructions that a division, a root or a special function counts as


def work(key):
    """Returns the optimized instructions of an elementwise case, and their number, weighed."""
    fun, *args = case(key)
    text = jax.jit(fun).lower(*args).compile().as_text()
    found = collections.Counter(re.findall(r"= \S+ ([\w-]+)\(", text))
    found = {name: count for name, count in found.items() if name not in NOT_WORK}
    heavy = {"divide", "sqrt", "rsqrt"} | (found.keys() - PLAIN)
    return found, sum(n * (HEAVY if name in heavy else 1) for name, n in found.items())


@pytest.mark.parametrize("key", one_of_each([*ELEMENTWISE, "select_n", "eq", "is_finite"], "cost"))
def test_cost_of_elementwise_rules_agrees_with_instructions(key):
    """Nothing: a few instructions that there are. Dear: a special one. Never: very many."""
    found, weight = work(key)
    if rule(key).cost == FUSED:
        assert found.keys() <= PLAIN and weight <= 30
    elif rule(key).cost == DEAR:
        assert found.keys() - PLAIN or weight > 30
        assert weight <= 100
    else:
        assert weight > 100


@pytest.mark.parametrize("key", [k for k in ROWS if k in CASES and rule(k).cost == FUSED])
def test_cost_of_other_rules_is_fused_for_views_and_reductions_alone(key):
    """Views, and reductions, which compilers fuse with what they reduce."""
    fun, *args = CASES[key]
    text = jax.jit(fun).lower(*args).as_text()
    found = re.findall(r"(?:stablehlo|chlo)\.(\w+)", text)
    assert {name.replace("_", "-") for name in found} <= PLAIN | NOT_WORK


def test_cost_of_rules_that_move_memory_or_loop_is_never():
    for key in ROWS:
        if key in CASES and rule(key).need == rules.FULL and rule(key).cost != NEVER:
            assert key in ("reduce_sum", "reduce_prod")


# ---- traits -------------------------------------------------------------------------------------


def having(trait):
    """Returns the cases of rows that have a trait."""
    return [key for key in (*ELEMENTWISE, *CASES) if trait in rule(key).traits]


@pytest.mark.parametrize("key", [k for k in CASES if "reduce" in k or k in having(rules.REDUCES)])
def test_reduces_trait_is_of_results_smaller_than_operands(key):
    fun, *args = CASES[key]
    (result,) = jax.tree.leaves(jax.eval_shape(fun, *args))
    whole = key in ("reduce_scatter",)  # of all devices together, one array
    assert (result.size < np.size(args[0]) and not whole) == (rules.REDUCES in rule(key).traits)


@pytest.mark.parametrize("key", having(rules.SAME_CONSTANT))
def test_same_constant_trait_is_of_constants_that_stay_constant(key):
    fun, *args = CASES[key]
    (result,) = jax.tree.leaves(fun(*[np.full_like(x, 0.3) for x in args]))
    assert np.all(result == result.dtype.type(0.3))


@pytest.mark.parametrize("key", having(rules.SAME_PARAMETER))
def test_same_parameter_trait_is_of_views_with_entries_of_the_parameter(key):
    fun, parameter = CASES[key]
    for result in jax.tree.leaves(fun(parameter)):
        assert np.all(np.isin(result, parameter.astype(result.dtype)))


@pytest.mark.parametrize("key", having(rules.PART))
def test_part_trait_is_of_results_with_each_entry_once(key):
    fun, whole = CASES[key]
    parts = np.concatenate([np.ravel(x) for x in jax.tree.leaves(fun(whole))])
    assert np.unique(parts).size == parts.size


def test_looks_up_trait_is_of_gather_alone():
    assert having(rules.LOOKS_UP) == ["gather"]


@pytest.mark.parametrize(
    ("key", "half"),
    thorough_but(
        itertools.product(having(rules.HAS_WIDE_FORM), [BFLOAT16, FLOAT16]),
        *[("dot_general", BFLOAT16), ("ragged_dot_general", FLOAT16)],
    ),
)
def test_wide_form_trait_is_of_half_operands_with_float32_results(key, half):
    """Half operands in, float32 out. What hardware makes of it: hardware/test_wide_form.py."""
    eqn = equation(key)
    operands = [jnp.ones(v.aval.shape, half) for v in eqn.invars[:2]]
    rest = [jnp.ones(v.aval.shape, v.aval.dtype) for v in eqn.invars[2:]]

    def wide(*operands):
        params = {**eqn.params, "preferred_element_type": np.dtype("float32")}
        return eqn.primitive.bind(*operands, *rest, **params)

    result, back = jax.vjp(wide, *operands)
    assert result.dtype == np.float32 and {x.dtype for x in back(result)} == {half}


def has_half_form(key, half):
    """Returns whether the primitive of a case, as traced in float32, lowers with half operands."""
    eqn = equation(key)
    avals = [v.aval for v in eqn.invars]
    dtypes = [half if a.dtype == np.float32 else a.dtype for a in avals]
    operands = [jax.ShapeDtypeStruct(a.shape, d) for a, d in zip(avals, dtypes, strict=True)]
    try:
        jax.jit(lambda *xs: bind(eqn, xs)).lower(*operands)
    except (NotImplementedError, TypeError, ValueError):
        return False
    return True


# Those that only the newest JAX refuses: before, a CPU has them as sums of products.
REFUSED_SINCE = () if NEWER else ("cholesky_update", "symmetric_product")


@pytest.mark.parametrize("half", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize(
    "key",
    one_of_each(
        (k for k in (*ELEMENTWISE, *CASES) if k not in COLLECTIVES and k not in REFUSED_SINCE),
        *("gain", rules.NO_HALF_FORM),
    ),
)
def test_no_half_form_trait_is_of_rules_that_fail_in_half(key, half):
    assert has_half_form(key, half) == (rules.NO_HALF_FORM not in rule(key).traits)


SPECIAL_POINTS = np.array([-1.0, -0.5, 0.0, 0.5, 1.0], np.float32)
# JAX gives NaN there, since 0.12 infinity at zero.
POLE_IS_NAN = () if NEWER else ("digamma",)
POLES = {
    "triangular_solve": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        *(np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)),
    )
}


@pytest.mark.parametrize(
    "key", one_of_each((k for k in ELEMENTWISE if k not in POLE_IS_NAN), "span", rules.POLE)
)
def test_pole_trait_is_of_elementwise_rules_that_reach_infinity(key):
    grid = np.meshgrid(*[SPECIAL_POINTS] * OPERANDS[key])
    result = ELEMENTWISE[key](*[x.ravel() for x in grid])
    powers = key.startswith("integer_pow") and "-" not in key  # of these, only negative ones
    assert np.any(np.isinf(result)) == (rules.POLE in rule(key).traits and not powers)


@pytest.mark.parametrize("key", having(rules.POLE))
def test_pole_trait_is_exhibited_for_every_rule(key):
    if key in POLES:
        fun, *args = POLES[key]
        assert np.isinf(fun(*args)).all()
    assert key in POLES or key in ELEMENTWISE


RANKED = [key for key in CASES if rule(key).need in (rules.MOVE, rules.COMPARE)]


@pytest.mark.parametrize("key", one_of_each(RANKED, "gain", rules.RANKS))
def test_ranks_trait_is_of_rules_that_place_or_sort(key):
    fun, x, *others = CASES[key]
    results = [np.asarray(y) for y in jax.tree.leaves(fun(x, *others))]
    places = any(np.issubdtype(y.dtype, np.integer) for y in results)
    sorts = any(np.array_equal(y, np.sort(x, None)) for y in results) and np.any(np.diff(x) < 0)
    assert (places or sorts) == (rules.RANKS in rule(key).traits)


# ---- jumps ----------------------------------------------------------------------------------

WITH_FEW_OPERANDS = [key for key in ELEMENTWISE if OPERANDS[key] <= 2 and key not in SLOW]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("key", one_of_each(WITH_FEW_OPERANDS, "span", rules.JUMPS))
def test_jumps_trait_is_of_rules_that_jump(key):
    x = np.arange(0.5, 8, 0.5)
    others = [np.ones_like(x)] * (OPERANDS[key] - 1)
    below, above = (
        np.asarray(ELEMENTWISE[key](x * (1 + step), *others)) for step in (-1e-12, 1e-12)
    )
    near = np.maximum(np.abs(below), np.abs(above)) < 1e6  # to a pole is no jump
    jumps = not np.allclose(below[near], above[near], rtol=0.1, atol=0.1)
    assert jumps == (rules.JUMPS in rule(key).traits)
