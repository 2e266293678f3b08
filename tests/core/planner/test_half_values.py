"""Rule S: a matmul reads 16-bit operands and returns 16 bits, and nothing else is rounded."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from joint import planned
from support import equations as equations_of
from support import normal

from mpjax._src.core.base import _jax
from mpjax._src.core.planner import rounding
from mpjax._src.core.planner.equations import Value, opened

HALF = np.dtype(jnp.bfloat16)
X, W = jnp.ones((4, 32)), jnp.ones((32, 32))


def flags(fun, *args):
    """Returns for each result of a function whether it is a 16-bit number."""
    program = jax.make_jaxpr(fun)(*args)
    equations = []
    outs = opened(program, [Value(aval) for aval in _jax.in_avals(program)], equations)
    made = rounding.made(equations, (), HALF)
    return [out in made for out in outs]


def wanted(fun, *args):
    """Returns for each argument of a function whether it is read in 16 bits alone."""
    program = jax.make_jaxpr(fun)(*args)
    ins, equations = [Value(aval) for aval in _jax.in_avals(program)], []
    outs = opened(program, ins, equations)
    found = rounding.wanted(equations, outs, ())
    return [v in found for v in ins]


MADE = {
    "matmul": (lambda x, w: x @ w, True),
    "view": (lambda x, w: (x @ w).T.reshape(2, 64)[:, ::-1], True),
    "relu": (lambda x, w: jnp.maximum(x @ w, 0), True),
    "relu, by its own rule": (lambda x, w: jax.nn.relu(x @ w), True),
    "silu, by its own rule": (lambda x, w: jax.nn.silu(x @ w), False),
    "masked by zeros": (lambda x, w: jnp.where(x > 0, x @ w, 0), True),
    "masked by no 16-bit number": (lambda x, w: jnp.where(x > 0, x @ w, 0.1), False),
    "sum": (lambda x, w: x @ w + x, False),
    "with an argument": (lambda x, w: jnp.concatenate([x @ w, x]), False),
    "short sum": (lambda x, w: x[:, :4] @ w[:4], False),
    "longer sum": (lambda x, w: x[:, :5] @ w[:5], True),
    "widened by the user": (lambda x, w: x.astype(HALF).astype("float32").T, True),
    "widened from another": (lambda x, w: x.astype("float16").astype("float32"), False),
    "a few columns": (lambda x, w: x @ w[:, :16], False),
    "more columns": (lambda x, w: x @ w[:, :17], True),
    "a few columns in a loop": (lambda x, w: lax.map(lambda r: r @ w[:, :16], x), False),
    "of its own precision": (lambda x, w: jnp.dot(x, w, precision="highest"), False),
    "stacked by a loop": (lambda x, w: lax.scan(lambda c, r: (c, r @ w), 0, x)[1], True),
    "carried by a loop": (lambda x, w: lax.scan(lambda c, _: (c @ w, 0), x, W)[0], False),
    "of both branches": (lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: -(x @ w)), True),
    "of one branch": (lambda x, w: lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: x), False),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_a_16_bit_number(name):
    fun, expected = MADE[name]
    assert flags(fun, X, W) == [expected]


WANTED = {
    "matmul": (lambda x, w: x @ w, [True, True]),
    "view": (lambda x, w: x[:, ::-1] @ w.T, [True, True]),
    "also a sum": (lambda x, w: x @ w + x, [False, True]),
    "returned": (lambda x, w: (x @ w, x), [False, True]),
    "sorted first": (lambda x, w: jnp.sort(x) @ w, [False, True]),
    "in a loop": (lambda x, w: lax.scan(lambda c, r: (c + r @ w, 0), x[0], x)[0], [False, True]),
    "sliced by a loop": (
        lambda x, w: lax.scan(lambda c, r: (c, r @ w), 0, x)[1],
        [True, True],
    ),
    "in one branch": (
        lambda x, w: lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: x @ w + 1),
        [True, False],
    ),
    "by a condition": (
        lambda x, w: lax.while_loop(lambda c: c[0, 0] < 1, lambda c: c @ w, x),
        [False, False],
    ),
}


@pytest.mark.parametrize("name", WANTED)
def test_what_matmuls_alone_read(name):
    fun, expected = WANTED[name]
    assert wanted(fun, X, W) == expected


def test_the_price_of_handing_over():
    made, read, other = (Value(jax.typeof(X)) for _ in range(3))
    mask = Value(jax.typeof(X > 0))
    price = rounding.Price({made}, {read}, HALF)
    assert [price(v) / X.size for v in (made, read, other, mask)] == [2, 2, 4, 1]


def test_a_short_sum_of_a_derivative_is_one_of_any_matmul():
    """Of a projection to a few heads, say, the gradient by the features sums over the heads."""

    def back(x, w):
        return jax.vjp(lambda x: jnp.sum(jnp.tanh(x @ w)), x)[1](1.0)

    program = jax.make_jaxpr(back)(X, jnp.ones((X.shape[-1], 2)))
    equations = []
    opened(program, [Value(aval) for aval in _jax.in_avals(program)], equations)
    assert [rounding.is_half_matmul(e) for e in equations if e.name == "dot_general"] == [True] * 2


ENTRY_BY_ENTRY = {
    "of vectors": lambda x: jnp.vdot(x[0], x[1]),
    "of rows": lambda x: jnp.einsum("nk,nk->n", x, 3 * x),
    "of both axes": lambda x: jnp.einsum("nk,nk->", x, 3 * x),
}


@pytest.mark.parametrize("name", ENTRY_BY_ENTRY)
def test_products_that_are_added_up_entry_by_entry_stay_float32(name):
    run = planned(ENTRY_BY_ENTRY[name])
    (dot,) = [e for e in equations_of(jax.make_jaxpr(run)(X)) if e.primitive.name == "dot_general"]
    assert {v.aval.dtype for v in (*dot.invars, *dot.outvars)} == {np.dtype("float32")}


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
def test_masked_log_probabilities_times_one_hot_labels_are_finite(half):
    def loss(w):
        logits = jnp.where(jnp.arange(32) < 20, X @ w, -1e9)
        labels = jax.nn.one_hot(jnp.arange(len(X)), 32)
        return jnp.sum(jnp.einsum("nk,nk->n", jax.nn.log_softmax(logits), labels))

    w = normal(7, X.shape[1], 32)
    found, grads = jax.value_and_grad(planned(loss, half))(w)
    assert jnp.isfinite(found) and jnp.isfinite(grads).all()
