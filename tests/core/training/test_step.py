"""The training step trains: under every policy, and with other people's models."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import (
    POLICIES,
    bits,
    described,
    dtypes,
    linear_loss,
    linear_problem,
    net_loss,
    net_problem,
)
from support import matmul_dtypes, thorough_but

import mpjax

# ---- it trains -----------------------------------------------------------------------------------


def test_float32_train_step_equals_the_loop_by_hand(rng):
    params, batch = linear_problem(rng)
    optimizer = optax.adamw(optax.cosine_decay_schedule(1e-2, 10))
    init, step = mpjax.build_train_step(linear_loss, optimizer, "float32")
    state, step = jax.jit(init)(params), jax.jit(step)

    @jax.jit
    def by_hand(params, opt_state):
        loss, grads = jax.value_and_grad(linear_loss)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(grads)

    opt_state = jax.jit(optimizer.init)(params)
    for number in range(5):
        state, metrics = step(state, batch)
        params, opt_state, loss, norm = by_hand(params, opt_state)
        np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-6)
        assert int(state.step) == number + 1
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), state.params, params)


# By operation and at the boundary, both halves, masters and none.
QUICK = ("O2:bfloat16", "p=f32,c=f16,o=f32")


@pytest.mark.parametrize("policy", thorough_but(POLICIES, QUICK[1]))
def test_every_policy_learns_and_keeps_its_dtypes(policy, rng):
    params, model_state, batch = net_problem(rng, 32)
    init, step = mpjax.build_train_step(net_loss, optax.adam(3e-2), policy, has_aux=True)
    state = jax.jit(init)(params, model_state, jax.random.key(int(rng.integers(1000))))
    before = jax.tree.map(described, state)
    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert jax.tree.map(described, state) == before
    assert step._cache_size() == 1
    assert dtypes(state.model_state) == {"float32"}
    assert metrics["aux"]["logits"].dtype == jnp.float32


@pytest.mark.parametrize(
    "policy", thorough_but(POLICIES, *QUICK, "mixed_float16", "mixed_bfloat16,casting=boundary")
)
def test_matmuls_run_in_the_compute_dtype_backward_too(policy, rng):
    params, model_state, batch = net_problem(rng)
    init, step = mpjax.build_train_step(net_loss, optax.sgd(0.1), policy, has_aux=True)
    found = matmul_dtypes(step, init(params, model_state, jax.random.key(0)), batch)
    half = mpjax.get_policy(policy).compute_dtype.name
    assert len(found) == 5 and set(found) == {(half, half)}


@pytest.mark.parametrize("half", thorough_but(["float16", "bfloat16"], 0))
def test_o2_parameters_are_their_masters_rounded(half, rng):
    params, model_state, batch = net_problem(rng)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(5.0))
    init, step = mpjax.build_train_step(net_loss, optimizer, f"O2:{half}", has_aux=True)
    state, step = jax.jit(init)(params, model_state, jax.random.key(0)), jax.jit(step)
    assert state.params["Dense_0"]["kernel"].dtype == half
    assert state.params["BatchNorm_0"]["scale"].dtype == jnp.float32
    for _ in range(5):
        state, _ = step(state, batch)
        masters = mpjax.optim.master_params(state.opt_state, state.params)
        assert dtypes(masters) == {"float32"}
        rounded = jax.tree.map(lambda m, p: np.asarray(m).astype(p.dtype), masters, state.params)
        assert bits(rounded) == bits(state.params)


def test_o3_has_half_parameters_and_no_masters(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.adam(1e-2), "O3:bfloat16")
    state, _ = jax.jit(step)(init(params), batch)
    assert dtypes(state.params) == {"bfloat16"}
    assert len(jax.tree.leaves(state.opt_state)) == 5  # count, two moments for two parameters
    assert dtypes(state.opt_state) == {"int32", "float32"}


def test_overrides_are_obeyed_and_checked_once(rng):
    params, batch = linear_problem(rng)
    seen = {}

    def loss_fn(params, batch):
        seen.update(jax.tree.map(lambda x: x.dtype.name, params))
        return linear_loss(params, jax.tree.map(lambda x: x.astype(jnp.float32), batch))

    policy = mpjax.get_policy("O3:float16").override({"b": "float32"})
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy)
    state, _ = jax.eval_shape(lambda params: step(init(params), batch), params)
    assert seen == {"w": "float16", "b": "float32"}
    assert state.params["b"].dtype == jnp.float32
    init, _ = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy.override({"bias": "f32"}))
    with pytest.raises(ValueError, match="pattern 'bias' matches no parameter path.*nearest"):
        init(params)


def test_the_batch_is_cast_but_for_what_is_not_floating(rng):
    seen = {}

    def loss_fn(params, batch):
        seen.update({k: getattr(v, "dtype", None) for k, v in batch.items()})
        return jnp.float32(0) * params["w"].sum().astype(jnp.float32)

    batch = {"x": np.ones(2, np.float32), "labels": np.array([70000, 1]), "key": jax.random.key(0)}
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "p=f32,c=f16,o=f32")
    jax.jit(step)(init({"w": jnp.ones(2)}), batch)
    assert seen["x"] == jnp.float16 and seen["labels"] == jnp.int32
    assert seen["key"] == jax.random.key(0).dtype


def test_numpy_float64_batch_is_cast_without_jit_too():
    seen = []
    loss_fn = lambda p, batch: (seen.append(batch.dtype), p["w"].astype(jnp.float32))[1]  # noqa: E731
    for policy in ("p=f32,c=bf16", "mixed_bfloat16"):
        init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy)
        step(init({"w": 1.0}), np.ones(3))
    assert seen == [jnp.bfloat16, jnp.float32]


def test_a_batch_is_rounded_for_matmuls_alone(rng):
    def loss_fn(params, batch):
        assert batch["x"].dtype == batch["weight"].dtype == jnp.float32
        return jnp.sum(batch["weight"]) + jnp.mean(batch["x"] @ params["w"])

    x, weight = (jnp.asarray(rng.normal(size=(3, 3)) + 1000, jnp.float32) for _ in range(2))
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_bfloat16")
    _, metrics = jax.jit(step)(init({"w": jnp.zeros((3, 3))}), {"x": x, "weight": weight})
    np.testing.assert_allclose(metrics["loss"], jnp.sum(weight), rtol=1e-6)


def test_an_override_may_name_a_scope(rng):
    def loss_fn(params, batch):
        x, y = batch
        with jax.named_scope("head"):
            return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    params, batch = linear_problem(rng)
    policy = mpjax.get_policy("mixed_float16").override({"head": "float32"})
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), policy)
    state = init(params)
    assert matmul_dtypes(step, state, batch) == [("float32", "float32")] * 2
    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), policy.override({"*/heat/*": "float32"})
    )
    with pytest.raises(ValueError, match="pattern '\\*/heat/\\*' matches neither.*nearest"):
        step(init(params), batch)


def test_op_lists_act_in_the_step(rng):
    params, batch = linear_problem(rng)
    policy = mpjax.get_policy("mixed_bfloat16").with_ops(full=("dot_general",))
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1), policy)
    assert matmul_dtypes(step, init(params), batch) == [("float32", "float32")] * 2


@pytest.mark.thorough
@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_an_autocast_loss_trains(half, rng):
    params, model_state, batch = net_problem(rng, 32)
    loss_fn = mpjax.autocast(net_loss, f"mixed_{half}")
    init, step = mpjax.build_train_step(
        loss_fn, optax.adam(3e-2), "float32", loss_scale="dynamic", has_aux=True
    )
    state = jax.jit(init)(params, model_state, jax.random.key(0))
    assert {half} == {dtype for row in matmul_dtypes(step, state, batch) for dtype in row}
    step = jax.jit(step, donate_argnums=0)
    losses = []
    for _ in range(40):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])
    assert dtypes(state.model_state) == dtypes(state.params) == {"float32"}
    assert step._cache_size() == 1


# ---- other people's models -----------------------------------------------------------------------


@pytest.mark.thorough
def test_nnx_model_trains_with_build_train_step(rng):
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.hidden = nnx.Linear(8, 8, rngs=rngs)
            self.norm = nnx.BatchNorm(8, rngs=rngs)
            self.head = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(nnx.relu(self.norm(self.hidden(x))))

    graph, params, rest = nnx.split(Model(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, model_state):
        model = nnx.merge(graph, params, model_state)
        losses = optax.softmax_cross_entropy_with_integer_labels(
            model(batch["x"]).astype(jnp.float32), batch["y"]
        )
        return losses.mean(), nnx.state(model, nnx.Not(nnx.Param))

    policy = mpjax.get_policy("O2:bfloat16").override({"head/*": "float32"})
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-2), policy)
    state, step = jax.jit(init)(params, rest), jax.jit(step, donate_argnums=0)
    assert state.params["hidden"]["kernel"][...].dtype == jnp.bfloat16
    assert state.params["norm"]["scale"][...].dtype == jnp.float32
    assert state.params["head"]["kernel"][...].dtype == jnp.float32
    _, _, batch = net_problem(rng)
    losses = []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0] and step._cache_size() == 1


@pytest.mark.thorough
def test_equinox_model_trains_with_build_train_step(rng):
    model = eqx.nn.MLP(8, 3, 8, 2, key=jax.random.key(0))
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss_fn(params, batch):
        logits = jax.vmap(eqx.combine(params, static))(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(
            logits.astype(jnp.float32), batch["y"]
        ).mean()

    _, _, batch = net_problem(rng)
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-2), "mixed_float16")
    state, step = jax.jit(init)(params), jax.jit(step, donate_argnums=0)
    state, metrics = step(state, batch)
    first = metrics["loss"]
    for _ in range(30):
        state, metrics = step(state, batch)
    assert metrics["loss"] < first


def test_init_error_names_a_function_among_the_parameters():
    model = eqx.nn.MLP(1, 1, 1, 1, key=jax.random.key(0))
    init, _ = mpjax.build_train_step(linear_loss, optax.adam(1e-2))
    with pytest.raises(TypeError, match=r"params\['.*activation'\] .*eqx.partition"):
        init(model)
