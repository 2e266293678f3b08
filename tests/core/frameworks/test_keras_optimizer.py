"""Keras's optimizers with mpjax's loss scale: eagerly, in jit, and where a scale is forgotten."""

import mpjax.keras  # isort: skip  # before Keras, for its backend

import jax
import keras
import numpy as np
import pytest


def built(loss_scale=8.0):
    variable = keras.Variable(np.float32([1, 2]))
    optimizer = mpjax.keras.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale)
    optimizer.build([variable])
    return optimizer, variable, [v.value for v in optimizer.variables]


def test_loss_scale_optimizer_updates_outside_of_jit():
    variable = keras.Variable(np.float32([1, 2]))
    optimizer = mpjax.keras.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    for grad, wanted in (([8, 16], [0.5, 1]), ([np.inf, 0], [0.5, 1]), ([8, 0], [0, 1])):
        optimizer.apply([np.float32(grad)], [variable])
        assert variable.value.tolist() == wanted
    assert optimizer.built and int(optimizer.skipped_steps.value) == 1


@pytest.mark.parametrize("loss_scale", [8.0, "dynamic"])
def test_a_jitted_update_without_a_scaled_loss_is_an_error(loss_scale):
    optimizer, variable, state = built(loss_scale)
    update = jax.jit(lambda grads: optimizer.stateless_apply(state, grads, [variable.value]))
    with pytest.raises(ValueError, match=r"no loss .* loss = optimizer.scale_loss\(loss, "):
        update([np.float32([8, 16])])
    factor = jax.jit(optimizer.scale_loss)(np.float32(1), state)  # the advice
    (new,), _ = update([factor * np.float32([1, 2])])
    np.testing.assert_array_equal(new, [0.5, 1])


def test_a_scale_that_changes_is_no_constant_of_a_jitted_step():
    optimizer, _, state = built("dynamic")
    assert float(optimizer.scale_loss(2.0)) == 2.0**17
    assert float(jax.grad(optimizer.scale_loss)(2.0)) == 2.0**16  # eager: read at each call
    with pytest.raises(ValueError, match=r"read the loss scale once.*optimizer_variables"):
        jax.jit(optimizer.scale_loss)(2.0)
    halved = [v / 2 if v == 2.0**16 else v for v in state]
    scaled = jax.jit(optimizer.scale_loss)
    assert [float(scaled(2.0, variables)) for variables in (state, halved)] == [2.0**17, 2.0**16]
    for fixed in (8.0, "none"):
        optimizer = built(fixed)[0]
        assert float(jax.jit(optimizer.scale_loss)(2.0)) == float(optimizer.scale_loss(2.0))


def test_an_update_of_other_variables_names_both_counts():
    optimizer, variable, state = built()
    grads, values = [np.float32([1, 2])] * 2, [variable.value] * 2
    with pytest.raises(ValueError, match=r"has 2 variables, but .* built for 1\. .*compile"):
        optimizer.stateless_apply(state, grads, values)


def test_layers_that_are_unfrozen_need_a_new_compile():
    layers = [keras.layers.Dense(2), keras.layers.Dense(1)]
    model, x = keras.Sequential([keras.Input((2,)), *layers]), np.ones((4, 2), np.float32)
    layers[0].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    mpjax.keras.mixed_precision(model, "mixed_bfloat16")
    model.fit(x, x[:, :1], verbose=0)
    layers[0].trainable = True
    model.train_function = None
    with pytest.raises(ValueError, match=r"has 4 variables, but .* built for 2\. .*compile"):
        model.fit(x, x[:, :1], verbose=0)
