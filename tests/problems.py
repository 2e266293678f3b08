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
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape) / 10, jnp.float32)  # noqa: E731
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
    x = jnp.asarray(rng.normal(size=(examples, 4)), jnp.float32)
    batch = {"x": x, "y": x[:, :3].argmax(1)}
    variables = Net().init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["x"])
    return variables.pop("params"), variables, batch


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

    stacked = jax.tree.map(lambda *g: jnp.stack(g), *all_grads)
    carry = (params, optimizer.init(params))
    return jax.jit(lambda c, g: jax.lax.scan(body, c, g)[0])(carry, stacked)
