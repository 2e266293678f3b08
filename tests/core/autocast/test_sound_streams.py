"""Residual streams of ordinary models: kept in 16 bits, and as sound as the same models by hand.

By hand, each block rounds the stream that it hands on; so does the yardstick. What must not be 16
bits instead, steps that are small beside their state, is in test_sound_steps.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from measure import check, rounded
from support import normal, thorough_but

import mpjax

BATCH, LENGTH, WIDTH = 2, 8, 32
TOKENS = normal(0, BATCH, LENGTH, WIDTH)
IMAGES = normal(1, 2, 6, 6, 8)


def layer_norm(x):
    mean = jnp.mean(x, -1, keepdims=True)
    variance = jnp.maximum(0.0, jnp.mean(jnp.square(x), -1, keepdims=True) - jnp.square(mean))
    return (x - mean) * lax.rsqrt(variance + 1e-6)


def attend(p, x):
    q, k, v = (x @ p[name] for name in "qkv")
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 4) @ v @ p["o"]


def mlp(p, x):
    return jax.nn.gelu(x @ p["up"]) @ p["down"]


def pre_norm(p, x):
    x = x + attend(p, layer_norm(x))
    return x + mlp(p, layer_norm(x))


def post_norm(p, x):
    x = layer_norm(x + attend(p, x))
    return layer_norm(x + mlp(p, x))


def sandwich_norm(p, x):
    x = x + layer_norm(attend(p, layer_norm(x)))
    return x + layer_norm(mlp(p, layer_norm(x)))


def parallel_blocks(p, x):
    y = layer_norm(x)
    return x + attend(p, y) + mlp(p, y)


def rms_norm_and_gate(p, x):
    y = x * lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)
    return x + (jax.nn.silu(y @ p["up"]) * (y @ p["gate"])) @ p["down"]


def convolve(x, w):
    return lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def batch_norm(x):
    mean = jnp.mean(x, (0, 1, 2))
    variance = jnp.maximum(0.0, jnp.mean(jnp.square(x), (0, 1, 2)) - jnp.square(mean))
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def residual_block(p, x):
    y = jax.nn.relu(batch_norm(convolve(x, p["first"])))
    return jax.nn.relu(x + batch_norm(convolve(y, p["second"])))


def pre_activation_block(p, x):
    y = convolve(jax.nn.relu(batch_norm(x)), p["first"])
    return x + convolve(jax.nn.relu(batch_norm(y)), p["second"])


def transformer_params(depth):
    shapes = dict.fromkeys("qkvo", (WIDTH, WIDTH))
    shapes |= {"up": (WIDTH, 32), "gate": (WIDTH, 32), "down": (32, WIDTH)}
    return {
        name: normal(i + 2, depth, *shape, scale=shape[0] ** -0.5)
        for i, (name, shape) in enumerate(shapes.items())
    }


def resnet_params(depth):
    return {
        name: normal(i + 2, depth, 3, 3, 8, 8, scale=0.12)
        for i, name in enumerate(("first", "second"))
    }


BLOCKS = {
    "pre-norm": (pre_norm, transformer_params, TOKENS),
    "post-norm": (post_norm, transformer_params, TOKENS),
    "sandwich norm": (sandwich_norm, transformer_params, TOKENS),
    "parallel blocks": (parallel_blocks, transformer_params, TOKENS),
    "gated, rms norm": (rms_norm_and_gate, transformer_params, TOKENS),
    "resnet": (residual_block, resnet_params, IMAGES),
    "pre-activation resnet": (pre_activation_block, resnet_params, IMAGES),
}


def model(name, depth, scanned, stream=lambda x: x):
    """Returns a loss function of parameters and inputs: an embedding, the blocks, a head."""
    block, params, inputs = BLOCKS[name]
    width = inputs.shape[-1]
    embed, head = normal(11, width, width, scale=0.5), normal(12, width, 4, scale=0.3)

    def fun(p, x):
        x = stream(x @ embed)
        if scanned:
            x, _ = lax.scan(lambda x, p: (stream(block(p, x)), None), x, p)
        else:
            for i in range(depth):
                x = stream(block(jax.tree.map(lambda w, i=i: w[i], p), x))
        return layer_norm(x) @ head

    return fun, (params(depth), inputs)


DEEP = ("pre-norm", "resnet", "pre-activation resnet")
CASES = {
    **{f"{name}, 2 blocks": (name, 2, False) for name in BLOCKS},
    **{f"{name}, 12 blocks": (name, 12, False) for name in DEEP},
    **{f"{name}, 48 blocks scanned": (name, 48, True) for name in DEEP},
    **{f"{name}, 12 blocks scanned": (name, 12, True) for name in BLOCKS},
}
MEASURED = [("pre-norm, 2 blocks", "bfloat16"), ("resnet, 2 blocks", "float16")]
HALVES = ("bfloat16", "float16")


# A norm on the stream itself makes it float32.
@pytest.mark.parametrize(
    "name", thorough_but([n for n in BLOCKS if not n.startswith(("post", "sandwich"))], 0, 2, 4)
)
def test_no_residual_stream_is_kept_in_float32(name):
    fun, args = model(name, 3, False)
    loss = lambda p, x: jnp.mean(fun(p, x) ** 2)  # noqa: E731
    found = mpjax.explain(loss, argnums=0)(*args).kept
    assert not [k for k in found if (k.dtype, k.shape) == ("f32", args[1].shape)]


@pytest.mark.parametrize(
    ("name", "half"),
    thorough_but([(name, half) for half in HALVES for name in CASES], *MEASURED),
)
def test_residual_stream_is_sound(name, half):
    fun, args = model(*CASES[name])
    by_hand, _ = model(*CASES[name], lambda x: rounded(x, half))
    check(fun, args, half, (0, 1), by_hand=by_hand)
