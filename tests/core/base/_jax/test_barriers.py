"""Barriers and layouts: where they stand, and what goes through them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mpjax._src.core.base import _jax

X = jnp.ones(3)

BARRIERS = [
    (_jax.cpu_barrier, ["cpu"]),
    (_jax.gpu_barrier, ["cuda"]),
    (_jax.again_barrier, ["cpu", "cuda"]),
]


@pytest.mark.parametrize(("barrier", "platforms"), BARRIERS)
@pytest.mark.parametrize("lowered", ["cpu", "cuda", "tpu"])
def test_a_barrier_stands_on_its_platforms_alone(barrier, platforms, lowered):
    text = jax.jit(barrier).trace(X).lower(lowering_platforms=(lowered,)).as_text()
    assert ("optimization_barrier" in text) == (lowered in platforms)
    np.testing.assert_array_equal(jax.vmap(jax.grad(barrier))(X), X)


@pytest.mark.parametrize(("axis", "order"), [(None, "1, 0"), (0, "2, 1, 0"), (1, "2, 0, 1")])
def test_rows_are_contiguous_on_one_gpu(axis, order):
    """And under vmap: in the text, the axes of an array stand in the opposite order."""
    fun, x = _jax.row_major, np.ones((2, 3), np.float32)
    if axis is not None:
        fun, x = jax.vmap(fun, axis, axis), np.ones((2, 3, 4), np.float32)
    traced = jax.jit(fun).trace(x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" in text and f"dense<[{order}]>" in text
    assert "LayoutConstraint" not in traced.lower(lowering_platforms=("cpu",)).as_text()


@pytest.mark.parametrize("mapped", [False, True])
def test_the_order_of_rows_is_left_to_xla_where_it_partitions(mapped):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    fun = _jax.row_major
    if mapped:
        fun = jax.shard_map(
            fun, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x")
        )
    x = jax.ShapeDtypeStruct((4, 3), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("x")))
    text = jax.jit(fun).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert ("LayoutConstraint" in text) == mapped


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint, jax.vmap])
def test_a_name_in_linear_code_is_transposed(around):
    double = around(lambda x: 2 * checkpoint_name(x, "x"))
    np.testing.assert_array_equal(jax.linear_transpose(double, X)(X)[0], 2 * X)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_carrier_is_zero_and_carries_all_derivatives(around):
    """What a code depends on: partial evaluation of a loop's body keeps the dependence."""

    def fun(x):
        def body(total, x):
            return total + jnp.square(x + _jax.carrier(x)), None

        return jax.lax.scan(around(body), 0.0, x)[0]

    # As (x + 0)**2 with the tangent 2 * dx: the derivative is 4x, and its derivative 8.
    np.testing.assert_allclose(jax.jvp(fun, (X,), (X,))[1], 4 * jnp.square(X).sum(), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(fun)(X), 4 * X, rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: jax.grad(fun)(x).sum())(X), 8.0, rtol=1e-6)
    assert not jax.vmap(_jax.carrier)(X).any()


@pytest.mark.parametrize(("axis", "held"), [(None, "2x4x3"), (0, "5x2x4x3"), (2, "5x2x4x3")])
def test_the_left_operand_of_a_matmul_is_held_in_its_order_on_cpus_alone(axis, held):
    """Batch, free and contracted dimensions: XLA:CPU has no kernel for another order."""
    x, y = np.ones((2, 3, 4), np.float32), np.ones((3, 2, 5), np.float32)

    def hold(x, y):
        return _jax.held_for_cpu(x, y, (((1,), (0,)), ((0,), (1,))))

    if axis is not None:
        hold = jax.vmap(hold, (axis, None), (axis, None))
        x = np.stack([x] * 5, axis)
    traced = jax.jit(hold).trace(x, y)
    lines = traced.lower(lowering_platforms=("cpu",)).as_text().splitlines()
    held_in = [line for line in lines if "optimization_barrier" in line]
    assert f"<{held}x" in held_in[0] and "<3x2x5x" in held_in[1]
    assert "transpose" not in traced.lower(lowering_platforms=("cuda",)).as_text()
    assert np.sum(jax.jit(hold)(x, y)[0]) == x.size
