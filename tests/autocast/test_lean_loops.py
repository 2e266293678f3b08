"""storage=lean in loops: no copies of parameters are kept, and those of constants are made once."""

import collections

import jax
import jax.numpy as jnp
import pytest
from support import equations, normal

import mpjax
from mpjax._src.base.devices import traced_for

LEAN = "mixed_bfloat16,storage=lean"
BIG = normal(2, 64, 16)


def kept(fun, policy, *args):
    """Returns how many arrays of each shape and dtype are kept, arguments not counted."""
    report = mpjax.explain(fun, policy, argnums=0)(*args)
    return collections.Counter((k.dtype, k.shape) for k in report.kept)


LAYERS = normal(3, 6, 8, 8, scale=0.3)  # of six layers
SCALES = normal(4, 6, 8)


def layers_of(layer, *params):
    """Returns a loss of stacked layers, and its arguments."""

    def fun(params, x):
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(x, *p), None), x, params)[0] ** 2)

    return fun, params, BIG[:, :8]


def nested(params, x):
    def group(x, w):
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0], None

    return jnp.mean(jax.lax.scan(group, x, params[0])[0] ** 2)


STACKS = {
    "plain": layers_of(lambda x, w: x + jnp.tanh(x @ w), LAYERS),
    "transposed": layers_of(lambda x, w: x + jnp.tanh(x @ w.T), LAYERS),
    "halved": layers_of(lambda x, w: x + (x @ w[:, :4]) @ w[:, 4:].T, LAYERS),
    "scaled": layers_of(lambda x, w, s: x + (x @ w) * s, LAYERS, SCALES),
    "mapped": layers_of(jax.vmap(lambda x, w: x + jnp.tanh(x @ w), (0, None)), LAYERS),
}


@pytest.mark.parametrize("name", STACKS)
def test_scan_keeps_no_copies_of_its_parameters(name):
    found = kept(STACKS[name][0], LEAN, *STACKS[name][1:])
    stacks = {shape for _, shape in found if shape[0] == 6}
    assert {shape[1] for shape in stacks} == {64}  # what is computed from the data


@pytest.mark.parametrize("name", STACKS)
def test_by_default_a_loop_keeps_what_lean_keeps(name):
    fun, *args = STACKS[name]
    stacks = [
        {k: n for k, n in kept(fun, policy, *args).items() if k[1][0] == 6}
        for policy in ("mixed_bfloat16", LEAN)
    ]
    assert stacks[0] == stacks[1] != {}


def test_on_a_tpu_a_loop_keeps_what_is_computed_outside_of_loops():
    w, x = normal(5, 6, 8, 8), normal(6, 64, 8)

    def fun(w, x):
        def layer(x, w):
            return jax.nn.softmax(x @ w.T @ x.T) @ x, None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    def stacks(policy):
        return {k: n for k, n in kept(fun, policy, w, x).items() if k[1][0] == 6}

    same = {}
    for device in ("h100", "v5e"):
        with traced_for(device):
            same[device] = stacks("mixed_bfloat16") == stacks(LEAN)
    assert same == {"h100": True, "v5e": False}


def test_a_sum_with_a_float32_carry_is_kept_in_16_bits_if_a_matmul_alone_reads_it():
    def fun(params, x):
        h = jnp.tanh(x @ params[0])

        def turn(carry, _):  # the carry sums, so it is float32
            return carry + (carry + h) @ params[1], None

        return jnp.mean(jax.lax.scan(turn, jnp.zeros(h.shape), length=2)[0] ** 2)

    found = kept(fun, LEAN, (LAYERS[0], LAYERS[1]), BIG[:, :8])
    assert found["bf16", (2, 64, 8)] == 1
    assert not any(dtype == "f32" and shape == (2, 64, 8) for dtype, shape in found)


def test_nested_scan_keeps_no_copies_of_its_parameters():
    found = kept(nested, LEAN, (LAYERS.reshape(2, 3, 8, 8),), BIG[:, :8])
    assert {shape for _, shape in found if shape[0] == 2} == {(2, 3, 64, 8)}


def recurrent(w, x):
    """A recurrent network: all iterations read the same weights."""

    def cell(h, x):
        h = jnp.tanh(x @ w[:8] + h @ w[8:])
        return h, h

    return jnp.mean(jax.lax.scan(cell, jnp.zeros((4, 8)), x)[1] ** 2)


def test_copies_of_a_loops_constants_are_made_once():
    args = normal(5, 16, 8), normal(6, 5, 4, 8)
    gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(recurrent, LEAN)))(*args)
    (back,) = (e for e in gradient.eqns if e.primitive.name == "scan" and e.params["reverse"])
    weights = [(8, 8), (16, 8)]
    copied = [
        e.outvars[0].aval
        for e in equations(back.params["jaxpr"].jaxpr)
        if e.primitive.name == "convert_element_type" and e.invars[0].aval.shape in weights
    ]
    assert not [aval for aval in copied if aval.dtype == jnp.bfloat16]


def test_what_comes_into_a_loop_is_kept_in_half_if_half_operations_alone_read_it():
    def fun(w, x):
        def cell(h, x):
            h = jnp.tanh(h + x @ w)
            return h, None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((4, 8)), jnp.exp(x))[0] ** 2)

    args = normal(5, 8, 8), normal(6, 5, 4, 8)
    found = kept(fun, LEAN, *args)
    assert found["f32", (5, 4, 8)] == 0 < found["bf16", (5, 4, 8)]


def grouped(params, x):
    """Attention of three groups of four queries for each of two keys."""

    def layer(x, w):
        q, k, v = ((x @ w[:, : n * 8]).reshape(2, 64, n, 8) for n in (6, 2, 2))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 64, 48)
        return x + y @ w, None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


@pytest.mark.parametrize("storage", ["fast", "lean"])
def test_attention_in_a_loop_is_kept_in_the_order_of_its_matmul(storage):
    """JAX computes groups of queries by vmap, whose axis comes first: (3, 2, 2, 64, 64)."""
    args = normal(5, 4, 48, 48, scale=0.2), normal(6, 2, 64, 48)
    found = kept(grouped, f"mixed_bfloat16,storage={storage}", *args)
    stacks = {shape for _, shape in found if shape[0] == 4 and shape[-2:] == (64, 64)}
    assert stacks == {(4, 2, 2, 3, 64, 64)}  # layers, batch, groups, queries of one group
    traced = jax.jit(jax.grad(mpjax.autocast(grouped, "mixed_bfloat16"))).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" in text


def test_attention_whose_weights_change_their_shape_is_kept_as_it_is():
    """The matmul has an axis more than the softmax."""

    def layer(x, w):
        y = (x @ w).reshape(2, 64, 4, 8)
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->qbhk", y, y))
        out = jnp.einsum(
            "qbgrk,bkgrd->bqgrd", p.reshape(64, 2, 2, 2, 64), y.reshape(2, 64, 2, 2, 8)
        )
        return x + out.reshape(2, 64, 32), None

    def loss(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    args = normal(5, 4, 32, 32, scale=0.06), normal(6, 2, 64, 32)
    found, want = (jax.jit(jax.grad(f))(*args) for f in (mpjax.autocast(loss, LEAN), loss))
    assert jnp.linalg.norm(found - want) < 2**-5 * jnp.linalg.norm(want)


@pytest.mark.parametrize("storage", ["fast", "lean"])
def test_what_a_loop_keeps_of_a_sequence_does_not_depend_on_how_many_there_are(storage):
    """Sums beyond 32 bits are rounded for the minimum cut: ties have to stay ties."""
    length, heads, width = 1024, 12, 64
    shape = jax.ShapeDtypeStruct

    def layer(x, p):
        q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:2], 3 * heads, width), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
        out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return x + out.reshape(x.shape) @ p["out"], None

    def loss(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    size = heads * width
    params = {
        "qkv": shape((12, size, 3 * size), "float32"),
        "out": shape((12, size, size), "float32"),
    }
    explained = mpjax.explain(loss, f"mixed_bfloat16,storage={storage}", argnums=0)
    stored = [
        explained(params, shape((n, length, size), "float32")).stored_after / n
        for n in (32, 44, 48, 63, 64, 65)
    ]
    assert max(stored) < 1.02 * min(stored)


@pytest.mark.parametrize("read", ["elementwise", "matmul"])
def test_who_reads_the_parts_decides_whether_an_array_is_kept_whole(read):
    """Both have as many bytes. Views cost nothing elementwise; a matmul's operand is written."""

    def fun(w, x):
        a, b = jnp.split(x @ w, 2, axis=1)
        return jnp.mean((a * b if read == "elementwise" else a @ b.T) ** 2)

    shapes = {shape for _, shape in kept(fun, LEAN, normal(3, 16, 32), BIG)}
    assert ((64, 32) in shapes) == (read == "elementwise")


def test_a_carry_in_16_bits_is_not_kept_in_float32_as_well():
    """A norm at the start of a layer reads it in float32, for its statistics too."""

    def layer(x, w):
        x = x.astype(jnp.float32)
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x + jax.nn.silu(y @ w) @ w.T

    fun, params, x = layers_of(layer, LAYERS)
    for policy in ("mixed_bfloat16", LEAN):
        found = kept(lambda p, x: fun(p, x @ BIG[:8, :8]), policy, params, x)
        stacked = {(dtype, shape): n for (dtype, shape), n in found.items() if shape[0] == 6}
        assert ("f32", (6, 64, 8)) not in stacked, policy
        assert ("bf16", (6, 64, 8)) in stacked, policy
