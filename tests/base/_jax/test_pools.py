"""The sums from -0.0 that gradients of marked max pools are; all others are lowered by JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jaxlib.mlir import ir
from support import normal

import mpjax
from mpjax._src.base import _jax
from mpjax._src.base._jax import pools

POOLS = {
    "max": (lax.max, -np.inf, (3, 3), (2, 2), "SAME"),
    "min": (lax.min, np.inf, (2, 3), (2, 1), "VALID"),
}


def pool(x, name="max"):
    reducer, start, window, strides, padding = POOLS[name]
    start = np.array(start, x.dtype)
    return lax.reduce_window(x, start, reducer, (1, *window, 1), (1, *strides, 1), padding)


def gradient(name="max"):
    return jax.grad(lambda x: jnp.sum(pool(x, name) ** 2))


def marked(fun):
    def run(*args):
        with _jax.marked():
            return fun(*args)

    return run


def sums_from(fun, *args, platform="cuda"):
    """Returns the numbers from which max pools of the lowered program are summed back."""
    traced = jax.jit(lambda *args: fun(*args)).trace(*args)  # not one of another test
    module = traced.lower(lowering_platforms=(platform,)).compiler_ir()
    starts = []

    def visit(op):
        if op.name == "stablehlo.select_and_scatter":
            value = op.operands[2].owner.attributes["value"]
            starts.append(str(value).partition("<")[2].partition(">")[0])
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return [float(start) for start in starts]


X = normal(0, 2, 7, 9, 3)


def is_below(number):
    return number == 0 and np.signbit(number)


def test_marked_pool_is_summed_from_negative_zero_on_gpus():
    for x in (X, X.astype(jnp.bfloat16)):
        assert [*map(is_below, sums_from(marked(gradient()), x))] == [True]
        assert [*map(is_below, sums_from(gradient(), x))] == [False]
        for platform in ("cpu", "tpu"):
            starts = sums_from(marked(gradient()), x, platform=platform)
            assert [*map(is_below, starts)] == [False]


@pytest.mark.parametrize("name", POOLS)
def test_sums_equal_those_of_jax(name):
    program = jax.make_jaxpr(gradient(name))(X)
    (eqn,) = (e for e in program.eqns if e.primitive.name == "select_and_scatter_add")
    source = normal(1, *eqn.invars[0].aval.shape)
    own = np.asarray(eqn.primitive.bind(source, X, **eqn.params))
    found = np.asarray(pools._scatter(source, X, **eqn.params))
    np.testing.assert_array_equal(found, own)
    unread = own == 0
    assert unread.any() and np.signbit(found)[unread].all() and not np.signbit(own)[unread].any()


LOSSES = {
    "plain": lambda w, x: jnp.mean(pool(jax.nn.relu(x @ w)) @ w),
    "jit": jax.jit(lambda w, x: jnp.mean(pool(jax.nn.relu(x @ w)) @ w)),
    "remat": jax.checkpoint(lambda w, x: jnp.mean(pool(jax.nn.relu(x @ w)) @ w)),
    "scan": lambda w, x: lax.scan(
        lambda c, x: (c + jnp.mean(pool(jax.nn.relu(x @ w)) @ w), None), 0.0, x[None]
    )[0],
}


@pytest.mark.parametrize("name", LOSSES)
def test_autocast_marks_pools(name):
    loss = mpjax.autocast(LOSSES[name], "mixed_bfloat16")
    w = normal(1, 3, 3)
    assert [*map(is_below, sums_from(jax.grad(loss), w, X))] == [True]
    mapped = jax.vmap(jax.grad(loss), (0, None))
    assert [*map(is_below, sums_from(mapped, w[None], X))] == [True]
