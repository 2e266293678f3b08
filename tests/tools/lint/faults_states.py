"""Public faults of optimizers, loss scales, gradients that are accumulated, and gates."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from faults import BF16, F16, F32, Fault, as_half, normal

ROWS, WIDTH, MICRO = 16, 8, 4


def layer(params, x):
    normed = x * jax.lax.rsqrt(jnp.mean(jnp.square(x.astype(F32)), -1, keepdims=True) + 1e-6)
    return (normed.astype(x.dtype) * params["scale"]) @ params["kernel"]


def error(params, batch):
    """Returns the loss of parameters and inputs of one dtype."""
    out = layer(params, batch["x"])
    return jnp.mean(jnp.square(out.astype(F32) - batch["y"]))


def error_in_half(params, batch):
    return error(as_half(params), batch)


def params_of(dtype):
    return {"scale": jnp.ones(WIDTH, dtype), "kernel": normal(WIDTH, WIDTH, dtype=dtype, scale=0.3)}


def batch(dtype=BF16):
    return {"x": normal(ROWS, WIDTH, dtype=dtype), "y": normal(ROWS, WIDTH, seed=1)}


# ---- speculators#765, Model-Optimizer#2322, optax#1444: updates that rounding takes --------------

ADAM = optax.adam(1e-4)


def wide(tree):
    return jax.tree.map(lambda x: x.astype(F32), tree)


def half_weights(state, batch):
    params, moments = state
    grads = wide(jax.grad(error)(params, batch))
    updates, moments = ADAM.update(grads, moments, wide(params))
    updates = as_half(updates)
    return optax.apply_updates(params, updates), moments  # <- here: speculators#765


def wide_weights(state, batch):
    params, moments = state
    grads = jax.grad(error_in_half)(params, batch)
    updates, moments = ADAM.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments


def made_again(state, batch):
    """The masters are not kept: a resume made them of the half weights, and so does each step."""
    halves, moments = state
    masters = wide(halves)
    grads = jax.grad(error_in_half)(masters, batch)
    updates, moments = ADAM.update(grads, moments, masters)
    masters = optax.apply_updates(masters, updates)  # <- here: Model-Optimizer#2322
    return as_half(masters), moments


def kept(state, batch):
    masters, moments = state
    grads = jax.grad(error_in_half)(masters, batch)
    updates, moments = ADAM.update(grads, moments, masters)
    return optax.apply_updates(masters, updates), moments


def descended(params, batch):
    grads = wide(jax.grad(error)(params, batch))
    updates = jax.tree.map(lambda g: -1e-4 * g, grads)
    return optax.apply_updates(params, updates)  # <- here: optax#1444


def descended_wide(params, batch):
    grads = jax.grad(error_in_half)(params, batch)
    updates = jax.tree.map(lambda g: -1e-4 * g, grads)
    return optax.apply_updates(params, updates)


def adam_state(dtype):
    params = params_of(dtype)
    return params, ADAM.init(wide(params))


# ---- Optimisers.jl#215, optax#1552, optax#1405: moments and their numbers ------------------------


def half_moment(second, gradient):
    return 0.999 * second + 0.001 * jnp.square(gradient)  # <- here: Optimisers.jl#215


def wide_moment(second, gradient):
    return 0.999 * second + 0.001 * jnp.square(gradient.astype(F32))


def half_moments(state, batch):
    params, moments = state
    grads = jax.grad(error)(params, batch)
    updates, moments = ADAM.update(grads, moments, params)  # <- here: optax#1552
    return optax.apply_updates(params, updates), moments


RATE = np.float32(1e-2)
DRIFTS = optax.chain(optax.scale_by_learning_rate(RATE), optax.trace(0.9))
STAYS = optax.chain(optax.scale_by_learning_rate(float(RATE)), optax.trace(0.9))


def drifting(state, batch):
    params, moments = state
    grads = jax.grad(error)(params, batch)
    updates, moments = DRIFTS.update(grads, moments, params)  # <- here: optax#1405
    return optax.apply_updates(params, updates), moments


def staying(state, batch):
    params, moments = state
    grads = jax.grad(error_in_half)(params, batch)
    updates, moments = STAYS.update(grads, moments, params)
    return optax.apply_updates(params, updates), moments


def momentum(optimizer, dtype):
    params = params_of(dtype)
    return params, optimizer.init(params)


# ---- flax#2547, maxtext#3721: loss scales and gradients that are not finite ----------------------


def scaled(params, scale, batch):
    grads = jax.grad(lambda p: scale * error(as_f16(p), batch))(params)
    grads = jax.tree.map(lambda g: g / scale, grads)
    finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(g)) for g in jax.tree.leaves(grads)]))
    return grads, finite


def as_f16(tree):
    return jax.tree.map(lambda x: x.astype(F16), tree)


def gated(finite, grads, params):
    return jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), params, grads)


def endless_scale(state, batch):
    grads, finite = scaled(state["params"], state["scale"], batch)
    due = finite & (state["good"] >= 1999)
    scale = jnp.where(finite, state["scale"], state["scale"] / 2)
    scale = jnp.where(due, scale * 2, scale)  # <- here: flax#2547
    good = jnp.where(finite & ~due, state["good"] + 1, 0)
    return {"params": gated(finite, grads, state["params"]), "scale": scale, "good": good}


def limited_scale(state, batch):
    grads, finite = scaled(state["params"], state["scale"], batch)
    due = finite & (state["good"] >= 1999)
    scale = jnp.where(finite, state["scale"], jnp.maximum(state["scale"] / 2, 1.0))
    scale = jnp.where(due, jnp.minimum(scale * 2, 2.0**24), scale)
    good = jnp.where(finite & ~due, state["good"] + 1, 0)
    return {"params": gated(finite, grads, state["params"]), "scale": scale, "good": good}


def scaled_state():
    return {"params": params_of(F32), "scale": jnp.float32(2.0**10), "good": jnp.int32(0)}


def hidden(params, batch):
    grads = jax.grad(error_in_half)(params, batch)
    grads = jax.tree.map(jnp.nan_to_num, grads)  # <- here: maxtext#3721
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


def skipped(params, batch):
    grads = jax.grad(error_in_half)(params, batch)
    finite = jnp.isfinite(optax.tree.norm(grads))
    return gated(finite, grads, params)


# ---- maxtext#5039: gradients that are accumulated ------------------------------------------------


def zeros(params):
    return jax.tree.map(lambda p: jnp.zeros(p.shape, F32), params)


def rounded_then_added(params, batches):
    def turn(total, batch):
        grads = jax.grad(error_in_half)(params, batch)
        grads = jax.tree.map(lambda g: g.astype(BF16), grads)  # <- here: maxtext#5039
        return jax.tree.map(jnp.add, total, grads), None

    return jax.lax.scan(turn, zeros(params), batches)[0]


def added(params, batches):
    def turn(total, batch):
        grads = jax.grad(error_in_half)(params, batch)
        return jax.tree.map(jnp.add, total, grads), None

    return jax.lax.scan(turn, zeros(params), batches)[0]


def batches():
    return jax.tree.map(lambda x: jnp.stack([x] * MICRO), batch())


# ---- xla#26371: rows that are added to each other ------------------------------------------------


def half_rows(table, ids, kernel):
    def loss(table):
        rows = table.astype(BF16)[ids]  # <- here: xla#26371
        return jnp.mean(jnp.square((rows @ kernel).astype(F32)))

    return jax.grad(loss)(table)


def wide_rows(table, ids, kernel):
    def loss(table):
        rows = table[ids].astype(BF16)
        return jnp.mean(jnp.square((rows @ kernel).astype(F32)))

    return jax.grad(loss)(table)


FAULTS = (
    Fault(
        "speculators#765",
        "vllm-project/speculators/pull/765",
        "The weights of norms are bfloat16 and equal to 1.0. Adam's updates are below half an ulp "
        "there, so these weights never move.",
        "stalled-update",
        half_weights,
        wide_weights,
        lambda: (adam_state(BF16), batch()),
        lambda: (adam_state(F32), batch()),
    ),
    Fault(
        "Model-Optimizer#2322",
        "NVIDIA/Model-Optimizer/pull/2322",
        "A resume drops the float32 master weights and makes new ones from the bfloat16 weights. "
        "The part of each update that rounding removed is lost for good.",
        "stalled-update",
        made_again,
        kept,
        lambda: (adam_state(BF16), batch()),
        lambda: (adam_state(F32), batch()),
    ),
    Fault(
        "optax#1444",
        "google-deepmind/optax/issues/1444",
        "optax.apply_updates adds float32 updates to 16-bit weights and rounds the sum.",
        "stalled-update",
        descended,
        descended_wide,
        lambda: (params_of(BF16), batch()),
        lambda: (params_of(F32), batch()),
    ),
    Fault(
        "Optimisers.jl#215",
        "FluxML/Optimisers.jl/issues/215",
        "In bfloat16, beta2 = 0.999 is 1.0: the second moment never forgets.",
        "lost-constant",
        half_moment,
        wide_moment,
        lambda: (normal(WIDTH, dtype=BF16), normal(WIDTH, dtype=BF16, seed=1)),
        lambda: (normal(WIDTH), normal(WIDTH, dtype=BF16, seed=1)),
    ),
    Fault(
        "optax#1552",
        "google-deepmind/optax/issues/1552",
        "Adam's moments take the dtype of the parameters, and so are averaged in bfloat16.",
        "half-average",
        half_moments,
        wide_weights,
        lambda: (momentum(ADAM, BF16), batch()),
        lambda: (adam_state(F32), batch()),
    ),
    Fault(
        "optax#1405",
        "google-deepmind/optax/issues/1405",
        "A NumPy learning rate turns the updates of a bfloat16 model into float32, and the "
        "momentum that they are added to changes its dtype.",
        "state-dtype-drift",
        drifting,
        staying,
        lambda: (momentum(DRIFTS, BF16), batch()),
        lambda: (momentum(STAYS, F32), batch()),
    ),
    Fault(
        "flax#2547",
        "google/flax/issues/2547",
        "A dynamic loss scale doubles without limit while gradients stay finite, becomes inf, and "
        "stays inf.",
        "endless-scale",
        endless_scale,
        limited_scale,
        lambda: (scaled_state(), batch(F16)),
    ),
    Fault(
        "maxtext#3721",
        "AI-Hypercomputer/maxtext/pull/3721",
        "nan_to_num over all gradients hides an overflow in the backward pass.",
        "hidden-nonfinite",
        hidden,
        skipped,
        lambda: (params_of(F32), batch()),
    ),
    Fault(
        "maxtext#5039",
        "AI-Hypercomputer/maxtext/pull/5039",
        "Gradients are rounded to bfloat16 and then accumulated in float32: digits are lost, and "
        "no memory is saved.",
        "cast-undone",
        rounded_then_added,
        added,
        lambda: (params_of(F32), batches()),
    ),
    Fault(
        "xla#26371",
        "openxla/xla/issues/26371",
        "The gradient of an embedding is a scatter-add in bfloat16. Rows that are read often lose "
        "digits with each addition, and GPUs add the updates one by one.",
        "half-scatter",
        half_rows,
        wide_rows,
        lambda: (normal(8, WIDTH), jnp.arange(4096) % 8, normal(WIDTH, WIDTH, dtype=BF16)),
    ),
)
