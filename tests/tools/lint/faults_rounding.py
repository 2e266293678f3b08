"""Updates of 16-bit weights: lost if rounded to the nearest, and kept if rounded at random."""

import jax
import jax.numpy as jnp
import optax
from faults import BF16, F32, Fault, normal
from flax import nnx

import mpjax

ROWS, WIDTH, RATE = 16, 8, 1e-5


def loss_of(params, x):
    return jnp.mean(jnp.square((x.astype(params["w"].dtype) @ params["w"]).astype(F32)))


def weights():
    return {"w": normal(WIDTH, WIDTH, dtype=BF16) + 2}


def batch():
    return normal(ROWS, WIDTH)


# ---- optimizers ----------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(WIDTH, WIDTH, param_dtype=BF16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.linear(x.astype(BF16))


def of_nnx(model, optimizer, x):
    grads = nnx.grad(lambda m: jnp.mean(jnp.square(m(x).astype(F32))))(model)
    optimizer.update(model, grads)  # <- here: weights of a module


def nnx_arguments(wrap):
    def make():
        model = Model()
        return model, nnx.Optimizer(model, wrap(optax.sgd(RATE)), wrt=nnx.Param), batch()

    return make


def descended(optimizer):
    def step(state, x):
        params, moments = state
        grads = jax.grad(loss_of)(params, x)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments  # <- here: weights in a scan

    return step


def scanned(optimizer):
    step = descended(optimizer)

    def run(state, xs):
        return jax.lax.scan(lambda state, x: (step(state, x), None), state, xs)[0]

    return run


SGD = optax.sgd(RATE, momentum=0.9)
RANDOM = mpjax.optim.with_stochastic_rounding(SGD)


def scan_arguments(optimizer):
    return lambda: ((weights(), optimizer.init(weights())), jnp.stack([batch()] * 2))


LION = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(RATE))


def built(policy):
    return mpjax.build_train_step(loss_of, LION, policy)


NEAREST, STOCHASTIC = built("O3:bfloat16"), built("O3:bfloat16,rounding=stochastic")


def stepped(build):
    def step(state, x):
        return build[1](state, x)  # <- here: O3

    return step


def state_of(build):
    return lambda: (build[0](mpjax.cast(weights(), "float32")), batch())


# ---- by hand -------------------------------------------------------------------------------------


def bare(w, x):
    """The weights are one array, and not a tree."""
    grad = jax.grad(lambda w: loss_of({"w": w}, x))(w)
    return w - RATE * grad  # <- here: a bare array


def bare_wide(w, x):
    grad = jax.grad(lambda w: loss_of({"w": w}, x))(w)
    return w - 0.5 * grad


def rounded_plainly(state, x):
    grads = jax.grad(loss_of)(state["params"], x)

    def rounded(p, g):
        wide = p.astype(F32) - RATE * g.astype(F32)  # <- here: dither
        return wide.astype(BF16)

    params = jax.tree.map(rounded, state["params"], grads)
    return {"params": params, "key": jax.random.split(state["key"])[0]}


def dithered(state, x):
    """Noise of an ulp is added before the cast, so that the mean of the roundings is exact."""
    grads = jax.grad(loss_of)(state["params"], x)
    key, now = jax.random.split(state["key"])

    def rounded(p, g):
        wide = p.astype(F32) - RATE * g.astype(F32)
        noise = jax.random.uniform(now, p.shape, minval=-0.5, maxval=0.5)
        return (wide + noise * jnp.abs(wide) * 2.0**-7).astype(BF16)

    return {"params": jax.tree.map(rounded, state["params"], grads), "key": key}


def keyed():
    return {"params": weights(), "key": jax.random.key(0)}, batch()


FAULTS = (
    Fault(
        "weights of a module",
        "",
        "An optimizer of an NNX module rounds its bfloat16 weights to the nearest.",
        "stalled-update",
        of_nnx,
        of_nnx,
        nnx_arguments(lambda optimizer: optimizer),
        nnx_arguments(mpjax.optim.with_stochastic_rounding),
    ),
    Fault(
        "weights in a scan",
        "",
        "Steps in a scan round bfloat16 weights to the nearest.",
        "stalled-update",
        scanned(SGD),
        scanned(RANDOM),
        scan_arguments(SGD),
        scan_arguments(RANDOM),
    ),
    Fault(
        "O3",
        "",
        "A policy without masters rounds small updates away.",
        "stalled-update",
        stepped(NEAREST),
        stepped(STOCHASTIC),
        state_of(NEAREST),
        state_of(STOCHASTIC),
    ),
    Fault(
        "a bare array",
        "",
        "Weights in one bfloat16 array lose their updates.",
        "stalled-update",
        bare,
        bare_wide,
        lambda: (weights()["w"], batch()),
    ),
    Fault(
        "dither",
        "",
        "A float32 sum is rounded to bfloat16 weights without noise.",
        "stalled-update",
        rounded_plainly,
        dithered,
        keyed,
    ),
)
