"""Fits a small network with Optimistix' BFGS, and learns through its implicit root finder."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
import optimistix as optx

k_data, k_mlp, k_deq = jr.split(jr.key(0), 3)
x = jr.normal(k_data, (256, 8))
y = jnp.sin(x @ jnp.arange(1.0, 9.0) / 4)


# Minimizing with a quasi-Newton method.
def loss_fn(model, data):
    x, y = data
    return jnp.mean((jax.vmap(model)(x)[:, 0] - y) ** 2)


mlp = eqx.nn.MLP(8, 1, 32, 2, activation=jnp.tanh, key=k_mlp)
arrays, static = eqx.partition(mlp, eqx.is_inexact_array)
found = optx.minimise(
    lambda arrays, data: loss_fn(eqx.combine(arrays, static), data),
    optx.BFGS(rtol=1e-4, atol=1e-4),
    arrays,
    (x, y),
    max_steps=20,
    throw=False,
)
print(f"BFGS loss {loss_fn(eqx.combine(found.value, static), (x, y))}")


# A deep equilibrium layer: the gradient passes through the fixed point.
class Equilibrium(eqx.Module):
    inner: eqx.nn.Linear
    outer: eqx.nn.Linear
    read: eqx.nn.Linear

    def __init__(self, key):
        k_inner, k_outer, k_read = jr.split(key, 3)
        self.inner = eqx.nn.Linear(64, 64, key=k_inner)
        self.outer = eqx.nn.Linear(8, 64, key=k_outer)
        self.read = eqx.nn.Linear(64, 1, key=k_read)

    def __call__(self, x):
        def fixed(z, args):
            inner, x = args
            return jnp.tanh(0.5 * inner(z) + x)

        solver = optx.FixedPointIteration(rtol=1e-4, atol=1e-4)
        args = self.inner, self.outer(x)
        return self.read(optx.fixed_point(fixed, solver, jnp.zeros(64), args, throw=False).value)


model = Equilibrium(k_deq)
optimizer = optax.adam(3e-3)
opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))


@eqx.filter_jit
def make_step(model, opt_state, data):
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, data)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


for step in range(10):
    model, opt_state, loss = make_step(model, opt_state, (x, y))
    print(f"step {step} loss {loss}")
