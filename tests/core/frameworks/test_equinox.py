"""Loops of Equinox: modules with leaves that are no arrays, and states."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from loops.optax_equinox import Model, loss_fn
from support import normal, thorough_but

import mpjax

X, Y = np.asarray(normal(1, 32, 4)), np.asarray(normal(2, 32, 8))
POLICIES = ["float32", "mixed_float16"]


def arrays(*trees):
    return [np.asarray(x) for x in jax.tree.leaves(eqx.filter(trees, eqx.is_array))]


@functools.cache
def loop(policy):
    """Returns a step and its first state: plain, or in mixed precision by four lines more."""
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    optimizer = optax.adamw(1e-2)
    if policy:
        optimizer = mpjax.optim.skip_nonfinite(optimizer)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def plain(model, state, opt_state, x, y):
        (loss, state), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, state, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, opt_state, loss

    @eqx.filter_jit
    def mixed(model, old, opt_state, scale, x, y):
        grad_fn = mpjax.scaled_value_and_grad(mpjax.autocast(loss_fn, policy), scale, has_aux=True)
        (loss, state), grads, finite = grad_fn(model, old, x, y)
        params = eqx.filter(model, eqx.is_array)
        updates, opt_state = optimizer.update(grads, opt_state, params, finite=finite)
        state, scale = mpjax.select(finite, state, old), scale.adjust(finite)
        return eqx.apply_updates(model, updates), state, opt_state, scale, loss

    if not policy:
        return plain, (model, state, opt_state)
    return mixed, (model, state, opt_state, mpjax.DynamicLossScale())


def train(policy, steps=40):
    step, kept = loop(policy)
    losses = []
    for _ in range(steps):
        *kept, loss = step(*kept, X, Y)
        losses.append(float(loss))
    return kept, losses


@pytest.mark.parametrize("policy", thorough_but(POLICIES, "mixed_float16"))
def test_equinox_loop_has_the_curve_of_float32(policy):
    (model, state, *_), losses = train(policy)
    (want, want_state, _), plain = train(None)
    tolerance = 1e-6 if policy == "float32" else 0.03
    np.testing.assert_allclose(losses, plain, rtol=tolerance)
    assert isinstance(model, Model) and model.name == "model" and model.last.bias is None
    for got, expected in zip(arrays(model, state), arrays(want, want_state), strict=True):
        np.testing.assert_allclose(got, expected, atol=10 * tolerance)
        assert got.dtype == expected.dtype


def test_skipped_equinox_step_leaves_no_trace():
    step, kept = loop("mixed_float16")
    *kept, _ = step(*kept, X, Y)
    bad = X.copy()
    bad[2, 0] = np.inf
    *after, _ = step(*kept, bad, Y)
    for new, old in zip(after[:2], kept[:2], strict=True):
        assert all(map(np.array_equal, arrays(new), arrays(old)))
    assert float(after[3].loss_scale) == float(kept[3].loss_scale) / 2
    assert int(after[2].skipped_steps) == 1


def test_gradients_have_the_structure_of_filter_grad():
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    scale = mpjax.StaticLossScale(1024.0)

    def loss(state, model):
        return loss_fn(model, state, X, Y)[0]

    want = eqx.filter_jit(eqx.filter_grad(lambda model: loss(state, model)))(model)
    for argnums in (1, -1):
        gradient = mpjax.scaled_value_and_grad(loss, scale, argnums)
        _, grads, finite = eqx.filter_jit(gradient)(state, model)
        assert jax.tree.structure(grads) == jax.tree.structure(want) and finite
        for got, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-7)
    gradient = mpjax.scaled_value_and_grad(
        lambda a, b: loss(state, eqx.combine(a, b)), scale, (0, 1)
    )
    parts = eqx.partition(model, lambda x: eqx.is_array(x) and x.ndim == 2)
    (first, second), *_ = eqx.filter_jit(gradient)(*parts)[1:]
    assert first.first.bias is None and second.first.bias.shape == (16,)


class Recurrent(eqx.Module):
    size: int  # a leaf, and none to train
    cell: eqx.nn.GRUCell
    head: eqx.nn.MLP  # whose activation is a leaf

    def __init__(self, key):
        keys = jax.random.split(key)
        self.size, self.cell = 8, eqx.nn.GRUCell(2, 8, key=keys[0])
        self.head = eqx.nn.MLP(8, 1, 8, 1, key=keys[1])

    def __call__(self, xs):
        last, _ = jax.lax.scan(lambda h, x: (self.cell(x, h), None), jnp.zeros(self.size), xs)
        return self.head(last)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_equinox_module_with_numbers_and_functions_trains(policy):
    """`optimizer.init` of the whole module, and updates that are not shown it, work as plain."""

    def fun(model):
        return jnp.mean((jax.vmap(model)(X.reshape(32, 2, 2))[:, 0] - Y[:, 0]) ** 2)

    def trained(optimizer, differentiate):
        model = Recurrent(jax.random.key(0))
        opt_state = optimizer.init(model)

        @eqx.filter_jit
        def step(model, opt_state):
            grads = differentiate(opt_state)(model)
            updates, opt_state = optimizer.update(grads, opt_state)
            return eqx.apply_updates(model, updates), opt_state

        for _ in range(5):
            model, opt_state = step(model, opt_state)
        return model

    plain = trained(optax.sgd(0.1), lambda opt_state: eqx.filter_grad(fun))
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), policy, 128.0)
    mixed = trained(optimizer, lambda s: lambda m: optimizer.value_and_grad(fun, s)(m)[1])
    assert mixed.size == 8 and jax.tree.structure(mixed) == jax.tree.structure(plain)
    for got, want in zip(arrays(mixed), arrays(plain), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6 if policy == "float32" else 5e-3)


def test_a_tree_with_nothing_to_train_is_refused():
    gradient = mpjax.scaled_value_and_grad(lambda tree: 1.0 * tree["n"], mpjax.NoOpLossScale())
    with pytest.raises(TypeError, match="real- or complex-valued"):
        gradient({"n": jnp.int32(3)})


@pytest.mark.parametrize("policy", thorough_but(["O2:float16", "O3:bfloat16"], 0))
def test_equinox_16_bit_weights_stay_16_bit_after_a_cast(policy):
    """`eqx.apply_updates` returns float32 weights; a cast makes them those of optax."""
    optimizer = mpjax.mixed_precision(optax.adam(1e-2), policy)
    model = optimizer.policy.cast_to_param(eqx.nn.MLP(4, 8, 16, 1, key=jax.random.key(0)))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))

    def fun(model):
        return jnp.mean((jax.vmap(model)(X) - Y) ** 2)

    _, grads = eqx.filter_jit(optimizer.value_and_grad(fun, opt_state))(model)
    params, update = eqx.filter(model, eqx.is_array), eqx.filter_jit(optimizer.update)
    updates, opt_state = update(grads, opt_state, params)
    wide = eqx.apply_updates(model, updates)
    with pytest.raises(ValueError, match=r"layers.* is float32, .*Cast after eqx\.apply_updates"):
        optimizer.update(grads, opt_state, eqx.filter(wide, eqx.is_array))
    half = optimizer.policy.cast_to_param(wide)
    for got, want in zip(arrays(half), arrays(optax.apply_updates(params, updates)), strict=True):
        assert got.dtype == want.dtype and np.array_equal(got, want)
    update(grads, opt_state, eqx.filter(half, eqx.is_array))


def test_optimizers_are_arguments_of_filter_jit_and_share_a_gradient():
    """As in diffrax's neural SDE: what filter_jit passes on is the optimizer, rebuilt."""
    keys = jax.random.split(jax.random.key(1))
    models = tuple(eqx.nn.MLP(4, 4, 8, 1, key=key) for key in keys)
    optimizers = [mpjax.mixed_precision(optax.rmsprop(r), "mixed_float16") for r in (1e-2, -1e-2)]
    states = tuple(
        optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        for optimizer, model in zip(optimizers, models, strict=True)
    )

    def loss(models, x):
        made, judge = models
        return jnp.mean(jax.vmap(judge)(x) - jax.vmap(judge)(jax.vmap(made)(x)))

    @eqx.filter_jit
    def step(models, states, optimizers, x):
        value, grads = optimizers[0].value_and_grad(loss, states)(models, x)
        made = []
        for model, optimizer, grad, state in zip(models, optimizers, grads, states, strict=True):
            updates, state = optimizer.update(grad, state, scaled_by=states)
            made.append((eqx.apply_updates(model, updates), state))
        return *zip(*made, strict=True), value

    values = []
    for _ in range(6):
        models, states, value = step(models, states, optimizers, X)
        values.append(float(value))
    assert all(isinstance(model, eqx.nn.MLP) for model in models) and np.isfinite(values).all()
    assert all(bool(state.finite) for state in states) and values[-1] != values[0]
