"""Fits a graph neural network potential of JAX MD to energies and forces of a soft-sphere fluid."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax_md import energy, partition, quantity, space

N, BOX, FRAMES, STEPS = 32, 4.0, 4, 8
key = jax.random.key(0)
displacement, shift = space.periodic(BOX)

# The truth: energies and forces of random configurations.
truth = jax.jit(jax.vmap(energy.soft_sphere_pair(displacement, sigma=1.2)))
truth_force = jax.jit(jax.vmap(quantity.force(energy.soft_sphere_pair(displacement, sigma=1.2))))
k_positions, k_model = jax.random.split(key)
positions = jax.random.uniform(k_positions, (FRAMES, N, 3), maxval=BOX)
energies, forces = truth(positions), truth_force(positions)

neighbor_fn, energy_fn = energy.graph_network_neighbor_list(
    displacement,
    BOX,
    r_cutoff=1.6,
    dr_threshold=0.2,
    key=k_model,
    n_recurrences=2,
    mlp_sizes=(64, 64),
    format=partition.Dense,
)
neighbors = neighbor_fn.allocate(positions[0], extra_capacity=16)
graphdef, params = nnx.split(energy_fn.model)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
opt_state = optimizer.init(params)


def predicted_energy(params, position):
    nbrs = neighbors.update(position)
    return nnx.merge(graphdef, params)(position, nbrs)


def loss_fn(params, positions, energies, forces):
    energy_and_gradient = jax.vmap(jax.value_and_grad(predicted_energy, argnums=1), (None, 0))
    predicted, gradients = energy_and_gradient(params, positions)
    energy_loss = jnp.mean((predicted - energies) ** 2) / N**2
    return energy_loss + jnp.mean((gradients + forces) ** 2)


@jax.jit
def update_step(params, opt_state, *batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    updates, opt_state = optimizer.update(grads, opt_state)
    return optax.apply_updates(params, updates), opt_state, loss


for step in range(STEPS):
    params, opt_state, loss = update_step(params, opt_state, positions, energies, forces)
    print(f"step {step} loss {loss}")
