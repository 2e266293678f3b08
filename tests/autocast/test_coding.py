"""storage=8bit: the loss of storage=lean, and gradients from 8-bit codes of what is kept."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.jet import jet
from jax.sharding import PartitionSpec as P
from models import MODELS
from support import equations, normal, thorough_but

import mpjax
from benchmarks.models import MODELS as NETWORKS
from benchmarks.models import SMALL
from benchmarks.on_cpu.codes import drawn
from mpjax._src.autocast import coding, environment, plan
from mpjax._src.autocast.steps import CodedCheckpoint
from mpjax._src.base.coded import encode

LEAN, CODED = "mixed_bfloat16,storage=lean", "mixed_bfloat16,storage=8bit"
X = normal(7, 64, 256)
WEIGHTS = [(normal(i, 256, 512) / 16, normal(i + 1, 512, 256) / 32) for i in (1, 3)]


def block(x, w):
    mean = x.mean(-1, keepdims=True)
    normed = (x - mean) * jax.lax.rsqrt(jnp.square(x - mean).mean(-1, keepdims=True) + 1e-5)
    return x + jax.nn.gelu(normed @ w[0]) @ w[1]


def loss(weights, x):
    return jnp.square(functools.reduce(block, weights, x)).mean()


def scanned(weights, x):
    stacked = jax.tree.map(lambda *w: jnp.stack(w), *weights)
    return jnp.square(jax.lax.scan(lambda h, w: (block(h, w), None), x, stacked)[0]).mean()


def attention(weights, x):
    q, k, v = (x[None, :, None] @ w[:, :64] for w in (weights[0][0], weights[1][0], weights[0][0]))
    return jnp.square(jax.nn.dot_product_attention(2 * q, k, v, is_causal=True)).mean()


def error(found, exact):
    """Returns the error of a gradient, relative to its size."""
    found, exact = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(t)]) for t in (found, exact)
    )
    return np.linalg.norm(found - exact) / np.linalg.norm(exact)


def exactly(fun, *args):
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), args)
        return jax.tree.map(np.asarray, jax.jit(fun)(*wide))


@functools.cache
def exact_gradient():
    return exactly(jax.grad(loss), WEIGHTS, X)


@pytest.mark.parametrize("fun", [loss, scanned, attention])
def test_the_loss_is_that_of_lean_and_gradients_have_at_most_twice_the_error(fun):
    lean, coded = (
        jax.jit(jax.value_and_grad(mpjax.autocast(fun, policy))) for policy in (LEAN, CODED)
    )
    x = normal(5, 256, 256)
    exact = exactly(jax.grad(fun), WEIGHTS, x)
    (value, gradient), (lean_value, lean_gradient) = coded(WEIGHTS, x), lean(WEIGHTS, x)
    np.testing.assert_allclose(value, lean_value, rtol=1e-6)  # other fusions, on a GPU
    assert error(gradient, lean_gradient) > 0
    assert error(gradient, exact) < 2 * error(lean_gradient, exact)


@pytest.mark.parametrize(
    "fun, codes, most",
    [(loss, {"int8"}, 0.7), (scanned, {"int8"}, 0.8), (attention, {"uint8"}, 0.9)],
)
def test_large_values_are_kept_as_codes(fun, codes, most):
    x = normal(5, 1024, 256)
    lean, coded = (mpjax.explain(fun, policy, argnums=0)(WEIGHTS, x) for policy in (LEAN, CODED))
    kept = {array.dtype for array in coded.kept if np.prod(array.shape) >= coding.FEWEST}
    assert codes <= kept
    assert coded.stored_after < most * lean.stored_after


def efficientnet():
    """Squeeze and excitation, in which all results of an island are kept."""
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
    args = WEIGHTS[0][0][:, :64], normal(5, 256, 256)
    exact = exactly(jax.grad(alike), *args)
    lean, coded = (
        error(jax.jit(jax.grad(mpjax.autocast(alike, policy)))(*args), exact)
        for policy in (LEAN, CODED)
    )
    assert coded < 1.5 * lean  # of values in 8 bits, it is about 2 times


def states(w, x):
    h = jax.lax.associative_scan(
        lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]), (jax.nn.sigmoid(x @ w), x @ w)
    )[1]
    return jnp.square(jax.nn.silu(h)).sum()


def test_recurrence_runs_once():
    gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(states, CODED)))(WEIGHTS[0][0], X)
    names = [eqn.primitive.name for eqn in equations(gradient.jaxpr)]
    assert names.count("linear_recurrence") == 2


def quotients(h, x):
    return x / (jnp.square(h) + 0.01)


def roots(h, x):
    return x * jnp.sqrt(jnp.abs(h) + 0.001)


def kinks(h, x):
    return x * (jax.nn.relu(jnp.abs(h) @ WEIGHTS[0][0]) @ WEIGHTS[0][1])


@pytest.mark.parametrize("read", [quotients, roots, kinks])
def test_codes_serve_functions_that_are_sensitive_near_zero(read):
    """Of 255 levels at equal distances, gradients have two to four times the error."""

    def total(w, x):
        return read(x @ w, x).sum()

    args = normal(8, 256, 256) / 16, normal(5, 256, 256)
    exact = exactly(jax.grad(total), *args)
    lean, coded = (
        error(jax.jit(jax.grad(mpjax.autocast(total, policy)))(*args), exact)
        for policy in (LEAN, CODED)
    )
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
        (loss, (WEIGHTS, normal(5, 256, 256)), True),
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
    gradient = jax.jit(jax.grad(mpjax.autocast(loss, CODED)))
    text = export.export(gradient, platforms=["cuda"])(WEIGHTS, x).mlir_module()
    assert "xi8>" in text and "LayoutConstraint" not in text


def test_logits_have_no_code(monkeypatch):
    """The exponential of a cross entropy would amplify the error of their codes."""
    monkeypatch.setattr(coding, "FEWEST", 4)
    found, kinds = [], coding.kinds

    def spied(*args):
        found.extend(coded := kinds(*args))
        return coded

    monkeypatch.setattr(coding, "kinds", spied)
    model, *args, _ = NETWORKS["unet"](**SMALL["unet"])
    jax.eval_shape(jax.grad(mpjax.autocast(model, CODED), has_aux=True), *args)
    logits = {value.aval.shape for value in found if value.aval.shape[-1:] == (21,)}
    assert found and not logits


def test_kernels_read_codes_themselves(monkeypatch):
    """Behind a barrier, the values that codes stand for would be written to memory first."""
    monkeypatch.setattr(coding, "FEWEST", 2**12)
    model, params = efficientnet()
    jaxpr = jax.make_jaxpr(jax.grad(mpjax.autocast(model, CODED)))(params)
    behind = [
        eqn.invars[0].aval
        for outer in equations(jaxpr.jaxpr)
        if outer.primitive.name == "remat2"
        for eqn in equations(outer.params["jaxpr"])
        if eqn.primitive.name == "again_barrier"
    ]
    assert len([x for x in behind if x.size >= coding.FEWEST]) <= 2  # inputs of islands, not coded


@pytest.fixture
def inside(monkeypatch):
    """The operations of each checkpoint that decodes, in programs planned in a test."""
    names, checkpoints = [], plan.checkpoints

    def spied(*args):
        steps = checkpoints(*args)
        decoding = (s for s in steps if isinstance(s, CodedCheckpoint))
        names.extend([getattr(x, "name", "") for x in s.steps] for s in decoding)
        return steps

    monkeypatch.setattr(plan, "checkpoints", spied)
    return names


def test_a_mean_is_differentiated_with_the_norm_that_reads_it(inside, monkeypatch):
    """Else the cotangent of what both read is rounded to bfloat16 before the mean's is added."""
    monkeypatch.setattr(coding, "FEWEST", 2**12)
    model, params = efficientnet()
    jax.eval_shape(mpjax.autocast(model, CODED), params)
    assert inside and ["reduce_sum"] not in inside


def test_adjacent_steps_decode_what_they_read_once(inside):
    def fun(weights, x):
        first, *others = weights
        h = x @ first
        return sum(jnp.mean(h @ w) for w in others)

    weights = [normal(i, 256, 256) for i in (1, 2, 3)]
    jax.eval_shape(mpjax.autocast(fun, CODED), weights, normal(4, 256, 256))
    assert [names.count("dot_general") for names in inside][-1] == 2


def test_codes_of_rounded_values_are_made_from_the_16_bit_array():
    """Else a GPU writes the float32 array too. The largest entries are found on the way."""

    def fun(x):
        return encode(jnp.sin(x).astype(jnp.bfloat16), "int8", rounded=True)

    found = equations(jax.make_jaxpr(fun)(normal(8, 64, 256)))
    held = [e.outvars[0].aval.dtype.name for e in found if e.primitive.name == "again_barrier"]
    assert held == ["bfloat16"]


def test_islands_round_what_they_make_and_convolutions_do_not(monkeypatch):
    monkeypatch.setattr(coding, "FEWEST", 2**12)
    rounded = []

    def spied(x, kind, *args):
        rounded.append(args[0])
        return encode(x, kind, *args)

    monkeypatch.setattr(environment, "encode", spied)
    model, params = efficientnet()
    jax.eval_shape(mpjax.autocast(model, CODED), params)
    assert {*rounded} == {False}

    def lstm(weights, x):
        h = c = jnp.zeros((64, 256))
        for now in x:
            i, f, g, o = jnp.split(now @ weights[0] + h @ weights[1], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return jnp.mean(h**2)

    weights = [normal(i, 256, 1024) / 16 for i in (6, 7)]
    jax.eval_shape(jax.grad(mpjax.autocast(lstm, CODED)), weights, normal(5, 3, 64, 256))
    assert {*rounded} == {True, False}


def test_what_comes_into_a_loop_is_kept_in_16_bits():
    """It has no code, and only matmuls in 16 bits and an island that stands rounding read it."""
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
    assert "int8" in {a.dtype for a in coded.kept}
    assert not [a for a in coded.kept if a.dtype == "f32" and a.shape == (8, 64, cell)]
    assert coded.stored_after < 0.9 * lean.stored_after


def test_few_entries_are_kept_as_they_are():
    small = X[: coding.FEWEST // 512 - 1]
    lean, coded = (
        jax.jit(jax.grad(mpjax.autocast(loss, policy)))(WEIGHTS, small) for policy in (LEAN, CODED)
    )
    jax.tree.map(np.testing.assert_array_equal, lean, coded)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_non_finite_values_stay_non_finite(bad):
    def product(w, x):
        return (jax.nn.gelu(x @ w[0]) @ w[1]).sum()

    x = np.array(X)
    x[3, 5] = bad
    gradient = jax.jit(jax.grad(mpjax.autocast(product, CODED)))(WEIGHTS[0], x)
    assert not np.isfinite(gradient[0]).all()


GRADIENT = jax.grad(mpjax.autocast(loss, CODED))
TRANSFORMED = {
    "jit": lambda: jax.jit(GRADIENT)(WEIGHTS, X),
    "checkpoint": lambda: jax.jit(jax.grad(jax.checkpoint(mpjax.autocast(loss, CODED))))(
        WEIGHTS, X
    ),
    "cond": lambda: jax.jit(
        jax.grad(
            mpjax.autocast(
                lambda w, x: jax.lax.cond(x[0, 0] < 9, loss, lambda *_: 0.0, w, x), CODED
            )
        )
    )(WEIGHTS, X),
    "vmap": lambda: jax.tree.map(
        lambda x: x[0], jax.jit(jax.vmap(GRADIENT, (None, 0)))(WEIGHTS, jnp.stack([X, 2 * X]))
    ),
    "vmap inside": lambda: jax.jit(
        jax.grad(
            lambda w: jax.vmap(mpjax.autocast(loss, CODED), (None, 0))(w, jnp.stack([X, X])).mean()
        )
    )(WEIGHTS),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations(name):
    assert error(TRANSFORMED[name](), exact_gradient()) < 0.02


def test_sharded_batches():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    def mean(w, x):
        return jax.lax.pmean(mpjax.autocast(loss, CODED)(w, x), "data")

    assert error(jax.jit(jax.grad(mean))(WEIGHTS, X), exact_gradient()) < 0.02


DIRECTION = jax.tree.map(lambda x: normal(int(x.shape[0]), *x.shape), WEIGHTS)


def forward_of_reverse(fun, w):
    return jax.jvp(jax.grad(lambda w: fun(w, X)), (w,), (DIRECTION,))[1]


def reverse_of_reverse(fun, w):
    def along(w):
        pairs = zip(*map(jax.tree.leaves, (jax.grad(fun)(w, X), DIRECTION)), strict=True)
        return sum(jnp.vdot(a, b) for a, b in pairs)

    return jax.grad(along)(w)


def reverse_of_forward(fun, w):
    return jax.grad(lambda w: jax.jvp(lambda w: fun(w, X), (w,), (DIRECTION,))[1])(w)


@pytest.mark.parametrize("second", [forward_of_reverse, reverse_of_reverse, reverse_of_forward])
def test_second_derivatives(second):
    found = jax.jit(lambda w: second(mpjax.autocast(loss, CODED), w))(WEIGHTS)
    with jax.default_matmul_precision("highest"):
        assert error(found, jax.jit(functools.partial(second, loss))(WEIGHTS)) < 0.03


@pytest.mark.thorough
def test_second_derivatives_of_a_recurrence_whose_result_is_kept_as_a_code():
    w, direction = WEIGHTS[0][0], DIRECTION[0][0]

    def moved(fun):
        return jax.jvp(jax.grad(lambda w: fun(w, X)), (w,), (direction,))[1]

    found = jax.jit(lambda: moved(mpjax.autocast(states, CODED)))()
    with jax.default_matmul_precision("highest"):
        assert error(found, moved(states)) < 0.03


def test_second_derivatives_of_loops():
    found = jax.jit(functools.partial(reverse_of_reverse, mpjax.autocast(scanned, CODED)))(WEIGHTS)
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(functools.partial(reverse_of_reverse, loss))(WEIGHTS)
        assert error(found, exact) < 0.03


@pytest.mark.thorough
def test_taylor_mode():
    series = [X / 9, jnp.zeros_like(X)]
    values, terms = jet(lambda x: mpjax.autocast(loss, CODED)(WEIGHTS, x), (X,), (series,))
    assert np.isfinite(values) and np.isfinite(terms).all()


def test_codes_change_no_forward_pass():
    run = jax.make_jaxpr(jax.jit(mpjax.autocast(loss, CODED)))(WEIGHTS, X)
    compiled = jax.jit(mpjax.autocast(loss, CODED)).lower(WEIGHTS, X).compile().as_text()
    assert not re.search(r"s8\[\d+,", compiled)  # a GPU's matmuls have workspaces of bytes
    assert run.out_avals[0].dtype == jnp.float32
