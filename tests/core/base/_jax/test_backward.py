"""The backward pass that is being traced, and those around it."""

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import internals

X = jnp.ones(3)


def test_what_is_told_of_a_cotangent_knows_whether_the_loss_was_scaled():
    """Also of a loss in a jit, which JAX transposes by itself before it knows what is outside."""
    heard = []
    watched = _jax.on_transpose(_jax.FLOAT16_GRADIENT, lambda: heard.append(_jax.is_scaled()))

    def loss(x):
        return jnp.sum(watched(x) ** 2)

    of = lambda scaled: lambda x, scale: scaled(loss(x), scale)  # noqa: E731
    scalings = {
        "times": (lambda loss, scale: loss * scale, True),
        "constant": (lambda loss, scale: loss * 8.0, True),
        "twice": (lambda loss, scale: (loss * 0.5) * scale, True),
        "in a jit": (jax.jit(lambda loss, scale: loss * scale), True),
        "constant in a jit": (lambda loss, scale: jax.jit(lambda x: x * 8)(loss), True),
        "a weight": (lambda loss, scale: loss * 0.5, False),
        "none": (lambda loss, scale: loss, False),
    }
    for scaled, is_scaled in scalings.values():
        for wrap in (
            lambda f: jax.jit(jax.grad(f)),
            lambda f: jax.grad(jax.jit(f)),
            lambda f: jax.jit(jax.grad(jax.checkpoint(f))),
            jax.grad,
        ):
            heard.clear()
            wrap(of(scaled))(X, jnp.float32(8))
            assert heard == [is_scaled]
    for scale in (1.0, 8.0):
        heard.clear()
        inner = jax.jit(lambda x: loss(x))
        jax.grad(lambda x: jax.checkpoint(inner)(x) * scale)(X)  # noqa: B023
        assert heard == [scale > 1]
    assert not _jax.is_scaled()
    assert _jax.FLOAT16_GRADIENT in str(jax.make_jaxpr(watched)(X))
    np.testing.assert_array_equal(jax.hessian(loss)(X), 2 * np.eye(X.size))
    np.testing.assert_array_equal(jax.vmap(watched)(X), X)


def test_no_backward_pass_is_followed_in_a_jax_without_its_function(monkeypatch):
    monkeypatch.delattr(jax._src.interpreters.ad, "backward_pass3")
    monkeypatch.delitem(vars(internals), "backward_pass3", raising=False)
    assert _jax.is_scaled()
