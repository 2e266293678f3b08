"""Noise is no finding: what is zero in exact arithmetic is judged by the terms that cancel."""

import itertools

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from support import normal, thorough_but

import mpjax


def batch_norm(params, x):
    h = x @ params["w"] + params["bias"]
    h = (h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5)
    return jnp.mean(jax.nn.relu(h) @ params["out"])


def dropped(params, x):
    """Random bits become floats by their bits, an operation that has no other form."""
    keep = jax.random.bernoulli(jax.random.key(0), 0.8, x.shape)
    return batch_norm(params, jnp.where(keep, x, 0))


def attention(params, x):
    q, k = x @ params["w"], x @ params["out"].T + params["bias"]
    return jnp.mean((jax.nn.softmax(q @ k.T) @ x) ** 2)


def scores(params, x):
    return (jnp.tanh(x @ params["w"] + params["bias"]) @ params["out"])[:, :4]


PARAMS, X = {"w": normal(0, 8, 8), "bias": normal(1, 8), "out": normal(2, 8, 8)}, normal(3, 32, 8)
OLD = scores(PARAMS, X)


def advantages(params, x):
    """The loss itself is zero, as that of a policy gradient before its first step."""
    advantage = X[:, :4] - X[:, :4].mean()
    return -jnp.mean(jnp.exp(scores(params, x) - OLD) * advantage)


NOISE = {
    batch_norm: "gradient of bias",
    dropped: "gradient of bias",
    attention: "gradient of bias",
    advantages: "loss",
}
POLICIES = ("mixed_bfloat16", "mixed_float16")


@pytest.mark.parametrize(
    ("fun", "policy"),
    thorough_but(itertools.product(NOISE, POLICIES), (advantages, "mixed_bfloat16")),
)
def test_compare_judges_what_cancels_by_its_terms(fun, policy):
    noise = NOISE[fun]
    compared = mpjax.compare(fun, policy)(PARAMS, X)
    assert compared.noise == (noise,)
    assert 0 < compared.results[noise] < 0.05
    assert all(error < 1 for error in compared.results.values())
    assert noise in compared.to_dict()["noise"]
    assert f"{noise} (only rounding error in float32" in " ".join(
        map(" ".join, compared.named(None))
    )


def test_difference_that_bfloat16_alone_loses_is_no_noise():
    """The terms cancel, and float32 has digits left: half has none."""

    def fun(params, x):
        big = (x @ params["w"]).astype(jnp.bfloat16) + jnp.bfloat16(4000)
        return jnp.mean((big - jnp.bfloat16(4000)).astype(jnp.float32) * params["bias"])

    compared = mpjax.compare(fun, "mixed_bfloat16")(PARAMS, X)
    assert not compared.noise and max(compared.results.values()) > 0.2


def test_a_gradient_that_overflowed_is_no_noise():
    def fun(params, x):
        return jnp.mean(((x @ params["w"]) * 1e4).astype(jnp.float16).astype(jnp.float32) ** 2)

    compared = mpjax.compare(fun, "mixed_float16", loss_scale=1.0)(PARAMS, X * 1e3)
    assert not compared.noise and compared.results["loss"] == float("inf")


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jax.nn.relu(self.norm(self.dense(x))))


@pytest.mark.thorough
def test_compare_takes_an_nnx_module_and_leaves_it_as_it_was():
    model = Model(nnx.Rngs(0))
    before = [jnp.copy(x) for x in jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))]
    compared = mpjax.compare(lambda m, x: jnp.mean(m(x) ** 2), "mixed_bfloat16")(model, X)
    assert compared.noise == ("gradient of dense/bias/value",)
    assert "gradient of dense/kernel/value" in compared.results
    assert not any("mean" in name for name in compared.results if name.startswith("gradient"))
    after = jax.tree.leaves(nnx.state(model, nnx.Not(nnx.RngKey)))
    assert all((a == b).all() for a, b in zip(before, after, strict=True))
