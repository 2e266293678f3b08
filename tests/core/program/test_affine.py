"""One reading of arithmetic: what it says of an operation, held against the operation itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from measure import run

from mpjax._src.core.base import _jax
from mpjax._src.core.planner.equations import Value, opened
from mpjax._src.core.program import affine
from mpjax._src.core.program.graph import build

X, Y = np.float32([[0.5, 2.0, 3.0]]), np.float32([[1.5, 0.25, 4.0]])


def last(fun, *args):
    """Returns the last operation of a function, and its operands and result as arrays."""
    block = build(*_jax.open_jaxpr(jax.make_jaxpr(fun)(*args)))
    arrays = dict(zip(block.invars, args, strict=True))
    op = block.ops[-1]
    ins = [arrays[v] if v in arrays else affine.number(v) for v in op.ins]
    return op, ins, np.asarray(run(fun, *args))


LINEAR = {
    "add": (lambda x, y: x + y, 2),
    "sub": (lambda x, y: x - y, 2),
    "neg": (lambda x, y: -x, 1),
    "mul": (lambda x, y: 3.0 * x, 1),
    "mul on the right": (lambda x, y: x * 3.0, 1),
    "mul by zero": (lambda x, y: x * 0.0, 1),
    "div": (lambda x, y: x / 4.0, 1),
    "reshape": (lambda x, y: x.reshape(3), 1),
    "broadcast": (lambda x, y: jnp.broadcast_to(x, (2, 1, 3)), 1),
}


@pytest.mark.parametrize("name", LINEAR)
def test_terms_say_what_a_result_is_the_sum_of(name):
    fun, count = LINEAR[name]
    op, ins, out = last(fun, X, Y)
    parts = affine.terms(op)
    assert len(parts) == count
    found = sum(weight * np.asarray(ins[place]) for place, weight in parts)
    assert np.array_equal(np.broadcast_to(found.reshape(-1), out.shape), out)


OTHERS = {
    "a product": lambda x, y: x * y,
    "a reciprocal": lambda x, y: 1.0 / x,
    "over zero": lambda x, y: x / jnp.zeros(()),
    "a maximum": jnp.maximum,
    "a square": lambda x, y: x * x,
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_have_no_terms(name):
    assert affine.terms(last(OTHERS[name], X, Y)[0]) == ()


def test_what_is_known_of_an_operand_makes_a_product_a_multiple():
    op, *_ = last(lambda x, y: x * y, X, Y)
    assert affine.terms(op, lambda v: 7.0 if v is op.ins[1] else None) == ((0, 7.0),)


POWERS = {
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "integer_pow": lambda x, y: x**3,
    "square": lambda x, y: jnp.square(x),
    "sqrt": lambda x, y: jnp.sqrt(x),
    "rsqrt": lambda x, y: jax.lax.rsqrt(x),
    "view": lambda x, y: x[:, None],
}


@pytest.mark.parametrize("name", POWERS)
def test_powers_say_what_a_result_is_the_product_of(name):
    op, ins, out = last(POWERS[name], X, Y)
    factors = [np.asarray(ins[place]) ** power for place, power in affine.powers(op)]
    assert np.allclose(np.prod(factors, axis=0).reshape(out.shape), out, rtol=1e-5)


def test_a_sum_has_no_powers():
    assert affine.powers(last(lambda x, y: x + y, X, Y)[0]) == ()


@pytest.mark.parametrize("fun", [jnp.exp, jnp.exp2, jnp.log])
def test_rates_are_those_of_exponentials_and_logarithms(fun):
    op, (x,), out = last(fun, X)
    rate = affine.RATES[op.name]
    natural = np.exp(rate * x) if op.name.startswith("exp") else np.log(x) / rate
    assert np.allclose(natural, out, rtol=1e-5)
    assert affine.RATES["log2"] == affine.RATES["exp2"]


def test_factor_is_of_the_value_that_is_multiplied():
    op, *_ = last(lambda x, y: x / 4.0, X, Y)
    assert affine.factor(op, op.ins[0]) == 0.25
    assert affine.factor(op, op.ins[1]) is None
    for fun in (lambda x, y: x + y, lambda x, y: x[0]):
        op, *_ = last(fun, X, Y)
        assert affine.factor(op, op.ins[0]) is None


def test_equations_of_the_planner_are_read_alike():
    program = jax.make_jaxpr(lambda x, y: (jnp.reshape(x, 3) / 4.0, x - y, jnp.sqrt(y)))(X, Y)
    into: list = []
    opened(program, [Value(v.aval) for v in program.jaxpr.invars], into)
    assert [*map(affine.terms, into)] == [((0, 1.0),), ((0, 0.25),), ((0, 1.0), (1, -1.0)), ()]
    assert affine.powers(into[-1]) == ((0, 0.5),)


def test_number_is_what_fills_a_value():
    op, *_ = last(lambda x, y: x + jnp.full((1, 3), 2.5), X, Y)
    assert [affine.number(v) for v in op.ins] == [None, 2.5]


@given(st.lists(st.tuples(st.dictionaries(st.sampled_from("abc"), st.integers(-4, 4)),
                          st.integers(-3, 3))))  # fmt: skip
def test_total_is_the_sum_and_leaves_out_what_cancels(parts):
    found = affine.total(parts)
    sums = {name: sum(w * form.get(name, 0) for form, w in parts) for name in "abc"}
    assert found == {name: count for name, count in sums.items() if count}


def test_total_cancels_up_to_rounding_but_for_infinity():
    assert affine.total([({"a": 1 / 3}, 3.0), ({"a": -1.0}, 1.0 + 1e-9)]) == {}
    assert affine.total([({"a": 1e-9}, 1.0)]) == {"a": 1e-9}
    assert affine.total([({"a": -np.inf}, 2.0), ({"a": 1.0}, 1.0)]) == {"a": -np.inf}
