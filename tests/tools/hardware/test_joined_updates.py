"""Updates of small parameters, in steps that are compiled for an absent H100.

The suite `benchmarks.tried` has whole models; these have some matmuls with biases.
"""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from absent import compiles, shape

import mpjax
from mpjax._src.core.base import trees


def kernels(count):
    """Returns the number of kernels of a step with so many biases."""
    biases = {f"bias{i}": shape(512) for i in range(count)}

    def loss(params, x):
        for i in range(count):
            x = jnp.tanh(x @ params["weights"][i] + params[f"bias{i}"])
        return jnp.mean(x**2)

    init, step = mpjax.build_train_step(loss, optax.sgd(0.1, momentum=0.9), "mixed_bfloat16")
    state = jax.eval_shape(init, {"weights": shape(count, 512, 512), **biases})
    report = mpjax.compile_for("h100", jax.jit(step, donate_argnums=0), state, shape(512, 512))
    return sum(row.runs for row in report.kernels)


@pytest.mark.thorough
@compiles("h100")
@pytest.mark.parametrize(("count", "saved"), [(1, -1), (3, 1)])
def test_joined_updates_of_n_parameters_take_n_less_two_fewer_kernels(monkeypatch, count, saved):
    """With momentum, a parameter is two arrays: three are joined, and one is not."""
    as_it_is = kernels(count)
    monkeypatch.setattr(trees, "SEVERAL", 1)
    joined = kernels(count)
    monkeypatch.setattr(trees, "SEVERAL", math.inf)
    assert kernels(count) - joined == saved
    assert as_it_is == min(joined, joined + saved)
