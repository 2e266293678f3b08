"""A plan pass by pass: each pass has its own table, and says what it found out."""

import jax
import jax.numpy as jnp
import pytest
from support import normal

from mpjax._src.instruments.passes import passes

W, X = normal(0, 8, 8), normal(1, 4, 8)


def loss(w, x):
    h = jax.nn.gelu(x @ w)
    centered = h - h.mean(-1, keepdims=True)
    return jnp.mean(jax.nn.softmax(centered @ w) @ w)


@pytest.fixture(scope="module")
def texts():
    return passes(loss, "mixed_float16")(W, X)


def row(text, *names):
    return next(line for line in text.splitlines() if all(name in line for name in names))


@pytest.mark.parametrize(
    ("name", "operation", "found"),
    [
        ("classify", "exp", 'rule=full half=f16 why="float32 list"'),
        ("facts", "dot_general", "half span=1"),
        ("facts", "reduce_max", "peak="),
        ("demand", "dot_general", "amplified"),
        ("decide", "sub", "compute=f32"),
        ("store", "SoftmaxIsland=", "exp"),
    ],
)
def test_each_pass_says_what_it_found_out(texts, name, operation, found):
    lines = [line for line in texts[name].splitlines() if operation in line]
    assert found in " ".join(lines)


def test_store_pass_shows_marks_and_kept_values():
    text = passes(loss)(W, X)["store"]
    assert row(text, "reduce_max", "steady") and "Recomputed=" in text and "kept" not in text
    text = passes(loss, "mixed_bfloat16,storage=lean")(W, X)["store"]
    assert "Checkpoint=" in text and "kept=float32[4,8]" in text
    scanned = passes(lambda w, x: jax.lax.scan(lambda h, _: (h @ w, None), x, None, length=2)[0])
    assert row(scanned(W, X)["store"], "1: dot_general")


def test_passes_take_shapes_alone():
    shapes = jax.ShapeDtypeStruct((4, 8), jnp.float32), jax.ShapeDtypeStruct((8, 8), jnp.float32)
    text = passes(lambda x, w: x @ w, "float32")(*shapes)
    assert "forced=full" in text["classify"]
    assert "compute=f32" in text["decide"]
