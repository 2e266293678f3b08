import flax.linen as nn
import jax
import jax.numpy as jnp
import optax


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False)(nn.Dense(16, use_bias=False)(x))
        return nn.Dense(8)(nn.relu(x))


model = Model()
optimizer = optax.adamw(1e-2)


def loss_fn(params, batch_stats, x, y):
    variables = {"params": params, "batch_stats": batch_stats}
    out, new = model.apply(variables, x, mutable=["batch_stats"])
    return jnp.mean((out - y) ** 2), new["batch_stats"]


@jax.jit
def train_step(params, batch_stats, opt_state, x, y):
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, new_stats), grads = gradient(params, batch_stats, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    batch_stats = new_stats
    return loss, params, batch_stats, opt_state


def start(x):
    variables = model.init(jax.random.key(0), x)
    params, batch_stats = variables["params"], variables["batch_stats"]
    return params, batch_stats, optimizer.init(params)
