"""Trains a variational autoencoder of digits with NumPyro's SVI, as its vae.py does."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn
from numpyro import optim
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO

HIDDEN, Z, PIXELS, BATCH, STEPS = 256, 16, 784, 64, 20


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.softplus(nn.Dense(HIDDEN)(x))
        return nn.Dense(Z)(h), jnp.exp(nn.Dense(Z)(h))


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z):
        return nn.sigmoid(nn.Dense(PIXELS)(nn.softplus(nn.Dense(HIDDEN)(z))))


def model(batch):
    decode = flax_module("decoder", Decoder(), input_shape=(BATCH, Z))
    with numpyro.plate("batch", batch.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([Z]).to_event(1))
        numpyro.sample("obs", dist.Bernoulli(decode(z)).to_event(1), obs=batch)


def guide(batch):
    encode = flax_module("encoder", Encoder(), input_shape=(BATCH, PIXELS))
    z_loc, z_std = encode(batch)
    with numpyro.plate("batch", batch.shape[0]):
        return numpyro.sample("z", dist.Normal(z_loc, z_std).to_event(1))


def images(rng):
    """Returns blurred bars, which are as large as MNIST's digits."""
    rows, columns = rng.integers(4, 24, (2, BATCH))
    grid = np.arange(28)
    bars = np.exp(-((grid - rows[:, None]) ** 2) / 8)[:, :, None] + np.zeros((1, 1, 28))
    bars = np.maximum(bars, np.exp(-((grid - columns[:, None]) ** 2) / 8)[:, None, :])
    return (bars.reshape(BATCH, -1) > 0.5).astype(np.float32)


rng = np.random.default_rng(0)
svi = SVI(model, guide, optim.Adam(1e-3), Trace_ELBO())
svi_state = svi.init(jax.random.key(1), images(rng))
update = jax.jit(svi.update)
for step in range(STEPS):
    svi_state, loss = update(svi_state, images(rng))
    print(f"step {step} loss {loss / BATCH}")
