"""Turns a flax model into a loss with abstract arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import mpjax


def cross_entropy(logits, labels):
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def masked_cross_entropy(logits, labels):
    """The mean cross entropy where a label is not below 0."""
    seen = labels >= 0
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype(jnp.float32), jnp.maximum(labels, 0)
    )
    return jnp.sum(jnp.where(seen, losses, 0.0)) / jnp.maximum(seen.sum(), 1)


def written(hidden, weight, labels, transposed=False):
    """The cross entropy of a linear layer as it is usually written."""
    return cross_entropy(hidden @ (weight.T if transposed else weight), labels)


def with_jax_cce(hidden, weight, labels, transposed=False):
    from jax_cce import linear_cross_entropy

    weight = weight if transposed else weight.T
    return linear_cross_entropy(hidden.reshape(-1, hidden.shape[-1]), weight, labels.reshape(-1))


# The loss of a language model as a function of its last hidden values and the weight of its head.
HEADS = {"written": written, "mpjax": mpjax.linear_cross_entropy, "jax-cce": with_jax_cce}


def sinusoids(length, width):
    """Returns fixed positions, as in the first transformer."""
    rates = np.exp(-np.log(10000) * np.arange(width // 2) / (width // 2 - 1))
    angles = np.arange(length)[:, None] * rates
    return np.concatenate([np.sin(angles), np.cos(angles)], -1).astype(np.float32)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def classifier(model, inputs, labels, entropy=cross_entropy):
    """Returns the tuple of a `MODELS` entry for a model whose only variables are parameters."""
    variables = jax.eval_shape(model.init, jax.random.key(0), inputs)

    def loss(params, rest, batch):
        return entropy(model.apply({"params": params}, batch[0]), batch[1]), rest

    return loss, variables["params"], {}, (inputs, labels), optax.adamw(3e-4)


def language_model(model, batch, length, head="written"):
    """Returns the tuple of a `MODELS` entry for a model that predicts the next token.

    The loss is `HEADS[head]`. All but "written" read the model's first embedding, and its
    results without logits.
    """
    tokens = array(batch, length, dtype=jnp.int32)
    if head == "written":
        return classifier(model, tokens, tokens)
    _, params, rest, *others = classifier(model, tokens, tokens)

    def loss(params, rest, batch):
        hidden = model.apply({"params": params}, batch[0], logits=False)
        weight = params["Embed_0"]["embedding"].astype(hidden.dtype)
        return HEADS[head](hidden, weight, batch[1], transposed=True), rest

    return loss, params, rest, *others


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
