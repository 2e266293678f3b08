"""What is taken for granted of how JAX rounds constants, and of what casts."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mpjax._src import _jax


def rounded(fun, *args):
    found = []
    with _jax.numbers_rounded(found):
        program = jax.make_jaxpr(fun)(*args)
    return program, [(number.value, str(number.dtype), number.result) for number in found]


def test_numbers_are_written_down_before_they_are_rounded():
    x = jnp.ones(3, jnp.bfloat16)
    assert rounded(lambda x: lax.mul(x, jnp.asarray(0.999, x.dtype)), x)[1] == [
        (0.999, "bfloat16", 1)
    ]
    assert rounded(lambda x: x + jnp.full(3, 1e9, "float16"), x)[1] == [(1e9, "float16", np.inf)]
    assert rounded(lambda x: x * jnp.asarray(0.999), x)[1] == []


def test_a_cast_of_a_constant_to_half_stays_in_the_program():
    def names(half):
        program, _ = rounded(lambda x: x * 0.999, jnp.ones(3, half))
        return [eqn.primitive.name for eqn in program.eqns]

    assert names("bfloat16") == ["convert_element_type", "mul"] and names("float32") == ["mul"]


def test_a_cast_that_is_written_is_told_from_a_promotion():
    def fun(x):
        return x.astype("float32"), jnp.asarray(x, "float32"), x + np.ones(3, np.float32)

    casts = [e for e in jax.make_jaxpr(fun)(jnp.ones(3, "bfloat16")).eqns if "convert" in str(e)]
    assert [_jax.is_promotion(eqn) for eqn in casts] == [False, False, True]
