"""Fits a normalizing flow to two moons with FlowJAX, whose function has the loop."""

import jax.numpy as jnp
import jax.random as jr
from flowjax.bijections import RationalQuadraticSpline
from flowjax.distributions import Normal
from flowjax.flows import masked_autoregressive_flow
from flowjax.train import fit_to_data


def two_moons(key, n):
    k_angle, k_noise = jr.split(key)
    angle = jr.uniform(k_angle, (n,), maxval=jnp.pi)
    upper = jnp.stack([jnp.cos(angle), jnp.sin(angle)], 1)
    lower = jnp.stack([1 - jnp.cos(angle), 0.5 - jnp.sin(angle)], 1)
    moons = jnp.where(jnp.arange(n)[:, None] % 2 == 0, upper, lower)
    return moons + 0.05 * jr.normal(k_noise, (n, 2))


k_data, k_flow, k_train = jr.split(jr.key(0), 3)
flow = masked_autoregressive_flow(
    k_flow,
    base_dist=Normal(jnp.zeros(2)),
    transformer=RationalQuadraticSpline(knots=8, interval=4),
    flow_layers=4,
    nn_width=64,
)
data = two_moons(k_data, 1_000)
flow, losses = fit_to_data(
    k_train, flow, data, learning_rate=3e-3, max_epochs=4, batch_size=100, show_progress=False
)
for epoch, loss in enumerate(losses["train"]):
    print(f"epoch {epoch} loss {loss}")
print(f"held-out loss {-jnp.mean(flow.log_prob(two_moons(jr.key(9), 500)))}")
