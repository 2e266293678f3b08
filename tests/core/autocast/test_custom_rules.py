"""Functions with rules of their own: what their rules are given under autocast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.custom_derivatives import SymbolicZero
from measure import run
from programs import W, X
from support import HALVES, assert_near, cast, found, full_matmuls, normal, thorough_but

import mpjax


def ruled(count, *given):
    """Returns ``tanh(x @ w)``, whose backward rule branches on residuals that are no arrays."""

    def run(w, x, *_):
        return jnp.tanh(x @ w)

    def fwd(w, x, *operands):
        y = run(w, x)
        kept = operands or (True, count, 0.5)
        return y, (w, x, y, kept)

    def bwd(res, ct):
        w, x, y, (flag, count, half, *steps) = res
        assert float(half) == 0.5
        assert all(array[-1] == 2 for array in steps)
        if flag:
            for _ in range(count):
                ct = ct / count
        d = ct * (1 - y**2)
        return x.T @ d, d @ w.T, *[None] * len(given)

    call = jax.custom_vjp(run)
    call.defvjp(fwd, bwd)
    return lambda w, x: call(w, x, *given)


def in_scan(fun):
    return lambda w, x: lax.scan(lambda c, _: (fun(w, c), None), x, None, length=2)[0]


WAYS = {
    "plain": lambda fun: jax.grad(fun, (0, 1)),
    "jit of grad": lambda fun: jax.jit(jax.grad(fun, (0, 1))),
    "grad of jit": lambda fun: jax.grad(jax.jit(fun), (0, 1)),
    "remat": lambda fun: jax.grad(jax.checkpoint(fun), (0, 1)),
    "vmap": lambda fun: jax.vmap(
        jax.grad(lambda w, x: fun(w, jnp.stack([x] * 8)), (0, 1)), (None, 0)
    ),
}


AROUND = {"alone": lambda fun: fun, "scan": in_scan}
PAIRS = [(around, way) for around in AROUND for way in WAYS]


@pytest.mark.parametrize(("around", "way"), thorough_but(PAIRS, 0, 2, 4, 6, 8))
def test_custom_vjp_residuals_that_are_python_values_come_back_unchanged(way, around):
    fun = AROUND[around](ruled(3))
    loss = lambda w, x: jnp.sum(fun(w, x) ** 2)  # noqa: E731
    auto = WAYS[way](cast(loss))
    assert_near(*run(lambda *args: (auto(*args), WAYS[way](loss)(*args)), W, X), 0.03)
    assert not full_matmuls(auto, W, X)


def test_custom_vmap_rule_runs_under_the_policy():
    @jax.custom_batching.custom_vmap
    def fun(x):
        return jnp.tanh(x @ W)

    @fun.def_vmap
    def rule(size, batched, x):
        return jnp.sin(x @ W), True

    each, x = jax.vmap(cast(lambda x: fun(x))), normal(2, 3, 4, 8)
    assert {row[1] for row in found(each, x)} == {("bfloat16", "bfloat16")}
    assert_near(*run(lambda x: (each(x), jnp.sin(x @ W)), x), 0.02)


def test_custom_vjp_operands_that_are_python_values_come_back_unchanged():
    fun = ruled(3, True, 3, 0.5, np.arange(3))
    loss = lambda w, x: jnp.sum(fun(w, x) ** 2)  # noqa: E731
    for way in (jax.grad, lambda f: jax.jit(jax.grad(f))):
        assert_near(
            *run(lambda *args, way=way: (way(cast(loss))(*args), way(loss)(*args)), W, X), 0.03
        )


def test_backward_rule_repeats_the_decisions_of_its_adaptive_solver():
    """An adaptive solver: how many steps, and which were accepted, hangs on float32 comparisons."""
    limit = float(jnp.linalg.norm(X @ W)) * 0.5**4 * (1 + 1e-6)

    def error(w, x, n):
        return jnp.linalg.norm(x @ w) * 0.5**n

    @jax.custom_vjp
    def solve(w, x):
        loops = lax.while_loop(
            lambda c: c[1] > limit, lambda c: (c[0] + 1, error(w, x, c[0] + 1)), (0, jnp.inf)
        )
        return jnp.tanh(x @ w) * loops[0]

    def bwd(res, ct):
        w, x = res

        def step(total, n):
            accepted = error(w, x, n) <= limit
            return jnp.where(accepted & (total == 0), n, total), None

        n, _ = lax.scan(step, jnp.float32(0), jnp.arange(9.0))
        return jax.vjp(lambda w, x: jnp.tanh(x @ w) * n, w, x)[1](ct)

    solve.defvjp(lambda w, x: (solve(w, x), (w, x)), bwd)
    loss = lambda w, x: jnp.sum(solve(w, x))  # noqa: E731
    want, *found = jax.jit(
        lambda *args: [
            jax.value_and_grad(f, (0, 1))(*args) for f in (loss, *(cast(loss, h) for h in HALVES))
        ]
    )(W, X)
    for got in found:
        assert_near(got, want, 1e-5)
    short = mpjax.explain(loss, "mixed_bfloat16")(W, X).shortfalls()
    assert "custom_vjp_call" in {row.primitive for row in short}


def test_custom_vjp_rule_is_told_of_symbolic_zero_cotangents():
    @jax.custom_vjp
    def f(x, w):
        return jnp.tanh(x @ w), jnp.sum(x)

    def fwd(x, w):
        return f(x.value, w.value), (x.value, w.value)

    def bwd(saved, cts):
        x, w = saved
        assert isinstance(cts[1], SymbolicZero), "nobody differentiates the sum"
        ct = cts[0] * (1 - jnp.tanh(x @ w) ** 2)
        return ct @ w.T, x.T @ ct

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    x, w = normal(1, 4, 8), normal(2, 8, 8)
    auto = mpjax.autocast(lambda x, w: jnp.sum(f(x, w)[0] ** 2), "mixed_bfloat16")
    for got, want in zip(
        run(jax.grad(auto, (0, 1)), x, w),
        run(jax.grad(lambda x, w: jnp.sum(jnp.tanh(x @ w) ** 2), (0, 1)), x, w),
        strict=True,
    ):
        assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)
    assert not full_matmuls(jax.grad(auto, (0, 1)), x, w)
    with pytest.raises(AssertionError, match="nobody differentiates"):
        jax.eval_shape(jax.grad(mpjax.autocast(lambda x, w: f(x, w)[1], "mixed_bfloat16")), x, w)


def is_number(x):
    return isinstance(x, float | np.generic | np.ndarray)


@pytest.mark.parametrize(
    "policy",
    thorough_but(["float32", "mixed_bfloat16", "mixed_float16"], "float32", "mixed_float16"),
)
@pytest.mark.parametrize("number", [2.0, np.float64(2), np.float32(2)])
def test_custom_vjp_rule_gets_a_differentiated_number_as_an_array(policy, number):
    """A rule may take numbers for settings that have no gradient, and arrays for the others."""
    seen = []

    @jax.custom_vjp
    def solve(y, rate, setting):
        return setting * jnp.sum(y * jnp.exp(rate))

    def bwd(res, ct):
        y, rate, setting = res
        seen.append(type(setting))
        scaled = setting * ct * jnp.exp(rate)
        return y * 0 + scaled, 0.0 if is_number(rate) else jnp.sum(y) * scaled, None

    solve.defvjp(lambda *args: (solve(*args), args), bwd)
    grads = [
        jax.grad(around(lambda rate: solve(X[0], rate, number)))(number)
        for around in (jax.jit, lambda f: mpjax.autocast(f, policy))
    ]
    np.testing.assert_allclose(*grads, rtol=0.02)
    assert float(grads[0]) and len({*seen}) == 1


def product(x):
    return jnp.sum((W * x) @ W)


forward, backward = jax.custom_jvp(product), jax.custom_vjp(product)
forward.defjvp(functools.partial(jax.jvp, product))
backward.defvjp(lambda x: (product(x), x), lambda x, ct: jax.vjp(product, x)[1](ct))


@pytest.mark.parametrize("x", [0.5, np.float32(0.5)])
@pytest.mark.parametrize(("fun", "rule"), [(forward, jax.jvp), (backward, jax.vjp)])
def test_a_tangent_or_cotangent_may_be_a_number(fun, rule, x):
    def derivatives(fun):
        if rule is jax.vjp:
            return jax.vjp(fun, x)[1](1.0)
        return jax.jvp(fun, (x,), (1.0,)), jax.linearize(fun, x)[1](1.0)

    got, want = map(derivatives, (mpjax.autocast(fun, "mixed_bfloat16"), fun))
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.02)


def solver(matrix):
    """Returns ``matrix @ x`` with a rule that closes over the matrix."""
    solve = jax.custom_vjp(lambda x: matrix @ x)
    solve.defvjp(lambda x: (matrix @ x, None), lambda _, ct: (matrix.T @ ct,))
    return solve


@pytest.mark.parametrize("jitted", [False, True])
def test_a_rule_that_closes_over_an_array_may_be_evaluated_from_its_jaxpr(jitted):
    matrix, x = normal(1, 8, 8), normal(2, 8, 2)
    written = jax.make_jaxpr(jax.jit(solver(matrix)) if jitted else solver(matrix))(x)
    loss = lambda x: jnp.sum(jnp.sin(jax.core.eval_jaxpr(written.jaxpr, written.consts, x)[0]))  # noqa: E731
    assert_near(*run(lambda x: (jax.grad(cast(loss))(x), jax.grad(loss)(x)), x), 0.02)
    assert not full_matmuls(jax.grad(cast(loss)), x)


def test_gradient_of_an_array_that_a_custom_vjp_rule_closes_over_raises():
    written = jax.make_jaxpr(solver(normal(1, 4, 4)))(X[:4])
    loss = lambda m: jnp.sum(jax.core.eval_jaxpr(written.jaxpr, [m], X[:4])[0])  # noqa: E731

    def unseen(m):  # the rules do not read it
        solve = jax.custom_vjp(lambda x: jnp.sum(m) * x)
        solve.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
        return jnp.sum(solve(X))

    for fun in (loss, unseen):
        for around in (jax.jit, cast):
            with pytest.raises(Exception, match="closed-over value"):
                jax.grad(around(fun))(normal(1, 4, 4))


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.checkpoint])
def test_a_rule_that_does_not_read_its_cotangent_keeps_its_gradient(wrapped):
    @jax.custom_vjp
    def loss(x):
        return jnp.sum(x)

    loss.defvjp(lambda x: (jnp.sum(x), x), lambda x, ct: (jnp.cos(x),))
    fun = wrapped(lambda w, x: loss(jnp.tanh(x @ w)))
    both = jax.grad(cast(fun)), jax.grad(fun)
    assert_near(*(jax.jit(f)(W, X) for f in both), 0.02)
