"""Trains a convolutional network with Keras' fit on its JAX backend."""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import keras
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--half", action="store_true")
args = parser.parse_args()

keras.utils.set_random_seed(0)
if args.half:
    keras.config.set_dtype_policy("mixed_bfloat16")

rng = np.random.default_rng(0)
labels = rng.integers(0, 10, 512)
patterns = rng.normal(size=(10, 16, 16, 1))
images = (patterns[labels] + 0.5 * rng.normal(size=(512, 16, 16, 1))).astype("float32")

model = keras.Sequential(
    [
        keras.Input((16, 16, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.MaxPooling2D(),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(10, activation="softmax", dtype="float32"),
    ]
)
model.compile(
    optimizer=keras.optimizers.Adam(1e-3),
    loss="sparse_categorical_crossentropy",
    metrics=["accuracy"],
)
history = model.fit(images, labels, batch_size=64, epochs=3, verbose=0, validation_split=0.1)
for epoch, (loss, held_out) in enumerate(
    zip(history.history["loss"], history.history["val_loss"], strict=True)
):
    print(f"epoch {epoch} loss {loss}, held-out {held_out}")
