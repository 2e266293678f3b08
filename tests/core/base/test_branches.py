"""Programs without conditionals: the results are those of the branch that is taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import equations

from mpjax._src.core.base import _jax
from mpjax._src.core.base.branches import flattened


def nested(i, x):
    inner = lambda x: jax.lax.cond(x > 2, lambda x: x * 3, lambda x: x - 1, x)  # noqa: E731
    return jax.lax.switch(i, [jax.jit(inner), jnp.exp, lambda x: 5.0], x)


def arrays(i, x):
    return jax.lax.cond(i > 0, lambda a: (a, a.sum()), lambda a: (-a, 1.0), jnp.arange(3.0) * x)


@pytest.mark.parametrize("fun", [nested, arrays])
def test_results_are_those_of_the_branch_that_is_taken(fun):
    flat = flattened(jax.make_jaxpr(fun)(0, 1.0))
    assert not {"cond", "jit", "pjit"} & {eqn.primitive.name for eqn in equations(flat)}
    for i in range(3):
        for x in (1.0, 4.0):
            got = _jax.eval_closed(flat, np.int32(i), np.float32(x))
            for a, b in zip(got, jax.tree.leaves(fun(i, x)), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-6)


def test_a_scalar_of_a_branch_that_is_not_taken_is_one():
    flat = flattened(jax.make_jaxpr(lambda i, x: jax.lax.cond(i > 0, jnp.log, jnp.abs, x))(1, 1.0))
    (log,) = (eqn for eqn in equations(flat) if eqn.primitive.name == "log")
    logged = _jax.with_results(flat, log.invars)
    for i, x in ((1, -3.0), (0, 1.0)):
        assert float(_jax.eval_closed(logged, np.int32(i), np.float32(-3))[0]) == x
