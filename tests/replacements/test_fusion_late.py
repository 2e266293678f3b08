"""Attention that is normalized after its product: `explain` says that it is not fused, and why."""

import jax.numpy as jnp
import numpy as np
import pytest

import mpjax

X = np.random.default_rng(0).normal(size=(2, 64, 32)).astype(np.float32)
FUSED = "mixed_bfloat16,fused_attention=true"
NOT_FUSED = "xla: normalized after the product"


def weights(x):
    scores = jnp.einsum("btd,bsd->bts", x, x) / 6
    return jnp.exp(scores - scores.max(-1, keepdims=True))


def divided(x):
    e = weights(x)
    return (e @ x) / e.sum(-1, keepdims=True)


def inverted(x):
    e = weights(x)
    return jnp.einsum("bts,bsd->btd", e, x) * (1 / e.sum(-1))[..., None]


def masked(x):
    e = jnp.where(np.tril(np.ones((64, 64), bool)), weights(x), 0)
    return (e @ x) / e.sum(-1)[..., None]


@pytest.mark.parametrize("fun", [divided, inverted, masked])
@pytest.mark.parametrize("argnums", [None, 0])
def test_explain_says_that_attention_normalized_late_is_not_fused(fun, argnums):
    loss = lambda x: jnp.sum(fun(x) ** 2)  # noqa: E731
    report = mpjax.explain(loss, FUSED, argnums, target="h100")(X)
    assert "attention: " + NOT_FUSED in report.summary()
    assert not any(line.startswith("attention") for line in mpjax.explain(loss)(X).summary())


def test_explain_names_no_attention_where_there_is_none():
    def features(x):
        return (jnp.exp(x) @ x.mT) / jnp.exp(x).sum(-1, keepdims=True)  # of no scores

    def another_sum(x):
        return (weights(x) @ x) / x.sum(-1, keepdims=True)

    for fun in (features, another_sum):
        report = mpjax.explain(fun, FUSED, target="h100")(X)
        assert not any(row.attention for row in report.rows)
