"""Results, carries and branches are as weakly typed as the program has them."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from programs import W, X
from support import cast

PROGRAMS = {
    "results": lambda w, x: (lax.full_like(1.0, 2.0), jnp.sqrt(4.0), lax.full_like(1, 3), x @ w),
    "while": lambda w, x: lax.while_loop(
        lambda c: c[0] < 9.0, lambda c: (c[0] * 2.0, c[1] @ w), (1.0, x)
    ),
    "fori": lambda w, x: lax.fori_loop(0, 3, lambda i, c: (c[0] * 2.0, c[1] @ w), (1.0, x)),
    "scan": lambda w, x: lax.scan(lambda c, s: (c @ w * s, s * 2.0), x, jnp.arange(3) * 1.0),
    "carry": lambda w, x: lax.scan(lambda c, y: (c * 1.5, y @ w * c), 1.0, x),
    "cond": lambda w, x: lax.cond(x[0, 0] > 0, lambda: jnp.sum(x @ w), lambda: 2.0),
    "switch": lambda w, x: lax.switch(
        1, [lambda: 1.0, lambda: jnp.sum(x @ w), lambda: jnp.float32(0)]
    ),
    "jit": lambda w, x: jax.jit(lambda s, x: (s * 2, s * (x @ w)))(2.0, x),
    "remat": lambda w, x: jax.checkpoint(lambda s, x: (s * 2, s * (x @ w)))(2.0, x),
}


def types(tree):
    return [(x.shape, x.dtype, x.weak_type) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_autocast_keeps_weak_types(name):
    fun = PROGRAMS[name]
    auto, want = cast(fun), types(jax.eval_shape(fun, W, X))
    with jax.enable_checks(True):
        assert types(jax.eval_shape(auto, W, X)) == want
        assert types(jax.eval_shape(jax.jit(auto), W, X)) == types(auto(W, X)) == want
        loop = lambda f: jax.make_jaxpr(lambda w: jax.jvp(lambda w: f(w, X), (w,), (w,)))(W)  # noqa: E731
        assert types(loop(auto).out_avals) == types(loop(fun).out_avals)


def test_a_result_that_is_a_literal_is_an_array_while_tracing():
    auto = cast(lambda x: (lax.full_like(1, 3), lax.full_like(1.0, 3.0), x))
    three, too, _ = jax.eval_shape(lambda x: jax.tree.map(lambda a: a.astype(int), auto(x)), X)
    assert three.dtype == too.dtype == jnp.int32
