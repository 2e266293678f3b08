"""Contract: how JAX rounds constants and casts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mpjax._src.core.base import _jax


def traced(fun, *args):
    with _jax.casts_of_numbers():
        return jax.make_jaxpr(fun)(*args)


def numbers(fun, *args):
    """Returns the numbers that a program casts."""
    eqns = traced(fun, *args).eqns
    return [float(e.invars[0].val) for e in eqns if e.primitive.name == "convert_element_type"]


def test_numbers_that_are_rounded_stay_as_they_are_written():
    x = jnp.ones(3, jnp.bfloat16)
    decay = pytest.approx([0.999])
    assert numbers(lambda x: lax.mul(x, jnp.full(3, 0.999, x.dtype)), x) == decay
    assert numbers(lambda x: x * jnp.asarray(0.999, x.dtype), x) == decay
    assert numbers(lambda x: x * jnp.bfloat16(0.999), x) == decay
    assert numbers(lambda x: x * 0.999 + 1, x) == pytest.approx([0.999, 1])
    assert numbers(lambda: jnp.full(3, 1e9, "float16")) == [1e9]
    assert not numbers(lambda x: x * 0.999 + jnp.asarray(0.999), jnp.ones(3))


def test_program_with_unrounded_literals_computes_the_same():
    x = jnp.linspace(0, 1, 5, dtype=jnp.bfloat16)

    def fun(x):
        return jnp.full(5, 0.1, x.dtype) * x + 0.3 - jnp.asarray(0.7, x.dtype)

    assert (_jax.eval_closed(traced(fun, x), x)[0] == jax.jit(fun)(x)).all()


def test_a_cast_that_is_written_is_told_from_a_promotion():
    def fun(x):
        return x.astype("float32"), jnp.asarray(x, "float32"), x + np.ones(3, np.float32)

    casts = [e for e in jax.make_jaxpr(fun)(jnp.ones(3, "bfloat16")).eqns if "convert" in str(e)]
    assert [_jax.is_promotion(eqn) for eqn in casts] == [False, False, True]
