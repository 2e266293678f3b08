"""Taylor mode, which knows no custom derivatives: autocast then writes the program plainly."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.jet import jet
from measure import run
from programs import W, layer_norm
from support import HALVES, assert_near, cast, found, normal, thorough_but

X = normal(1, 8, 8)
FUNCTIONS = {
    "mlp": lambda x: jnp.tanh(x @ W + W[0]) @ W,
    "softmax": lambda x: jax.nn.softmax(x @ W) @ W,
    "attention": lambda x: jax.nn.softmax((x @ W) @ x.T / 3) @ x,
    "gelu": lambda x: jax.nn.gelu(x @ W) @ W,
    "norm": lambda x: layer_norm(x @ W) @ W,
    "loss": lambda x: jnp.mean(jax.nn.logsumexp(x @ W, -1)),
    "rows": lambda x: jnp.tanh(x[jnp.asarray([2, 0, 1])] @ W) @ W,
    "pick": lambda x: jnp.take_along_axis(x @ W, jnp.arange(8)[:, None] % 5, 1),
}


def taylor(fun):
    return lambda x: jet(fun, (x,), ((jnp.ones_like(x), jnp.zeros_like(x)),))


PAIRS = [(half, name) for half in HALVES for name in FUNCTIONS]
QUICK = [(HALVES[i % 2], name) for i, name in enumerate(FUNCTIONS)]


@pytest.mark.parametrize(("half", "name"), thorough_but(PAIRS, *QUICK))
def test_taylor_series_of_an_autocast_function_matches_float32(name, half):
    fun = FUNCTIONS[name]
    auto = taylor(cast(fun, half))
    assert_near(run(auto, X), run(taylor(fun), X), 0.03)
    assert all(set(dtypes) == {half} for _, dtypes, _ in found(auto, X))


def test_taylor_mode_within_other_transformations_matches_float32():
    fun = FUNCTIONS["mlp"]
    for around in (
        lambda f: jax.vmap(lambda x: taylor(f)(x)),
        lambda f: taylor(jax.vmap(f)),
        lambda f: jax.grad(lambda x: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(taylor(f)(x)))),
        lambda f: taylor(jax.grad(lambda x: jnp.sum(f(x)))),
    ):
        assert_near(run(around(cast(fun)), X), run(around(fun), X), 0.05)
