"""Attention of packages, as they are published, as the fused kernel."""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx
from support import thorough_but
from test_fusion import CAUSAL, H, N, X, assert_alike, said


def of_linen(**options):
    module = linen.MultiHeadDotProductAttention(N, **options)
    params = jax.jit(module.init)(jax.random.key(0), X)
    rngs = {"dropout": jax.random.key(1)}
    return lambda p, mask: module.apply(p, X, mask=mask, rngs=rngs), params


def of_nnx():
    module = nnx.MultiHeadAttention(N, N * H, decode=False, rngs=nnx.Rngs(0))
    graph, state = nnx.split(module)
    return lambda p, mask: nnx.merge(graph, p)(X, mask=mask), state


def of_haiku():
    def call(x, mask):
        init = hk.initializers.VarianceScaling()
        return hk.MultiHeadAttention(N, H, w_init=init)(x, x, x, mask=mask)

    module = hk.without_apply_rng(hk.transform(call))
    return lambda p, mask: module.apply(p, X, mask), jax.jit(
        lambda: module.init(jax.random.key(0), X, None)
    )()


def of_equinox():
    module = eqx.nn.MultiheadAttention(N, N * H, key=jax.random.key(0))
    params, rest = eqx.partition(module, eqx.is_array)

    def call(p, mask):
        mask = None if mask is None else mask[0, 0]
        return jax.vmap(lambda x: eqx.combine(p, rest)(x, x, x, mask=mask))(X)

    return call, params


PACKAGES = {"linen": of_linen, "nnx": of_nnx, "haiku": of_haiku, "equinox": of_equinox}


@pytest.mark.parametrize(
    ("name", "masked"),
    thorough_but([(name, masked) for masked in (False, True) for name in PACKAGES], 1, 2, 4, 7),
)
def test_attention_of_each_package_is_fused(name, masked):
    call, params = PACKAGES[name]()
    mask = CAUSAL[None, None] if masked else None
    fun = lambda p: call(p, mask)  # noqa: E731
    assert said(fun, params) == ["cudnn, causal" if masked else "cudnn"]
    assert_alike(fun, params, 0.01)
    given = lambda p, mask: call(p, mask)  # noqa: E731
    assert not masked or said(given, params, jnp.asarray(mask)) == ["cudnn, a mask"]


def test_attention_with_dropout_is_not_fused_and_says_why():
    call, params = of_linen(dropout_rate=0.5, deterministic=False)
    why = "xla: mul is applied to its weights, as in dropout or scaling"
    assert said(lambda p: call(p, None), params) == [why]
