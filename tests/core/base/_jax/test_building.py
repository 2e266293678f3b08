"""Jaxprs and equations of loops, built from parts as JAX would build them."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building, held


def test_a_jaxpr_of_parts():
    program = jax.make_jaxpr(lambda x: jnp.sin(x) * jnp.arange(3.0))(2.0)
    inner, consts = _jax.open_jaxpr(program)
    constants = dict(zip(inner.constvars, consts, strict=True))
    info = building.anonymous(program)
    again = building.jaxpr_of(constants, inner.invars, inner.outvars, inner.eqns, info)
    np.testing.assert_allclose(_jax.eval_closed(again, 2.0)[0], np.sin(2) * np.arange(3), rtol=1e-6)


def test_a_scan_with_another_body():
    def fun(x, xs):
        return lax.scan(lambda c, a: (c + a, c * a), x, xs)

    (eqn,) = jax.make_jaxpr(fun)(1.0, jnp.ones(3)).eqns

    def body(k, c, a):
        return [c + k * a, c, a]

    new = jax.make_jaxpr(body)(2.0, 1.0, 1.0)
    params = building.scan_of(eqn.params, new, 1, 1, 1)
    assert _jax.scan_counts(params) == (1, 1)
    outs = eqn.primitive.bind(2.0, 1.0, jnp.arange(3.0), **params)
    assert [np.asarray(x).tolist() for x in outs] == [7.0, [1.0, 1.0, 3.0], [0.0, 1.0, 2.0]]


def test_types():
    aval = jax.typeof(jnp.ones((2, 3)))
    assert building.stacked_aval(5, aval).shape == (5, 2, 3)
    zeros = _jax.zeros_of(aval)
    assert zeros.shape == (2, 3) and not zeros.any()
    assert held.is_inexact(aval) and not held.is_inexact(jax.typeof(jnp.arange(3)))


def test_what_acts():
    def fun(x):
        jax.debug.callback(lambda x: None, x)
        return jnp.sin(x)

    eqns = jax.make_jaxpr(fun)(1.0).eqns
    assert [building.acts(e.effects) for e in eqns] == [True, False]
    assert not building.blank().invars
