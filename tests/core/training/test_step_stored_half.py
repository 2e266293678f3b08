"""Training under policies that store parameters in half: the loss stays a float32 program."""

import functools
import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from support import matmul_dtypes, normal, thorough_but

import mpjax

STORED_HALF = ["O2:bfloat16", "O2:float16", "p=bf16,c=bf16,casting=op"]
IMAGES, LABELS = np.asarray(normal(0, 8, 3, 6, 6)), np.arange(8) % 4


def cross_entropy(logits):
    return optax.softmax_cross_entropy_with_integer_labels(logits, LABELS).mean()


def strict_problem():
    params = {"kernel": normal(1, 8, 3, 3, 3, scale=0.3), "head": normal(2, 8, 4)}

    def loss(params, images):
        h = lax.conv_general_dilated(images, params["kernel"], (1, 1), "SAME")
        h, _ = lax.scan(
            lambda c, row: (jnp.maximum(c, row), None), jnp.zeros((8, 8, 6)), jnp.moveaxis(h, 2, 0)
        )
        return cross_entropy(h.mean(-1) @ params["head"])

    return loss, params


def trained(policy, loss, params, batch, model_state=None, steps=8):
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), policy)
    state, step = jax.jit(init)(params, model_state), jax.jit(step, donate_argnums=0)
    before = [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    losses = []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(state)] == before
    assert step._cache_size() == 1
    return state, losses


@pytest.mark.parametrize("policy", thorough_but(STORED_HALF, "O2:float16"))
@pytest.mark.parametrize("images", thorough_but([IMAGES, IMAGES.astype(jnp.bfloat16)], 1))
def test_loss_that_does_not_promote_trains_in_the_stored_dtype(policy, images):
    loss, params = strict_problem()
    half = mpjax.get_policy(policy).param_dtype
    if images.dtype not in (jnp.float32, half):
        images = images.astype(half)
    _, losses = trained(policy, loss, params, images)
    assert losses[-1] < losses[0]
    np.testing.assert_allclose(losses[0], jax.jit(loss)(params, IMAGES), rtol=0.02)
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), policy)
    assert set(matmul_dtypes(step, init(params), images)) == {(half.name, half.name)}


class Net(eqx.Module):
    conv: eqx.nn.Conv2d
    norm: eqx.nn.BatchNorm
    second: eqx.nn.Conv2d
    head: eqx.nn.Linear

    def __init__(self, key, mode):
        keys = jax.random.split(key, 3)
        self.conv = eqx.nn.Conv2d(3, 8, 3, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, "batch", mode=mode)
        self.second = eqx.nn.Conv2d(8, 8, 3, key=keys[1])
        self.head = eqx.nn.Linear(8, 4, key=keys[2])

    def __call__(self, x, state):
        x, state = self.norm(self.conv(x), state)
        return self.head(jax.nn.relu(self.second(jax.nn.relu(x))).mean((1, 2))), state


def equinox_problem(mode, inference=False):
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0), mode)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    if mode == "ema":  # which equinox leaves uninitialized
        state = jax.tree.map(lambda x: x if x.dtype == bool else jnp.ones_like(x), state)

    def loss(params, images, model_state):
        model = eqx.combine(params, static)
        model = eqx.nn.inference_mode(model) if inference else model
        run = functools.partial(jax.vmap, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = run(model)(images, model_state)
        return cross_entropy(logits), state

    return loss, params, state


@pytest.mark.thorough
@pytest.mark.parametrize("policy", STORED_HALF)
@pytest.mark.parametrize("mode", ["ema", "batch"])
def test_batch_norms_keep_their_statistics_in_float32(policy, mode):
    loss, params, model_state = equinox_problem(mode)
    state, losses = trained(policy, loss, params, IMAGES, model_state)
    wanted, want = trained("float32", loss, params, IMAGES, model_state)
    np.testing.assert_allclose(losses, want, rtol=0.05)
    states = map(jax.tree.leaves, (state.model_state, wanted.model_state))
    for got, exact in zip(*states, strict=True):
        assert got.dtype == exact.dtype
        np.testing.assert_allclose(got, exact, rtol=0.05, atol=0.02)


AT_BOUNDARY = ["O3:bfloat16", "O3:float16", "p=f32,c=bf16,o=f32", "p=f32,c=f16"]


def carry_problem():
    params = {"w": normal(1, 6, 4, scale=0.3)}

    def loss(params, images):
        def cell(last, row):
            h = jnp.tanh(row @ params["w"])
            return h, h - last

        steps = lax.scan(cell, jnp.zeros((8, 4)), images.mean(1).swapaxes(0, 1))[1]
        return cross_entropy(jnp.mean(steps**2, 0))

    return loss, params


def bytes_problem():
    params = {"kernel": normal(1, 4, 3, 3, 3, scale=0.3)}

    def loss(params, images):
        images = (images > 0).astype(jnp.float32) / 3
        h = lax.conv_general_dilated(images, params["kernel"], (1, 1), "SAME")
        return cross_entropy(h.mean((2, 3)))

    return loss, params


PROBLEMS = {
    "a carry that starts in float32": carry_problem,
    "a batch made float32": bytes_problem,
    "statistics in float32": functools.partial(equinox_problem, "ema"),
    "statistics in float32, read": functools.partial(equinox_problem, "ema", True),
    "statistics in float32, read of a batch": functools.partial(equinox_problem, "batch", True),
}


CASTS = list(itertools.product(PROBLEMS, AT_BOUNDARY))
QUICK = (
    ("a carry that starts in float32", "O3:bfloat16"),
    ("a batch made float32", "p=f32,c=f16"),
)


@pytest.mark.parametrize("name, policy", thorough_but(CASTS, *QUICK))
def test_loss_that_fails_on_boundary_casts_is_cast_by_operation(policy, name):
    """What mixes dtypes where nothing promotes is cast operation by operation."""
    loss, params, *model_state = PROBLEMS[name]()
    policy = mpjax.get_policy(policy)
    with pytest.warns(mpjax.errors.PrecisionWarning, match="casting=op") as told:
        state, losses = trained(policy, loss, params, IMAGES, *model_state)
    assert len(told) == 1 and str(policy) in str(told[0].message)
    want = jax.jit(loss)(params, IMAGES, *model_state)
    np.testing.assert_allclose(losses[0], want[0] if model_state else want, rtol=0.03)
    assert losses[-1] < losses[0]
    dtypes = {x.dtype for x in jax.tree.leaves(state.params)}
    assert dtypes == {policy.param_dtype}
    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), policy)
    half = policy.compute_dtype.name
    with pytest.warns(mpjax.errors.PrecisionWarning):
        found = matmul_dtypes(step, init(params, *model_state), IMAGES)
    assert set(found) == {(half, half)}


@pytest.mark.thorough
def test_batch_norm_state_stays_float32_in_micro_batches():
    model, model_state = eqx.nn.make_with_state(Net)(jax.random.key(0), "ema")
    params, static = eqx.partition(model, eqx.is_inexact_array)

    def loss(params, images, model_state):
        run = functools.partial(jax.vmap, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
        logits, state = run(eqx.combine(params, static))(images, model_state)
        return jnp.mean(logits**2), state

    init, step = mpjax.build_train_step(loss, optax.sgd(0.1), "O3:bfloat16", accumulate_steps=2)
    with pytest.warns(mpjax.errors.PrecisionWarning, match="casting=op"):  # a select of one dtype
        state, metrics = jax.jit(step)(jax.jit(init)(params, model_state), IMAGES)
    assert metrics["grads_finite"]
    assert {x.dtype.name for x in jax.tree.leaves(state.model_state)} == {"float32", "bool"}


def test_loss_that_takes_boundary_casts_is_traced_once_and_its_error_stays():
    calls = []

    def fine(params, batch):
        calls.append(params["w"].dtype)
        return jnp.mean((batch @ params["w"]).astype(jnp.float32) ** 2)

    def wrong(params, batch):
        calls.append(params["w"].dtype)
        return jnp.mean(batch @ params["w"].T)

    for loss in (fine, wrong):
        init, step = mpjax.build_train_step(loss, optax.sgd(0.1), "O3:bfloat16")
        state = init({"w": jnp.ones((4, 2))})
        if loss is fine:
            jax.eval_shape(step, state, jnp.ones((3, 4)))
            assert calls == [jnp.bfloat16]
        else:
            with pytest.raises(TypeError, match=r"dot_general requires.*\(4,\) and \(2,\)"):
                jax.eval_shape(step, state, jnp.ones((3, 4)))
