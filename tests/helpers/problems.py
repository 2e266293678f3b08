"""Training problems, and helpers for the tests of the training step."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

BY_OP = ["mixed_bfloat16", "mixed_float16", "O2:float16", "O2:bfloat16"]
AT_BOUNDARY = ["float32", "O3:bf16", "p=f32,c=f16,o=f32", "mixed_bfloat16,casting=boundary"]
POLICIES = [*BY_OP, *AT_BOUNDARY]

METRICS = (
    *("loss", "grad_norm", "grads_finite", "loss_finite", "state_finite"),
    *("loss_scale", "skipped_steps", "consecutive_skips"),
)


def linear_loss(params, batch):
    x, y = batch
    return jnp.mean((x @ params["w"] + params["b"] - y).astype(jnp.float32) ** 2)


def linear_problem(rng, examples=8):
    # Small enough for gradients times 2**16 to fit float16.
    draw = lambda *shape: np.float32(rng.normal(size=shape) / 10)  # noqa: E731
    return {"w": draw(4, 3), "b": draw(3)}, (draw(examples, 4), draw(examples, 3))


class Net(nn.Module):
    """A small network with BatchNorm and Dropout: model state and rng."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(nn.relu(x)))


def net_loss(params, batch, model_state, rng):
    logits, new_state = Net().apply(
        {"params": params, **model_state},
        batch["x"],
        rngs={"dropout": rng},
        mutable=["batch_stats"],
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["y"])
    return losses.mean(), (new_state, {"logits": logits})


def net_problem(rng, examples=8):
    x = np.float32(rng.normal(size=(examples, 8)))
    batch = {"x": x, "y": x[:, :3].argmax(1)}
    # What Net().init returns, without its many small programs.
    dense = lambda *shape: {  # noqa: E731
        "kernel": np.float32(rng.normal(size=shape) / np.sqrt(shape[0])),
        "bias": np.zeros(shape[1], np.float32),
    }
    zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
    norm = {"scale": ones, "bias": zeros}
    params = {"Dense_0": dense(8, 8), "BatchNorm_0": norm, "Dense_1": dense(8, 3)}
    return params, {"batch_stats": {"BatchNorm_0": {"mean": zeros, "var": ones}}}, batch


def bits(tree):
    """Returns every leaf as raw bytes, so that NaN equals NaN and -0.0 does not equal 0.0."""
    data = lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x  # noqa: E731
    return [np.asarray(data(leaf)).tobytes() for leaf in jax.tree.leaves(tree)]


def described(leaf):
    return leaf.dtype, leaf.shape, getattr(leaf, "weak_type", None)


def dtypes(tree):
    return {leaf.dtype.name for leaf in jax.tree.leaves(tree)}


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def run_updates(optimizer, params, all_grads):
    """Applies updates in one jitted scan, which fails if the state changes its dtypes."""

    def body(carry, grads):
        params, state = carry
        updates, state = optimizer.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), None

    def run(params, all_grads):
        stacked = jax.tree.map(lambda *g: jnp.stack(g), *all_grads)
        return jax.lax.scan(body, (params, optimizer.init(params)), stacked)[0]

    return jax.jit(run)(params, all_grads)
