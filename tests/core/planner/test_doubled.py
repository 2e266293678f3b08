"""Special functions that a matmul's operand and cotangents need are computed for each of them."""

import jax
import jax.numpy as jnp
import pytest
from joint import planned
from support import assert_near, equations, normal, thorough_but

X, W, V = normal(0, 64, 16), normal(1, 16, 32), normal(2, 32, 16)


def mlp(act):
    return lambda w, v: jnp.sum((act(X @ w) @ v) ** 2)


def backward(fun, storage):
    """Returns the names of the equations of the backward part of a gradient."""
    run = planned(fun, storage=storage)
    jaxpr = jax.make_jaxpr(jax.grad(run, (0, 1)))(W, V).jaxpr
    *_, back = [e for e in jaxpr.eqns if e.primitive.name == "planned"]
    return [e.primitive.name for e in equations(back.params["jaxpr"])]


ACTIVATIONS = {
    "erfc": lambda x: jax.nn.gelu(x, approximate=False),
    "erf": lambda x: x * jax.lax.erf(x),
    "tanh": lambda x: x * jnp.tanh(x),
    "logistic": lambda x: x * jax.lax.logistic(x),
}


@pytest.mark.parametrize("name", thorough_but(ACTIVATIONS, *range(0, len(ACTIVATIONS), 2)))
def test_a_dear_value_is_computed_for_the_matmul_and_beside_cotangents(name):
    fun = mlp(ACTIVATIONS[name])
    names = backward(fun, "lean")
    assert names.count(name) == 2
    found = jax.grad(planned(fun, storage="lean"), (0, 1))(W, V)
    assert_near(found, jax.grad(fun, (0, 1))(W, V), rtol=0.02)


def test_a_cheap_value_is_computed_once():
    names = backward(mlp(lambda x: x * jnp.abs(x)), "lean")
    assert names.count("abs") == 1


def test_a_gate_of_two_arrays_is_computed_once():
    def fun(w, v):
        a, b = X @ w, X @ w[::-1]
        return jnp.sum(((jax.lax.logistic(a) * b) @ v) ** 2)

    assert backward(fun, "lean").count("logistic") == 1
