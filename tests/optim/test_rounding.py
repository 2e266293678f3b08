"""Stochastic rounding: the mean is exact, what is held stays, and bits depend on the key alone."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import thorough_but

import mpjax
from mpjax._src.optim.rounding import drawn, stochastically

rounded = jax.jit(stochastically, static_argnums=1)
stochastic_round = jax.jit(mpjax.optim.stochastic_round, static_argnums=1)
HALVES = ["bfloat16", "float16"]
DRAWS = 1_000_000
VALUES = [1.001, -7.7e-6, 123.456, 3.3e-5, 2.1e-8, 60000.5]


@pytest.mark.parametrize("half", HALVES)
def test_stochastic_round_never_moves_a_16_bit_value(half):
    """All 65,536, NaN, Inf and subnormals too, by the least and the largest random number."""
    bits = np.arange(1 << 16, dtype=np.uint16)
    wide = bits.view(jnp.dtype(half)).astype(np.float32)  # NumPy flushes no subnormals
    nan = np.isnan(wide)
    for random in (0, 0xFFFFFFFF):
        y = np.asarray(rounded(wide, jnp.dtype(half), np.full(wide.shape, random, np.uint32)))
        np.testing.assert_array_equal(y.view(np.uint16)[~nan], bits[~nan])
        assert np.isnan(y.astype(np.float32))[nan].all()


@pytest.mark.parametrize(
    "value, half",
    thorough_but(itertools.product(VALUES, HALVES), (-7.7e-6, "bfloat16"), (3.3e-5, "float16")),
)
def test_stochastic_round_mean_is_the_value(half, value):
    x = np.full(DRAWS, value, np.float32)
    y = stochastic_round(x, half, jax.random.key(7))
    assert y.dtype == half
    y = np.asarray(y, np.float64)
    low, high = np.unique(y)
    assert low < float(np.float32(value)) < high
    # Neighbors: nothing of the half dtype lies between them.
    assert float(jnp.asarray((low + high) / 2, half)) in (low, high)
    spread = y.std() / np.sqrt(DRAWS)
    assert abs(y.mean() - float(np.float32(value))) < 4 * spread


@pytest.mark.parametrize("half", HALVES)
def test_stochastic_round_chance_is_the_distance_bit_by_bit(half, rng):
    """Against exact arithmetic: the next value is taken if, and only if, the lot is below it."""
    exponents = rng.integers(-40, 15, 4000)
    x = np.float32(rng.choice([-1, 1], 4000) * np.exp2(exponents) * rng.uniform(1, 2, 4000))
    info = jnp.finfo(half)
    exact = np.abs(x.astype(np.float64))
    unit = np.exp2(np.maximum(np.frexp(exact)[1] - 1, info.minexp) - info.nmant)
    down, chance = np.floor(exact / unit), np.floor(exact / unit % 1 * 2**32)
    lots = rng.integers(0, 1 << 32, 4000)
    lots[::2] = np.clip(chance + rng.integers(-1, 2, 4000), 0, 2**32 - 1)[::2]
    lots = lots.astype(np.uint32)
    y = np.asarray(rounded(x, jnp.dtype(half), lots)).astype(np.float64)
    wanted = (down + (lots < chance)) * unit * np.sign(x)
    np.testing.assert_array_equal(y, wanted)


@pytest.mark.parametrize("half", HALVES)
def test_stochastic_round_beyond_the_largest_value_is_a_cast(half):
    largest = float(jnp.finfo(half).max)
    more = min(largest * 1.003, float(jnp.finfo(jnp.float32).max))
    x = np.float32([largest, largest * (1 + 2.0**-14), more, np.inf, -np.inf, np.nan])
    y = np.asarray(stochastic_round(x, half, jax.random.key(0)))
    np.testing.assert_array_equal(y.astype(np.float32), np.float32(jnp.asarray(x).astype(half)))
    assert y[1] == largest


def test_stochastic_round_bits_do_not_depend_on_devices():
    mesh = jax.make_mesh((8,), ("data",))
    key, x = jax.random.key(3), np.linspace(-1, 1, 64 * 8, dtype=np.float32).reshape(64, 8)
    optimizer = mpjax.optim.with_stochastic_rounding(optax.adam(1e-3), seed=5)

    @jax.jit
    def both(x, key):
        params = x.astype(jnp.bfloat16)
        updates, _ = optimizer.update(x, optimizer.init(params), params)
        return mpjax.optim.stochastic_round(x, "bfloat16", key), optax.apply_updates(
            params, updates
        )

    alone = both(x, key)
    for spec in (PartitionSpec("data"), PartitionSpec(None, "data")):
        spread = both(jax.device_put(x, NamedSharding(mesh, spec)), key)
        for a, b in zip(alone, spread, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("half", HALVES)
def test_stochastic_rounding_and_kahan_keep_updates_below_half_a_unit(half):
    """Where rounding to the nearest stands still."""
    rate, steps = 1e-4, 50
    params = np.ones(20_000, half)
    for optimizer, wanted in (
        (mpjax.optim.with_stochastic_rounding(optax.sgd(rate)), 1 - rate * steps),
        (mpjax.optim.with_kahan_summation(optax.sgd(rate)), 1 - rate * steps),
        (optax.sgd(rate), 1.0),
    ):

        @jax.jit
        def run(params, state, optimizer=optimizer):
            def body(carry, _):
                params, state = carry
                updates, state = optimizer.update(jnp.ones(params.shape), state, params)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(body, (params, state), length=steps)[0]

        new, state = run(params, jax.jit(optimizer.init)(params))
        assert new.dtype == half
        mean = np.asarray(mpjax.optim.master_params(state, new)).astype(np.float64).mean()
        assert mean == pytest.approx(wanted, abs=3e-4)


def test_stochastic_rounding_draws_anew_for_every_step_leaf_and_seed():
    params = {name: np.ones(4096, jnp.bfloat16) for name in "ab"}
    grads = jax.tree.map(lambda p: np.full(p.shape, np.float32(2.0**-9)), params)
    seen = []
    for seed in (-1, 2**32 - 2):
        optimizer = mpjax.optim.with_stochastic_rounding(optax.sgd(1.0), seed=seed)
        state, update = optimizer.init(params), jax.jit(optimizer.update)
        for _ in range(2):
            updates, state = update(grads, state, params)
            seen += [np.asarray(x).tobytes() for x in jax.tree.leaves(updates)]
        assert int(state.draws) == 2
    assert len(set(seen)) == 8


@pytest.mark.thorough
def test_draws_of_stochastic_rounding_are_uniform_and_uncorrelated(rng):
    """By place, step, leaf and seed: means and correlations as those of independent draws."""
    count, seed = 1 << 16, int(rng.integers(1 << 31))
    numbers = [(seed + s, step, leaf) for s in (0, 1) for step in (7, 8) for leaf in (0, 1)]
    draws = np.stack([np.ravel(drawn((256, 256), *n)) / 2.0**32 for n in numbers])
    spread = 1 / np.sqrt(count)
    np.testing.assert_allclose(draws.mean(1), 0.5, atol=5 * spread / np.sqrt(12))
    np.testing.assert_allclose(draws.var(1), 1 / 12, atol=5 * spread / np.sqrt(180))
    between = np.corrcoef(np.concatenate([draws, np.roll(draws, 1, 1), np.roll(draws, 256, 1)]))
    assert abs(between - np.eye(len(between))).max() < 6 * spread
    bits = np.asarray(drawn((count,), seed, 0, 0))[:, None] >> np.arange(32, dtype=np.uint32) & 1
    np.testing.assert_allclose(bits.mean(0), 0.5, atol=3 * spread)


def test_stochastic_rounding_passes_float32_and_frozen_leaves_and_arguments(rng):
    ones = np.ones(3, np.float32)
    params = {"half": np.ones(3, jnp.bfloat16), "full": ones, "none": ones}
    grads = {"half": ones, "full": ones, "none": None}
    inner = optax.GradientTransformationExtraArgs(
        lambda params: (), lambda u, s, p, *, rate: (jax.tree.map(lambda x: -rate * x, u), s)
    )
    optimizer = mpjax.optim.with_stochastic_rounding(inner)
    update = jax.jit(optimizer.update)
    updates, _ = update(grads, optimizer.init(params), params, rate=0.25)
    assert updates["full"].tolist() == updates["half"].tolist() == [-0.25] * 3
    assert updates["none"] is None


def test_stochastic_rounding_refuses_bad_arguments():
    x, key = jnp.ones(2), jax.random.key(0)
    with pytest.raises(ValueError, match="dtype='float32' must be a 16-bit dtype"):
        mpjax.optim.stochastic_round(x, "float32", key)
    with pytest.raises(TypeError, match="x=.* must be an array of float32"):
        mpjax.optim.stochastic_round(jnp.arange(3), "bfloat16", key)
    with pytest.raises(TypeError, match="key=0 must be one PRNG key"):
        mpjax.optim.stochastic_round(x, "bfloat16", 0)
    with pytest.raises(ValueError, match="seed=1.5 must be an integer"):
        mpjax.optim.with_stochastic_rounding(optax.sgd(0.1), seed=1.5)
    half = x.astype(jnp.bfloat16)
    optimizer = mpjax.optim.with_stochastic_rounding(optax.sgd(0.1))
    with pytest.raises(ValueError, match="with_stochastic_rounding: update was called without"):
        optimizer.update(x, optimizer.init(half))
    with pytest.raises(ValueError, match="not the StochasticRoundingState of"):
        optimizer.update(x, mpjax.optim.with_kahan_summation(optax.sgd(0.1)).init(half), half)
