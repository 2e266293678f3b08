"""Entries that are picked one a row: their cotangent is a comparison, not a sum into zeros."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from joint import EXACT, planned
from support import assert_near, equations, normal, thorough_but

ROWS, COLUMNS = 6, 24
X = normal(0, 2, ROWS, COLUMNS)
INDICES = np.array([[0, 5, 23, 24, -1, -30], [7, 7, 7, 0, 1, 2]])  # some are out of bounds


def along(axis, mode=None):
    def pick(x, i):
        i = jnp.expand_dims(i, axis)
        return jnp.take_along_axis(jnp.moveaxis(x, -1, axis), i, axis, mode=mode)

    return pick


def of_rows(x, i):
    return jax.vmap(jax.vmap(lambda row, i: row[i]))(x, i)


PICKS = {
    "last": along(-1),
    "first": along(0),
    "clipped": along(1, "clip"),
    "vmap": of_rows,
    "counted": lambda x, i: x[jnp.arange(2)[:, None], jnp.arange(ROWS), i],
    "counted in one": lambda x, i: x.reshape(-1, COLUMNS)[jnp.arange(2 * ROWS), i.ravel()][:ROWS],
    "of bytes": lambda x, i: of_rows(x, (i % COLUMNS).astype("uint8")),
}


def scatters(fun, *args):
    eqns = equations(jax.make_jaxpr(jax.grad(fun))(*args))
    return [e.primitive.name for e in eqns if e.primitive.name.startswith("scatter")]


def both(fun):
    """Returns the gradients of a planned function and of the function, from one compilation."""
    funs = planned(fun, EXACT), fun
    return jax.jit(lambda x, i: [jax.grad(f)(x, i) for f in funs])(X, INDICES)


@pytest.mark.parametrize("name", thorough_but(PICKS, *range(0, len(PICKS), 2)))
def test_what_is_picked_one_a_row_is_compared(name):
    def fun(x, i):
        picked = PICKS[name](x, i)
        return jnp.sum(jnp.where(jnp.isnan(picked), 0, picked) * jnp.arange(ROWS) ** 2)

    assert scatters(fun, X, INDICES) and not scatters(planned(fun, EXACT), X, INDICES)
    assert_near(*both(fun), rtol=1e-6)


@pytest.mark.parametrize(
    "pick",
    [
        lambda x, i: x[0][i[0]],
        lambda x, i: x[0][:, i[0, :5]],
        lambda x, i: x[0][i[0], i[1]],
        lambda x, i: x[0, :, :ROWS][i[0], jnp.arange(ROWS)][jnp.arange(3)],
        lambda x, i: x[0][jnp.arange(3), i[0, :3]],
        lambda x, i: x[0, :, :ROWS][jnp.arange(ROWS), jnp.arange(ROWS)],
    ],
)
def test_other_sums_stay(pick):
    def fun(x, i):
        return jnp.sum(jnp.sin(pick(x, i % ROWS)))

    assert scatters(planned(fun, EXACT), X, INDICES)
    assert_near(*both(fun), rtol=1e-6)
