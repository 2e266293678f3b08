"""The ways in which JAX runs a function of two matmuls, and in which its lowering is tested."""

import jax
import jax.numpy as jnp
from jax import lax


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w) @ w)


WAYS = {
    "forward": lambda f: f,
    "gradient": jax.grad,
    "vmap": lambda f: jax.vmap(jax.grad(f), (None, 1)),
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "forward mode": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "scan": lambda f: lambda w, x: lax.scan(lambda c, x: (c, jax.grad(f)(w, x)), 0, x)[1],
}
