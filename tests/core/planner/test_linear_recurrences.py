"""Linear recurrences that associative scans compute: their derivatives read factors and results."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.jet import jet
from joint import EXACT, planned
from planners import kept, sound
from support import assert_near, equations, normal, thorough_but

TURNS, WIDTH = 13, 48
X = normal(0, TURNS, WIDTH)
V = normal(1, WIDTH, WIDTH, scale=0.3)


def then(first, second):
    return first[0] * second[0], second[0] * first[1] + second[1]


def otherwise(first, second):
    (a, b), (c, d) = first, second
    return c * a, d + b * c


def scanned(x, then=then, **options):
    a, b = jnp.exp(-(x**2)), jnp.sin(x)
    return lax.associative_scan(then, (a, b), **options)


def state(x, **options):
    return scanned(x, **options)[1]


STATES = {
    "first axis": state,
    "other order": functools.partial(state, then=otherwise),
    "last axis": functools.partial(state, axis=1),
    "reverse": functools.partial(state, reverse=True),
    "vmap": lambda x: jax.vmap(lambda x: state(x, axis=1))(jnp.stack([x, 2 * x])),
    "jit": jax.jit(state),
    "checkpoint": jax.checkpoint(state),
    "loop": lambda x: lax.scan(lambda c, s: (state(c * s), s), x, jnp.arange(3.0))[0],
    "branch": lambda x: lax.cond(x[0, 0] > 9, lambda x: x, state, x),
    "of one": lambda x: state(state(x)),
    "both results": lambda x: sum(scanned(x)),
}
FOUND = [name for name in STATES if name != "both results"]


def of(state):
    return lambda v, x: jnp.sum(jnp.tanh(state(x @ v) @ v))


def of_one(state):
    return lambda x: jnp.sum(jnp.sin(state(x)))


def interleaved(fun, *args):
    """Returns how often a program puts the entries of arrays in turns."""
    pads = (e for e in equations(jax.make_jaxpr(fun)(*args)) if e.primitive.name == "pad")
    return sum(any(gap for *_, gap in e.params["padding_config"]) for e in pads)


@pytest.mark.parametrize("name", thorough_but(STATES, "other order", "reverse", "both results"))
def test_gradients_are_jax_s(name):
    fun = of_one(STATES[name])
    ours = jax.jit(jax.value_and_grad(planned(fun, EXACT)))
    assert_near(ours(X), jax.jit(jax.value_and_grad(fun))(X), rtol=1e-4)


@pytest.mark.parametrize("name", thorough_but(["first axis", "reverse", "loop"], "first axis"))
@pytest.mark.parametrize("half", thorough_but(["bfloat16", "float16"], "float16"))
def test_rounded_results_are_as_accurate(name, half):
    wrong = sound(of(STATES[name]), (V, X), half, (0, 1))
    assert not wrong, wrong


@pytest.mark.parametrize("name", FOUND)
def test_the_derivative_is_a_recurrence(name):
    """What JAX writes for the levels is what the forward pass runs."""
    fun = of_one(STATES[name])
    assert not interleaved(jax.grad(planned(fun, EXACT)), X)
    assert interleaved(fun, X)


def test_the_results_alone_are_kept():
    assert kept(planned(of_one(state), EXACT), (X,), (0,)) <= 4 * X.size
    assert kept(of_one(state), (X,), (0,)) >= 12 * X.size


@pytest.mark.parametrize("plain", [jnp.add, jnp.maximum, lambda a, b: a * b + a])
def test_other_scans_stay(plain):
    fun = of_one(lambda x: lax.associative_scan(plain, x))
    ours = jax.jit(jax.value_and_grad(planned(fun, EXACT)))
    assert interleaved(planned(fun, EXACT), X)
    assert_near(ours(X), jax.jit(jax.value_and_grad(fun))(X), rtol=1e-4)


def test_second_derivatives():
    fun = lambda x: jnp.sum(jax.grad(planned(of_one(state), EXACT))(x) ** 2)  # noqa: E731
    want = lambda x: jnp.sum(jax.grad(of_one(state))(x) ** 2)  # noqa: E731
    assert_near(*jax.jit(lambda x: (jax.grad(fun)(x), jax.grad(want)(x)))(X), rtol=1e-3)


def test_taylor_series_of_a_gradient():
    def series(fun):
        return jax.jit(lambda x: jet(jax.grad(fun), (x,), ((x, 0 * x),)))(X)

    assert_near(series(planned(of_one(state), EXACT)), series(of_one(state)), rtol=1e-4)


@pytest.mark.parametrize("half", thorough_but(["bfloat16", "float16"], "bfloat16"))
def test_the_derivative_reads_what_matmuls_alone_read_in_16_bits(half):
    def read_by_a_matmul(v, x):
        return jnp.sum(jnp.tanh(state(x @ v) @ v))

    def read_beside(v, x):
        h = state(x @ v)
        return jnp.sum(jnp.tanh(h @ v)) + jnp.sum(h**2)

    for fun, dtype in ((read_by_a_matmul, half), (read_beside, "float32")):
        _, backward = jax.vjp(planned(fun, half), V, X)
        jaxpr = jax.make_jaxpr(backward)(jnp.float32(1))
        moved = [e for e in equations(jaxpr) if e.primitive.name == "concatenate"]
        assert moved
        kept_arrays = [x for x in jax.tree.leaves(backward) if isinstance(x, jax.Array)]
        found = {str(x.dtype) for x in kept_arrays if x.shape == X.shape and _is_state(x)}
        assert dtype in found and (dtype == "float32" or "float32" not in found)


def _is_state(x):
    return bool(jnp.allclose(jnp.asarray(x, jnp.float32), state(X @ V), rtol=0.05, atol=0.05))


@pytest.mark.parametrize("half", thorough_but(["bfloat16", "float16"], "float16"))
def test_rounded_states_are_as_accurate_in_long_recurrences(half):
    def fun(v, x):
        x = jnp.tile(x, (16, 1)) @ v
        h = scanned(x / 4)[1]  # factors near one: states of many turns
        return jnp.sum(jnp.tanh(h @ v))

    assert not sound(fun, (V, X), half)
