"""Programs under autocast run, with half in every matmul, close to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import PROGRAMS, W, X
from support import BOTH, HALVES, assert_near, cast, found, full_matmuls, normal


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, half):
    fun = PROGRAMS[name]
    auto = cast(fun, half)
    tolerance = 0.05 if half == "bfloat16" else 0.01
    assert not full_matmuls(auto, W, X)
    assert not full_matmuls(BOTH(auto), W, X)
    assert len(found(auto, W, X)) == len(found(fun, W, X))
    assert jax.eval_shape(auto, W, X) == jax.eval_shape(fun, W, X)
    assert_near(jax.jit(BOTH(auto))(W, X), jax.jit(BOTH(fun))(W, X), tolerance)


@pytest.mark.parametrize("name", ["mlp", "attention", "custom_jvp", "rnn", "layers", "conditional"])
def test_transformations_around(name):
    fun = PROGRAMS[name]

    @jax.jit
    def run(w, x):
        def each(f):
            return (
                f(w, x),
                jax.vmap(f, (None, 0))(w, x[:, None]),
                jax.grad(jax.checkpoint(f))(w, x),
                jax.jvp(f, (w, x), (w, x))[1],
            )

        return each(cast(fun)), each(fun)

    assert_near(*run(W, X), 0.05)


def test_hessian():
    def fun(x):
        return jnp.sum(jax.nn.logsumexp(jnp.tanh(x @ W) @ W, -1))

    want = jax.jit(jax.hessian(fun))(X[:2])
    assert_near(jax.jit(jax.hessian(cast(fun)))(X[:2]), want, 0.1)


def test_while_counts_in_half_and_solves_in_float32():
    def counted(w, x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[
            1
        ]

    assert [row[1] for row in found(cast(counted), W, X)] == [("bfloat16", "bfloat16")]

    def solved(w, x):
        def unfinished(c):
            return jnp.max(jnp.abs(c[0] - c[1])) > 1e-6

        return lax.while_loop(unfinished, lambda c: (0.2 * c[0] @ w + x, c[0]), (x, x + 1))[0]

    np.testing.assert_allclose(cast(solved)(W, X), solved(W, X), rtol=1e-5)


def test_while_whose_condition_computes_the_residual_ends():
    """Else a matmul in half keeps it from its tolerance: without the cap it would run for ever."""
    matrix, b = jnp.eye(8) + W[:8, :8] @ W[:8, :8].T / 8, X[0, :8]

    def solve(matrix, b):
        def unfinished(c):
            return (jnp.linalg.norm(b - matrix @ c[0]) > 1e-4) & (c[1] < 500)

        def turn(c):
            return c[0] + 0.2 * (b - matrix @ c[0]), c[1] + 1

        return lax.while_loop(unfinished, turn, (jnp.zeros_like(b), 0))

    (x, turns), (want, wanted) = cast(solve)(matrix, b), solve(matrix, b)
    assert turns == wanted < 500
    np.testing.assert_allclose(x, want, rtol=1e-5)


def test_a_scaled_transpose_before_a_matmul_that_accumulates_in_float32():
    """XLA:CPU moves both behind the matmul, and then finds no kernel for it."""
    scale, x = jnp.float32(0.3), normal(0, 16, 5)
    for fun in (
        lambda s, x: jnp.exp((s * x.T) @ x),
        lambda s, x: jnp.exp((s * jnp.tanh(x @ x.T @ x).T) @ x),
    ):
        assert_near(jax.jit(cast(fun))(scale, x), fun(scale, x))
