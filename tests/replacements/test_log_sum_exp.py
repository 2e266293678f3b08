"""The maximum and the sum of exponentials in one pass, as losses by blocks have them on GPUs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import assert_near, normal

from mpjax._src.core.base import _jax
from mpjax._src.replacements.derivatives import log_sum_exp

LONG = 1100


@pytest.fixture(autouse=True)
def one_pass(monkeypatch):
    """Runs here what a GPU would run."""
    monkeypatch.setattr(_jax, "GPUS", ("cpu",))


ODD = {
    "nothing": [-np.inf] * 3,
    "one": [-np.inf, 2.0, -np.inf],
    "infinite": [1.0, np.inf, -np.inf],
    "no number": [1.0, np.nan, np.inf],
    "all that float32 holds": [3e38, -3e38, 0.0],
    "far apart": [200.0, 0.0, -200.0],
}


@pytest.mark.parametrize("name", ODD)
def test_of_nonfinite_rows_it_is_jax_s(name):
    row = jnp.asarray(ODD[name] * 400)
    np.testing.assert_allclose(jax.jit(log_sum_exp)(row), jax.nn.logsumexp(row), rtol=1e-6)


def test_one_pass_is_as_exact_as_two(rng):
    x = np.asarray(rng.normal(0, 10, (16, 50_000)), np.float32)
    exact = np.log(np.sum(np.exp(x.astype(np.float64)), -1))
    np.testing.assert_allclose(jax.jit(log_sum_exp)(x), exact, rtol=2e-6)


def test_derivatives_of_one_pass_are_jax_s():
    x, direction = normal(0, 4, LONG, scale=3.0), normal(1, 4, LONG)

    def derived(fun):
        gradient = jax.grad(lambda x: jnp.sum(jnp.sin(fun(x))))
        return jax.jvp(fun, (x,), (direction,)), jax.jvp(gradient, (x,), (direction,))

    want, got = (
        jax.jit(lambda f=f: derived(f))() for f in (lambda x: jax.nn.logsumexp(x, -1), log_sum_exp)
    )
    assert_near(got, want, 1e-4)


def test_in_taylor_mode_what_is_written_is_derived():
    def taylor(fun):
        return jet(lambda x: fun(x * jnp.arange(1.0, LONG + 1) / LONG), (0.5,), ((1.0, 0.0),))

    want, got = (jax.jit(lambda f=f: taylor(f))() for f in (jax.nn.logsumexp, log_sum_exp))
    assert_near(got, want, 1e-4)


def test_shards_of_a_row_are_joined_without_a_gather():
    mesh = jax.make_mesh((2,), ("vocabulary",), axis_types=(AxisType.Auto,))
    x = jax.device_put(normal(2, 4, LONG), NamedSharding(mesh, P(None, "vocabulary")))
    compiled = jax.jit(jax.value_and_grad(lambda x: jnp.sum(log_sum_exp(x)))).lower(x).compile()
    gathers = [line for line in compiled.as_text().splitlines() if " all-gather(" in line]
    assert not any(str(LONG) in line.split("all-gather(")[0] for line in gathers), gathers
    np.testing.assert_allclose(compiled(x)[0], jnp.sum(jax.nn.logsumexp(x, -1)), rtol=1e-5)
