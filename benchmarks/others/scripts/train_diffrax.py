"""Trains a neural ODE on spirals with Diffrax and Equinox, as its example does."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import optax


class Func(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, *, key):
        self.mlp = eqx.nn.MLP(2, 2, 128, 2, activation=jax.nn.softplus, key=key)

    def __call__(self, t, y, args):
        return self.mlp(y)


class NeuralODE(eqx.Module):
    func: Func

    def __init__(self, *, key):
        self.func = Func(key=key)

    def __call__(self, ts, y0):
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(self.func),
            diffrax.Tsit5(),
            t0=ts[0],
            t1=ts[-1],
            dt0=ts[1] - ts[0],
            y0=y0,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=ts),
        )
        return solution.ys


def spirals(ts, size, key):
    def solve(y0):
        def f(t, y, args):
            x = y / (1 + y)
            return jnp.stack([x[1], -x[0]], axis=-1)

        solver, saveat = diffrax.Tsit5(), diffrax.SaveAt(ts=ts)
        term = diffrax.ODETerm(f)
        return diffrax.diffeqsolve(term, solver, ts[0], ts[-1], 0.1, y0, saveat=saveat).ys

    return jax.vmap(solve)(jr.uniform(key, (size, 2), minval=-0.6, maxval=1.0))


@eqx.filter_value_and_grad
def grad_loss(model, ti, yi):
    y_pred = jax.vmap(model, in_axes=(None, 0))(ti, yi[:, 0])
    return jnp.mean((yi - y_pred) ** 2)


@eqx.filter_jit
def make_step(ti, yi, model, opt_state):
    loss, grads = grad_loss(model, ti, yi)
    updates, opt_state = optim.update(grads, opt_state)
    return loss, eqx.apply_updates(model, updates), opt_state


data_key, model_key, loader_key = jr.split(jr.key(5678), 3)
ts = jnp.linspace(0, 10, 40)
ys = spirals(ts, 128, data_key)
model = NeuralODE(key=model_key)
optim = optax.adabelief(3e-3)
opt_state = optim.init(eqx.filter(model, eqx.is_inexact_array))
for step in range(15):
    loader_key, key = jr.split(loader_key)
    yi = jr.choice(key, ys, (32,), replace=False)[:, :10]
    loss, model, opt_state = make_step(ts[:10], yi, model, opt_state)
    print(f"step {step} loss {loss}")
