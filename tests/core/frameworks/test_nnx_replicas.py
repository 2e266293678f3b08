"""Loops of Flax NNX on several replicas, in `jax.shard_map`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from problems import mesh
from support import normal

import mpjax.nnx

X, Y = np.asarray(normal(1, 32, 4)), np.asarray(normal(2, 32, 8))
BAD = X.copy()
BAD[3, 1] = np.nan


class Model(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
        self.last = nnx.Linear(4, 8, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.last(self.norm(x))


def made():
    model = Model()
    optimizer = mpjax.nnx.Optimizer(model, optax.sgd(0.1, 0.9), "mixed_float16")
    return nnx.split((model, optimizer))


GRAPH, STATE = made()


def step(state, x, y, axis_name=None):
    model, optimizer = nnx.merge(GRAPH, state)

    def loss_fn(model):
        return jnp.mean((model(x) - y) ** 2)

    loss, grads = mpjax.nnx.value_and_grad(loss_fn, optimizer, axis_name=axis_name)(model)
    optimizer.update(model, grads)
    return loss, grads, nnx.state((model, optimizer)), optimizer.metrics()


@jax.jit
@jax.shard_map(mesh=mesh(), in_specs=(P(), P("data"), P("data")), out_specs=P())
def replicas(state, x, y):
    return step(state, x, y, "data")


def test_loss_gradients_and_statistics_are_averaged_over_replicas():
    twice = [np.concatenate([each[:16]] * 2) for each in (X, Y)]  # each replica has the same rows
    got, want = replicas(STATE, *twice), jax.jit(step)(STATE, *twice)
    for a, b in zip(*map(jax.tree.leaves, (got[:3], want[:3])), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-3)  # sums of float16 matmuls
    _, _, after, _ = replicas(STATE, X, Y)
    mean = nnx.merge(GRAPH, after)[0].norm.mean.get_value()
    np.testing.assert_allclose(mean, 0.01 * X.mean(0), rtol=1e-3, atol=1e-5)


def test_nan_on_one_replica_is_skipped_on_all():
    _, _, after, metrics = replicas(STATE, BAD, Y)
    assert int(metrics["skipped_steps"]) == 1
    (old, _), (new, _) = (nnx.merge(GRAPH, state) for state in (STATE, after))
    for a, b in zip(*(jax.tree.leaves(nnx.state(m)) for m in (old, new)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_axis_that_is_not_mapped_is_refused():
    with pytest.raises(ValueError, match="no axis 'data' is mapped"):
        step(STATE, X, Y, "data")
