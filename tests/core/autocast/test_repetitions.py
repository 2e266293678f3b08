"""A gather that repeats the entries of an axis in order: its transpose is a sum, not a scatter."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from measure import run
from support import BOTH, HALVES, assert_near, cast, equations, normal, thorough_but

W, X = normal(0, 8, 8, scale=0.4), normal(1, 2, 4, 6, 8)
TWICE = np.arange(8) // 2


def loss_of(change):
    return lambda w, x: jnp.mean(jnp.sin(change(x @ w) @ w))


def primitives(fun):
    return {eqn.primitive.name for eqn in equations(jax.make_jaxpr(jax.grad(fun))(W, X))}


REPEATED = {
    "both axes": lambda y: jax.image.resize(y, (2, 8, 18, 8), "nearest"),
    "the last axis": lambda y: jax.image.resize(y, (2, 4, 6, 16), "nearest")[..., ::2],
    "indices that are closed over": lambda y: y[:, TWICE],
    "taken": lambda y: jnp.take(y, TWICE, 1),
    "in a scan": lambda y: jax.lax.scan(lambda c, y: (c, y[jnp.arange(8) // 2]), 0.0, y)[1],
}


PAIRS = [(name, half) for name in REPEATED for half in HALVES]


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, 3, 4, 7, 8))
def test_gather_of_entries_repeated_in_order_becomes_no_gather(name, half):
    loss = loss_of(REPEATED[name])
    assert "scatter-add" in primitives(loss)
    assert primitives(cast(loss, half)).isdisjoint(["gather", "scatter-add"])
    assert_near(*run(lambda *args: [BOTH(f)(*args) for f in (cast(loss, half), loss)], W, X), 0.03)


def test_repetitions_are_found_where_implicit_transfers_are_refused():
    planned = cast(loss_of(lambda y: y[:, jnp.arange(8) // 2]), "bfloat16")
    args = jnp.asarray(W), jnp.asarray(X)
    with jax.transfer_guard("disallow"):
        names = {eqn.primitive.name for eqn in equations(jax.make_jaxpr(planned)(*args))}
    assert "gather" not in names


OTHERS = {
    "out of order": lambda y: y[:, np.arange(8) % 4],
    "not equally often": lambda y: jax.image.resize(y, (2, 7, 6, 8), "nearest"),
    "some of them": lambda y: y[:, np.arange(6) // 2],
    "fewer": lambda y: jax.image.resize(y, (2, 2, 6, 8), "nearest"),
    "indices that depend on arguments": lambda y: y[:, TWICE + (y[0, 0, 0, 0] > 99).astype(int)],
    "part of a row": lambda y: jax.lax.gather(
        y,
        TWICE[:, None],
        jax.lax.GatherDimensionNumbers((0, 2, 3), (1,), (1,)),
        (2, 1, 5, 8),
    )[..., :2, :],
}


@pytest.mark.parametrize("name", thorough_but(OTHERS, "not equally often", "part of a row", 4))
def test_other_gathers_stay_gathers(name):
    loss = loss_of(OTHERS[name])
    assert "scatter-add" in primitives(cast(loss))
    assert_near(*run(lambda *args: [BOTH(f)(*args) for f in (cast(loss), loss)], W, X), 0.03)


@pytest.mark.parametrize("around", [jax.jit, jax.checkpoint, jax.vmap])
def test_repetitions_match_float32_under_jit_checkpoint_and_vmap(around):
    loss = loss_of(REPEATED["both axes"])
    fun = around(cast(loss)) if around is not jax.vmap else cast(loss)
    gradient = jax.grad(fun)
    if around is jax.vmap:
        gradient = lambda w, x: jnp.mean(jax.vmap(jax.grad(fun), (None, 0))(w, x[:, None]), 0)  # noqa: E731
    assert_near(run(gradient, W, X), run(jax.grad(loss), W, X), 0.03)


def test_repetitions_export_with_symbolic_sizes():
    batch = jax.export.symbolic_shape("b, 4, 6, 8")
    numbers = jax.lax.GatherDimensionNumbers((1, 2, 3), (0,), (0,))

    def change(y):  # one along the axis whose size is not known, one along another
        first = jax.lax.gather(y, np.zeros((2, 1), np.int32), numbers, (1, *y.shape[1:]))
        return first[:, TWICE]

    loss = jax.grad(cast(loss_of(change)))
    x = jax.ShapeDtypeStruct(batch, jnp.float32)
    exported = jax.export.export(jax.jit(loss))(jax.ShapeDtypeStruct(W.shape, jnp.float32), x)
    assert_near(exported.call(W, X), run(loss, W, X), 0.03)


def test_sum_of_cotangents_of_a_repetition_is_not_rounded_in_between():
    def loss(w, x):  # the gradient of x is a sum of 64 entries, of which one is large
        y = jnp.repeat(x @ w, 1, 1)[:, np.arange(256) // 64]
        weights = np.where(np.arange(256) % 64, 2.0**-9, 1.0).astype(np.float32)
        return jnp.sum((y @ w) * weights[:, None, None])

    x, w = X, np.eye(8, dtype=np.float32)
    got, want = (run(jax.grad(f, 1), w, x) for f in (cast(loss), loss))
    assert np.max(np.abs(got - want)) <= 2.0**-8 * np.max(np.abs(want))
