"""Training scripts in the styles of different libraries, and the lines that mpjax changes there.

`LINES` has for each script the lines that a diff adds, without the import: for bfloat16, where the
function is wrapped, and for float16, where the gradient goes through the optimizer.
"""

HEAD = '''"""A script."""
from __future__ import annotations

import functools
import jax
from jax import value_and_grad as vg
import jax.numpy as jnp
import optax


def loss_fn(params, x, y):
    return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - y) ** 2)


'''
STEP = """optimizer = optax.adamw(1e-2)


@jax.jit
def step(params, opt_state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


"""
LOOP = """keys = jax.random.split(jax.random.key(0), 3)
x = jax.random.normal(keys[0], (16, 8)); y = x[:, :1] * 2
params = {"w": jax.random.normal(keys[1], (8, 32)) / 3}
params["v"] = jax.random.normal(keys[2], (32, 1)) / 6
opt_state = optimizer.init(params)
losses = []
for _ in range(5):
    params, opt_state, loss = step(params, opt_state, x, y)
    losses.append(loss)
"""
OPTAX = HEAD + STEP + LOOP
CALL = "jax.value_and_grad(loss_fn)"
STORED = OPTAX.replace(f"{CALL}(", "grad_fn(").replace(
    "optimizer =", f"grad_fn = {CALL}\noptimizer ="
)

CLASS = """import jax, optax
from jax import numpy as jnp
class Trainer:
    def __init__(self, lr):
        self.tx, self.lr = optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.adam(lr),
        ), lr
        self.params = {"w": jnp.full((8, 4), 0.1)}
        self.opt_state = self.tx.init(self.params)
    def loss(self, params, x): return jnp.mean((x @ params["w"] - 1) ** 2)
    def step(self, x):
        loss, grads = jax.value_and_grad(self.loss)(self.params, x)
        updates, self.opt_state = self.tx.update(grads, self.opt_state)
        self.params = optax.apply_updates(self.params, updates)
        return loss
trainer = Trainer(1e-2)
losses = [trainer.step(jnp.ones((2, 8))) for _ in range(5)]"""

MAIN = """#!/usr/bin/env python
import numpy as np, optax; import jax
import jax.numpy as jnp
def make_optimizer(lr):
    schedule = optax.cosine_decay_schedule(lr, 100)
    return optax.adam(schedule), schedule
def main():
    tx, schedule = make_optimizer(1e-2)  # two results
    params = jnp.full((8, 4), 0.1)
    opt_state = tx.init(params)
    def loss_fn(p): return jnp.mean((jnp.ones((2, 8)) @ p - 1) ** 2)
    grad_fn = jax.value_and_grad(loss_fn)
    losses = []
    for i in range(5):
        loss, grads = grad_fn(params)
        grads = jax.tree.map(lambda g: g * 1.0, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates); losses.append(loss)
    return losses
losses = main()
"""

NNX = """import jax.numpy as jnp
import optax
from flax import nnx
def loss_fn(model, x, y):
    return jnp.mean((model(x) - y) ** 2)
@nnx.jit
def train_step(model: nnx.Module, optimizer: nnx.Optimizer, x, y):
    grad_fn = nnx.value_and_grad(loss_fn)
    loss, grads = grad_fn(model, x, y)
    optimizer.update(model, grads)
    return loss
model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
losses = [train_step(model, optimizer, jnp.eye(3), jnp.ones((3, 1))) for _ in range(5)]
"""
NNX_INNER = NNX.replace(
    "    grad_fn = nnx.value_and_grad(loss_fn)\n    loss, grads = grad_fn(model, x, y)\n",
    "    @nnx.grad(has_aux=True)\n    def grads_of(model, x, y):\n"
    "        return (loss_fn(model, x, y),) * 2\n    grads, loss = grads_of(model, x, y)\n",
)

LINEN = """import flax.linen as nn
from flax.training import train_state
import jax, jax.numpy as jnp, optax
class TrainState(train_state.TrainState):
    extra: int = 0
@jax.jit
def step(state: TrainState, x, y):
    def loss_fn(params):
        return jnp.mean((state.apply_fn({"params": params}, x) - y) ** 2)
    grads, loss = jax.grad(lambda p: (loss_fn(p),) * 2, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads), loss
def create(rng):
    net = nn.Dense(1)
    return TrainState.create(
        apply_fn=net.apply,
        params=net.init(rng, jnp.eye(3))["params"],
        tx=optax.adamw(1e-2),
    )
state = create(jax.random.key(0)); losses = []
for _ in range(5):
    state, loss = step(state, jnp.eye(3), jnp.ones((3, 1)))
    losses.append(loss)
"""

EQUINOX = """import equinox as eqx, jax, jax.numpy as jnp, optax

@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def compute_loss(model, x, y):
    return jnp.mean((jax.vmap(model)(x) - y) ** 2), x

@eqx.filter_jit
def make_step(model, x, y, opt_state):
    (loss, _), grads = compute_loss(model, x, y)
    updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    return loss, eqx.apply_updates(model, updates), opt_state

model = eqx.nn.MLP(3, 1, 16, 2, key=jax.random.key(0))
optim = optax.adam(1e-2)
opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
losses = []
for _ in range(5):
    loss, model, opt_state = make_step(model, jnp.eye(3), jnp.ones((3, 1)), opt_state)
    losses.append(loss)
"""

HAIKU = """import haiku as hk, jax, jax.numpy as jnp, optax
net = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.9)(hk.Linear(2)(x), True))
def loss_fn(params, state, x):
    out, state = net.apply(params, state, None, x)
    return jnp.mean((out - 1) ** 2), state
opt = optax.adam(1e-2)
params, state = net.init(jax.random.key(0), x := jnp.eye(3))
opt_state = opt.init(params)
gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
losses = []
for _ in range(5):
    (loss, state), grads = gradient(params, state, x=x)
    updates, opt_state = opt.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    losses.append(loss)
"""

ACCUMULATED = OPTAX.replace(
    f"    loss, grads = {CALL}(params, x, y)\n",
    f"    def micro(total, batch):\n        loss, g = {CALL}(params, *batch)\n"
    "        return jax.tree.map(jnp.add, total, g), loss\n"
    "    zero = jax.tree.map(jnp.zeros_like, params)\n"
    "    parts = x.reshape(2, 8, 8), y.reshape(2, 8, 1)\n"
    "    grads, loss = jax.lax.scan(micro, zero, parts)\n    loss = loss.mean()\n",
)

SCRIPTS = {
    "optax": OPTAX,
    "keyword": OPTAX.replace(CALL, "vg(\n        fun=loss_fn,  # the loss\n    )"),
    "brackets": OPTAX.replace(CALL, "(jax.value_and_grad((loss_fn), 0))"),
    "stored": STORED,
    "jitted": STORED.replace(CALL, f"jax.jit({CALL})").replace("@jax.jit\n", ""),
    "decorated": OPTAX.replace("def loss_fn", "@jax.value_and_grad\ndef loss_fn").replace(
        CALL, "loss_fn"
    ),
    "partial": OPTAX.replace(
        "def loss_fn",
        "@functools.partial(\n    jax.value_and_grad, has_aux=True\n)  # long\ndef loss_fn",
    )
    .replace("** 2)\n", "** 2), 1\n")
    .replace(f"loss, grads = {CALL}", "(loss, _), grads = loss_fn"),
    "passed": OPTAX.replace(
        "@jax.jit\ndef step(params, opt_state,", "def step(params, opt_state, tx,"
    )
    .replace("optimizer.update", "tx.update")
    .replace("step(params, opt_state, x", "step(params, opt_state, optimizer, x"),
    "accumulated": ACCUMULATED,
    "class": CLASS,
    "main": MAIN,
    "nnx": NNX,
    "nnx_inner": NNX_INNER,
    "linen": LINEN,
    "equinox": EQUINOX,
    "haiku": HAIKU,
}

WRAPPED = 'jax.value_and_grad(mpjax.autocast(loss_fn, "mixed_bfloat16"))'
DECORATOR = '@mpjax.autocast(policy="mixed_bfloat16")'
CREATED = 'optimizer = mpjax.mixed_precision(optax.adamw(1e-2), "mixed_float16")'
TAKEN = "optimizer.value_and_grad(loss_fn, opt_state)"
LATER = "lambda opt_state: optimizer.value_and_grad(loss_fn, opt_state)"
NNX_OPTIMIZER = (
    'optimizer = mpjax.nnx.Optimizer(model, optax.adamw(1e-2), "mixed_float16", wrt=nnx.Param)'
)

LINES = {
    "optax": ([f"loss, grads = {WRAPPED}(params, x, y)"],
              [CREATED, f"loss, grads = {TAKEN}(params, x, y)"]),
    "keyword": (['fun=mpjax.autocast(loss_fn, "mixed_bfloat16"),  # the loss'],
                [CREATED, f"loss, grads = {TAKEN}(params, x, y)"]),
    "brackets": (
        ['loss, grads = (jax.value_and_grad((mpjax.autocast(loss_fn, "mixed_bfloat16")), 0))'
         "(params, x, y)"],
        [CREATED, "loss, grads = (optimizer.value_and_grad(loss_fn, opt_state, 0))(params, x, y)"],
    ),
    "stored": ([f"grad_fn = {WRAPPED}"],
               [f"grad_fn = {LATER}", CREATED, "loss, grads = grad_fn(opt_state)(params, x, y)"]),
    "jitted": (
        [f"grad_fn = jax.jit({WRAPPED})"],
        [f"grad_fn = jax.jit(lambda opt_state, *args: {TAKEN}(*args))", CREATED,
         "loss, grads = grad_fn(opt_state, params, x, y)"],
    ),
    "decorated": ([DECORATOR], [CREATED, f"loss, grads = {TAKEN}(params, x, y)"]),
    "partial": (
        [DECORATOR],
        [CREATED, f"(loss, _), grads = {TAKEN[:-1]}, has_aux=True)(params, x, y)"],
    ),
    "passed": ([f"loss, grads = {WRAPPED}(params, x, y)"],
               [CREATED, "loss, grads = tx.value_and_grad(loss_fn, opt_state)(params, x, y)"]),
    "accumulated": ([f"loss, g = {WRAPPED}(params, *batch)"],
                    [CREATED, f"loss, g = {TAKEN}(params, *batch)"]),
    "class": (
        ['loss, grads = jax.value_and_grad(mpjax.autocast(self.loss, "mixed_bfloat16"))'
         "(self.params, x)"],
        ["self.tx, self.lr = mpjax.mixed_precision(optax.chain(", '), "mixed_float16"), lr',
         "loss, grads = self.tx.value_and_grad(self.loss, self.opt_state)(self.params, x)"],
    ),
    "main": (
        [f"grad_fn = {WRAPPED}"],
        ['tx = mpjax.mixed_precision(tx, "mixed_float16")',
         "grad_fn = lambda opt_state: tx.value_and_grad(loss_fn, opt_state)",
         "loss, grads = grad_fn(opt_state)(params)"],
    ),
    "nnx": (['grad_fn = nnx.value_and_grad(mpjax.autocast(loss_fn, "mixed_bfloat16"))'],
            ["grad_fn = mpjax.nnx.value_and_grad(loss_fn, optimizer)", NNX_OPTIMIZER]),
    "nnx_inner": (
        [DECORATOR],
        ["(_, loss), grads = mpjax.nnx.value_and_grad(grads_of, optimizer, has_aux=True)"
         "(model, x, y)", NNX_OPTIMIZER],
    ),
    "linen": (
        ["grads, loss = jax.grad(mpjax.autocast(lambda p: (loss_fn(p),) * 2, "
         '"mixed_bfloat16"), has_aux=True)(state.params)'],
        ["class TrainState(mpjax.linen.TrainState):",
         "(_, loss), grads = state.value_and_grad(lambda p: (loss_fn(p),) * 2, has_aux=True)"
         "(state.params)", 'policy="mixed_float16",'],
    ),
    "equinox": (
        [DECORATOR],
        ["(loss, _), grads = optim.value_and_grad(compute_loss, opt_state, has_aux=True)"
         "(model, x, y)", 'optim = mpjax.mixed_precision(optax.adam(1e-2), "mixed_float16")'],
    ),
    "haiku": (
        ['gradient = jax.jit(jax.value_and_grad(mpjax.autocast(loss_fn, "mixed_bfloat16"), '
         "has_aux=True))"],
        ['opt = mpjax.mixed_precision(optax.adam(1e-2), "mixed_float16")',
         "gradient = jax.jit(lambda opt_state, *args, **kwargs: opt.value_and_grad(loss_fn, "
         "opt_state, has_aux=True)(*args, **kwargs))",
         "(loss, state), grads = gradient(opt_state, params, state, x=x)"],
    ),
}  # fmt: skip
