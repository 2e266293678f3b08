"""Forward mode around autocast: in the compiled program, tangents are multiplied in 16 bits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support import HALVES, cast, thorough_but

W, X = np.ones((8, 8), np.float32), np.ones((8, 8), np.float32)


def attention(w, x):
    q = x @ w
    return jnp.sum(jnp.tanh(jax.nn.softmax(q @ x.T) @ x) @ w)


def convolution(w, x):
    x, w = x.reshape(1, 1, *x.shape), w[None, None, :3, :3]
    return jnp.sum(jnp.tanh(lax.conv_general_dilated(x, w, (1, 1), "SAME")) ** 2)


WAYS = {
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda w: f(w, x), w)[1](w),
    "jacfwd": lambda f: lambda w, x: jax.jacfwd(lambda scale: f(scale * w, scale * x))(1.0),
    "hessian-vector": lambda f: lambda w, x: jax.jvp(jax.grad(lambda w: f(w, x)), (w,), (w,)),
    "of remat": lambda f: lambda w, x: jax.jvp(jax.checkpoint(f), (w, x), (w, x)),
}


@pytest.mark.parametrize("half", thorough_but(HALVES, "bfloat16"))
@pytest.mark.parametrize("fun", [attention, convolution])
@pytest.mark.parametrize("way", WAYS)
def test_forward_mode_matmuls_have_two_half_operands(way, fun, half):
    compiled = jax.jit(WAYS[way](cast(fun, half))).lower(W, X).as_text()
    operands = re.findall(r"stablehlo\.(?:dot_general|convolution).* : \(([^)]*)\)", compiled)
    short = {"bfloat16": "bf16", "float16": "f16"}[half]
    assert len(operands) > 1 or "linearize" in way
    for pair in operands:
        assert [x.split("x")[-1] for x in re.findall(r"<([^>]*)>", pair)] == [short, short]
