"""Programs under autocast run, with half in every matmul, close to float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from measure import run
from programs import PROGRAMS, W, X
from roundings import backward_pass, needless
from support import (
    BOTH,
    HALVES,
    assert_near,
    cast,
    equations,
    found,
    full_matmuls,
    normal,
    thorough_but,
)

# Each program is tried in one 16-bit dtype here, in the other one in the thorough tier.
PAIRS = [(name, half) for name in PROGRAMS for half in HALVES]
QUICK = [(name, HALVES[i % 2]) for i, name in enumerate(PROGRAMS) if i % 4 in (0, 3)]
COMPILED = ("shard_mapped", "pmapped", "references")  # they cannot run operation by operation


def check_gradients(name, half, compiled):
    auto, fun = BOTH(cast(PROGRAMS[name], half)), BOTH(PROGRAMS[name])
    both = lambda *args: (auto(*args), fun(*args))  # noqa: E731
    tolerance = 0.05 if half == "bfloat16" else 0.01
    assert_near(*(jax.jit(both)(W, X) if compiled else run(both, W, X)), tolerance)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "half"), PAIRS)
def test_programs_match_float32_gradients_as_compiled(name, half):
    check_gradients(name, half, True)


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, *QUICK))
def test_programs_have_16_bit_matmuls_and_match_float32_gradients(name, half):
    fun = PROGRAMS[name]
    auto = cast(fun, half)
    assert not full_matmuls(auto, W, X)
    assert not full_matmuls(BOTH(auto), W, X)
    assert len(found(auto, W, X)) <= len(found(fun, W, X))
    assert jax.eval_shape(auto, W, X) == jax.eval_shape(fun, W, X)
    check_gradients(name, half, name in COMPILED)


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, *QUICK[::3]))
def test_no_program_rounds_between_elementwise_operations(name, half):
    auto = cast(PROGRAMS[name], half)
    assert not [*needless(jax.make_jaxpr(auto)(W, X).jaxpr)]
    assert not [*needless(backward_pass(auto, W, X))]


def test_needless_finds_a_rounding_between_elementwise_operations():
    half = jnp.ones((4, 4), jnp.bfloat16)
    assert len([*needless(jax.make_jaxpr(lambda x: jnp.abs(x * 2) @ x)(half).jaxpr)]) == 1


TRANSFORMED = ["mlp", "attention", "custom_jvp", "rnn", "layers", "conditional"]


@pytest.mark.parametrize("name", thorough_but(TRANSFORMED, "custom_jvp", "layers"))
def test_transformations_around_autocast_match_float32(name):
    fun = PROGRAMS[name]

    def both(w, x):
        def each(f):
            return (
                f(w, x),
                jax.vmap(f, (None, 0))(w, x[:, None]),
                jax.grad(jax.checkpoint(f))(w, x),
                jax.jvp(f, (w, x), (w, x))[1],
            )

        return each(cast(fun)), each(fun)

    assert_near(*run(both, W, X), 0.05)


def test_hessian_of_autocast_matches_float32():
    def fun(x):
        return jnp.sum(jax.nn.logsumexp(jnp.tanh(x @ W) @ W, -1))

    got, want = run(lambda x: (jax.hessian(cast(fun))(x), jax.hessian(fun)(x)), X[:2])
    assert_near(got, want, 0.1)


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

    got, want = jax.jit(lambda w, x: (cast(solved)(w, x), solved(w, x)))(W, X)
    np.testing.assert_allclose(got, want, rtol=1e-5)


def test_the_condition_of_a_while_loop_reads_the_dtype_that_is_carried():
    """It read that of the initial value: a condition that looks at its bits did not compile."""

    def signed(w, x):
        def unfinished(c):
            sign = lax.bitcast_convert_type(c[1][0, 0], jnp.uint32) >> 31
            return (c[0] < 3) & (sign < 2)

        return lax.while_loop(unfinished, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]

    program = jax.make_jaxpr(cast(signed))(W, X)
    (loop,) = [eqn for eqn in equations(program) if eqn.primitive.name == "while"]
    condition, body = loop.params["cond_jaxpr"], loop.params["body_jaxpr"]
    carried = [aval.dtype.name for aval in body.in_avals[-2:]]
    assert [aval.dtype.name for aval in condition.in_avals] == carried
    got, want = jax.jit(lambda w, x: (cast(signed)(w, x), signed(w, x)))(W, X)
    np.testing.assert_allclose(got, want, atol=0.05)


def test_while_whose_condition_computes_the_residual_ends():
    """Else a matmul in half keeps it from its tolerance: without the cap it would run for ever."""
    matrix, b = jnp.eye(8) + W[:8, :8] @ W[:8, :8].T / 8, X[0, :8]

    def solve(matrix, b):
        def unfinished(c):
            return (jnp.linalg.norm(b - matrix @ c[0]) > 1e-4) & (c[1] < 500)

        def turn(c):
            return c[0] + 0.2 * (b - matrix @ c[0]), c[1] + 1

        return lax.while_loop(unfinished, turn, (jnp.zeros_like(b), 0))

    both = jax.jit(lambda *args: (cast(solve)(*args), solve(*args)))
    (x, turns), (want, wanted) = both(matrix, b)
    assert turns == wanted < 500
    np.testing.assert_allclose(x, want, rtol=1e-5)


def test_scaled_transpose_before_a_matmul_with_float32_result_runs_on_a_cpu():
    """XLA:CPU moves both behind the matmul, and then finds no kernel for it."""
    scale, x = jnp.float32(0.3), normal(0, 16, 5)
    for fun in (
        lambda s, x: jnp.exp((s * x.T) @ x),
        lambda s, x: jnp.exp((s * jnp.tanh(x @ x.T @ x).T) @ x),
    ):
        assert_near(jax.jit(cast(fun))(scale, x), run(fun, scale, x))
