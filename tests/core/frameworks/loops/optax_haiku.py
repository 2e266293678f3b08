import haiku as hk
import jax
import jax.numpy as jnp
import optax


def network(x):
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(
        hk.Linear(16, with_bias=False)(x), is_training=True
    )
    return hk.Linear(8)(hk.dropout(hk.next_rng_key(), 0.1, jax.nn.relu(x)))


model = hk.transform_with_state(network)
optimizer = optax.adamw(1e-2)


def loss_fn(params, state, rng, x, y):
    out, state = model.apply(params, state, rng, x)
    return jnp.mean((out - y) ** 2), state


@jax.jit
def train_step(params, state, opt_state, x, y):
    rng = jax.random.fold_in(jax.random.PRNGKey(1), optax.tree.get(opt_state, "count"))
    gradient = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, new_state), grads = gradient(params, state, rng, x, y)
    updates, opt_state = optimizer.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    state = new_state
    return loss, params, state, opt_state


def start(x):
    params, state = model.init(jax.random.PRNGKey(0), x)
    return params, state, optimizer.init(params)
