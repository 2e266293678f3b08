"""Masters without float32 copies: split ones are the same numbers, and small updates are kept."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from problems import bits, run_updates
from support import thorough_but

import mpjax
from mpjax import checkpoint
from mpjax._src.core.training import residuals

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-3),
    "momentum": lambda: optax.sgd(1e-2, momentum=0.9),
    "lamb": lambda: optax.lamb(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4)),
}
POLICIES = [
    *("O2:bfloat16,masters=split", "O2:bfloat16,masters=split8"),
    *("O3:bfloat16,rounding=kahan", "O3:float16,rounding=kahan", "O3:bfloat16,rounding=stochastic"),
]


def loss_fn(params, x):
    y = jnp.tanh(x @ params["a"]) @ params["b"] * params["norm"]
    return jnp.mean((y - x[:, :4]).astype(jnp.float32) ** 2)


def problem(rng):
    draw = lambda *shape: np.float32(rng.normal(size=shape) / 3)  # noqa: E731
    return {"a": draw(8, 16), "b": draw(16, 4), "norm": np.ones(4, np.float32)}, draw(16, 8)


def as_split(masters):
    """Float32 masters as the weights that split ones have: rounded away from zero at ties."""
    return jax.tree.map(lambda m: residuals.split(m, jnp.bfloat16, "uint16")[0], masters)


def both_runs(optimizer, grad_fn, masters, steps):
    """The bits of split masters and of float32 ones whose weights round the same way."""
    split = mpjax.optim.with_master_weights(optimizer, storage="split")

    def body(carry, _):
        (params, state), (masters, moments) = carry
        updates, state = split.update(grad_fn(params), state, params)
        params = optax.apply_updates(params, updates)
        updates, moments = optimizer.update(grad_fn(as_split(masters)), moments, masters)
        masters = optax.apply_updates(masters, updates)
        return ((params, state), (masters, moments)), None

    @jax.jit
    def run(masters):
        params = as_split(masters)
        state = split.init(params)
        whole = mpjax.optim.master_params(state, params)
        carry = (params, state), (whole, optimizer.init(whole))
        (params, state), (masters, _) = jax.lax.scan(body, carry, length=steps)[0]
        return params, as_split(masters), mpjax.optim.master_params(state, params), masters

    params, rounded, split_masters, masters = run(masters)
    assert bits(params) == bits(rounded)
    return bits(split_masters), bits(masters)


@pytest.mark.parametrize("name", thorough_but(OPTIMIZERS, "adamw"))
def test_split_masters_equal_float32_masters_bit_for_bit(name, rng):
    masters, x = problem(rng)
    grad_fn = lambda p: jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss_fn)(p, x))  # noqa: E731
    split, whole = both_runs(OPTIMIZERS[name](), grad_fn, masters, steps=500)
    assert split == whole


@pytest.mark.thorough
def test_split_masters_equal_float32_masters_over_ten_thousand_steps(rng):
    masters, x = problem(rng)
    grad_fn = lambda p: jax.tree.map(lambda g: g.astype(jnp.float32), jax.grad(loss_fn)(p, x))  # noqa: E731
    split, whole = both_runs(optax.adamw(1e-3), grad_fn, masters, steps=10_000)
    assert split == whole


@pytest.mark.thorough
def test_checkpoint_of_split_masters_does_not_change_the_run(rng, tmp_path):
    params, x = problem(rng)
    init, step = mpjax.build_train_step(loss_fn, optax.adamw(1e-3), "O2:bfloat16,masters=split")
    like = jax.jit(init)(params)
    step, state = jax.jit(step), like
    for number in range(20):
        state, _ = step(state, x)
        if number == 9:
            checkpoint.save(tmp_path / "c", state)
    back = checkpoint.restore(tmp_path / "c", like)
    for _ in range(10):
        back, _ = step(back, x)
    assert bits(back) == bits(state)
    full = mpjax.checkpoint.export_params(state)
    assert bits(full) == bits(mpjax.optim.master_params(state.opt_state, state.params))
    assert not jnp.array_equal(full["a"], state.params["a"].astype(jnp.float32))


RUNS = list(itertools.product(OPTIMIZERS, POLICIES))


@pytest.mark.parametrize("name, policy", thorough_but(RUNS, 0, 6, 9))
def test_step_without_float32_copies_trains_skips_and_compiles_once(policy, name, rng):
    params, x = problem(rng)
    init, step = mpjax.build_train_step(loss_fn, OPTIMIZERS[name](), policy)
    step, state, losses = jax.jit(step, donate_argnums=0), jax.jit(init)(params), []
    bad = x.copy()
    bad[0, 0] = np.nan
    for number in range(12):
        if number == 5:
            before = bits((state.params, state.opt_state))
            state, metrics = step(state, bad)
            assert before == bits((state.params, state.opt_state)) and metrics["skipped_steps"] == 1
        state, metrics = step(state, x)
        losses.append(float(metrics["loss"]))
    assert step._cache_size() == 1 and losses[-1] < losses[0]
    held = jax.tree.leaves((state.params, getattr(state.opt_state, "masters", ())))
    sizes = {"split": 4, "split8": 3, "kahan": 4, "stochastic": 2}[policy.partition("=")[2]]
    halves = sum(leaf.size for leaf in jax.tree.leaves(state.params) if leaf.dtype.itemsize == 2)
    assert sum(x.nbytes for x in held if x.dtype != jnp.float32) == sizes * halves


@pytest.mark.parametrize("storage", thorough_but(["float32", "split", "split8"], 1))
def test_apply_updates_gives_the_bits_that_a_step_stores(storage, rng):
    """Operation by operation, so that no compiler contracts a product and a sum in one of them."""
    optimizer = mpjax.optim.with_master_weights(optax.sgd(1e-2, momentum=0.9), storage)
    params = {"w": jnp.asarray(rng.normal(size=4096), jnp.bfloat16), "full": jnp.ones(3)}
    state = optimizer.init(params)
    for _ in range(5):
        grads = jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), jnp.float32), params)
        stepped = optimizer.step(grads, state, params)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert bits((stepped.params, stepped.state)) == bits((params, state))


def test_split_master_is_off_by_one_rounding_where_addition_is_inexact():
    optimizer = mpjax.optim.with_master_weights(optax.sgd(1.0), storage="split")
    params = np.array([1.0, 2.0, 1.0], jnp.bfloat16)
    wanted = np.float32([2.0**-20 * 1.2345678, 1.5, 2.0**-14 * 1.2345678])

    def moved(params):
        state = optimizer.init(params)
        updates, state = optimizer.update(params.astype(jnp.float32) - wanted, state, params)
        return mpjax.optim.master_params(state, optax.apply_updates(params, updates))

    got = jax.jit(moved)(params)
    np.testing.assert_array_less(np.abs(got - wanted), np.float32([2.0**-23, 1e-9, 2.0**-23]))


def test_split8_masters_lose_updates_below_2_to_the_minus_17():
    """An update below 2**-17 of a weight is lost, one above it is not."""
    for share, moves in ((2.0**-18, False), (2.0**-16, True)):
        optimizer = mpjax.optim.with_master_weights(optax.sgd(share), storage="split8")
        params = jnp.ones(4, jnp.bfloat16)
        _, state = run_updates(optimizer, params, [jnp.ones(4, jnp.bfloat16)] * 8)
        assert (state.masters != 0).any() == moves


@pytest.mark.thorough
def test_split_masters_have_the_same_bits_on_one_and_eight_devices(rng):
    """Elementwise: a gradient that no device sums gives the same bits however it lies."""
    mesh = jax.make_mesh((8,), ("data",))
    params = jnp.asarray(rng.normal(size=(64, 16)), jnp.bfloat16)
    grads = [jnp.asarray(rng.normal(size=(64, 16)), jnp.float32) for _ in range(3)]
    for storage in ("split", "split8"):
        optimizer = mpjax.optim.with_master_weights(optax.sgd(1e-3), storage)
        runs = [
            run_updates(optimizer, *jax.device_put((params, grads), NamedSharding(mesh, spec)))
            for spec in (PartitionSpec(), PartitionSpec("data"), PartitionSpec(None, "data"))
        ]
        assert bits(runs[0]) == bits(runs[1]) == bits(runs[2])


def test_residuals_of_split_masters_are_sharded_as_their_parameters():
    mesh = jax.make_mesh((8,), ("data",))
    init, _ = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "O2:bfloat16,masters=split")
    params = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 4)), "norm": jnp.ones(4)}
    spec = {"a": PartitionSpec("data"), "b": PartitionSpec("data"), "norm": PartitionSpec()}
    where = {name: NamedSharding(mesh, part) for name, part in spec.items()}
    placed = mpjax.optim.state_shardings(jax.eval_shape(init, params), where)
    state = jax.jit(init, out_shardings=placed)(params)
    assert state.opt_state.masters["a"].sharding.spec == spec["a"]
    assert state.opt_state.masters["a"].addressable_shards[0].data.shape == (1, 16)


@pytest.mark.thorough
def test_inside_vmap_an_ensemble_keeps_its_residuals(rng):
    params, x = problem(rng)
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-2), "O2:bfloat16,masters=split")
    members = jax.tree.map(lambda p: np.stack([p, p + np.float32(0.1)]), params)
    states = jax.jit(jax.vmap(init))(members)
    states, _ = jax.jit(jax.vmap(step, in_axes=(0, None)))(states, x)
    alone, _ = jax.jit(step)(jax.jit(init)(jax.tree.map(lambda p: p[1], members)), x)
    full = jax.jit(lambda state: mpjax.optim.master_params(state.opt_state, state.params))
    got, want = full(states), full(alone)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a[1], b, rtol=1e-3, atol=1e-5), got, want)


def test_with_master_weights_refuses_bad_storage():
    half = {"w": jnp.ones(2, jnp.float16)}
    with pytest.raises(ValueError, match="storage='spilt' must be one of .*Did you mean 'split'"):
        mpjax.optim.with_master_weights(optax.sgd(0.1), storage="spilt")
    with pytest.raises(ValueError, match=r"params\['w'\] is float16.*storage='split'.*bfloat16"):
        mpjax.optim.with_master_weights(optax.sgd(0.1), storage="split").init(half)
    whole = mpjax.optim.with_master_weights(optax.sgd(0.1))
    params = {"w": jnp.ones(2, jnp.bfloat16)}
    for other in (
        mpjax.optim.with_master_weights(optax.sgd(0.1), storage="split"),
        mpjax.optim.with_kahan_summation(optax.sgd(0.1)),
    ):
        with pytest.raises(ValueError, match="the state has float32 for .*another storage"):
            other.update(params, whole.init(params), params)
    with pytest.raises(ValueError, match="with_kahan_summation: update was called without params"):
        mpjax.optim.with_kahan_summation(optax.sgd(0.1)).update(params, other.init(params))


@pytest.mark.parametrize(
    "policy, message",
    [
        ("O2:float16,masters=split", "stored in float16"),
        ("O3:bfloat16,masters=split", "no master weights"),
        ("O2:bfloat16,rounding=kahan", "the policy keeps master weights"),
        ("O2:bfloat16,masters=whole", "masters='whole' must be 'float32'"),
        ("O3:bfloat16,rounding=up", "rounding='up' must be 'nearest'"),
        ("O2:bfloat16,moments=4bit", "moments='4bit' must be 'float32' or '8bit'"),
    ],
)
def test_policy_that_contradicts_its_masters_or_rounding_is_refused(policy, message):
    with pytest.raises(ValueError, match=message):
        mpjax.get_policy(policy)


def test_policy_with_masters_or_rounding_round_trips_as_text():
    """A setting without effect on float32 parameters stands beside any level that stores these."""
    for text in (*POLICIES, "mixed_bfloat16,masters=split", "mixed_float16,rounding=stochastic"):
        policy = mpjax.get_policy(text)
        assert str(policy) == text and mpjax.get_policy(str(policy)) == policy
    policy = mpjax.get_policy("O2:bfloat16")
    assert policy.replace(masters="split") == mpjax.get_policy(POLICIES[0])
