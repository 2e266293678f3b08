"""A rounding that derivatives do not see, in all transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import normal

from mpjax._src.core.base._jax.rounded import rounded_p

X = jnp.append(normal(0, 5), 1e-6)  # the last is subnormal in float16


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap, jax.checkpoint])
def test_a_rounding_has_the_derivative_one(wrap, half):
    fun = wrap(lambda x: rounded_p.bind(x, half=np.dtype(half)))
    rounded = X.astype(half).astype(jnp.float32)
    assert (fun(X) == rounded).all() and (rounded != X).any()
    value, tangent = jax.jvp(fun, (X,), (2.1 * X,))
    assert (value == rounded).all() and (tangent == 2.1 * X).all()
    assert (jax.vjp(fun, X)[1](2.1 * X)[0] == 2.1 * X).all()
    assert (jax.jvp(lambda x: fun(x) * x, (X,), (X,))[1] == X * X + rounded * X).all()
