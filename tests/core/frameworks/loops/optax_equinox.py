import equinox as eqx
import jax
import jax.numpy as jnp
import optax


class Model(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear
    activation: object
    name: str

    def __init__(self, key):
        keys = jax.random.split(key)
        self.first = eqx.nn.Linear(4, 16, key=keys[0])
        self.norm = eqx.nn.BatchNorm(16, axis_name="batch", mode="batch")
        self.last = eqx.nn.Linear(16, 8, use_bias=False, key=keys[1])
        self.activation, self.name = jax.nn.relu, "model"

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(self.activation(x)), state


optimizer = optax.adamw(1e-2)


def loss_fn(model, state, x, y):
    run = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))
    out, state = run(x, state)
    return jnp.mean((out - y) ** 2), state


@eqx.filter_jit
def train_step(model, state, opt_state, x, y):
    gradient = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    (loss, new_state), grads = gradient(model, state, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
    model = eqx.apply_updates(model, updates)
    state = new_state
    return loss, model, state, opt_state


def start(x):
    model, state = eqx.nn.make_with_state(Model)(jax.random.key(0))
    return model, state, optimizer.init(eqx.filter(model, eqx.is_array))
