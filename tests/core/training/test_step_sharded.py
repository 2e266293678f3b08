"""Training steps that XLA partitions: what they compute and send on each of eight devices."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absent import partitioned, spread
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import thorough_but

import mpjax
from mpjax._src.tools.hardware import hlo_costs

WIDTH, ROWS = 64, 512


def loss(params, x):
    def layer(x, w):
        return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


PARAMS = {
    "up": np.full((3, WIDTH, 2 * WIDTH), np.float32(1 / WIDTH)),
    "down": np.full((3, 2 * WIDTH, WIDTH), np.float32(1 / WIDTH)),
    "bias": np.zeros((3, 2 * WIDTH), np.float32),
}


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def compiled(mesh, fully_sharded, accumulate_steps):
    """Returns the step's FLOPs on one device, and what that sends."""
    init, step = mpjax.build_train_step(
        loss, optax.adam(1e-3), "mixed_bfloat16", accumulate_steps=accumulate_steps
    )

    def place(leaf):
        axes = P(None, "data") if fully_sharded and leaf.ndim == 3 else P()
        return spread(mesh, axes, *leaf.shape, dtype=leaf.dtype)

    state = jax.tree.map(place, jax.eval_shape(init, PARAMS))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    batch = spread(mesh, P("data"), ROWS, WIDTH)
    text, rows = partitioned(mesh, step, state, batch, out_shardings=(shardings, None))
    return sum(m.times * m.flops for m in hlo_costs.costs(text).matmuls), rows


@pytest.mark.parametrize(
    "fully_sharded", thorough_but([False, True], 1), ids=["data parallel", "fully sharded"]
)
def test_micro_batches_of_a_sharded_step_move_no_data(mesh, fully_sharded):
    flops, rows = compiled(mesh, fully_sharded, 1)
    split_flops, split_rows = compiled(mesh, fully_sharded, 4)
    assert 0 < split_flops <= 1.01 * flops
    assert {row.carries for row in split_rows} <= {row.carries for row in rows} | {"statistics"}
    assert not [row for row in split_rows if row.carries in ("data", "activations")]


@pytest.mark.thorough
def test_accumulation_on_many_devices_equals_one_device(mesh):
    batch = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), "float32", accumulate_steps=4)
    alone, metrics = jax.jit(step)(init(PARAMS), batch)
    spread_out = jax.device_put(batch, NamedSharding(mesh, P("data")))
    state = jax.device_put(init(PARAMS), NamedSharding(mesh, P()))
    together, metrics_of_all = jax.jit(step)(state, spread_out)
    chex.assert_trees_all_close(alone.params, together.params, rtol=1e-5, atol=1e-7)
    assert metrics["loss"] == pytest.approx(float(metrics_of_all["loss"]), rel=1e-5)
