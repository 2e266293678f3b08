"""Turns a flax model into a loss with abstract arguments."""

import jax
import jax.numpy as jnp
import optax


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def classifier(model, inputs, labels):
    """Returns the tuple of a `MODELS` entry for a model whose only variables are parameters."""
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def loss(params, rest, batch):
        return cross_entropy(model.apply({"params": params}, batch[0]), batch[1]), rest

    return loss, variables["params"], {}, (inputs, labels), optax.adamw(3e-4)


def language_model(model, batch, length):
    """Returns the tuple of a `MODELS` entry for a model that predicts the next token."""
    tokens = array(batch, length, dtype=jnp.int32)
    return classifier(model, tokens, tokens)


def with_statistics(model, images, labels):
    """Returns the tuple of a `MODELS` entry for a model with BatchNorm; ``rest`` has statistics."""
    labels = array(*labels, dtype=jnp.int32)
    images = array(*images)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)

    def loss(params, stats, batch):
        logits, updated = model.apply(
            {"params": params, "batch_stats": stats}, batch[0], mutable=["batch_stats"]
        )
        return cross_entropy(logits, batch[1]), updated["batch_stats"]

    stats = variables["batch_stats"]
    return loss, variables["params"], stats, (images, labels), optax.sgd(0.1, momentum=0.9)
