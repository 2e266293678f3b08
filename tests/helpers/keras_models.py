"""Keras models for the tests of `mpjax.keras`, and what they are asked."""

import mpjax.keras  # isort: skip  # before Keras, for its backend

import os
import subprocess
import sys

import keras
import numpy as np
from support import matmul_dtypes, normal

X = np.asarray(normal(1, 64, 8))
Y = X[:, :1] * X[:, 1:2]
LAYERS = keras.layers


def made(kind=keras.Model, compiled=True, **options):
    """Returns a model of a class, with statistics and seeds."""
    keras.utils.set_random_seed(0)
    start = keras.Input((8,))
    hidden = LAYERS.Dense(16, activation="relu", **options)(start)
    hidden = LAYERS.Dropout(0.1)(LAYERS.BatchNormalization()(hidden))
    model = kind(start, LAYERS.Dense(1)(hidden))
    if compiled:
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model


def mixed(kind, policy, loss_scale="auto"):
    return mpjax.keras.mixed_precision(made(kind), policy, loss_scale)


def fitted(model, epochs=6, x=X):
    options = {"epochs": epochs, "batch_size": 16, "verbose": 0, "shuffle": False}
    return model.fit(x, Y, **options).history["loss"]


def values(variables):
    return [np.asarray(v.value) for v in variables]


def same(a, b):
    return all(map(np.array_equal, a, b))


def dtypes_of_step(model):
    """Returns the dtypes of the operands of all matmuls of a train step."""
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    state = model._get_jax_state(*[True] * 4)
    found = matmul_dtypes(lambda state: model.train_step(state, (X[:16], Y[:16])), state)
    return {dtype for pair in found for dtype in pair}


def run_python(code, *args, **environment):
    """Runs a program in a new process, and returns what it printed."""
    command = [sys.executable, "-c", code, *map(str, args)]
    environment = {**os.environ, "KERAS_BACKEND": "jax", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout
