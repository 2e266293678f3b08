"""Keras 3 on JAX: `fit` in mixed precision, loops of `stateless_call`, and its own dtype policy."""

import mpjax.keras  # isort: skip  # before Keras, for its backend

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from support import matmul_dtypes, normal, thorough_but

import mpjax

pytestmark = pytest.mark.filterwarnings("ignore:.*__array__ implementation:DeprecationWarning")
X = np.asarray(normal(1, 64, 4))
Y = X[:, :1] * X[:, 1:2]
LAYERS = keras.layers
POLICIES = ["float32", "mixed_bfloat16", "mixed_float16"]


def made(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((4,)),
            LAYERS.Dense(16, activation="relu", **options),
            LAYERS.BatchNormalization(),
            LAYERS.Dropout(0.1),
            LAYERS.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model


def fitted(model, epochs=6, x=X):
    options = {"epochs": epochs, "batch_size": 16, "verbose": 0, "shuffle": False}
    return model.fit(x, Y, **options).history["loss"]


def values(variables):
    return [np.asarray(v.value) for v in variables]


def same(a, b):
    return all(map(np.array_equal, a, b))


@functools.cache
def plain():
    """Returns the losses of Keras's own `fit`, and of `evaluate` after it."""
    model = made()
    return fitted(model), model.evaluate(X, Y, verbose=0)[0]


@pytest.mark.parametrize("policy", thorough_but(POLICIES, "mixed_float16"))
def test_fit_is_keras_own_under_float32_and_near_it_in_half(policy):
    wanted, evaluated = plain()
    model = mpjax.keras.mixed_precision(made(), policy, 64.0)
    losses = fitted(model)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5 if policy == "float32" else 0.15)
    assert losses[-1] < losses[0] and model.predict(X, verbose=0).dtype == np.float32
    assert {v.dtype for v in model.trainable_variables} == {"float32"}
    loss, _ = model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(loss, evaluated, rtol=0.15)


def test_keras_fit_evaluate_and_predict_run_in_float16():
    model = mpjax.keras.mixed_precision(made(), "mixed_float16")
    fitted(model, epochs=1)
    trained, carried, metrics, variables = (
        [v.value for v in group]
        for group in (
            model.trainable_variables,
            model.non_trainable_variables,
            model.metrics_variables,
            model.optimizer.variables,
        )
    )
    batch = (X[:16], Y[:16])
    for dtypes in (
        matmul_dtypes(lambda t: model.train_step((t, carried, variables, metrics), batch), trained),
        matmul_dtypes(lambda t: model.test_step((t, carried, metrics), batch), trained),
        matmul_dtypes(lambda t: model.predict_step((t, carried), batch), trained),
    ):
        assert len(dtypes) >= 2 and set(dtypes) == {("float16", "float16")}


def test_skipped_keras_step_leaves_no_trace():
    model = mpjax.keras.mixed_precision(made(), "mixed_float16")
    fitted(model, epochs=2)
    before, skips = values(model.variables), int(model.optimizer.skipped_steps.value)
    inner = values(model.optimizer.inner_optimizer.variables)
    scale = float(model.optimizer.loss_scale.loss_scale)
    bad = np.where(np.arange(64)[:, None] % 16 == 3, np.inf, X)  # one row of each batch
    fitted(model, epochs=1, x=bad)
    assert same(values(model.variables), before)
    assert same(values(model.optimizer.inner_optimizer.variables), inner)
    assert int(model.optimizer.skipped_steps.value) == skips + 4
    assert float(model.optimizer.loss_scale.loss_scale) == scale / 16


def test_keras_saves_a_model_with_its_loss_scale(tmp_path):
    model = mpjax.keras.mixed_precision(made(), "mixed_float16", 1024.0)
    fitted(model, epochs=1)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, mpjax.keras.LossScaleOptimizer)
    assert float(again.optimizer.loss_scale.loss_scale) == 1024
    assert same(values(again.weights), values(model.weights))
    # It goes on with its optimizer.
    fitted(mpjax.keras.mixed_precision(again, "mixed_float16"), epochs=1)


def test_loss_scale_optimizer_updates_outside_of_jit():
    variable = keras.Variable(np.float32([1, 2]))
    optimizer = mpjax.keras.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    for grad, wanted in (([8, 16], [0.5, 1]), ([np.inf, 0], [0.5, 1]), ([8, 0], [0, 1])):
        optimizer.apply([np.float32(grad)], [variable])
        assert variable.value.tolist() == wanted
    assert optimizer.built and int(optimizer.skipped_steps.value) == 1


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
            x = np.where(np.arange(4) == 1, np.nan, X) if number == 5 else X
            *kept, loss = step(*kept, x)
            losses.append(float(loss))
        assert np.isnan(losses[5]) and losses[-1] < losses[0]
        curves.append(np.delete(losses, 5))
    np.testing.assert_allclose(*curves, rtol=0.1)


@pytest.mark.parametrize("own", thorough_but(["mixed_float16", "bfloat16"], 0))
def test_a_dtype_policy_of_keras_is_an_error(own):
    with pytest.raises(ValueError, match=rf"layer 'dense.*' has the dtype policy '{own}'"):
        mpjax.keras.mixed_precision(made(dtype=own))
    model = made(dtype="mixed_float16")
    trained, carried = ([v.value for v in vs] for vs in (model.trainable_variables, []))
    carried = [v.value for v in model.non_trainable_variables]
    run = mpjax.autocast(lambda *args: model.stateless_call(*args)[0], "mixed_bfloat16")
    with pytest.raises(ValueError, match=r"keras's own dtype policy .* Use one of them"):
        run(trained, carried, X)
    plain = mpjax.autocast(lambda *args: model.stateless_call(*args)[0], "float32")
    assert jax.eval_shape(plain, trained, carried, X).shape == (64, 1)


def test_keras_mixed_precision_refuses_bad_arguments():
    with pytest.raises(TypeError, match="must be a Keras model"):
        mpjax.keras.mixed_precision(3)
    model = keras.Sequential([keras.Input((4,)), LAYERS.Dense(1)])
    with pytest.raises(ValueError, match="is not compiled"):
        mpjax.keras.mixed_precision(model)
    with pytest.raises(ValueError, match="stores parameters in bfloat16"):
        mpjax.keras.mixed_precision(made(), "O2:bfloat16")
    with pytest.raises(ValueError, match="loss_scale='automatic'"):
        mpjax.keras.mixed_precision(made(), loss_scale="automatic")
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)), "mse")
    with pytest.raises(ValueError, match="would be scaled twice"):
        mpjax.keras.mixed_precision(model)
