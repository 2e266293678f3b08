"""Faults of float16 gradients that nothing scales: by hand, planned, of several libraries."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from faults import F16, F32, Fault, normal
from flax import linen as nn
from flax import nnx
from flax.training.dynamic_scale import DynamicScale

import mpjax

ROWS, WIDTH, MICRO = 16, 8, 4
MEMBER = "class member"
SGD = optax.sgd(0.1)


def as_half(tree):
    return jax.tree.map(lambda x: x.astype(F16), tree)


def descend(params, grads):
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(p.dtype), params, grads)


# ---- under autocast ------------------------------------------------------------------------------


def planned_loss(params, x, y):
    out = jnp.tanh(x @ params["inner"]) @ params["outer"]  # <- here: Open-Rig3R#35
    return jnp.mean((out - y) ** 2)


PLANNED = mpjax.autocast(planned_loss, "mixed_float16")


def planned_step(params, state, x, y):
    value, grads = jax.value_and_grad(PLANNED)(params, x, y)
    updates, state = SGD.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


OPTIMIZER = mpjax.mixed_precision(SGD, "mixed_float16")


def planned_step_scaled(params, state, x, y):
    value, grads = OPTIMIZER.value_and_grad(planned_loss, state)(params, x, y)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def params():
    return {"inner": normal(WIDTH, WIDTH), "outer": normal(WIDTH, 1)}


# ---- by hand -------------------------------------------------------------------------------------


def hand_loss(params, x, y):
    params, x = as_half((params, x))
    out = jnp.tanh(x @ params["inner"]) @ params["outer"]
    return jnp.mean((out.astype(F32) - y) ** 2)  # <- here: by hand


def hand_loss_scaled(params, x, y):
    return hand_loss(params, x, y) * 2.0**12


def accumulated(params, xs, ys):
    def turn(total, micro):
        def loss(params):
            out = jax.checkpoint(lambda p, x: jnp.tanh(x @ p["inner"]) @ p["outer"])(
                as_half(params), micro[0].astype(F16)
            )
            return jnp.mean((out.astype(F32) - micro[1]) ** 2)  # <- here: micro-batches

        return jax.tree.map(jnp.add, total, jax.grad(loss)(params)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return descend(params, jax.lax.scan(turn, zeros, (xs, ys))[0])


def accumulated_scaled(params, scale, xs, ys):
    def turn(total, micro):
        grads = jax.grad(lambda p: jnp.mean(scale * errors(p, *micro)))(params)
        return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    grads = jax.lax.scan(turn, zeros, (xs, ys))[0]
    grads = jax.tree.map(lambda g: g / scale, grads)
    fine = mpjax.all_finite(grads)
    new = descend(params, grads)
    scale = jnp.where(fine, jnp.minimum(scale * 1.001, 2.0**24), scale / 2)
    return mpjax.select(fine, new, params), scale


def errors(params, x, y):
    """The errors of each row: a vector is scaled as well as its mean."""
    params, x = as_half((params, x))
    return jnp.square((jnp.tanh(x @ params["inner"]) @ params["outer"]).astype(F32) - y)


def pulled(params, x, y):
    out, pull = jax.vjp(
        lambda p: jnp.tanh(x.astype(F16) @ p["inner"]) @ p["outer"], as_half(params)
    )
    loss, seed = jax.vjp(lambda out: jnp.mean((out.astype(F32) - y) ** 2), out)  # <- here: vjp
    (grads,) = pull(*seed(jnp.ones_like(loss)))
    return descend(params, grads), loss


def pulled_scaled(params, x, y):
    out, pull = jax.vjp(
        lambda p: jnp.tanh(x.astype(F16) @ p["inner"]) @ p["outer"], as_half(params)
    )
    loss, seed = jax.vjp(lambda out: jnp.mean((out.astype(F32) - y) ** 2), out)
    (grads,) = pull(*seed(jnp.full_like(loss, 1024.0)))
    return descend(params, jax.tree.map(lambda g: g.astype(F32) / 1024, grads)), loss


def by_rows(params, x, y):
    def one(p, x, y):
        out = jnp.tanh(x @ p["inner"]) @ p["outer"]
        return jnp.sum((out - y.astype(F16)) ** 2)  # <- here: per-example gradients

    grads = jax.vmap(jax.grad(one), (None, 0, 0))(as_half(params), x.astype(F16), y)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(F32).mean(0), params, grads)


def by_rows_scaled(params, x, y):
    def one(p, x, y):
        out = jnp.tanh(x @ p["inner"]) @ p["outer"]
        return jnp.sum((out - y.astype(F16)) ** 2) * 128

    grads = jax.vmap(jax.grad(one), (None, 0, 0))(as_half(params), x.astype(F16), y)
    return jax.tree.map(lambda p, g: p - 0.1 * g.astype(F32).mean(0) / 128, params, grads)


# ---- libraries -----------------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, dtype=F16)(nn.relu(nn.Dense(WIDTH, dtype=F16)(x)))


def linen_loss(params, x, y):
    out = Linen().apply(params, x)
    return jnp.mean((out.astype(F32) - y) ** 2)  # <- here: linen


def linen_step(params, state, x, y):
    value, grads = jax.value_and_grad(linen_loss)(params, x, y)
    updates, state = SGD.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def linen_step_scaled(params, state, scale, x, y):
    scale, fine, value, grads = scale.value_and_grad(linen_loss)(params, x, y)
    updates, changed = SGD.update(grads, state, params)
    new = mpjax.select(fine, (optax.apply_updates(params, updates), changed), (params, state))
    limited = scale.replace(scale=jnp.minimum(scale.scale, 2.0**24))
    return *new, limited, value


def linen():
    x = normal(ROWS, WIDTH)
    params = Linen().init(jax.random.key(0), x)
    return params, SGD.init(params), x, normal(ROWS, 1)


def linen_scaled():
    params, state, x, y = linen()
    return params, state, DynamicScale(), x, y


def nnx_gradients(model, x, y):
    def loss(model):
        out = model(x)
        return optax.l2_loss(out.astype(F32), y).mean()  # <- here: nnx

    return nnx.value_and_grad(loss)(model)


def nnx_gradients_scaled(model, x, y):
    def loss(model):
        return 2.0**10 * optax.l2_loss(model(x).astype(F32), y).mean()

    value, grads = nnx.value_and_grad(loss)(model)
    return value / 2**10, jax.tree.map(lambda g: g / 2**10, grads)


def nnx_model():
    model = nnx.Sequential(
        nnx.Linear(WIDTH, WIDTH, dtype=F16, rngs=nnx.Rngs(0)),
        jnp.tanh,
        nnx.Linear(WIDTH, 1, dtype=F16, rngs=nnx.Rngs(1)),
    )
    return model, normal(ROWS, WIDTH), normal(ROWS, 1)


def eqx_error(model, x, y):
    return jnp.mean((jax.vmap(model)(x).astype(F32) - y) ** 2)  # <- here: equinox


def eqx_step(model, x, y):
    halves = as_half(model)
    grads = eqx.filter_grad(eqx_error)(halves, x.astype(F16), y)
    return descend(model, grads)


def eqx_step_scaled(model, x, y):
    def loss(model):
        return eqx_error(as_half(model), x.astype(F16), y) / 2.0**-10

    return jax.tree.map(lambda p, g: p - 0.1 * g * 2.0**-10, model, eqx.filter_grad(loss)(model))


RULE = "unscaled-gradient"
SMALL = "Gradients are computed through float16 without a loss scale: small ones become zero."


def data():
    return normal(ROWS, WIDTH), normal(ROWS, 1)


def micro():
    return params(), normal(MICRO, ROWS, WIDTH), normal(MICRO, ROWS, 1)


FAULTS = (
    Fault(
        "Open-Rig3R#35",
        "engichang1467/Open-Rig3R/issues/35",
        *(SMALL, RULE, planned_step, planned_step_scaled),
        lambda: (params(), SGD.init(params()), *data()),
        mended_args=lambda: (params(), OPTIMIZER.init(params()), *data()),
    ),
    Fault(
        *("by hand", MEMBER, SMALL, RULE, hand_loss, hand_loss_scaled),
        lambda: (params(), *data()),
        argnums=0,
    ),
    Fault(
        *("micro-batches", MEMBER, SMALL, RULE, accumulated, accumulated_scaled, micro),
        mended_args=lambda: (micro()[0], jnp.float32(1024), *micro()[1:]),
    ),
    Fault("vjp", MEMBER, SMALL, RULE, pulled, pulled_scaled, lambda: (params(), *data())),
    Fault(
        *("per-example gradients", MEMBER, SMALL, RULE, by_rows, by_rows_scaled),
        lambda: (params(), *data()),
    ),
    Fault(
        *("linen", MEMBER, SMALL, RULE, linen_step, linen_step_scaled, linen),
        mended_args=linen_scaled,
    ),
    Fault("nnx", MEMBER, SMALL, RULE, nnx_gradients, nnx_gradients_scaled, nnx_model),
    Fault(
        *("equinox", MEMBER, SMALL, RULE, eqx_step, eqx_step_scaled),
        lambda: (eqx.filter(eqx.nn.Linear(WIDTH, 1, key=jax.random.key(0)), eqx.is_array), *data()),
    ),
)
