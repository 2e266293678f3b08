"""storage=8bit: codes are handed over, and derivatives of any order see through them."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P
from joint import planned
from models import MODELS
from support import equations, normal, thorough_but

import mpjax
from benchmarks.models import MODELS as NETWORKS
from benchmarks.models import SMALL
from benchmarks.on_cpu.codes import drawn
from mpjax._src.core.planner import coding

W, V = normal(0, 128, 256, scale=0.1), normal(1, 256, 128, scale=0.1)
X, DIRECTION = normal(2, 128, 128), normal(3, 128, 256)
QKV = normal(4, 1, 128, 2, 64)


def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w) @ V) ** 2)


def scanned(w, x):
    return jnp.mean(lax.scan(lambda c, _: (c + jnp.tanh(c @ w) @ V, None), x, length=2)[0] ** 2)


def chosen(w, x):
    return lax.cond(x[0, 0] < 9, loss, lambda *_: 0.0, w, x)


def coded(fun):
    return planned(fun, storage="8bit")


def arrays(fun, *args):
    return [v.aval for e in equations(jax.make_jaxpr(fun)(*args)) for v in e.outvars]


def codes(fun, *args):
    gradient = arrays(jax.grad(coded(fun)), *args)
    return {(a.dtype.name, a.shape) for a in gradient if a.dtype.name in ("int8", "uint8")}


def error(found, want):
    return np.linalg.norm(found - want) / np.linalg.norm(want)


@pytest.mark.parametrize("fun", thorough_but([loss, scanned, chosen], 0, 1))
def test_the_loss_is_that_of_lean_and_gradients_are_close(fun):
    value, found = jax.jit(jax.value_and_grad(coded(fun)))(W, X)
    same, lean = jax.jit(jax.value_and_grad(planned(fun, storage="lean")))(W, X)
    np.testing.assert_allclose(value, same, rtol=1e-6)
    assert 0 < error(found, lean) < 0.02
    assert {name for name, _ in codes(fun, W, X)} == {"int8", "uint8"}


def gated(w, x):
    return jnp.mean((jax.nn.silu(x @ w) @ V) ** 2)


def test_what_an_activation_reads_has_codes():
    assert ("int8", (128, 256)) in codes(gated, W, X)


def directional(fun):
    return lambda w, x: jnp.vdot(jax.grad(fun)(w, x), DIRECTION)


SECOND = {
    "forward over reverse": lambda f: (
        lambda w: jax.jvp(lambda w: jax.grad(f)(w, X), (w,), (DIRECTION,))[1]
    ),
    "reverse over reverse": lambda f: lambda w: jax.grad(directional(f))(w, X),
    "reverse over forward": lambda f: jax.grad(
        lambda w: jax.jvp(lambda w: f(w, X), (w,), (DIRECTION,))[1]
    ),
    "checkpoint": lambda f: lambda w: jax.grad(jax.checkpoint(f))(w, X),
    "vmap": lambda f: lambda w: jax.vmap(jax.grad(f), (0, None))(jnp.stack([w, 2 * w]), X),
}


PAIRS = [*itertools.product((loss, scanned), SECOND)]


@pytest.mark.parametrize(("fun", "name"), thorough_but(PAIRS, *range(0, 10, 3)))
def test_derivatives_of_any_order_see_through_codes(name, fun):
    found, want = (jax.jit(SECOND[name](f))(W) for f in (coded(fun), fun))
    assert error(found, want) < 0.04


def attention(q, x):
    return jnp.mean(jax.nn.dot_product_attention(q, jnp.sin(x), jnp.cos(x)) ** 2)


def test_weights_are_shares_and_values_are_kept_whole():
    found = codes(attention, QKV, QKV)
    assert {dtype for dtype, shape in found if shape[-2:] == (128, 128)} == {"uint8"}


@pytest.mark.parametrize("last", [jnp.exp, jnp.sin, lambda y: jax.nn.log_softmax(y)[:, 0]])
def test_what_is_enlarged_has_no_code(last):
    assert not codes(lambda w, x: jnp.sum(last(x @ w + 1)), W, X)


def test_the_derivative_of_an_erf_enlarges_nothing():
    fun = lambda w, x: jnp.sum(jax.nn.gelu(x @ w, approximate=False) @ V)  # noqa: E731
    assert codes(fun, W, X)


def test_small_arrays_and_integers_have_no_code():
    assert not codes(loss, W, X[:32])
    counted = lambda w, x: jnp.sum(jnp.sin((x > 0).astype(jnp.float32) @ w) * w.sum())  # noqa: E731
    assert ("int8", X.shape) not in codes(counted, W, X)


def test_a_relu_enlarges_nothing():
    def fun(w, x):
        y = x @ w
        y = jax.nn.relu((y - y.mean(0)) * lax.rsqrt(jnp.var(y, 0) + 1e-3))
        return jnp.sum((y @ V) ** 2)

    assert {name for name, _ in codes(fun, W, X)} == {"int8", "uint8"}


# ---- under a policy: accuracy, and what is kept --------------------------------------------------


LEAN, CODED = "mixed_bfloat16,storage=lean", "mixed_bfloat16,storage=8bit"
SHORT_X, LONG_X = normal(7, 64, 256), normal(5, 256, 256)
WEIGHTS = [(normal(i, 256, 512) / 16, normal(i + 1, 512, 256) / 32) for i in (1, 3)]


def block(x, w):
    mean = x.mean(-1, keepdims=True)
    normed = (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(normed @ w[0]) @ w[1]


def blocks(weights, x):
    return jnp.square(functools.reduce(block, weights, x)).mean()


def blocks_in_a_loop(weights, x):
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *weights)
    return jnp.square(lax.scan(lambda h, w: (block(h, w), None), x, stacked)[0]).mean()


def causal(weights, x):
    q, k, v = (x[None, :, None] @ w[:, :64] for w in (weights[0][0], weights[1][0], weights[0][0]))
    return jnp.square(jax.nn.dot_product_attention(2 * q, k, v, is_causal=True)).mean()


def exactly(fun, *args):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
        return jax.tree.map(np.asarray, jax.jit(fun)(*wide))


def errors(fun, *args):
    """Returns the errors of the gradients of 8bit and lean."""
    exact = exactly(jax.grad(fun), *args)
    return [
        distance(jax.jit(jax.grad(mpjax.autocast(fun, policy)))(*args), exact)
        for policy in (CODED, LEAN)
    ]


def distance(found, exact):
    found, exact = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (found, exact)
    )
    return error(found, exact)


@pytest.mark.parametrize("fun", thorough_but([blocks, blocks_in_a_loop, causal], 0, 2))
def test_gradients_have_at_most_twice_the_error_of_lean(fun):
    coded, lean = errors(fun, WEIGHTS, LONG_X)
    assert lean < coded < 2 * lean


@pytest.mark.parametrize(
    "fun, kinds, most",
    [(blocks, {"int8"}, 0.7), (blocks_in_a_loop, {"int8"}, 0.85), (causal, {"uint8"}, 0.9)],
)
def test_large_values_are_kept_as_codes(fun, kinds, most):
    x = normal(5, 1024, 256)
    lean, coded = (mpjax.explain(fun, policy, argnums=0)(WEIGHTS, x) for policy in (LEAN, CODED))
    assert kinds <= {a.dtype for a in coded.kept if np.prod(a.shape) >= coding.FEWEST}
    assert coded.stored_after < most * lean.stored_after


def efficientnet():
    """Squeeze and excitation."""
    sizes = {**SMALL["efficientnet"], "stages": ((1, 16, 1, 1, 3),)}
    model, params, rest, batch, _ = NETWORKS["efficientnet"](**sizes)
    params, rest = drawn(params, 0), drawn(rest, 1)
    return lambda p: model(p, rest, drawn(batch, 2, data=True))[0], params


MAKERS = {**MODELS, "efficientnet": efficientnet}


@pytest.mark.parametrize("name", thorough_but(MAKERS, "efficientnet"))
def test_no_gradient_of_a_model_is_lost(name, monkeypatch):
    monkeypatch.setattr(coding, "FEWEST", 4)
    model, params = MAKERS[name]()
    lean, coded = (
        jax.jit(jax.grad(mpjax.autocast(model, policy)))(params) for policy in (LEAN, CODED)
    )
    size = np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(lean)))
    for a, b in zip(jax.tree.leaves(lean), jax.tree.leaves(coded), strict=True):
        assert np.linalg.norm(a - b) < max(2**-10 * size, np.linalg.norm(a) / 4)


def alike(queries, x):
    """An attention whose values are almost the same, so that the terms of its row sums cancel."""
    keys, values = WEIGHTS[1][0][:, :64], WEIGHTS[0][0][:, 64:128]
    q, k, v = (x[None, :, None] @ w for w in (queries, keys, values))
    return (jax.nn.dot_product_attention(4 * q, k, 8 + v) * normal(9, 1, len(x), 1, 64)).sum()


def test_values_and_result_of_an_attention_are_kept_whole():
    coded, lean = errors(alike, WEIGHTS[0][0][:, :64], LONG_X)
    assert coded < 1.5 * lean  # of values in 8 bits, it is about 2 times


def quotients(h, x):
    return x / (jnp.square(h) + 0.01)


def roots(h, x):
    return x * jnp.sqrt(jnp.abs(h) + 0.001)


def kinks(h, x):
    return x * (jax.nn.relu(jnp.abs(h) @ WEIGHTS[0][0]) @ WEIGHTS[0][1])


@pytest.mark.parametrize("read", thorough_but([quotients, roots, kinks], kinks))
def test_codes_serve_functions_that_are_sensitive_near_zero(read):
    """Of 255 levels at equal distances, gradients have two to four times the error."""
    coded, lean = errors(lambda w, x: read(x @ w, x).sum(), normal(8, 256, 256) / 16, LONG_X)
    assert coded < 1.4 * lean


def convolved(weights, x):
    for w in weights:
        axes = ("NCHW", "OIHW", "NCHW")
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=axes)
        x = x + jax.nn.silu(y - y.mean((0, 2, 3), keepdims=True))
    return jnp.square(x).mean()


@pytest.mark.parametrize(
    "fun, args, in_order",
    [
        (blocks, (WEIGHTS, LONG_X), True),
        (convolved, ([normal(i, 8, 8, 3, 3) / 9 for i in (1, 2)], normal(6, 4, 8, 32, 32)), False),
    ],
)
def test_convolutions_choose_the_layout_of_codes(fun, args, in_order):
    """In another order than theirs, a GPU would transpose every array (NCHW: 1.3x the bytes)."""
    jaxpr = jax.make_jaxpr(jax.grad(mpjax.autocast(fun, CODED)))(*args)
    codes = {
        (eqn.primitive.name, str(v.aval.dtype))
        for eqn in equations(jaxpr.jaxpr)
        for v in eqn.outvars
    }
    assert ("convert_element_type", "int8") in codes
    assert (("row_major", "int8") in codes) == in_order


@pytest.mark.parametrize("shape", ["512, 256", "b, 256"])
def test_gradients_are_exported_for_gpus(shape):
    x = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
    gradient = jax.jit(jax.grad(mpjax.autocast(blocks, CODED)))
    text = export.export(gradient, platforms=["cuda"])(WEIGHTS, x).mlir_module()
    assert "xi8>" in text and "LayoutConstraint" not in text


def test_logits_have_no_code(monkeypatch):
    """The exponential of a cross entropy would amplify the error of their codes."""
    monkeypatch.setattr(coding, "FEWEST", 4)
    model, *args, _ = NETWORKS["unet"](**SMALL["unet"])
    gradient = arrays(jax.grad(mpjax.autocast(model, CODED), has_aux=True), *args)
    found = {a.shape for a in gradient if a.dtype in (jnp.int8, jnp.uint8)}
    assert found and not [shape for shape in found if shape[-1:] == (21,)]


def test_gates_of_a_loop_are_kept_as_codes():
    cell, x = 256, normal(5, 8, 64, 256)
    weights = [normal(i, 256, 4 * cell) / 16 for i in (6, 7)]

    def lstm(weights, x):
        def step(state, x):
            h, c = state
            i, f, g, o = jnp.split(x @ weights[0] + h @ weights[1], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zeros = jnp.zeros((64, cell))
        return jnp.square(jax.lax.scan(step, (zeros, zeros), x)[0][0]).mean()

    lean, coded = (mpjax.explain(lstm, policy, argnums=0)(weights, x) for policy in (LEAN, CODED))
    full = [a for a in coded.kept if a.dtype == "f32" and a.shape == (8, 64, cell)]
    assert len(full) == 1  # a carry
    assert coded.stored_after < 0.7 * lean.stored_after


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_non_finite_values_stay_non_finite(bad):
    x = np.array(LONG_X)
    x[3, 5] = bad
    gradient = jax.jit(jax.grad(mpjax.autocast(gated_blocks, CODED)))(WEIGHTS[0], x)
    assert not np.isfinite(gradient[0]).all()


def gated_blocks(w, x):
    return (jax.nn.gelu(x @ w[0]) @ w[1]).sum()


def test_sharded_batches():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def mean(w, x):
        return lax.pmean(mpjax.autocast(blocks, CODED)(w, x), "data")

    exact = exactly(jax.grad(blocks), WEIGHTS, SHORT_X)
    assert distance(jax.jit(jax.grad(mean))(WEIGHTS, SHORT_X), exact) < 0.02


@pytest.mark.thorough
def test_taylor_mode():
    series = [SHORT_X / 9, jnp.zeros_like(SHORT_X)]
    auto = mpjax.autocast(blocks, CODED)
    values, terms = jet(lambda x: auto(WEIGHTS, x), (SHORT_X,), (series,))
    assert np.isfinite(values) and np.isfinite(terms).all()


def test_codes_change_no_forward_pass():
    text = jax.jit(mpjax.autocast(blocks, CODED)).lower(WEIGHTS, SHORT_X).compile().as_text()
    assert not re.search(r"s8\[\d+,", text)  # a GPU's matmuls have workspaces of bytes
