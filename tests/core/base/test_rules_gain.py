"""The gain of each row: by how much it amplifies a relative error of its operands.

The number is the largest ``|x f'(x)|`` over the larger of ``|f(x)|`` and, for a bounded function,
its bound; entries of one array are summed over. Sums count against the magnitudes of their terms.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives
from jax.lax import linalg
from primitives import (
    CASES,
    ELEMENTWISE,
    OPERANDS,
    UNARY,
    halves,
    one_of_each,
    over_rows,
    rule,
    scatter,
    some_halves,
)

from mpjax._src.core.base import rules
from mpjax._src.core.base.rules import BOUNDED, NONE, ONE, RANGE, SUM, UNBOUNDED

pytestmark = pytest.mark.usefixtures("x64")

FLOAT32 = jnp.finfo(jnp.float32)
SLACK = 1 + 1e-5  # of a difference
SMALL_POWERS = {"square": 2, "integer_pow 3": 3, "integer_pow 4": 4, "integer_pow -4": 4}


def gain_of(key):
    params = {"y": int(key.split()[1])} if " " in key else {}
    return rule(key).gain_of(params)


def agrees(gain, number, once=1.0):
    """Returns whether a number agrees with its row."""
    if gain == NONE:
        return number == 0
    if gain in (ONE, SUM):
        return number <= once * SLACK
    return 4 < number <= 100 * SLACK if gain == RANGE else number > 100 * SLACK


def ratio(errors, sizes):
    """Returns the largest of some quotients, of which those of zero are zero."""
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.where(errors == 0, 0, errors / sizes)
    return np.fmax.reduce(np.ravel(found), initial=0)  # NaN where JAX has no derivative


# ---- what amplifies without end ------------------------------------------------------------------

# Operands in the range of half where the number of a result exceeds 100.
NEAR = 1 - 2.0**-8
SYMMETRIC = np.array([[1, NEAR], [NEAR, 1]])
THREE = np.array([[1, 1, 1], [1, 1, NEAR], [1, NEAR, 1]])
SINGULAR = np.array([[1, 1], [1, 1 + 2.0**-7]])
LOWER = np.array([[1.0, 0], [1, 1]])
EXHIBITS = {
    "reduce_prod": (over_rows(lax.reduce_prod), np.ones(128)),
    "cumprod": (lax.cumprod, np.ones(128)),
    "cumlogsumexp": (lax.cumlogsumexp, np.full(2, -0.693359375)),
    "scatter-mul": (
        lambda x, u: scatter(lax.scatter_mul, np.zeros((128, 1), np.int32))(x, u),
        *(np.ones(2), np.ones(128)),
    ),
    "igamma": (lax.igamma, 2.0**20, 2.0**20),
    "igammac": (lax.igammac, 2.0**20, 2.0**20),
    "igamma_grad_a": (lax.igamma_grad_a, 1000.0, 1400.0),
    "zeta": (lax.zeta, 1 + 2.0**-7, 1.0),
    "polygamma": (lax.polygamma, 1.0, -1 + 2.0**-8),
    "regularized_incomplete_beta": (
        primitives.regularized_incomplete_beta_p.bind,
        *(65504.0, 65504.0, 0.5),
    ),
    "cholesky": (linalg.cholesky_p.bind, SYMMETRIC),
    "cholesky_update": (linalg.cholesky_update_p.bind, np.array([[1.0, 1], [0, 1]]), [1, -NEAR]),
    "eig": (lambda x: linalg.eig(x)[0], np.array([[1, 1], [-NEAR, -1]])),
    "eigh": (lambda x: linalg.eigh(x)[1], SYMMETRIC),
    "hessenberg": (lambda x: linalg.hessenberg(x)[0], THREE),
    "householder_product": (linalg.householder_product, np.ones((1, 1)), [NEAR]),
    "lu": (lambda x: linalg.lu(x)[0], SINGULAR),
    "ormqr": (linalg.ormqr, np.ones((1, 1)), [NEAR], np.ones((1, 1))),
    "qr": (lambda x: linalg.qr(x)[1], SINGULAR),
    "geqrf": (lambda x: linalg.qr(x)[1], SINGULAR),  # which makes it of geqrf
    "schur": (lambda x: linalg.schur(x)[0], np.array([[1, 1], [-NEAR, -1]])),
    "svd": (lambda x: linalg.svd(x)[1], SYMMETRIC),
    "tridiagonal": (lambda x: linalg.tridiagonal(x, lower=True)[1], THREE),
    "tridiagonal_solve": (
        linalg.tridiagonal_solve,
        *([0, NEAR], [1.0, 1], [NEAR, 0], [[1.0], [-1]]),
    ),
    "triangular_solve": (
        lambda a, b: linalg.triangular_solve(a, b, left_side=True, lower=True),
        *(LOWER, [[1.0], [1 / NEAR]]),
    ),
}


# ---- elementwise --------------------------------------------------------------------------------


def points(key):
    return (halves(),) if key in UNARY else some_halves(OPERANDS[key])


def number(key, place):
    """Returns the gain of an operand: the largest over the whole range of both halves."""
    fun, operands = ELEMENTWISE[key], points(key)

    def along(x):
        return fun(*operands[:place], x, *operands[place + 1 :])

    x = jnp.asarray(operands[place])
    result, slope = map(np.asarray, jax.jit(lambda x: jax.jvp(along, (x,), (jnp.ones_like(x),)))(x))
    sizes = np.abs(result)
    held = (sizes <= FLOAT32.max) & (sizes >= FLOAT32.tiny) & ~np.isnan(slope)
    if rule(key).gain == SUM:
        sizes = sum(map(np.abs, operands))
    if rule(key).span == BOUNDED:
        sizes = np.maximum(sizes, sizes[held].max())
    held &= operands[place] != 0  # zero has no relative error
    return ratio(np.abs(operands[place][held] * slope[held]), sizes[held])


@pytest.mark.parametrize(
    "key", one_of_each((key for key in ELEMENTWISE if key not in EXHIBITS), "gain")
)
def test_gain_of_elementwise_rules_agrees_with_measured_errors(key):
    numbers = [number(key, place) for place in range(OPERANDS[key])]
    assert agrees(gain_of(key), max(numbers), SMALL_POWERS.get(key, 1)), numbers


def test_gain_of_bounded_tails_is_one():
    """Far out, erfc and logistic amplify a relative error of their operand without end."""
    x = np.array([5.0, 9.0])
    for fun, key, sign in ((lax.erfc, "erfc", 1), (lax.logistic, "logistic", -10)):
        slope = jax.vmap(jax.grad(fun))(sign * x)
        assert np.min(np.abs(x * sign * slope / fun(sign * x))) > 40
        assert gain_of(key) == ONE and rule(key).span == BOUNDED


@pytest.mark.parametrize("y", [-101, -100, -5, -4, 4, 5, 100, 101])
def test_the_gain_of_a_power_is_its_exponent(y):
    gain = rules.RULES["integer_pow"].gain_of({"y": y})
    x = 1 + 2.0**-10
    found = x * jax.grad(lambda x: lax.integer_pow(x, y))(x) / x**y
    assert abs(found) == pytest.approx(abs(y)) and agrees(gain, abs(found), 4)


# ---- all others ---------------------------------------------------------------------------------


def compiled(fun, *args):
    """Returns a function that is compiled once, and its float operands in float64."""
    args = [np.asarray(x) for x in args]
    return jax.jit(fun), [x if x.dtype.kind == "i" else x.astype(np.float64) for x in args]


def flat(fun, args):
    """Returns the float results of a function as one vector."""
    leaves = [x for x in jax.tree.leaves(fun(*args)) if jnp.issubdtype(x.dtype, jnp.inexact)]
    return np.concatenate([np.ravel(np.asarray(x)) for x in leaves] or [np.zeros(0)])


STEP = 2.0**-14  # of a difference


def errors(fun, args, place):
    """Returns, of each entry of the result, the sum of |x df/dx| over the entries of an operand."""
    total, x = 0.0, args[place]
    for index in np.ndindex(np.shape(x)):
        up, down = np.array(x), np.array(x)
        up[index] *= 1 + STEP
        down[index] *= 1 - STEP
        ends = (flat(fun, [*args[:place], end, *args[place + 1 :]]) for end in (up, down))
        total = total + np.abs(np.subtract(*ends)) / (2 * STEP)
    return total


# The magnitudes of a sum's terms are the sum of the magnitudes, unless it subtracts.
TERMS = {
    "scatter-sub": scatter(lax.scatter_add),
    "fft": lambda x: jnp.full(x.size // 2 + 1, jnp.sum(x)),
}
# Its operand counts twice, as that of a square.
SUM_TWICE = {"symmetric_product": 2}


@pytest.mark.parametrize("key", one_of_each((key for key in CASES if gain_of(key) == SUM), "gain"))
def test_gain_of_sums_agrees_with_measured_errors(key):
    fun, args = compiled(*CASES[key])
    magnitudes = flat(TERMS.get(key, fun), args)
    signs = np.where(np.arange(args[-1].size) % 2, 1, -1).reshape(args[-1].shape)
    args[-1] = args[-1] * signs
    numbers = [ratio(errors(fun, args, place), magnitudes) for place in range(len(args))]
    assert agrees(SUM, max(numbers), SUM_TWICE.get(key, 1)) and max(numbers) > 0.1


APART = ("stop_gradient", "rng_uniform", "convert_element_type")
ALIKE = [key for key in CASES if gain_of(key) in (NONE, ONE) and key not in APART]


@pytest.mark.parametrize("key", one_of_each(ALIKE, "cost"))
def test_gain_of_moves_and_choices_agrees_with_measured_errors(key):
    fun, args = compiled(*CASES[key])
    if gain_of(key) == NONE:
        assert flat(fun, args).size == 0  # no float that could err
    else:
        found = sum(errors(fun, args, place) for place in range(len(args)))
        assert agrees(ONE, ratio(found, np.abs(flat(fun, args))))


def test_gain_of_stop_gradient_is_none():
    assert rule("stop_gradient").gain == NONE
    assert jax.grad(primitives.stop_gradient_p.bind)(2.0) == 0


@pytest.mark.parametrize("key", one_of_each(EXHIBITS, "span"))
def test_gain_of_exhibits_agrees_with_measured_errors(key):
    fun, args = compiled(*EXHIBITS[key])
    sizes = 1 if rule(key).span == BOUNDED else np.abs(flat(fun, args))
    numbers = [ratio(errors(fun, args, place), sizes) for place in range(len(args))]
    assert agrees(gain_of(key), max(numbers)), numbers


@pytest.mark.thorough
def test_gain_of_random_gamma_agrees_with_its_logarithm():
    """As a logarithm does near one. (A difference would see that some samples are rejected.)"""

    def samples(x):
        return jax.random.loggamma(jax.random.key(0), x, (500,))

    result, slope = jax.jvp(samples, (2.0,), (1.0,))
    assert agrees(gain_of("random_gamma"), ratio(np.abs(2.0 * slope), np.abs(result)))


def test_rules_of_unbounded_gain_are_exhibited():
    listed = {k for k in CASES if gain_of(k) == UNBOUNDED and rule(k).need == rules.FULL}
    assert listed - {"random_gamma"} <= EXHIBITS.keys()
