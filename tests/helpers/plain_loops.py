"""The loops of `examples/` in float32 and plain JAX: what mpjax offers to a loop is replaced.

A loop of `mpjax.build_train_step` becomes one of `jax.value_and_grad` and optax, and so do those of
the adapters. ``a`` wraps each function that a loop differentiates: it is the identity in a loop
that knows nothing of mpjax.
"""

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training import train_state

import mpjax
import mpjax.linen
import mpjax.nnx


@flax.struct.dataclass
class State:
    params: object
    opt_state: object
    model_state: object
    rng: object
    step: object

    @property
    def skipped_steps(self):
        return jnp.zeros((), jnp.int32)

    @property
    def loss_scale(self):
        return mpjax.StaticLossScale(1.0)


def build_train_step(a):
    def build(loss_fn, optimizer, policy, *, has_aux=False, accumulate_steps=1, **_):
        def init(params, model_state=None, rng=None):
            params = jax.tree.map(jnp.array, params)
            return State(params, optimizer.init(params), model_state, rng, jnp.zeros((), jnp.int32))

        def gradient(state, batch, key):
            given = {} if state.model_state is None else {"model_state": state.model_state}
            given |= {} if key is None else {"rng": key}
            more = has_aux or state.model_state is not None
            grad_fn = jax.value_and_grad(a(loss_fn), has_aux=more)
            value, grads = grad_fn(state.params, batch, **given)
            loss, aux = value if more else (value, None)
            if state.model_state is None:
                return loss, grads, None, aux
            return loss, grads, *(aux if has_aux else (aux, None))

        def step(state, batch):
            key, rng = (None, None) if state.rng is None else jax.random.split(state.rng)
            sums = None
            for i in range(accumulate_steps):
                part = jax.tree.map(lambda x: x[i::accumulate_steps], batch)  # noqa: B023
                *found, model_state, aux = gradient(state, part, key)
                sums = found if sums is None else jax.tree.map(jnp.add, sums, found)
                state = state.replace(model_state=model_state)
            loss, grads = jax.tree.map(lambda x: x / accumulate_steps, sums)
            updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
            params = optax.apply_updates(state.params, updates)
            new = state.replace(params=params, opt_state=opt_state, rng=rng, step=state.step + 1)
            metrics = {"loss": loss, "loss_scale": jnp.ones(()), "aux": aux}
            skips = dict.fromkeys(("skipped_steps", "consecutive_skips"), jnp.zeros((), jnp.int32))
            return new, metrics | skips

        return init, step

    return build


def scaled_value_and_grad(a):
    def scaled(fun, loss_scale, argnums=0, has_aux=False, **_):
        def run(*args):
            modules = any(isinstance(x, eqx.Module) for x in args)
            take = eqx.filter_value_and_grad if modules else jax.value_and_grad
            options = {} if modules else {"argnums": argnums}
            return *take(a(fun), has_aux=has_aux, **options)(*args), jnp.array(True)

        return run

    return scaled


class Optimizer(nnx.Optimizer):
    def __init__(self, model, tx, policy, loss_scale=None, wrt=nnx.Param):
        super().__init__(model, tx, wrt=wrt)

    def metrics(self):
        zeros = dict.fromkeys(("skipped_steps", "consecutive_skips"), jnp.zeros((), jnp.int32))
        return {"loss_scale": jnp.ones(()), **zeros}

    skipped_steps = jnp.zeros((), jnp.int32)


def linen_state(a):
    class Plain(train_state.TrainState):
        def value_and_grad(self, fun, has_aux=False):
            return jax.value_and_grad(a(fun), has_aux=has_aux)

        @property
        def loss_scale(self):
            return mpjax.StaticLossScale(1.0)

        @property
        def skipped_steps(self):
            return jnp.zeros((), jnp.int32)

        @classmethod
        def create(cls, *, policy, loss_scale=None, **options):
            return super().create(**options)

    return Plain


def install(monkeypatch, a):
    """Replaces what mpjax offers to loops."""
    monkeypatch.setattr(mpjax, "build_train_step", build_train_step(a))
    monkeypatch.setattr(mpjax, "scaled_value_and_grad", scaled_value_and_grad(a))
    monkeypatch.setattr(mpjax, "autocast", lambda fun=None, policy=None: fun)
    monkeypatch.setattr(mpjax, "raise_if_diverged", lambda *args, **options: None)
    monkeypatch.setattr(mpjax.nnx, "Optimizer", Optimizer)
    monkeypatch.setattr(
        mpjax.nnx,
        "value_and_grad",
        lambda fun, optimizer, **options: nnx.value_and_grad(a(fun), **options),
    )
    monkeypatch.setattr(mpjax.linen, "TrainState", linen_state(a))
