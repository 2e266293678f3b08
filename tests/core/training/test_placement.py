"""Where a training state lies, given where its parameters lie."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState as FlaxTrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import mpjax

PARAMS = {
    "dense": {"kernel": np.ones((16, 32), np.float32), "bias": np.ones(32, np.float32)},
    "scale": np.float32(1),
}
SPECS = {"dense": {"kernel": P("data", "model"), "bias": P("model")}, "scale": P()}


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def on(mesh, specs=SPECS):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def loss(params, x):
    y = x @ params["dense"]["kernel"] + params["dense"]["bias"]
    return jnp.mean(params["scale"] * y**2)


def shapes(optimizer, policy="float32"):
    return jax.eval_shape(mpjax.build_train_step(loss, optimizer, policy).init, PARAMS)


OPTIMIZERS = {
    "adam": (optax.adam(0.1), ("mu", "nu")),
    "a chain": (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)), ("mu", "nu")),
    "momentum": (optax.sgd(0.1, momentum=0.9), ("trace",)),
    "averages": (optax.contrib.schedule_free_adamw(0.1), ("z",)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_shardings_place_optimizer_state_as_parameters(mesh, name):
    optimizer, kept = OPTIMIZERS[name]
    state = shapes(optimizer)
    found = mpjax.optim.state_shardings(state, on(mesh))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    assert found.params == on(mesh)
    for key in kept:
        assert optax.tree.get(found.opt_state, key) == on(mesh)
    others = [found.step, found.loss_scale, found.skipped_steps]
    assert all(leaf == NamedSharding(mesh, P()) for leaf in jax.tree.leaves(others))


@pytest.mark.parametrize("policy", ["O2:bfloat16", "O2:float16", "O3:bfloat16"])
def test_state_shardings_place_masters_as_parameters(mesh, policy):
    found = mpjax.optim.state_shardings(shapes(optax.adam(0.1), policy), on(mesh))
    if "O2" in policy:
        assert found.opt_state.masters == on(mesh)
    assert optax.tree.get(found.opt_state, "mu") == on(mesh)


def test_state_shardings_place_the_parts_of_a_partition(mesh):
    labels = {"dense": "slow", "scale": "fast"}
    optimizer = optax.partition({"slow": optax.adam(0.1), "fast": optax.sgd(0.1)}, labels)
    found = mpjax.optim.state_shardings(shapes(optimizer), on(mesh))
    assert optax.tree.get(found.opt_state, "mu")["dense"] == on(mesh)["dense"]
    assert optax.tree.get(found.opt_state, "count").spec == P()


def test_state_shardings_place_factored_moments_by_row_and_column(mesh):
    optimizer = optax.adafactor(0.1, min_dim_size_to_factor=8)
    state = shapes(optimizer)
    found = mpjax.optim.state_shardings(state, on(mesh))
    specs = {
        leaf.shape: place.spec
        for leaf, place in zip(
            jax.tree.leaves(state.opt_state), jax.tree.leaves(found.opt_state), strict=True
        )
    }
    assert specs[16,] == P("data") and specs[32,] == P("model") and specs[1,] == P()


def test_train_state_is_made_and_stays_where_state_shardings_say(mesh):
    init, once = mpjax.build_train_step(loss, optax.adam(0.1), "O2:bfloat16")
    where = mpjax.optim.state_shardings(jax.eval_shape(init, PARAMS), on(mesh))
    state = jax.jit(init, out_shardings=where)(PARAMS)
    step = jax.jit(once, donate_argnums=0, out_shardings=(where, None))
    batch = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, P("data")))
    alone, once = jax.jit(init)(PARAMS), jax.jit(once)
    for _ in range(3):
        state, _ = step(state, batch)
        alone, _ = once(alone, np.ones((8, 16), np.float32))
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == where
    chex.assert_trees_all_close(state.opt_state.masters, alone.opt_state.masters, atol=1e-3)
    assert step._cache_size() == 1


def test_state_shardings_take_flax_states_prefixes_and_specs(mesh):
    state = FlaxTrainState.create(apply_fn=None, params=PARAMS, tx=optax.adam(0.1))
    found = mpjax.optim.state_shardings(state, SPECS)
    assert found.opt_state[0].nu == SPECS and found.step == P()
    with jax.set_mesh(mesh):
        jax.jit(lambda state: state, out_shardings=found)(state)
    one = NamedSharding(mesh, P())
    assert set(jax.tree.leaves(mpjax.optim.state_shardings(state, one))) == {one}
    split = {"dense": {"kernel": P("data"), "bias": P()}, "scale": P()}
    prefix = mpjax.optim.state_shardings(state, {"dense": P(), "scale": P()})
    assert prefix.params["dense"] == {"kernel": P(), "bias": P()}
    assert mpjax.optim.state_shardings(state, split).params == split


def test_state_shardings_keep_the_memory_kind(mesh):
    place = NamedSharding(mesh, P("data"), memory_kind="unpinned_host")
    state = jax.eval_shape(
        mpjax.build_train_step(lambda w, x: jnp.sum(w), optax.adam(0.1)).init, jnp.ones(8)
    )
    found = mpjax.optim.state_shardings(state, place)
    assert {leaf.memory_kind for leaf in jax.tree.leaves(found)} == {"unpinned_host"}


@pytest.mark.parametrize(
    ("state", "shardings", "error", "match"),
    [
        ({"w": 1}, P(), TypeError, "state is a dict, which has no params.*eval_shape"),
        (shapes(optax.sgd(1.0)), {"dense": P()}, ValueError, "must have the structure"),
        (shapes(optax.sgd(1.0)), "data", TypeError, "dense/bias'.='data' must be"),
        (shapes(optax.sgd(1.0)), P("data"), ValueError, r"'scale'.=P\('data',\) has more"),
    ],
)
def test_state_shardings_refuse_bad_arguments(state, shardings, error, match):
    with pytest.raises(error, match=match):
        mpjax.optim.state_shardings(state, shardings)
