"""Keras's guides to custom steps and loops under `mpjax.keras`: right, or refused with the way."""

import mpjax.keras  # isort: skip  # before Keras, for its backend

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from keras_models import LAYERS, X, Y, dtypes_of_step, fitted, made, mixed, same, values
from support import thorough_but

import mpjax

pytestmark = pytest.mark.filterwarnings("ignore:.*__array__ implementation:DeprecationWarning")
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]


class Custom(keras.Model):
    """A model with its own train step. Subclasses say how gradients are computed and applied."""

    def loss_of(self, trained, carried, variables, x, y):
        out, carried = self.stateless_call(trained, carried, x, training=True)
        return jnp.mean((out - y) ** 2), carried

    def applied(self, variables, grads, trained):
        return self.optimizer.stateless_apply(variables, grads, trained)

    def train_step(self, state, data):
        trained, carried, variables, metrics = state
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.loss_of, has_aux=True)
        (loss, carried), grads = gradient(trained, carried, variables, x, y)
        trained, variables = self.applied(variables, grads, trained)
        return {"loss_": loss}, (trained, carried, variables, metrics)


class Guide(Custom):
    """As in "Customizing what happens in fit() with JAX"."""

    def compute_loss_and_updates(self, trained, carried, metrics, x, y, weight, training=False):
        out, carried = self.stateless_call(trained, carried, x, training=training)
        loss, (_, carried, metrics) = self.stateless_compute_loss(
            trained, carried, metrics, x=x, y=y, y_pred=out, sample_weight=weight, training=training
        )
        return loss, (out, carried, metrics)

    def train_step(self, state, data):
        trained, carried, variables, metrics = state
        x, y, weight = keras.utils.unpack_x_y_sample_weight(data)
        gradient = jax.value_and_grad(self.compute_loss_and_updates, has_aux=True)
        (loss, (_, carried, metrics)), grads = gradient(
            trained, carried, metrics, x, y, weight, training=True
        )
        trained, variables = self.applied(variables, grads, trained)
        return {"loss_": loss}, (trained, carried, variables, metrics)


class Scaling(Custom):
    """One that knows Keras's LossScaleOptimizer."""

    def loss_of(self, trained, carried, variables, x, y):
        loss, carried = super().loss_of(trained, carried, variables, x, y)
        with keras.StatelessScope(list(zip(self.optimizer.variables, variables, strict=True))):
            return self.optimizer.scale_loss(loss), carried


class Tiny(Custom):
    """Its gradients are 0 in float16 without a loss scale."""

    def loss_of(self, trained, carried, variables, x, y):
        loss, carried = super().loss_of(trained, carried, variables, x, y)
        return loss * 2e-8, carried


class OfLayers(Custom):
    """Calls parts of the model, as a GAN does, and updates twice."""

    def loss_of(self, trained, carried, variables, x, y):
        first, *_, last = (layer for layer in self.layers if layer.trainable_variables)
        hidden, _ = first.stateless_call(trained[:2], [], x)
        out, _ = last.stateless_call(trained[-2:], [], jax.nn.relu(hidden))
        return jnp.mean((out - y) ** 2), carried

    def applied(self, variables, grads, trained):
        trained, variables = super().applied(variables, grads, trained)
        return super().applied(variables, [0 * g for g in grads], trained)


class ByHand(Custom):
    def loss_of(self, trained, carried, variables, x, y):
        mapping = zip(self.trainable_variables, trained, strict=True)
        others = zip(self.non_trainable_variables, carried, strict=True)
        with keras.StatelessScope([*mapping, *others]):
            return jnp.mean((self(x) - y) ** 2), carried

    def test_step(self, state, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        return {"loss_": self.loss_of(*state[:2], None, x, y)[0]}, state


class Descent(Custom):
    def applied(self, variables, grads, trained):
        return [t - 0.01 * g for t, g in zip(trained, grads, strict=True)], variables


class Second(Custom):
    def compile(self, *args, **options):
        super().compile(*args, **options)
        self.other = keras.optimizers.SGD(0.1)


class Autocast(Custom):
    def loss_of(self, *args):
        return mpjax.autocast(super().loss_of, "mixed_bfloat16")(*args)


class Penalty(Custom):
    def loss_of(self, trained, carried, variables, x, y):
        slopes = jax.grad(lambda x: self.stateless_call(trained, carried, x)[0].sum())(x)
        loss, carried = super().loss_of(trained, carried, variables, x, y)
        return loss + jnp.mean(slopes**2), carried


def losses(model, epochs=3):
    options = {"epochs": epochs, "batch_size": 16, "verbose": 0, "shuffle": False}
    return model.fit(X, Y, **options).history["loss_"]


KINDS = [Custom, Guide, Scaling, OfLayers]
CASES = [(kind, policy) for kind in KINDS for policy in POLICIES]


@pytest.mark.parametrize(
    ("kind", "policy"), thorough_but(CASES, (Guide, "mixed_float16"), (Custom, "mixed_bfloat16"))
)
def test_custom_train_steps_run_in_16_bits_and_train(kind, policy):
    model = mixed(kind, policy, 64.0)
    assert dtypes_of_step(model) == {policy.removeprefix("mixed_")}
    plain = made(kind)
    # 16 bits move the loss by less than 15% at any epoch; a missing scale moves it by more.
    rtol = 1e-5 if policy == "float32" else 0.15
    np.testing.assert_allclose(losses(model), losses(plain), rtol=rtol)


def test_gradients_below_float16_arrive_by_the_loss_scale():
    plain, model = made(Tiny), mixed(Tiny, "mixed_float16", 2.0**24)
    for each in (plain, model):
        each.compile(keras.optimizers.SGD(2e6), "mse")
    start = values(plain.trainable_variables)
    wanted, found = (
        [new - old for new, old in zip(values(each.trainable_variables), start, strict=True)]
        for each in (plain, model)
        if losses(each, 1)
    )
    kernels = [place for place, v in enumerate(start) if v.ndim == 2]
    for place in kernels:
        scale = np.abs(wanted[place]).max()
        np.testing.assert_allclose(found[place], wanted[place], atol=0.1 * scale)


def test_a_skipped_custom_step_leaves_no_trace():
    model = mixed(Custom, "mixed_float16")
    losses(model, 2)
    before, skips = values(model.variables), int(model.optimizer.skipped_steps.value)
    scale = float(model.optimizer.loss_scale.loss_scale)
    bad = np.where(np.arange(64)[:, None] % 16 == 3, np.inf, X)
    model.fit(bad, Y, batch_size=16, shuffle=False, verbose=0)
    assert same(values(model.variables), before)
    assert int(model.optimizer.skipped_steps.value) == skips + 4
    assert float(model.optimizer.loss_scale.loss_scale) == scale / 16


class Rarely(Custom):
    """Updates only where the batch has a marked row."""

    def train_step(self, state, data):
        logs, new = super().train_step(state, data)
        x = data[0]
        kept = jax.lax.cond(x[0, 0] > 0, lambda: (new[0], new[2]), lambda: (state[0], state[2]))
        return logs, (kept[0], new[1], kept[1], new[3])


def test_statistics_move_in_a_step_without_an_update_after_a_skipped_one():
    model = mixed(Rarely, "mixed_float16", 64.0)
    x = X[:16].copy()
    moving = [v for v in model.non_trainable_variables if "moving_mean" in v.path]
    for first, bad, moved in ((1.0, True, False), (-1.0, False, True)):
        x[0, 0], x[1, 0] = first, np.inf if bad else 0.0
        before = values(moving)
        model.fit(x, Y[:16], shuffle=False, verbose=0)
        assert same(values(moving), before) != moved
    assert int(model.optimizer.consecutive_skips.value) == 1


@pytest.mark.parametrize(
    ("kind", "policy", "words"),
    [
        (ByHand, "mixed_bfloat16", r"ByHand.train_step calls no function .* = self.stateless_call"),
        (Descent, "mixed_bfloat16", r"must update by self.optimizer.stateless_apply"),
        (Second, "mixed_float16", r"not by self.other.* mpjax.keras.LossScaleOptimizer"),
        (Autocast, "mixed_float16", r"calls mpjax.autocast, .* Call self.stateless_call without"),
        (Penalty, "mixed_float16", r"differentiates a gradient .* Use 'mixed_bfloat16'"),
    ],
)
def test_steps_that_cannot_be_right_are_refused(kind, policy, words):
    with pytest.raises(ValueError, match=words):
        losses(mixed(kind, policy), 1)


def test_an_evaluation_step_that_calls_the_model_itself_is_refused():
    with pytest.raises(ValueError, match=r"ByHand.test_step calls no function .* bfloat16"):
        mixed(ByHand, "mixed_bfloat16").evaluate(X, Y, verbose=0)


def test_a_step_with_the_state_of_other_optimizers_is_refused():
    with pytest.raises(ValueError, match=r"must update by self.optimizer.stateless_apply"):
        mixed(Custom, "mixed_bfloat16").train_step(([], [], [np.ones(2)], []), (X, Y))


@pytest.mark.thorough
def test_a_model_inside_of_another_has_its_policy_in_both():
    inner = mixed(keras.Model, "mixed_float16", 64.0)
    outer = Custom(inner.inputs, LAYERS.Dense(1)(inner(inner.inputs[0])))
    outer.compile(keras.optimizers.Adam(1e-2))
    mpjax.keras.mixed_precision(outer, "mixed_bfloat16")
    losses(outer, 1)
    losses_of_inner = fitted(inner, 1)
    assert dtypes_of_step(outer) == {"bfloat16", "float32"}  # its own layer has a single weight
    assert dtypes_of_step(inner) == {"float16"}
    assert np.isfinite(losses_of_inner).all()


@pytest.mark.thorough
def test_variables_that_are_their_gradients_are_not_scaled():
    def history(policy):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((16,)), LAYERS.Dense(16), LAYERS.Dense(16)])
        model.layers[0].quantize("float8")
        model.compile(keras.optimizers.Adam(1e-2), "mse")
        if policy:
            mpjax.keras.mixed_precision(model, policy, 1024.0)
        x = np.tile(X, 2)
        model.fit(x, x, verbose=0)
        return [v for v in model.trainable_variables if v.overwrite_with_gradient]

    wanted, found = history(None), history("mixed_float16")
    assert len(wanted) == 6
    for a, b in zip(wanted, found, strict=True):
        if "outputs" not in a.path:  # those are of the scaled gradients
            np.testing.assert_allclose(b.numpy(), a.numpy(), rtol=0.05, err_msg=a.path)


@pytest.mark.thorough
def test_gradient_penalties_need_no_loss_scale_in_bfloat16():
    model = mixed(Penalty, "mixed_bfloat16")
    assert "bfloat16" in dtypes_of_step(model)
    np.testing.assert_allclose(losses(model), losses(made(Penalty)), rtol=0.15)


def gan():
    keras.utils.set_random_seed(1)
    parts = [
        keras.Sequential([keras.Input((8,)), LAYERS.Dense(8, "relu"), LAYERS.Dense(last)])
        for last in (8, 1)
    ]
    starts = [[v.value for v in part.trainable_variables] for part in parts]
    return (*parts, starts)


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_with_two_models_and_two_optimizers_trains(policy):
    """As the errors say: optimizers with a loss scale each, autocast, and scaled losses."""

    def curve(wrap, plan):
        generator, judge, (made_by, judged_by) = gan()
        optimizers = [wrap(keras.optimizers.Adam(1e-2)) for _ in range(2)]
        for optimizer, model in zip(optimizers, (generator, judge), strict=True):
            optimizer.build(model.trainable_variables)

        def judged(variables, x):
            return judge.stateless_call(variables, [], x)[0]

        def false(weights, other, x):
            return jax.nn.softplus(judged(weights, generator.stateless_call(other, [], x)[0]))

        def judge_loss(weights, other, x):
            true = jax.nn.softplus(-judged(weights, x))
            return jnp.mean(true) + jnp.mean(false(weights, other, x))

        def generator_loss(weights, other, x):
            return -jnp.mean(false(other, weights, x))

        def updated(optimizer, state, loss_fn, weights, other, x):
            def scaled(weights):
                loss = plan(loss_fn)(weights, other, x)
                scale = getattr(optimizer, "loss_scale", None)
                return (optimizer.scale_loss(loss, state) if scale else loss), loss

            (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(weights)
            return *optimizer.stateless_apply(state, grads, weights), loss

        @jax.jit
        def step(made_by, judged_by, states, x):
            judged_by, second, loss = updated(
                optimizers[1], states[1], judge_loss, judged_by, made_by, x
            )
            made_by, first, other = updated(
                optimizers[0], states[0], generator_loss, made_by, judged_by, x
            )
            return made_by, judged_by, [first, second], (loss, other)

        states = [[v.value for v in optimizer.variables] for optimizer in optimizers]
        curve = []
        for _ in range(20):
            made_by, judged_by, states, both = step(made_by, judged_by, states, X)
            curve.append([float(loss) for loss in both])
        return np.asarray(curve)

    def with_scale(optimizer):
        return mpjax.keras.LossScaleOptimizer(optimizer, 256.0)

    found = curve(with_scale, lambda fun: mpjax.autocast(fun, policy))
    # 16 bits may round each loss by 1%, and its history by as much again.
    np.testing.assert_allclose(found, curve(lambda x: x, lambda fun: fun), rtol=0.02, atol=1e-5)


def loop(model, optimizer, scaled, epochs=4):
    """Runs Keras's "Writing a training loop from scratch in JAX"."""
    optimizer.build(model.trainable_variables)

    @jax.jit
    def step(trained, carried, variables):
        def loss_fn(trained):
            out, new = model.stateless_call(trained, carried, X, training=True)
            loss = jnp.mean((out - Y) ** 2)
            return (optimizer.scale_loss(loss, variables) if scaled else loss), (loss, new)

        (_, (loss, carried_)), grads = jax.value_and_grad(loss_fn, has_aux=True)(trained)
        trained, variables = optimizer.stateless_apply(variables, grads, trained)
        return trained, carried_, variables, loss

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    state, curve = [[v.value for v in group] for group in groups], []
    for _ in range(epochs):
        *state, loss = step(*state)
        curve.append(float(loss))
    return curve


def test_a_loop_over_a_model_is_planned_and_refused_without_a_scale():
    model = mpjax.keras.mixed_precision(made(compiled=False), "mixed_float16")
    adam = keras.optimizers.Adam(1e-2)
    for optimizer in (adam, mpjax.keras.LossScaleOptimizer(adam, 64.0)):
        with pytest.raises(ValueError, match=r"in float16 without a loss scale.*scale_loss"):
            loop(model, optimizer, scaled=False)
    found = loop(model, mpjax.keras.LossScaleOptimizer(adam, 64.0), scaled=True)
    plain = made(compiled=False)
    wanted = loop(plain, keras.optimizers.Adam(1e-2), scaled=False)
    np.testing.assert_allclose(found, wanted, rtol=0.05)  # four steps of 16-bit matmuls
    model = mpjax.keras.mixed_precision(plain, "mixed_bfloat16")
    found = loop(model, keras.optimizers.Adam(1e-2), scaled=False)
    np.testing.assert_allclose(found, wanted, rtol=0.05)
    assert found != wanted


@pytest.mark.thorough
@pytest.mark.parametrize("policy", POLICIES)
def test_stateless_call_loops_train_with_optax_and_keras_optimizers(policy):
    """By an optimizer of optax, and by one of Keras's."""
    model = made()

    def loss_fn(trained, carried, x, y):
        out, carried = model.stateless_call(trained, carried, x, training=True)
        return jnp.mean((out - y) ** 2), carried

    by_optax = mpjax.mixed_precision(optax.adam(1e-2, eps=1e-7), policy)
    by_keras = mpjax.keras.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    by_keras.build(model.trainable_variables)

    @jax.jit
    def optax_step(trained, carried, opt_state, x):
        gradient = by_optax.value_and_grad(loss_fn, opt_state, has_aux=True)
        (loss, new), grads = gradient(trained, carried, x, Y)
        updates, opt_state = by_optax.update(grads, opt_state, trained)
        carried = mpjax.select(opt_state.finite, new, carried)
        return optax.apply_updates(trained, updates), carried, opt_state, loss

    @jax.jit
    def keras_step(trained, carried, variables, x):
        def scaled(*args):
            loss, new = mpjax.autocast(loss_fn, policy)(*args)
            with keras.StatelessScope(list(zip(by_keras.variables, variables, strict=True))):
                return by_keras.scale_loss(loss), (loss, new)

        (_, (loss, new)), grads = jax.value_and_grad(scaled, has_aux=True)(trained, carried, x, Y)
        trained, variables = by_keras.stateless_apply(variables, grads, trained)
        carried = mpjax.select(by_keras.finite(variables), new, carried)
        return trained, carried, variables, loss

    starts = [[v.value for v in vs] for vs in (model.trainable_variables, model.variables)]
    carried = [v.value for v in model.non_trainable_variables]
    curves = []
    for step, state in (
        (optax_step, by_optax.init(starts[0])),
        (keras_step, [v.value for v in by_keras.variables]),
    ):
        kept, losses = (starts[0], carried, state), []
        for number in range(20):
            x = np.where(np.arange(8) == 1, np.nan, X) if number == 5 else X
            *kept, loss = step(*kept, x)
            losses.append(float(loss))
        assert np.isnan(losses[5]) and losses[-1] < losses[0]
        curves.append(np.delete(losses, 5))
    np.testing.assert_allclose(*curves, rtol=0.1)
