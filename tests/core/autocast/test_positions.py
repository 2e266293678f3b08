"""Masks of positions: what is read of them, held against the arrays themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.core import jaxpr_as_fun
from measure import run

from mpjax._src.core.autocast.classify import Rulings
from mpjax._src.core.base import _jax
from mpjax._src.core.program.graph import build
from mpjax._src.core.program.views import own_axes
from mpjax._src.replacements import positions
from mpjax._src.replacements.flow import Flow

T, S = 5, 7


def known(fun):
    """Returns what is read of an array that a function makes, and the array."""
    jaxpr, consts = _jax.open_jaxpr(jax.make_jaxpr(fun)())
    block = build(jaxpr, consts)
    (value,) = block.outvars
    flow = Flow(block, Rulings())
    return positions.read(value, own_axes(value.aval.shape), flow), np.asarray(run(fun))


def evaluated(line, shape):
    """Returns a sum of positions as an array."""
    places = np.indices(shape)
    digits = [(n * ((places[d] // stride) % size)) for (d, stride, size), n in line.slopes]
    return sum(digits, np.zeros(shape, int)) + line.constant


def assert_same(found, array):
    if isinstance(found, positions.Line):
        assert np.array_equal(evaluated(found, array.shape), array)
        return
    kept = np.all([evaluated(line, array.shape) >= 0 for line in found.lines], axis=0)
    assert np.array_equal(np.where(kept, found.yes, found.no), array)


def rows():
    return jax.lax.broadcasted_iota(jnp.int32, (T, S), 0)


def columns():
    return jax.lax.broadcasted_iota(jnp.int32, (T, S), 1)


CONSTANT = np.tril(np.ones((2, T, S), np.float32)) * 3 + 1
READ = {
    "a number": lambda: jnp.full((T, S), 3),
    "positions": lambda: jnp.arange(S) - jnp.arange(T)[:, None] + 2,
    "negative positions": lambda: -rows() - 1,
    "closed-over positions": lambda: np.arange(3, 2 * S + 3, 2),
    "at least": lambda: rows() >= columns(),
    "more": lambda: rows() > columns() + 1,
    "at most": lambda: rows() <= columns(),
    "less": lambda: rows() < columns(),
    "not": lambda: jnp.logical_not(rows() < columns()),
    "and": lambda: (rows() >= columns()) & (rows() - columns() < 3),
    "or": lambda: ~(rows() >= columns()) | ~(rows() - columns() < 3),
    "tril": lambda: jnp.tril(jnp.ones((T, S))),
    "tril, compared": lambda: jnp.tril(jnp.ones((T, S)), 1) == 0,
    "triu": lambda: jnp.triu(jnp.ones((T, S)), 1) * -1e9,
    "of ones": lambda: (1.0 - jnp.tri(T, S)) * -1e10,
    "as a float": lambda: (rows() >= columns()).astype(jnp.float32),
    "less Inf": lambda: jnp.where(rows() >= columns(), 0.0, -jnp.inf),
    "a product": lambda: jnp.tri(T, S) * (rows() - columns() < 3).astype(jnp.float32),
    "a float of positions": lambda: rows().astype(jnp.float32) >= columns().astype(jnp.float32),
    "between positions": lambda: rows().astype(jnp.float32) + 0.5 > columns().astype(jnp.float32),
    "at least between": lambda: rows().astype(jnp.float32) - 0.5 >= columns().astype(jnp.float32),
    "every third": lambda: 3 * rows() - 2 >= columns() * 2,
    "a constant": lambda: jnp.asarray(CONSTANT),
    "a constant, compared": lambda: jnp.asarray(CONSTANT) > 2,
    "sliced": lambda: jnp.tril(jnp.ones((1, 9, 8)))[:, :T, :S],
    "a constant, sliced": lambda: jnp.asarray(np.tril(np.ones((9, 9), bool)))[:T, :S],
    "laid out": lambda: (rows() >= columns()).T[None].reshape(S, 1, T),
}


@pytest.mark.parametrize("name", READ)
def test_mask_of_positions_that_is_read_equals_the_array(name):
    found, array = known(READ[name])
    assert found is not None
    assert_same(found, array)


CHECKS = [lambda: jax.transfer_guard("disallow"), lambda: jax.debug_nans(True)]


@pytest.mark.parametrize("check", CHECKS, ids=["transfers", "NaNs"])
def test_masks_are_read_whatever_jax_checks_of_the_program(check):
    fun = lambda: (1.0 - jnp.tri(T, S)) * -jnp.inf  # noqa: E731
    block = build(*_jax.open_jaxpr(jax.make_jaxpr(fun)()))
    (value,) = block.outvars
    with check():
        found = positions.read(value, own_axes(value.aval.shape), Flow(block, Rulings()))
    assert np.isnan(found.yes) and found.no == -np.inf


UNREAD = {
    "equal": lambda: rows() == columns(),
    "either": lambda: (rows() >= columns()) | (rows() - columns() < -3),
    "chosen by one": lambda: jnp.where(rows() >= columns(), rows(), columns()),
    "blocks": lambda: rows() // 2 >= columns(),
    "bfloat16": lambda: rows().astype(jnp.bfloat16) >= 3,
    "few bits": lambda: rows().astype(jnp.int8) - columns().astype(jnp.int8) >= 0,
    "unsigned": lambda: rows().astype(jnp.uint32) - columns().astype(jnp.uint32) >= 0,
    "halves": lambda: rows() // 2 + columns() >= 3,
    "a float iota": lambda: jax.lax.iota(jnp.float32, T) >= 2,
    "sliced from further": lambda: jnp.tril(jnp.ones((9, 9)))[1 : T + 1, :S],
    "every other": lambda: jax.lax.slice(jnp.tril(jnp.ones((9, 9))), (0, 0), (9, 9), (2, 2)),
    "any constant": lambda: jnp.asarray(np.eye(T, dtype=bool)),
    "uneven steps": lambda: jnp.asarray(np.arange(T) ** 2),
    "an operation": lambda: jnp.sin(jnp.tri(T)),
}


@pytest.mark.parametrize("name", UNREAD)
def test_mask_of_unknown_positions_reads_as_none(name):
    assert known(UNREAD[name])[0] is None


@given(st.data())
def test_random_mask_of_positions_that_is_read_equals_the_array(data):
    numbers = st.integers(-3, 3)
    shape = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))

    def positions_of():
        places = [jax.lax.broadcasted_iota(jnp.int32, shape, d) for d in (0, 1)]
        a, b, c = (
            data.draw(st.sampled_from([-1, 0, 1])),
            data.draw(st.booleans()),
            data.draw(numbers),
        )
        first = places[0] if a >= 0 else -places[0]
        return (first - places[1] if b else first) + c

    def choice(depth):
        kind = data.draw(st.sampled_from(["compare", "and", "or", "not", "select", "number"]))
        if not depth or kind == "compare":
            name = data.draw(st.sampled_from(["ge", "gt", "le", "lt"]))
            return getattr(jax.lax, name)(positions_of(), positions_of())
        if kind == "not":
            return ~choice(depth - 1)
        if kind == "select":
            yes, no = (float(data.draw(numbers)) for _ in range(2))
            return jnp.where(choice(depth - 1), yes, no) > data.draw(numbers)
        if kind == "number":
            return (choice(depth - 1) * 2.0 - data.draw(numbers)) <= 1
        first, second = choice(depth - 1), choice(depth - 1)
        return first & second if kind == "and" else first | second

    made = []
    jaxpr = jax.make_jaxpr(lambda: made.append(choice(3)) or made[-1])()
    block = build(*_jax.open_jaxpr(jaxpr))
    (value,) = block.outvars
    found = positions.read(value, own_axes(value.aval.shape), Flow(block, Rulings()))
    if found is not None:
        (array,) = run(jaxpr_as_fun(jaxpr))
        assert_same(found, np.asarray(array))


def test_negated_line_of_positions_is_the_complement():
    found, array = known(lambda: rows() >= columns())
    (line,) = found.lines
    assert np.array_equal(evaluated(positions.negated(line), array.shape) >= 0, ~array)
