"""A function that is traced again gets the same program: its gradients are planned once."""

import collections

import jax
import jax.numpy as jnp
import pytest
from support import assert_near, normal, thorough_but

import mpjax
from mpjax._src.core.planner import kept, program

W, X = normal(0, 32, 32, scale=0.2), normal(1, 8, 32)
POLICY = "mixed_bfloat16"
SCALE = 3.0


@pytest.fixture
def plans(monkeypatch):
    """Counts the derivatives that are planned, and the programs that are written."""
    kept._kept.cache_clear()
    counts = collections.Counter()
    whole, written = program._with_gradient, program.written

    def counting(name, fun):
        def run(*args, **kwargs):
            counts[name] += 1
            return fun(*args, **kwargs)

        return run

    monkeypatch.setattr(program, "_with_gradient", counting("derivative", whole))
    monkeypatch.setattr(program, "written", counting("written", written))
    return counts


@jax.custom_vjp
def scaled(x):
    return jnp.sin(x)


scaled.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (SCALE * ct * jnp.cos(x),))


@jax.custom_jvp
def ruled(x):
    return jnp.sin(x)


ruled.defjvps(lambda t, out, x: 2 * t * jnp.cos(x))


def loss(w, x):
    x = jax.nn.gelu(jax.nn.relu(scaled(x @ w)) @ w)
    return jnp.mean(jax.nn.logsumexp(ruled(x), -1) ** 2)


WAYS = {
    "grad": jax.grad,
    "value_and_grad": jax.value_and_grad,
    "by the data": lambda f: jax.grad(f, 1),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda x: f(w, jnp.sin(x @ w)), (x,), (x,)),
    "vjp": lambda f: lambda *args: jax.vjp(f, *args)[1](1.0),
    "linearize": lambda f: lambda *args: jax.linearize(f, *args)[1](*args),
    "vmap": lambda f: jax.vmap(jax.grad(f), (None, 0)),
    "jit": lambda f: lambda *args: jax.jit(jax.grad(f))(*args),
    "checkpoint": lambda f: jax.grad(
        jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable)
    ),
}


@pytest.mark.parametrize("name", thorough_but(WAYS, *range(0, len(WAYS), 2)))
def test_a_second_derivative_of_the_same_plans_nothing(name, plans):
    fun = loss if name != "jvp" else lambda w, x: jnp.sum(jax.nn.gelu(ruled(x @ w)) ** 2)
    run = WAYS[name](mpjax.autocast(fun, POLICY))
    first = run(W, X)
    assert plans["written"]
    plans.clear()
    assert_near(run(W + 0, X + 0), first, rtol=1e-6)
    assert not plans


def test_other_shapes_policies_and_settings_are_planned(plans):
    gradients = [
        lambda: jax.grad(mpjax.autocast(loss, POLICY))(W, X),
        lambda: jax.grad(mpjax.autocast(loss, POLICY))(W, X[:4]),
        lambda: jax.grad(mpjax.autocast(loss, "mixed_float16"))(W, X),
        lambda: jax.grad(mpjax.autocast(loss, POLICY), 1)(W, X),
    ]
    for gradient in gradients:
        plans.clear()
        gradient()
        assert plans["derivative"] == 1
    with jax.default_matmul_precision("highest"):
        plans.clear()
        gradients[0]()
        assert plans["derivative"] == 1
    plans.clear()
    for gradient in gradients:
        gradient()
    assert not plans


def test_a_closed_over_array_has_its_present_value(plans):
    held = {"w": W}
    gradient = jax.grad(mpjax.autocast(lambda x: jnp.sum(jnp.sin(x @ held["w"])), POLICY))
    gradient(X)
    plans.clear()
    held["w"] = 2 * W
    assert_near(gradient(X), jax.grad(lambda x: jnp.sum(jnp.sin(x @ (2 * W))))(X))
    assert not plans


def test_a_number_that_the_function_reads_has_its_present_value():
    held = {"n": 2.0}
    gradient = jax.grad(mpjax.autocast(lambda x: held["n"] * jnp.sum(x @ W), POLICY))
    first = gradient(X)
    held["n"] = 4.0
    assert_near(gradient(X), 2 * first, rtol=1e-6)


def test_what_a_rule_reads_has_its_present_value(monkeypatch):
    gradient = jax.grad(mpjax.autocast(lambda x: jnp.sum(scaled(x)), POLICY))
    first = gradient(X)
    monkeypatch.setitem(globals(), "SCALE", 6.0)
    assert_near(gradient(X), 2 * first, rtol=1e-6)


def test_a_rule_with_another_argument_is_another_one():
    one = jax.custom_vjp(lambda x, s: jnp.sin(x), nondiff_argnums=(1,))
    one.defvjp(lambda x, s: (jnp.sin(x), x), lambda s, x, ct: (s * ct * jnp.cos(x),))
    two = jax.custom_jvp(lambda x, s: jnp.sin(x), nondiff_argnums=(1,))
    two.defjvp(lambda s, x, t: (jnp.sin(x[0]), s * t[0] * jnp.cos(x[0])))
    for fun in (one, two):

        def gradient(s, fun=fun):
            return jax.grad(mpjax.autocast(lambda x: jnp.sum(fun(x, s)), POLICY))(X)

        assert_near(gradient(6.0), 2 * gradient(3.0), rtol=1e-6)


def test_a_rule_that_is_made_anew_is_another_one():
    def with_scale(scale):
        fun = jax.custom_vjp(jnp.sin)
        fun.defvjp(lambda x: (jnp.sin(x), x), lambda x, ct: (scale * ct * jnp.cos(x),))
        return jax.grad(mpjax.autocast(lambda x: jnp.sum(fun(x)), POLICY))

    assert_near(with_scale(6.0)(X), 2 * with_scale(3.0)(X), rtol=1e-6)


def test_a_rule_that_reads_a_traced_value_keeps_nothing():
    def fun(x, s):
        rule = jax.custom_jvp(lambda x: x * 2)
        rule.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0] * 3))
        return jnp.sum(rule(x) * s)

    with jax.checking_leaks():
        jax.jit(lambda x: jax.grad(mpjax.autocast(fun, POLICY))(x, x))(X)
    assert_near(jax.grad(mpjax.autocast(fun, POLICY))(X, X), 3 * X, rtol=1e-6)


def test_clearing_jax_s_caches_clears_the_programs(plans):
    gradient = jax.grad(mpjax.autocast(loss, POLICY))
    gradient(W, X)
    jax.clear_caches()
    plans.clear()
    gradient(W, X)
    assert plans["derivative"] == 1
