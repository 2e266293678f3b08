"""The training step under scan, vmap, remat, replicas and sharding."""

import functools
import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from problems import METRICS, bits, linear_loss, linear_problem, mesh, net_loss, net_problem
from support import equations, thorough_but

import mpjax


@pytest.mark.thorough
def test_steps_in_a_scan_are_the_steps_one_by_one(rng):
    params, model_state, batch = net_problem(rng)
    optimizer = optax.sgd(1e-2, momentum=0.9)
    init, step = mpjax.build_train_step(net_loss, optimizer, "mixed_float16", has_aux=True)
    state = jax.jit(init)(params, model_state, jax.random.key(0))
    batches = jax.tree.map(lambda x: np.stack([x] * 3), batch)
    scanned, metrics = jax.jit(lambda s, b: jax.lax.scan(step, s, b))(state, batches)
    step = jax.jit(step)
    for _ in range(3):
        state, _ = step(state, batch)
    assert metrics["loss"].shape == (3,) and int(scanned.step) == 3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3),
        scanned.params,
        state.params,
    )


def test_an_ensemble_under_vmap_judges_each_member(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1), "mixed_float16")
    members = jax.tree.map(lambda p: np.stack([p, p, p]), params)
    for leaf in members.values():
        leaf[1, 0] = np.nan
    states = jax.jit(jax.vmap(init))(members)
    state, metrics = jax.jit(jax.vmap(step, in_axes=(0, None)))(states, batch)
    assert metrics["loss_finite"].tolist() == [True, False, True]
    assert state.step.tolist() == [1, 0, 1]


def test_remat_of_the_loss_changes_nothing(rng):
    params, batch = linear_problem(rng)
    results = []
    for loss_fn in (linear_loss, jax.checkpoint(linear_loss)):
        init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "mixed_bfloat16")
        results.append(jax.jit(step)(init(params), batch)[0].params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), *results)


def replicas(kind, step):
    """Returns ``step`` over two replicas, each with its half of the batch."""
    if kind in ("pmap", "vmap"):
        mapped = getattr(jax, kind)(step, axis_name="data", in_axes=(None, 0))
        mapped = mapped if kind == "pmap" else jax.jit(mapped)
        return lambda state, batch: jax.tree.map(
            lambda x: x[0],
            mapped(state, jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), batch)),
        )
    spec = PartitionSpec
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh(),
            in_specs=(spec(), spec("data")),
            out_specs=spec(),
            check_vma=kind == "checked",
        )
    )


KINDS = ["checked", "unchecked", "pmap"]
ALL = list(itertools.product(["float32", "O2:bf16"], [1, 2], [*KINDS, "vmap"]))
QUICK = (("float32", 2, "pmap"), ("float32", 1, "vmap"), ("O2:bf16", 1, "unchecked"))


@pytest.mark.parametrize("policy, accumulate_steps, kind", thorough_but(ALL, *QUICK))
def test_replicas_average_once_and_decide_together(kind, accumulate_steps, policy, rng):
    params, (x, y) = linear_problem(rng)
    options = {"accumulate_steps": accumulate_steps, "loss_scale": "dynamic"}
    build = partial(mpjax.build_train_step, linear_loss, optax.sgd(0.1), policy, **options)
    init, whole = build(accumulate_steps=1)
    _, local = build(axis_name="data")
    start, run = jax.jit(init)(params), replicas(kind, local)
    expected, want = jax.jit(whole)(start, (x, y))
    state, got = run(start, (x, y))
    rtol = 1e-5 if policy == "float32" else 0.02
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(got[name], want[name], rtol=rtol)
    masters = [mpjax.optim.master_params(s.opt_state, s.params) for s in (state, expected)]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), *masters)
    # One replica's NaN stops both.
    x[0] = np.nan
    state, metrics = run(start, (x, y))
    assert int(state.step) == 0 and int(state.skipped_steps) == 1 and not metrics["loss_finite"]
    assert bits(state.params) == bits(start.params)


IN_HALF = list(itertools.product(["mixed_bfloat16", "O2:float16", "O1:float16"], KINDS))


@pytest.mark.parametrize("policy, kind", thorough_but(IN_HALF, ("O2:float16", "checked")))
def test_replicas_average_gradients_in_16_bits_with_reduce_half(kind, policy, rng):
    """Scaled, as the backward pass made them: in float16 nothing of them is flushed."""
    params, (x, y) = linear_problem(rng)

    def small_loss(params, batch):
        return linear_loss(params, batch) * 1e-6

    build = partial(mpjax.build_train_step, small_loss, optax.sgd(0.1), axis_name="data")
    (init, wide), (_, half) = build(policy), build(f"{policy},reduce=half")
    start = jax.jit(init)(params)
    run, run_wide = replicas(kind, half), replicas(kind, wide)
    jaxpr = jax.make_jaxpr(run)(start, (x, y))
    sent = [
        v.aval
        for eqn in equations(jaxpr)
        if eqn.primitive.name.startswith("psum")
        for v in eqn.invars
    ]
    short = mpjax.get_policy(policy).compute_dtype
    assert [aval.dtype for aval in sent if aval.ndim == 2] == [short]
    (_, want), (state, got) = run_wide(start, (x, y)), run(start, (x, y))
    np.testing.assert_allclose(got["grad_norm"], want["grad_norm"], rtol=0.01)
    x[0] = np.nan
    state, metrics = run(start, (x, y))
    assert int(state.step) == 0 and not metrics["grads_finite"]


def test_replicas_average_model_state_and_draw_their_own_randomness(rng):
    def loss_fn(params, batch, model_state, rng):
        new = {"mean": batch.mean(), "n": model_state["n"] + 1}
        aux = jax.random.uniform(rng, (1,))
        return jnp.mean(batch * params["w"]).astype(jnp.float32), (new, aux)

    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), "float32", has_aux=True, axis_name="data"
    )
    state = init({"w": jnp.ones(())}, {"mean": jnp.zeros(()), "n": 0}, jax.random.key(0))
    spec = PartitionSpec
    step = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh(),
            in_specs=(spec(), spec("data")),
            out_specs=(spec(), {**dict.fromkeys(METRICS, spec()), "aux": spec("data")}),
        )
    )
    state, metrics = step(state, jnp.array([1.0, 3.0]))
    assert float(state.model_state["mean"]) == 2 and int(state.model_state["n"]) == 1
    assert len(set(metrics["aux"].tolist())) == 2


@pytest.mark.parametrize(
    "kind, accumulate_steps",
    thorough_but(itertools.product(KINDS, [1, 2]), ("checked", 2), ("unchecked", 1)),
)
def test_replicas_agree_on_keys_flags_and_constants_in_the_model_state(kind, accumulate_steps):
    def loss_fn(params, batch, model_state):
        new = {"key": jax.random.fold_in(model_state["key"], 1), "flag": batch.sum() > 0, "f": 3.0}
        return jnp.mean(batch * params["w"]), new

    options = {"accumulate_steps": accumulate_steps, "axis_name": "data"}
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32", **options)
    state = init({"w": 1.0}, {"key": jax.random.key(0), "flag": False, "f": 0.0})
    state, _ = replicas(kind, step)(state, jnp.array([1.0, 1.0, -1.0, -1.0]))
    assert bool(state.model_state["flag"]) and float(state.model_state["f"]) == 3
    folds = range(accumulate_steps)
    key = functools.reduce(lambda key, _: jax.random.fold_in(key, 1), folds, jax.random.key(0))
    assert bits(state.model_state["key"]) == bits(key)


@pytest.mark.thorough
def test_step_on_sharded_arrays_under_plain_jit_equals_one_device(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.sgd(0.1), "O2:bf16", accumulate_steps=2)
    start = jax.jit(init)(params)
    expected, _ = jax.jit(step)(start, batch)
    sharded = jax.device_put(batch, NamedSharding(mesh(), PartitionSpec("data")))
    state = jax.device_put(start, NamedSharding(mesh(), PartitionSpec()))
    state, _ = jax.jit(step, donate_argnums=0)(state, sharded)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a.astype(jnp.float32), b.astype(jnp.float32), rtol=0.02, atol=0.02
        ),
        state.params,
        expected.params,
    )
