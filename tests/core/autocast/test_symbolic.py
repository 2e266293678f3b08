"""Programs whose sizes are symbols, as `jax.export` traces them."""

import jax
import jax.numpy as jnp
import pytest
from jax import export
from measure import run
from programs import W, layer_norm
from support import assert_near, cast, full_matmuls, normal, thorough_but

import mpjax


def norm(w, x):
    return jnp.mean(layer_norm(x @ w) ** 2 * jnp.arange(8.0))


def mixer(w, x):
    y = jax.nn.gelu(layer_norm(x) @ w) + x
    return jnp.sum(jax.nn.softmax(y @ y.T / 3) @ y)


def cross_entropy(w, x):
    labels = jnp.arange(x.shape[0]) % 8
    logits = jax.nn.log_softmax(x @ w)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))


def loop(w, x):
    out, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w) + c, None), x, None, length=3)
    return jnp.mean(jnp.where(out > 0, out, jnp.exp(out)) ** 2)


def sums(w, x):
    return jnp.mean(jnp.cumsum(x @ w, 0) ** 2) + jnp.std(jnp.concatenate([x, x @ w]))


SYMBOLIC = {f.__name__: f for f in (norm, mixer, cross_entropy, loop, sums)}


@pytest.mark.parametrize("name", thorough_but(SYMBOLIC, "cross_entropy", "loop"))
def test_gradients_and_explain_take_a_symbolic_batch(name):
    fun = SYMBOLIC[name]
    auto = jax.value_and_grad(cast(fun), (0, 1))
    (batch,) = export.symbolic_shape("b")
    args = (W, jax.ShapeDtypeStruct((batch, 8), jnp.float32))
    assert not full_matmuls(auto, *args)
    report = mpjax.explain(fun, "mixed_bfloat16", argnums=(0, 1))(*args)
    assert report.half_flops == 1
    assert "dot_general" in str(report)
    exported = export.export(jax.jit(auto))(*args)
    for rows in (1, 5):
        x = normal(rows, rows, 8)
        assert_near(exported.call(W, x), run(jax.value_and_grad(fun, (0, 1)), W, x), 0.05)
