"""Matmuls of loops that no turn waits for: they run once, before or after the loop."""

import itertools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from joint import EXACT, planned
from planners import kept, sound
from support import assert_near, equations, normal, thorough_but

TURNS, BATCH, WIDTH = 6, 4, 32
X, H = (normal(i, WIDTH, WIDTH, scale=0.15) for i in range(2))
XS = normal(3, TURNS, BATCH, WIDTH)


def recurrent(x, h, xs):
    def turn(s, row):
        s = jnp.tanh(row @ x + s @ h)
        return s, s

    return lax.scan(turn, jnp.zeros((BATCH, WIDTH)), xs)[1]


def reversed_(x, h, xs):
    def turn(s, row):
        s = jnp.tanh(jnp.sin(row) @ x - (s @ h.T)[:, ::-1])
        return s, (s, row @ x)

    s, (ys, zs) = lax.scan(turn, xs[0], xs, reverse=True)
    return ys + s, zs


def concatenated(x, h, xs):
    both = jnp.concatenate([h, h.T], 1)

    def turn(s, row):
        a, b = jnp.split(s @ both + row @ jnp.concatenate([x, x], 1), 2, -1)
        return jnp.tanh(a) * b, None

    return lax.scan(turn, xs[0], xs)[0]


def stacked(x, h, xs):
    def turn(s, row):
        y = row @ x
        z = jnp.tanh(y) @ x
        return jnp.tanh(z + s @ h), (y, z, y * s)

    return lax.scan(turn, xs[0], xs)


def twice(x, h, xs):
    def turn(carry, row):
        a, b = carry
        c = jnp.tanh(row @ x + a @ h + b)
        return (c, a), (c, a, b)

    return lax.scan(turn, (xs[0], xs[1]), xs)


def nested(x, h, xs):
    def turn(s, row):
        rows = jnp.stack([row, s])
        return recurrent(x, h, rows)[-1], jnp.sum(s, -1)

    return lax.scan(turn, xs[0], xs)


def branches(x, h, xs):
    ways = [lambda s: recurrent(x, h, xs + s)[-1], lambda s: s @ h]

    def turn(s, i):
        return lax.switch(i, ways, s), None

    return lax.scan(turn, xs[0], jnp.arange(3) % 2)[0]


PROGRAMS = {
    f.__name__: f for f in (recurrent, reversed_, concatenated, stacked, twice, nested, branches)
}
PROGRAMS["checkpoint"] = lambda x, h, xs: lax.scan(
    jax.checkpoint(lambda s, row: (jnp.tanh(row @ x + s @ h), row @ x)), xs[0], xs
)
PROGRAMS["vmap"] = lambda x, h, xs: jax.vmap(recurrent, (None, None, 1))(x, h, xs[:, :, None])


def total(fun):
    def loss(*args):
        return sum(jnp.sum(jnp.sin(y) ** 2) for y in jax.tree.leaves(fun(*args)))

    return loss


def of_a_turn(fun, *args):
    """Returns how many matmuls are in the bodies of loops."""
    loops = [e for e in equations(jax.make_jaxpr(fun)(*args)) if e.primitive.name == "scan"]
    bodies = {id(e): e.params["jaxpr"] for e in loops}
    return sum(e.primitive.name == "dot_general" for b in bodies.values() for e in equations(b))


@pytest.mark.parametrize("name", thorough_but(PROGRAMS, *range(0, len(PROGRAMS), 2)))
def test_gradients_are_jax_s(name):
    fun = jax.value_and_grad(total(PROGRAMS[name]), (0, 1, 2))
    ours = jax.value_and_grad(planned(total(PROGRAMS[name]), EXACT), (0, 1, 2))
    assert_near(jax.jit(ours)(X, H, XS), jax.jit(fun)(X, H, XS), rtol=1e-4)


SOME = [*itertools.product(("bfloat16", "float16"), ("recurrent", "reversed_", "concatenated"))]


@pytest.mark.parametrize(("half", "name"), thorough_but(SOME, 0, 4, 5))
def test_rounded_results_are_as_accurate(name, half):
    wrong = sound(total(PROGRAMS[name]), (X, H, XS), half, (0, 1, 2))
    assert not wrong, wrong


@pytest.mark.parametrize("name", ["recurrent", "reversed_", "concatenated", "vmap"])
def test_only_what_a_turn_waits_for_runs_in_it(name):
    """A turn waits for one matmul, forward and backward."""
    fun = planned(total(PROGRAMS[name]), EXACT)
    assert of_a_turn(jax.grad(fun, (0, 1, 2)), X, H, XS) == 2
    assert of_a_turn(jax.grad(total(PROGRAMS[name]), (0, 1, 2)), X, H, XS) >= 6


def test_a_stack_that_is_larger_than_the_weights_is_not_written():
    batch = 40 * WIDTH
    xs, start = normal(4, TURNS, batch, WIDTH), np.zeros((batch, WIDTH), np.float32)

    def wide(x, h, xs):
        return lax.scan(lambda s, row: (jnp.tanh(row @ x + s @ h), None), start, xs)[0]

    ours, theirs = (jax.grad(f, (0, 1, 2)) for f in (planned(total(wide), EXACT), total(wide)))
    assert of_a_turn(ours, X, H, xs) == of_a_turn(theirs, X, H, xs)


def test_a_loop_that_holds_little_stays():
    """As a loss over chunks of rows, whose logits are larger than all that is stacked."""
    head = normal(7, WIDTH, 8 * WIDTH)

    def fun(head, xs):
        @jax.checkpoint
        def chunk(loss, rows):
            return loss + jnp.sum(jax.nn.logsumexp(rows @ head, -1)), None

        return lax.scan(chunk, 0.0, xs)[0]

    ours, theirs = (jax.grad(f, (0, 1)) for f in (planned(fun, EXACT), fun))
    assert of_a_turn(ours, head, XS) == of_a_turn(theirs, head, XS)


def test_a_sum_that_is_read_in_the_loop_stays():
    def fun(x, xs):
        def turn(s, row):
            s = s + row.T @ row
            return s, jnp.sum(s @ x)

        return lax.scan(turn, jnp.zeros((WIDTH, WIDTH)), xs)

    out = planned(total(fun), EXACT)
    assert_near(out(X, XS), total(fun)(X, XS), rtol=1e-5)
    assert_near(jax.grad(out)(X, XS), jax.grad(total(fun))(X, XS), rtol=1e-4)


def test_a_sum_of_what_runs_ahead_stays():
    def fun(x, xs):
        def turn(s, row):
            return s + row @ x, None

        return lax.scan(turn, xs[0], xs)[0]

    ours = planned(total(fun), EXACT)
    assert_near(jax.value_and_grad(ours)(X, XS), jax.value_and_grad(total(fun))(X, XS), rtol=1e-4)


def test_a_sum_of_products_runs_once_and_begins_with_what_it_began_with():
    def fun(x, xs):
        def turn(s, row):
            return s + (row.T @ jnp.tanh(row)).T, jnp.sum(row)

        return lax.scan(turn, x, xs)

    ours = planned(total(fun), EXACT)
    assert_near(jax.value_and_grad(ours)(X, XS), jax.value_and_grad(total(fun))(X, XS), rtol=1e-4)
    assert not of_a_turn(jax.grad(ours), X, XS)


@pytest.mark.parametrize("turns", [0, 1])
def test_few_turns(turns):
    fun = total(recurrent)
    ours = jax.grad(planned(fun, EXACT), (0, 1, 2))
    assert_near(ours(X, H, XS[:turns]), jax.grad(fun, (0, 1, 2))(X, H, XS[:turns]), rtol=1e-4)


def test_a_number_of_turns_that_is_not_known():
    (size,) = jax.export.symbolic_shape("t")
    rows = jax.ShapeDtypeStruct((size, BATCH, WIDTH), "float32")
    fun = total(recurrent)
    exported = jax.export.export(jax.jit(jax.grad(planned(fun, EXACT), (0, 1))))(X, H, rows)
    assert_near(exported.call(X, H, XS), jax.grad(fun, (0, 1))(X, H, XS), rtol=1e-4)


@pytest.mark.thorough
def test_gradients_of_gradients():
    def loss(planner):
        fun = planner(total(recurrent))
        return jax.grad(lambda *args: jnp.sum(jax.grad(fun)(*args) ** 2), (0, 1))

    ours = loss(lambda f: planned(f, EXACT))
    assert_near(ours(X, H, XS), loss(lambda f: f)(X, H, XS), rtol=1e-3)
    assert np.isfinite(ours(X, H, XS)[0]).all()


def test_constants_are_spread_in_the_turns():
    batch, rows = 3, 16

    def attend(x, w):
        scores = jnp.einsum("brd,bsd->brs", x @ w, x)
        mask = jnp.tril(jnp.ones((rows, rows), bool)) & jnp.ones(scores.shape, bool)
        return jax.nn.softmax(jnp.where(mask, scores, -1e30)) @ x, None

    def fun(ws, x):
        return lax.scan(attend, x, ws)[0]

    args = normal(5, 4, WIDTH, WIDTH, scale=0.1), normal(6, batch, rows, WIDTH)
    ours, theirs = (jax.grad(f, (0, 1)) for f in (planned(total(fun), EXACT), total(fun)))

    def masks(grad):
        loops = [e for e in equations(jax.make_jaxpr(grad)(*args)) if e.primitive.name == "scan"]
        given = [v.aval for e in loops for v in e.invars]
        return {aval.size for aval in given if aval.dtype == bool}

    assert masks(theirs) == {batch * rows * rows} and masks(ours) <= {rows * rows}
    assert_near(ours(*args), theirs(*args), rtol=1e-4)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_turns_give_is_not_stacked_again_where_it_is_given(reverse):
    def fun(h, xs):
        def turn(s, row):
            s = jnp.tanh(row + s @ h)
            return s, s

        return lax.scan(turn, xs[0], xs, reverse=reverse)[1]

    ours = planned(total(fun), EXACT)
    assert_near(jax.grad(ours, (0, 1))(H, XS), jax.grad(total(fun), (0, 1))(H, XS), rtol=1e-4)
    assert kept(ours, (H, XS), (0, 1)) == 4 * XS.size
    assert kept(total(fun), (H, XS), (0, 1)) >= 8 * XS.size
