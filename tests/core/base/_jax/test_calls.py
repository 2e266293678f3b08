"""Contract: what `calls.linearized_once` and `_jax.eval_once` assume about JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import ad
from support import thorough_but

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import calls

X = jnp.linspace(0.1, 1.0, 4)
RULES_RUN = []


@jax.custom_jvp
def sine(x):
    return jnp.sin(x)


@sine.defjvp
def _(primals, tangents):
    RULES_RUN.append(True)
    return sine(*primals), tangents[0] * jnp.cos(primals[0])


def body(x, n):
    y = jax.checkpoint(lambda x: jnp.tanh(sine(x)) * 2)(x)
    return [y, jnp.exp(y) * n, n + 1]


def once():
    avals = [jax.typeof(X), jax.typeof(jnp.int32(0))]
    return calls.linearized_once(_jax.trace(body, avals, "body"))


def thrice(body):
    def fun(x):
        n = jnp.int32(1)
        for _ in range(3):
            x, y, n = body(x, n)
            x = x + y
        return jnp.sum(x)

    return fun


USES = {
    "gradient": jax.grad,
    "jit": lambda f: jax.jit(jax.grad(f)),
    "value": lambda f: f,
    "tangent": lambda f: lambda x: jax.jvp(f, (x,), (x,)),
    "vmap": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "under vmap": lambda f: lambda x: jax.grad(lambda x: jnp.sum(jax.vmap(f)(x)))(x[None]),
    "curvature": jax.hessian,
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.mark.parametrize("use", thorough_but(USES, "gradient", "value", "under vmap", "remat"))
def test_linearized_once_leaves_nothing_but_equations(use):
    got, want = (USES[use](thrice(f)) for f in (once(), body))
    for g, w in zip(jax.tree.leaves(got(X)), jax.tree.leaves(want(X)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5)
    text = str(jax.make_jaxpr(got)(X))
    assert "inlined" not in text and text.count("tanh") <= str(jax.make_jaxpr(want)(X)).count(
        "tanh"
    )


def test_linearized_once_runs_a_rule_once_for_several_calls():
    fun = thrice(once())
    RULES_RUN.clear()
    jax.make_jaxpr(jax.grad(fun))(X)
    assert len(RULES_RUN) == 1
    jax.make_jaxpr(jax.grad(thrice(body)))(X)
    assert len(RULES_RUN) > 1


def test_linearized_once_differentiates_closed_over_values():
    def fun(scale):
        jaxpr = _jax.trace(lambda x: [x * scale], [jax.typeof(X)], "body")
        return jnp.sum(calls.linearized_once(jaxpr)(X)[0])

    assert jax.grad(fun)(2.0) == pytest.approx(float(jnp.sum(X)))


def test_equal_equations_are_linearized_once(monkeypatch):
    called, rule = [], ad.primitive_jvps[jax.lax.split_p]

    def counting(primals, tangents, **params):
        called.append([type(t) is ad.Zero for t in tangents])
        return rule(primals, tangents, **params)

    monkeypatch.setitem(ad.primitive_jvps, jax.lax.split_p, counting)

    def fun(x):
        for _ in range(3):
            x = jnp.concatenate([jnp.sin(jax.lax.split(x, (2, 2))[0])] * 2)
        return [jnp.sum(x)]

    jaxpr = _jax.trace(fun, [jax.typeof(X)], "fun")
    got = jax.grad(lambda x: _jax.eval_once(jaxpr, x)[0])(X)
    assert called == [[False]]
    np.testing.assert_allclose(got, jax.grad(lambda x: fun(x)[0])(X), rtol=1e-6)
