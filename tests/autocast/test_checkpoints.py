"""Checkpoints of lean storage: what islands inside keep, and how cotangents leave them."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import equations, normal

import mpjax

LEAN = "mixed_bfloat16,storage=lean"
W, X = normal(0, 8, 8), normal(1, 2, 64, 8)


def grouped_norm(x):
    y = x.reshape(*x.shape[:-1], 4, -1)
    mean = y.mean((1, 3), keepdims=True)
    variance = (y**2).mean((1, 3), keepdims=True) - mean**2
    return ((y - mean) * jax.lax.rsqrt(variance + 1e-5)).reshape(x.shape)


def test_no_reader_of_a_skip_connection_keeps_what_it_joins():
    """The parts are kept, and both readers join them again."""

    def loss(params, x):
        w, scale, wide = params
        skip = x @ w @ w
        joined = jnp.concatenate([jnp.sin(x @ w) @ w, skip], -1)
        y = jax.nn.silu(grouped_norm(joined) * scale) @ wide + joined @ wide
        return jnp.mean((y @ w * skip) ** 2)

    params = W, normal(2, 16), normal(3, 16, 8)
    kept = mpjax.explain(loss, LEAN, argnums=0)(params, X).kept
    shapes = collections.Counter(k.shape for k in kept)
    assert shapes[(2, 64, 16)] == 0  # nor what the activation returns
    found, want = (jax.jit(jax.grad(f))(params, X) for f in (mpjax.autocast(loss, LEAN), loss))
    for a, b in zip(found, want, strict=True):
        assert np.linalg.norm(a - b) < 2**-5 * np.linalg.norm(b)


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.softplus, jax.nn.gelu, jnp.tanh])
@pytest.mark.parametrize("gated", [False, True])
def test_small_vectors_keep_no_activation(activation, gated):
    """A norm's parameters, or a gate of the whole row, are small beside what they multiply."""

    def fun(w, scale, x):
        for _ in range(3):
            y = x @ w - (x @ w).mean(0)
            y = y * jax.lax.rsqrt((y**2).mean(0) + 1e-5)
            y = activation(y * scale["by"] + scale["plus"])
            if gated:  # squeeze and excitation
                y = y * jax.nn.sigmoid(y.mean(0) @ w)
            x = y
        return jnp.mean((x @ w) ** 2)

    w, x = normal(3, 16, 16), normal(4, 256, 16)
    args = w, {"by": normal(5, 16), "plus": normal(6, 16)}, x
    found = mpjax.explain(fun, LEAN, argnums=0)(*args).kept
    assert sum(k.shape == x.shape for k in found) == 4  # results of matmuls


def test_soft_capped_scores_are_kept_in_16_bits():
    """An island's sources count as well: scores are computed again from a matmul's result."""
    q, k, v = (normal(i, 2, 32, 8) for i in range(3))

    def fun(q):
        scores = 20 * jnp.tanh((q @ k.mT / 3) / 20)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return jnp.sum(weights / weights.sum(-1, keepdims=True) @ v)

    found = mpjax.explain(fun, LEAN, argnums=0, target="h100")(q).kept
    assert {k.dtype for k in found if k.shape == (2, 32, 32)} == {"bf16"}


# ---- cotangents of weights ----------------------------------------------------------------------


def after_a_layer(read):
    """A loss whose activation is computed again in front of what reads the weight."""

    def loss(weights, x):
        first, w = weights
        return jnp.sum(jnp.sin(read(w, jnp.tanh(x @ first))))

    return loss


WEIGHTS = normal(4, 4, 8), W
ONCE = {"once": lambda w, y: y @ w, "transposed": lambda w, y: y @ w.T}


def barriers(fun, policy):
    """Returns the dtypes in which the gradient of the weight passes barriers on one device."""
    loss = mpjax.autocast(after_a_layer(fun), policy)
    traced = jax.make_jaxpr(jax.grad(loss))(WEIGHTS, X[..., :4])
    return [
        half
        for eqn in equations(traced)
        if eqn.primitive.name == "optimization_barrier" and "halves" in eqn.params
        for half, v in zip(eqn.params["halves"], eqn.invars, strict=True)
        if v.aval.shape == W.shape
    ]


@pytest.mark.parametrize("half", ["bfloat16", "float16"])
@pytest.mark.parametrize("storage", ["lean", "8bit", "0.0"])
@pytest.mark.parametrize("name", ONCE)
def test_the_gradient_of_a_weight_waits_in_the_dtype_of_its_matmul(name, storage, half):
    found = barriers(ONCE[name], f"mixed_{half},storage={storage}")
    assert found and {*found} == {jnp.dtype(half)}


def test_a_sum_of_two_gradients_waits_in_float32():
    assert {*barriers(lambda w, y: y @ w + y @ w.T, LEAN)} == {None}


@pytest.mark.parametrize("devices", [1, 2])
def test_devices_sum_gradients_before_these_are_rounded(devices):
    mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.ShapeDtypeStruct((2, 64, 4), X.dtype, sharding=NamedSharding(mesh, P("i")))
    loss = mpjax.autocast(after_a_layer(ONCE["once"]), LEAN)
    traced = jax.jit(jax.grad(loss)).trace(WEIGHTS, split)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    waiting = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert any("tensor<8x8xbf16>" in line for line in waiting) == (devices == 1)
