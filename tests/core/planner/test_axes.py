"""Which axes are the same: through layouts, sums and tables, but not through matmuls."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mpjax._src.core.planner.axes import Axes, summed
from mpjax._src.core.planner.equations import parts
from mpjax._src.core.planner.kinds import axes_of_view

X = jnp.ones((4, 6, 8))


def same(fun, *args):
    """Returns pairs of axes of the first argument and of the result that are in one class."""
    (x, *_), equations, (out,) = parts(jax.make_jaxpr(fun)(*args))
    axes = Axes(equations)
    sizes = enumerate(x.aval.shape), enumerate(out.aval.shape)
    one, other = ([d for d, n in dims if n != 1] for dims in sizes)
    return {(i, d) for i in one for d in other if axes.of(x, [i]) == axes.of(out, [d])}


DIAGONAL = {(0, 0), (1, 1), (2, 2)}
MAPS = {
    "entry by entry": (lambda x: jnp.tanh(x) * 2 + 1, DIAGONAL),
    "transpose": (lambda x: x.transpose(2, 0, 1), {(2, 0), (0, 1), (1, 2)}),
    "split": (lambda x: x.reshape(4, 6, 2, 4), {(0, 0), (1, 1), (2, 2), (2, 3)}),
    "merge": (lambda x: x.reshape(24, 8), {(0, 0), (1, 0), (2, 1)}),
    "one more": (lambda x: x[:, None], {(0, 0), (1, 2), (2, 3)}),
    "sum": (lambda x: x.sum(1), {(0, 0), (2, 1)}),
    "sum, kept": (lambda x: x.sum(1, keepdims=True), {(0, 0), (2, 2)}),
    "less a mean": (lambda x: x - x.mean(2, keepdims=True), DIAGONAL),
    "slice": (lambda x: x[1:, ::2], DIAGONAL),
    "displaced": (lambda x: jnp.concatenate([x[:, 1:], x[:, :1]], 1), DIAGONAL),
    "rows of a table": (lambda x: jnp.zeros((9, 8)).at[jnp.arange(6)].add(x[0]), {(1, 0), (2, 1)}),
    "matmul": (lambda x: x @ jnp.ones((8, 8)), set()),
    "unknown": (lambda x: lax.sort(x, dimension=2), {(i, d) for i in range(3) for d in range(3)}),
}


@pytest.mark.parametrize("name", MAPS)
def test_axes_that_are_the_same(name):
    fun, pairs = MAPS[name]
    assert same(fun, X) == pairs


@pytest.mark.parametrize(
    ("fun", "axes"),
    [
        (lambda x: x.sum((0, 2)), {0, 2}),
        (lambda x: jnp.cumsum(x, 1), {1}),
        (lambda x: jnp.zeros((9, 6, 8)).at[jnp.arange(4)].add(x), {0}),
    ],
)
def test_axes_that_are_summed_over(fun, axes):
    _, equations, _ = parts(jax.make_jaxpr(fun)(X))
    (found,) = [e for e in equations if e.name in ("reduce_sum", "cumsum", "scatter-add")]
    assert {*summed(found)[1]} == axes


@pytest.mark.parametrize(
    ("before", "after"), [((0, 4), (0,)), ((4, 0), (0,)), ((0,), (4, 0)), ((0, 3), (3, 0))]
)
def test_axes_of_arrays_without_entries(before, after):
    _, (reshape,), _ = parts(jax.make_jaxpr(lambda x: x.reshape(after))(jnp.ones(before)))
    assert {*axes_of_view(reshape)} == {*range(len(before))}
