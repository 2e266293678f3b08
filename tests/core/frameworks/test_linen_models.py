"""Models of Flax linen with lifted transformations and states of their own, under `TrainState`."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training import train_state
from support import full_matmuls, matmul_dtypes

import mpjax.linen

X = np.int32(np.random.default_rng(0).integers(0, 16, (8, 6)))


class Block(nn.Module):
    width: int = 16

    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(2 * self.width)(nn.LayerNorm()(x))
        return x + nn.Dense(self.width)(nn.Dropout(0.1, deterministic=False)(nn.gelu(y))), None


class Scanned(nn.Module):
    """Layers by nn.scan, each under nn.remat; the embedding is the head too."""

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(16, 16)
        x = nn.MultiHeadDotProductAttention(2)(embed(tokens))
        block = nn.remat(Block, prevent_cse=False)
        rngs = {"params": True, "dropout": True}
        x, _ = nn.scan(block, variable_axes={"params": 0}, split_rngs=rngs, length=3)()(x, None)
        return embed.attend(nn.LayerNorm()(x))


class Spectral(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(16, 16)(tokens)
        x = nn.SpectralNorm(nn.Dense(32))(x, update_stats=True)
        x = nn.BatchNorm(use_running_average=False)(nn.relu(x))
        return nn.SpectralNorm(nn.Dense(16))(x, update_stats=True)


class Plain(train_state.TrainState):
    rest: Any


class Mixed(mpjax.linen.TrainState):
    rest: Any


def begun(model, policy):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    rest = dict(jax.jit(model.init)(rngs, X))
    params = rest.pop("params")
    given = {"apply_fn": model.apply, "params": params, "tx": optax.adam(3e-3), "rest": rest}
    if not policy:
        return Plain.create(**given)
    return Mixed.create(policy=policy, loss_scale=256.0, **given)


def loop(model, policy):
    return begun(model, policy), step_of(policy)


def step_of(policy):
    @jax.jit
    def step(state, x, weight):
        def loss_fn(params):
            rngs = {"dropout": jax.random.fold_in(jax.random.key(2), state.step)}
            variables = {"params": params, **state.rest}
            out, new = state.apply_fn(variables, x, rngs=rngs, mutable=[*state.rest])
            losses = optax.softmax_cross_entropy_with_integer_labels(out, jnp.roll(x, 1, 1))
            return weight * jnp.mean(losses), new

        differentiate = state.value_and_grad if policy else jax.value_and_grad
        (loss, new), grads = differentiate(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, rest=dict(new)), loss

    return step


def arrays(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("model", [Scanned(), Spectral()], ids=lambda m: type(m).__name__)
def test_all_matmuls_of_a_linen_step_run_in_float16(model):
    step, state = step_of("O2:float16"), jax.eval_shape(lambda: begun(model, "O2:float16"))
    assert not full_matmuls(lambda s: step(s, X, 1.0)[1], state)
    assert len(matmul_dtypes(step, state, X, 1.0)) > 6
    after, _ = jax.eval_shape(step, state, X, 1.0)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), (after, state)) == (
        jax.tree.map(lambda x: (x.shape, x.dtype), (state, state))
    )
    assert state.params["Embed_0"]["embedding"].dtype == jnp.float16
    assert {x.dtype for x in jax.tree.leaves(after.rest)} <= {np.dtype(np.float32)}


@pytest.mark.thorough
@pytest.mark.parametrize("model", [Scanned(), Spectral()], ids=lambda m: type(m).__name__)
def test_lifted_linen_model_has_the_curve_of_float32_and_skips(model):
    plain, plain_step = loop(model, None)
    wanted = []
    for _ in range(12):
        plain, loss = plain_step(plain, X, 1.0)
        wanted.append(float(loss))
    for policy, tolerance in (("float32", 1e-4), ("O2:float16", 0.03)):
        state, step = loop(model, policy)
        # O2's parameters are rounded before the first step.
        losses = []
        for _ in range(12):
            state, loss = step(state, X, 1.0)
            losses.append(float(loss))
        np.testing.assert_allclose(losses, wanted, rtol=tolerance)
        assert losses[-1] < 0.9 * losses[0] and int(state.step) == 12
        for got, want in zip(arrays(state.rest), arrays(plain.rest), strict=True):
            assert got.dtype == want.dtype == np.float32  # statistics and singular vectors
    half = jnp.float16
    assert state.params["Embed_0"]["embedding"].dtype == half
    assert not full_matmuls(lambda s: step(s, X, 1.0)[1], state)
    assert len(matmul_dtypes(step, state, X, 1.0)) > 6
    after, _ = step(state, X, jnp.inf)
    for name in ("params", "rest", "step"):
        assert all(map(np.array_equal, arrays(getattr(after, name)), arrays(getattr(state, name))))
    assert int(after.skipped_steps) == 1


@pytest.mark.thorough
def test_the_tied_weight_has_one_gradient_of_both_uses():
    state, _ = loop(Scanned(), "mixed_bfloat16")

    def loss_fn(params):
        rngs = {"dropout": jax.random.key(3)}
        return jnp.mean(state.apply_fn({"params": params}, X, rngs=rngs)[..., 0] ** 2)

    got = jax.jit(lambda p: state.value_and_grad(loss_fn)(p)[1])(state.params)["Embed_0"]
    want = jax.jit(jax.grad(loss_fn))(state.params)["Embed_0"]
    # Rows that are looked up, and row 0, which is multiplied by as well.
    largest = float(jnp.abs(want["embedding"]).max())
    np.testing.assert_allclose(got["embedding"], want["embedding"], atol=0.05 * largest)
    assert got["embedding"].dtype == np.float32
