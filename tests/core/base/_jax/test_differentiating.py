"""The functions of JAX that differentiate, and those that call custom rules, are known."""

import inspect

import jax
import jax.numpy as jnp

from mpjax._src.core.base import _jax


def in_rule():
    return _jax.in_custom_rule(inspect.currentframe())


def test_rules_are_told_from_their_functions():
    seen = {}

    @jax.custom_vjp
    def f(x):
        seen.setdefault("vjp", in_rule())
        return x

    def forward(x):
        seen["forward"] = in_rule()
        return x, None

    def backward(_, ct):
        seen["backward"] = in_rule()
        return (ct,)

    f.defvjp(forward, backward)

    @jax.custom_jvp
    def g(x):
        seen.setdefault("jvp", in_rule())
        return x

    @g.defjvp
    def _(primals, tangents):
        seen["tangent"] = in_rule()
        return primals[0], tangents[0]

    f(1.0), g(1.0), jax.grad(f)(1.0), jax.jit(jax.grad(g))(1.0)
    assert seen == {"vjp": False, "jvp": False, "forward": True, "backward": True, "tangent": True}


def test_derivatives_know_their_functions():
    def loss(x):
        return jnp.sum(x**2)

    made = [jax.grad(loss), jax.jacrev(loss)]
    for transform in (jax.value_and_grad, jax.jacrev):
        assert loss in [*_jax.gradients_of([transform])]
    assert made and not [*_jax.gradients_of([print])]
