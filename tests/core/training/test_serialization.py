"""States of training pass through flax.serialization and pickle, bit for bit."""

import itertools
import pickle

import flax.serialization
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import checkpoints
from problems import bits, linear_loss, linear_problem, net_loss, net_problem
from support import thorough_but

import mpjax

SCALES = ["none", 128.0, "dynamic"]


def program(policy="O2:float16", scale="auto", optimizer=None):
    return mpjax.build_train_step(
        net_loss, optimizer or optax.adam(1e-2), policy, loss_scale=scale, has_aux=True
    )


KEYS = [jax.random.PRNGKey, jax.random.key]
STATES = list(itertools.product(["float32", "O2:float16", "O3:bf16"], SCALES, KEYS))


@pytest.mark.parametrize("policy, scale, key", thorough_but(STATES, 0, 11, 14))
def test_bytes_and_pickles_hold_a_whole_train_state(policy, scale, key, rng):
    params, model_state, _ = net_problem(rng)
    optimizer = mpjax.optim.skip_nonfinite(optax.chain(optax.clip(1.0), optax.adamw(1e-2)))
    init, _ = program(policy, scale, optimizer)
    like = jax.jit(init)(params, model_state, key(0))
    moved = lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x + 1  # noqa: E731
    state = jax.jit(lambda tree: jax.tree.map(moved, tree))(like)
    for back in (
        flax.serialization.from_bytes(like, flax.serialization.to_bytes(state)),
        flax.serialization.from_state_dict(like, flax.serialization.to_state_dict(state)),
        pickle.loads(pickle.dumps(state)),
    ):
        assert jax.tree.structure(back) == jax.tree.structure(state)
        assert bits(back) == bits(state)
        assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(state)]
        assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(back))


def test_training_continues_from_flax_bytes_bit_for_bit(rng):
    params, batch = linear_problem(rng)
    init, step = mpjax.build_train_step(linear_loss, optax.adam(1e-2), "mixed_float16")
    step = jax.jit(step, donate_argnums=0)
    state, _ = step(init(params), batch)
    back = flax.serialization.from_bytes(init(params), flax.serialization.to_bytes(state))
    assert bits(step(back, batch)) == bits(step(state, batch))
    assert step._cache_size() == 1


def test_flax_checkpoint_restores_a_train_state(rng, tmp_path):
    params, _ = linear_problem(rng)
    init, _ = mpjax.build_train_step(linear_loss, optax.adam(1e-2), "O2:bfloat16")
    state = init(params)
    (tmp_path / "checkpoint_1").write_bytes(flax.serialization.to_bytes(state))
    assert bits(checkpoints.restore_checkpoint(tmp_path, init(params))) == bits(state)


@pytest.mark.parametrize(
    "was, to, message",
    [
        ("float32", "O3:bf16", "TrainState, in 'opt_state', lack '0'. .* another policy"),
        ("O3:bf16", "float32", "TrainState, in 'opt_state', do not fit: .*restore convert"),
        ("O2:float16", "float32", "TrainState, in 'opt_state', do not fit: .*another policy"),
        ("O2:bfloat16", "O2:float16", r"of a DynamicLossScale have the fields \[\], but"),
        ("O3:fp16", "O3:bf16", r"target\['params/.* is bfloat16.*have float16"),
        ("float32", "mixed_bfloat16", None),
    ],
)
def test_bytes_of_another_policy_are_refused(was, to, message, rng):
    """flax by itself narrows without a word."""
    params, model_state, _ = net_problem(rng)
    scale = "none" if was.startswith("O3") else "auto"
    data = flax.serialization.to_bytes(program(was, scale)[0](params, model_state))
    like = program(to, scale)[0](params, model_state)
    if message is None:
        assert bits(flax.serialization.from_bytes(like, data)) == bits(like)
        return
    with pytest.raises(ValueError, match=message):
        flax.serialization.from_bytes(like, data)


def test_bytes_of_another_loss_scale_or_model_are_refused(rng):
    params, _ = linear_problem(rng)
    build = lambda scale: mpjax.build_train_step(linear_loss, optax.sgd(1.0), loss_scale=scale)  # noqa: E731
    data = flax.serialization.to_bytes(build("dynamic")[0](params))
    with pytest.raises(ValueError, match="of a StaticLossScale have the fields .'growth_tracker'"):
        flax.serialization.from_bytes(build(2.0)[0](params), data)
    with pytest.raises(ValueError, match=r"target\['params/w'\] is .*\(2,\), but .*\(4, 3\)"):
        flax.serialization.from_bytes(build("dynamic")[0]({**params, "w": jnp.ones(2)}), data)
