"""Trains a small classifier with the optimizer of kfac-jax, which reads the loss's program."""

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np

SIZES = (64, 128, 128, 10)


def init(key):
    keys = jax.random.split(key, len(SIZES) - 1)
    shapes = zip(SIZES[:-1], SIZES[1:], strict=True)
    return [
        {"w": jax.random.normal(k, shape) / np.sqrt(shape[0]), "b": jnp.zeros(shape[1])}
        for k, shape in zip(keys, shapes, strict=True)
    ]


def loss_fn(params, batch):
    x, labels = batch
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    logits = x @ params[-1]["w"] + params[-1]["b"]
    kfac_jax.register_softmax_cross_entropy_loss(logits, labels)
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1)
    return -jnp.mean(chosen)


def batches(seed=0):
    rng = np.random.default_rng(seed)
    centers = rng.normal(size=(10, SIZES[0]))
    while True:
        labels = rng.integers(0, 10, 128)
        images = centers[labels] + rng.normal(size=(128, SIZES[0]))
        yield jnp.asarray(images, jnp.float32), jnp.asarray(labels)


optimizer = kfac_jax.Optimizer(
    value_and_grad_func=jax.value_and_grad(loss_fn),
    l2_reg=1e-3,
    use_adaptive_learning_rate=True,
    use_adaptive_momentum=True,
    use_adaptive_damping=True,
    initial_damping=1.0,
    num_burnin_steps=0,
)
data = batches()
key = jax.random.key(0)
params = init(key)
state = optimizer.init(params, key, next(data))
for step in range(6):
    key, sub = jax.random.split(key)
    params, state, stats = optimizer.step(
        params, state, sub, batch=next(data), global_step_int=step
    )
    print(f"step {step} loss {stats['loss']}")
