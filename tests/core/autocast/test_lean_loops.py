"""What loops keep: no copies of parameters, and nothing in float32 that matmuls alone read."""

import collections

import jax
import jax.numpy as jnp
import pytest
from support import equations, normal, thorough_but

import mpjax

FAST, LEAN = "mixed_bfloat16", "mixed_bfloat16,storage=lean"
N, D = 64, 32
X = normal(2, N, D)
LAYERS = normal(3, 6, D, D, scale=0.15)  # of six layers
SCALES = normal(4, 6, D)


def kept(fun, policy, *args):
    """Returns how many arrays of each shape and dtype are kept, arguments not counted."""
    report = mpjax.explain(fun, policy, argnums=0)(*args)
    return collections.Counter((k.dtype, k.shape) for k in report.kept)


def layers_of(layer, *params):
    """Returns a loss of stacked layers, and its arguments."""

    def fun(params, x):
        return jnp.mean(jax.lax.scan(lambda x, p: (layer(x, *p), None), x, params)[0] ** 2)

    return fun, params, X


STACKS = {
    "plain": layers_of(lambda x, w: x + jnp.tanh(x @ w), LAYERS),
    "transposed": layers_of(lambda x, w: x + jnp.tanh(x @ w.T), LAYERS),
    "halved": layers_of(lambda x, w: x + (x @ w[:, :16]) @ w[:, 16:].T, LAYERS),
    "scaled": layers_of(lambda x, w, s: x + (x @ w) * s, LAYERS, SCALES),
    "mapped": layers_of(jax.vmap(lambda x, w: x + jnp.tanh(x @ w), (0, None)), LAYERS),
}


@pytest.mark.parametrize("policy", [FAST, LEAN])
@pytest.mark.parametrize("name", STACKS)
def test_scan_keeps_no_copies_of_its_parameters(name, policy):
    found = kept(STACKS[name][0], policy, *STACKS[name][1:])
    stacks = {shape for _, shape in found if shape[0] == 6}
    assert {shape[1] for shape in stacks} == {N}  # what is computed from the data


def test_nested_scan_keeps_no_copies_of_its_parameters():
    def nested(params, x):
        def group(x, w):
            return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, w)[0], None

        return jnp.mean(jax.lax.scan(group, x, params[0])[0] ** 2)

    found = kept(nested, LEAN, (LAYERS.reshape(2, 3, D, D),), X)
    assert {shape for _, shape in found if shape[0] == 2} == {(2, 3, N, D)}


def test_layers_in_a_scan_keep_what_layers_written_out_keep():
    def layer(x, w):
        y = x @ w
        y = jax.nn.relu((y - y.mean(0)) * jax.lax.rsqrt(jnp.var(y, 0) + 1e-5))
        return jax.nn.relu(x + y @ w)

    def written_out(params, x):
        for w in params[0]:
            x = layer(x, w)
        return jnp.mean(x**2)

    flat, stacked = (kept(f, LEAN, (LAYERS,), X) for f in (written_out, layers_of(layer)[0]))
    large = sum(n for (_, shape), n in flat.items() if shape == (N, D))
    assert 6 * sum(n for (_, shape), n in stacked.items() if shape == (6, N, D)) <= large + 6


def test_copies_of_a_loops_constants_are_made_once():
    def recurrent(w, x):
        """A recurrent network: all iterations read the same weights."""

        def cell(h, x):
            h = jnp.tanh(x @ w[:D] + h @ w[D:])
            return h, h

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((4, D)), x)[1] ** 2)

    args = normal(5, 2 * D, D), normal(6, 5, 4, D)
    gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(recurrent, LEAN)))(*args)
    copied = [
        e.outvars[0].aval
        for loop in equations(gradient)
        if loop.primitive.name == "scan"
        for e in equations(loop.params["jaxpr"].jaxpr)
        if e.primitive.name == "convert_element_type"
        and e.invars[0].aval.shape in [(D, D), (2 * D, D)]
    ]
    assert not [aval for aval in copied if aval.dtype == jnp.bfloat16]


def test_what_comes_into_a_loop_is_kept_in_16_bits_if_matmuls_alone_read_it():
    def fun(w, x):
        def cell(h, x):
            h = jnp.tanh(h + x @ w)
            return h, None

        return jnp.mean(jax.lax.scan(cell, jnp.zeros((4, D)), x @ w)[0] ** 2)

    found = kept(fun, LEAN, normal(5, D, D), normal(6, 5, 4, D))
    assert found["bf16", (5, 4, D)] == 1


def test_a_sum_with_a_float32_carry_is_kept_in_16_bits_if_a_matmul_alone_reads_it():
    def fun(params, x):
        h = jnp.tanh(x @ params[0])

        def turn(carry, _):  # the carry sums, so it is float32
            return carry + (carry + h) @ params[1], None

        return jnp.mean(jax.lax.scan(turn, jnp.zeros(h.shape), length=2)[0] ** 2)

    found = kept(fun, LEAN, (LAYERS[0], LAYERS[1]), X)
    assert found["bf16", (2, N, D)] == 1
    assert not found["f32", (2, N, D)]


def grouped(params, x):
    """Attention of three groups of four queries for each of two keys."""

    def layer(x, w):
        q, k, v = ((x @ w[:, : n * 8]).reshape(2, 64, n, 8) for n in (6, 2, 2))
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 64, 48)
        return x + y @ w, None

    return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)


@pytest.mark.parametrize("storage", thorough_but(["fast", "lean"], "lean"))
def test_attention_in_a_loop_is_kept_in_the_order_of_its_matmul(storage):
    """JAX computes groups of queries by vmap, whose axis comes first: (3, 2, 2, 64, 64)."""
    args = normal(5, 4, 48, 48, scale=0.2), normal(6, 2, 64, 48)
    found = kept(grouped, f"mixed_bfloat16,storage={storage}", *args)
    stacks = {shape for _, shape in found if shape[0] == 4 and shape[-2:] == (64, 64)}
    assert stacks == {(4, 2, 2, 3, 64, 64)}  # layers, batch, groups, queries of one group
    traced = jax.jit(jax.grad(mpjax.autocast(grouped, "mixed_bfloat16"))).trace(*args)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "LayoutConstraint" in text


@pytest.mark.parametrize("storage", thorough_but(["fast", "lean"], "fast"))
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

    shapes = {shape for _, shape in kept(fun, LEAN, normal(3, D, 2 * D), X[:48])}
    assert ((48, 2 * D) in shapes) == (read == "elementwise")


def test_a_carry_is_kept_once():
    """A norm at the start of a layer reads it, for its statistics too."""

    def layer(x, w):
        y = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x + jax.nn.silu(y @ w) @ w.T

    fun, params, x = layers_of(layer, LAYERS)
    for policy in (FAST, LEAN):
        found = kept(fun, policy, params, x)
        assert found["f32", (6, N, D)] == 1, policy
