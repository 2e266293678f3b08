"""Matmuls and lookups whose operands are sent in 16 bits are to JAX what its own are."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from support import thorough_but

from mpjax._src.core.base import _jax

PLAIN, SWAPPED, IN_A_BATCH = NUMBERS = (
    (((1,), (0,)), ((), ())),
    (((0,), (2,)), ((), ())),
    (((2,), (1,)), ((0,), (2,))),
)


@pytest.mark.parametrize(
    ("numbers", "batched"),
    thorough_but(
        itertools.product(NUMBERS, [(0, None), (None, 1), (1, 0)]),
        *[(PLAIN, (None, 1)), (SWAPPED, (1, 0)), (IN_A_BATCH, (0, None))],
    ),
)
def test_a_half_matmul_is_a_matmul_to_jax(numbers, batched):
    """Batched, differentiated twice and transposed as JAX does a matmul of its own."""
    shapes = {1: ((3, 4), (4, 2, 5)), 2: ((4, 3), (2, 5, 4)), 3: ((5, 3, 4), (2, 4, 5))}
    left, right = shapes[1 + [0, 2, 1].index(numbers[0][1][0])]
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-2, 3, shape), jnp.float32) for shape in (left, right))

    def ours(x, y):
        more = {"dimension_numbers": numbers, "precision": None, "out_sharding": None}
        return _jax.half_dot(x, y, jnp.bfloat16, **more)

    def theirs(x, y):
        return lax.dot_general(x, y, numbers)

    def total(dot, *args):
        return jnp.sum(jnp.astype(dot(*args), jnp.float32) ** 2)

    def results(x, y):
        pairs = zip((x, y), batched, strict=True)
        wide = [v if axis is None else jnp.stack([v, 2 * v], axis) for v, axis in pairs]
        for dot in (ours, theirs):
            loss = functools.partial(total, dot)
            grad, batch = jax.grad(loss, (0, 1)), jax.vmap(dot, batched)
            yield (
                *(dot(x, y), grad(x, y), jax.jvp(grad, (x, y), (y.sum() * x, y))[1]),
                *(batch(*wide), jax.grad(functools.partial(total, batch), (0, 1))(*wide)),
                jax.vmap(grad, batched)(*wide),
            )

    both = jax.jit(lambda *args: [*results(*args)])(x, y)
    for got, want in zip(*map(jax.tree.leaves, both), strict=True):
        np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=0.02)


def test_a_lookup_in_half_is_a_gather_to_jax():
    table, indices = jnp.arange(12.0).reshape(4, 3) / 7, jnp.asarray([[2], [0], [2]])
    params = {
        "dimension_numbers": lax.GatherDimensionNumbers((1,), (0,), (0,)),
        "slice_sizes": (1, 3),
        "unique_indices": False,
        "indices_are_sorted": False,
        "mode": lax.GatherScatterMode.CLIP,
        "fill_value": None,
    }

    (eqn,) = jax.make_jaxpr(functools.partial(lax.gather_p.bind, **params))(table, indices).eqns
    primitive, planned = _jax.planned_gather(eqn, jnp.bfloat16)

    def rows(table, indices=indices):
        return primitive.bind(table, indices, **planned)

    want = table[indices[:, 0]]
    np.testing.assert_array_equal(jax.jit(rows)(table), want)  # one device: nothing is rounded
    np.testing.assert_array_equal(rows(table), want)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    spread = jax.device_put(table, jax.sharding.NamedSharding(mesh, PartitionSpec("data")))
    rounded = want.astype(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_array_equal(rows(spread), rounded)
    np.testing.assert_array_equal(jax.jit(rows)(spread), rounded)
    got = jax.grad(lambda t: jnp.sum(rows(t) * want))(table)
    np.testing.assert_allclose(got, jax.grad(lambda t: jnp.sum(t[indices[:, 0]] * want))(table))
    both = jax.vmap(rows)(jnp.stack([table, 2 * table]), jnp.stack([indices, indices + 1]))
    np.testing.assert_array_equal(both[1], 2 * table[indices[:, 0] + 1])


# ---- functions that depend on the number of devices ----------------------------------------------


def of_devices(x):
    """Adds 1 on one device, and 2 if devices share arrays."""
    return _jax.by_devices(lambda x: {"y": x + 1}, lambda x: {"y": x + 2}, x)["y"]


def test_by_devices_knows_how_many_share_an_array():
    mesh = jax.make_mesh((8,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(np.zeros(8), jax.sharding.NamedSharding(mesh, PartitionSpec("i")))
    alone = jax.jit(of_devices)(np.zeros(8)), jax.vmap(of_devices)(np.zeros((2, 8)))
    rows = PartitionSpec("i")
    mapped = jax.shard_map(of_devices, mesh=mesh, in_specs=rows, out_specs=rows)
    assert {*np.ravel(alone[0]), *np.ravel(alone[1]), *np.asarray(jax.jit(mapped)(x))} == {1}
    assert {*np.asarray(jax.jit(of_devices)(x))} == {2}


def test_by_devices_is_one_operation_that_is_not_differentiated():
    assert [e.primitive.name for e in jax.make_jaxpr(of_devices)(1.0).eqns] == ["by_devices"]
    with pytest.raises(NotImplementedError):
        jax.jvp(of_devices, (1.0,), (1.0,))
