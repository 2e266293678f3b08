"""autocast on one function at a time: jaxprs of forward and gradient, and numbers."""

import functools
import re

import jax
import jax.experimental.custom_partitioning
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import PROGRAMS, W, X
from support import assert_near, equations, found, full_matmuls, matmul_dtypes, normal

import mpjax

HALVES = ("bfloat16", "float16")
BOTH = functools.partial(jax.grad, argnums=(0, 1))


def cast(fun, half="bfloat16"):
    return mpjax.autocast(fun, f"mixed_{half}")


def rounded(x, half):
    return x.astype(half).astype(jnp.float32)


# ---- programs that must run, half in every matmul, close to float32 -----------------------------


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name, half):
    fun = PROGRAMS[name]
    auto = cast(fun, half)
    tolerance = 0.05 if half == "bfloat16" else 0.01
    assert not full_matmuls(auto, W, X)
    assert not full_matmuls(BOTH(auto), W, X)
    assert len(found(auto, W, X)) == len(found(fun, W, X))
    assert jax.eval_shape(auto, W, X) == jax.eval_shape(fun, W, X)
    assert_near(jax.jit(BOTH(auto))(W, X), jax.jit(BOTH(fun))(W, X), tolerance)


@pytest.mark.parametrize("name", ["mlp", "attention", "custom_jvp", "rnn", "layers", "conditional"])
def test_transformations_around(name):
    fun = PROGRAMS[name]

    @jax.jit
    def run(w, x):
        def each(f):
            return (
                f(w, x),
                jax.vmap(f, (None, 0))(w, x[:, None]),
                jax.grad(jax.checkpoint(f))(w, x),
                jax.jvp(f, (w, x), (w, x))[1],
            )

        return each(cast(fun)), each(fun)

    assert_near(*run(W, X), 0.05)


def test_hessian():
    def fun(x):
        return jnp.sum(jax.nn.logsumexp(jnp.tanh(x @ W) @ W, -1))

    want = jax.jit(jax.hessian(fun))(X[:2])
    assert_near(jax.jit(jax.hessian(cast(fun)))(X[:2]), want, 0.1)


def test_while_counts_in_half_and_solves_in_float32():
    def counted(w, x):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[
            1
        ]

    assert [row[1] for row in found(cast(counted), W, X)] == [("bfloat16", "bfloat16")]

    def solved(w, x):
        def unfinished(c):
            return jnp.max(jnp.abs(c[0] - c[1])) > 1e-6

        return lax.while_loop(unfinished, lambda c: (0.2 * c[0] @ w + x, c[0]), (x, x + 1))[0]

    np.testing.assert_allclose(cast(solved)(W, X), solved(W, X), rtol=1e-5)


# ---- what stays float32 -------------------------------------------------------------------------


def layer_norm(x):
    mean = x.mean(-1, keepdims=True)
    var = (x * x).mean(-1, keepdims=True) - mean**2
    return (x - mean) * lax.rsqrt(var + 1e-6)


FULL = {
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "logsumexp": lambda x: jax.nn.logsumexp(x, -1),
    "softmax by hand": lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
    "layer norm": layer_norm,
    "rms norm": lambda x: x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6),
    "variance": lambda x: jnp.var(x, -1),
    "cumsum": lambda x: jnp.cumsum(x, -1),
    "power": lambda x: jnp.abs(x) ** 2.5,
    "norm": lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True),
    "svd": lambda x: jnp.linalg.svd(x, compute_uv=False),
    "erf_inv": lambda x: lax.erf_inv(jnp.tanh(x)),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", FULL)
def test_float32_operations(name, half):
    x = rounded(X, half)
    got, want = cast(FULL[name], half)(x), jax.jit(FULL[name])(x)
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    # The same on a value that is half, as a matmul's result would be.
    identity = jnp.eye(8)
    got = cast(lambda x: FULL[name](lax.stop_gradient(x @ identity)), half)(x)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_large_values_in_float16():
    x = rounded(300 + X, "float16")
    np.testing.assert_allclose(cast(layer_norm, "float16")(x), jax.jit(layer_norm)(x), rtol=1e-6)
    through = cast(lambda x: layer_norm(x @ jnp.eye(8)) @ jnp.eye(8), "float16")
    np.testing.assert_allclose(through(x), layer_norm(x), atol=2e-3)


def test_wide_results():
    """A matmul read only by float32 operations gives float32; its backward matmuls stay half."""
    for reader in (
        lambda s: jnp.sum(jax.nn.softmax(s)[:, 0]),
        lambda s: jnp.mean(jax.nn.logsumexp(s, -1)),
        lambda s: jnp.mean((s - 1) ** 2),
        jnp.sum,
    ):
        rows = found(cast(lambda w, x: reader(x @ w)), W, X)  # noqa: B023
        assert rows == [("dot_general", ("bfloat16", "bfloat16"), "float32")]
        rows = found(BOTH(cast(lambda w, x: reader(x @ w))), W, X)  # noqa: B023
        assert len(rows) == 3 and all(row[1] == ("bfloat16",) * 2 for row in rows)


def test_bias_gives_half_and_its_gradient_is_summed_in_float32():
    def fun(b, w, x):
        return jnp.sum(jax.nn.relu((x @ w + b) @ w))

    adds = found(cast(fun), W[0], W, X, names=("add",))
    assert adds == [("add", ("bfloat16", "bfloat16"), "bfloat16")]
    sums = found(jax.grad(cast(fun)), W[0], W, X, names=("reduce_sum",))
    assert all(row[1] == ("float32",) for row in sums)
    ones = jnp.ones((3000, 8))
    grad = jax.grad(cast(lambda b: jnp.sum((ones @ W + b) @ jnp.eye(8))))(W[0])
    np.testing.assert_allclose(grad, 3000, rtol=1e-3)


def test_small_reductions_stay_float32():
    def fun(w, x):
        h = x @ w
        return jnp.sum(jax.nn.relu((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)) @ w)

    rows = found(cast(fun), W, X, names=("sub", "rsqrt"))
    assert all(row[2] == "float32" for row in rows)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mask", [-1e9, float(jnp.finfo(jnp.float32).min), -jnp.inf])
def test_fully_masked_rows(mask, half):
    allowed = jnp.array([[True] * 4, [False] * 4, [True, False] * 2, [False] * 4])

    def fun(w, x):
        scores = jnp.where(allowed, (x @ w) @ x.T, mask)
        return jax.nn.softmax(scores, where=allowed if mask == -jnp.inf else None) @ x

    got, want = cast(fun, half)(W, X), fun(W, X)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, atol=0.05)

    def added(w, x):
        return jax.nn.softmax((x @ w) @ x.T + jnp.where(allowed, 0.0, max(mask, -1e30))) @ x

    np.testing.assert_allclose(cast(added, half)(W, X), added(W, X), atol=0.05)


@pytest.mark.parametrize("half", HALVES)
def test_constants_that_half_would_lose(half):
    def fun(w, x):
        h = (x * 0) @ w
        return (h / (jnp.abs(h) + 1e-8)) @ w + 0.999 * (h + 1)

    assert np.all(np.isfinite(cast(fun, half)(W, X)))
    np.testing.assert_allclose(cast(fun, half)(W, X), fun(W, X), rtol=1e-6)


@pytest.mark.parametrize("half", HALVES)
def test_positions(half):
    def fun(w, x):
        positions = jnp.arange(5000, dtype=jnp.float32)[:, None]
        angles = positions * jnp.array([1.0, 0.01])
        return jnp.concatenate([jnp.sin(angles), positions], 1), x @ w

    np.testing.assert_allclose(cast(fun, half)(W, X)[0], fun(W, X)[0], rtol=1e-4, atol=1e-4)


ANGLES = {
    "einsum": lambda p, f: jnp.einsum("i,j->ij", p.astype(jnp.float32), f),
    "matmul": lambda p, f: p.astype(jnp.float32)[:, None] @ f[None],
    "scaled": lambda p, f: (p.astype(jnp.float32) / 2)[:, None] @ f[None],
    "three inputs": lambda p, f: jnp.stack([p, p, p], 1).astype(jnp.float32) @ jnp.stack([f] * 3),
    "float positions": lambda p, f: jnp.einsum("i,j->ij", p + jnp.float32(0), f),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", ANGLES)
def test_angles_of_rotary_embeddings(name, half):
    def fun(w, positions, q):
        angles = ANGLES[name](positions, 1 / 10000 ** (jnp.arange(0, 8, 2) / 8))
        return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1), q @ w

    q, positions = normal(3, 4096, 8), jnp.arange(4096)
    got, want = cast(fun, half)(W, positions, q), jax.jit(fun)(W, positions, q)
    assert_near(got[0], want[0], 1e-5)
    assert matmul_dtypes(cast(fun, half), W, positions, q)[-1] == (half, half)


def test_pixels_and_outer_products_are_half():
    def fun(w, pixels, column):
        images = pixels.astype(jnp.float32) / 255
        return jnp.sum((images @ w) ** 2), jnp.sum(jnp.tanh(column @ w[:1]))

    args = W, jnp.arange(32, dtype=jnp.uint8).reshape(4, 8), X[:, :1]
    assert not full_matmuls(cast(fun), *args)
    assert not full_matmuls(jax.grad(lambda *args: sum(cast(fun)(*args))), *args)


def test_running_sums():
    def fun(w, x):
        def step(total, _):
            return total + jnp.mean(jax.nn.relu(x @ w) * 0 + 1), None

        return lax.scan(step, 0.0, None, length=3000)[0]

    assert cast(fun)(W, X) == 3000

    def matmul_sum(w, x):
        def step(total, row):
            return total + row @ w, None

        return lax.scan(step, jnp.zeros(8), jnp.ones((3000, 8)))[0]

    np.testing.assert_allclose(cast(matmul_sum)(jnp.eye(8), X), 3000)


def test_state_that_is_returned_keeps_its_precision():
    state = jnp.float32(1.0001) * jnp.ones((4, 8))

    def fun(w, state, x):
        new = state + 1e-3 * (x @ w)
        return new, new @ w

    assert_near(cast(fun)(W, state, X)[0], fun(W, state, X)[0], 1e-4)


def test_training_inside_a_scan():
    """Parameters under training are a carry that feeds matmuls, and must not be half."""

    def fun(w, x):
        def step(w, _):
            grad = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
            return w - 1e-3 * grad, None

        return lax.scan(step, w, None, length=100)[0]

    assert_near(cast(fun)(W, X) - W, fun(W, X) - W, 0.02)


def test_lstm_cell_stays_float32():
    def fun(w, x):
        def step(carry, xt):
            h, c = carry
            z = xt @ w + h @ w
            c = jax.nn.sigmoid(z + 3) * c + jax.nn.sigmoid(z) * jnp.tanh(z)
            return (jax.nn.sigmoid(z) * jnp.tanh(c), c), None

        return lax.scan(step, (jnp.zeros(8), jnp.zeros(8)), x)[0]

    (scan,) = [e for e in equations(jax.make_jaxpr(cast(fun))(W, X)) if e.primitive.name == "scan"]
    h, c = scan.outvars[:2]
    assert h.aval.dtype == jnp.bfloat16 and c.aval.dtype == jnp.float32


def test_gradient_of_a_weight_in_a_loop():
    def fun(w, x):
        def step(h, _):
            return jnp.tanh(h @ w + x), jnp.mean(h)

        return jnp.sum(lax.scan(step, x, None, length=1000)[1])

    assert_near(jax.jit(jax.grad(cast(fun)))(W, X[0]), jax.grad(fun)(W, X[0]), 0.02)


def test_explicit_precision_stays():
    def fun(w, x):
        return jnp.sum(jnp.dot(x, w, precision="highest"))

    assert found(cast(fun), W, X)[0][1] == ("float32", "float32")


# ---- storage ------------------------------------------------------------------------------------


def kept(fun, *args):
    """Returns the shapes and dtypes of what the backward pass needs of the forward pass."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(fun, *a)[1]))(*args).jaxpr
    fresh = set(jaxpr.outvars) - set(jaxpr.invars) - set(jaxpr.constvars)
    return [(v.aval.shape, str(v.aval.dtype)) for v in fresh]


def test_exact_gelu_keeps_its_half_slope():
    def fun(w, x):
        return jnp.sum(jax.nn.gelu(x @ w, approximate=False) @ w)

    arrays = [dtype for shape, dtype in kept(cast(fun), W, X) if shape == X.shape]
    assert arrays == ["bfloat16"] * 3  # x, the slope, the result


def test_exact_gelu_keeps_no_more_than_the_other_before_a_gate():
    def fun(approximate, w, x):
        return jnp.sum((jax.nn.gelu(x @ w, approximate=approximate) * (x @ w.T)) @ w)

    exact, other = (functools.partial(fun, approximate) for approximate in (False, True))
    assert sorted(kept(cast(exact), W, X)) == sorted(kept(cast(other), W, X))
    assert "float32" not in [dtype for _, dtype in kept(cast(exact), W, X)]
    assert_near(BOTH(cast(exact))(W, X), BOTH(exact)(W, X), 0.03)


def test_gelu_keeps_its_half_slope():
    def fun(w, x):
        return jnp.sum(jax.nn.gelu(x @ w) @ w)

    arrays = [dtype for shape, dtype in kept(cast(fun), W, X) if shape == X.shape]
    assert arrays == ["bfloat16"] * 3  # x, the slope, the result
    exps = found(BOTH(cast(fun)), W, X, names=("tanh",))
    assert len(exps) == 1  # nothing is computed twice


@pytest.mark.parametrize("act", [jax.nn.silu, jnp.tanh, jax.nn.gelu, lambda x: jnp.sin(x) / 3])
@pytest.mark.parametrize("half", HALVES)
def test_sloped_islands_in_value_and_derivatives(act, half):
    def fun(w, x):
        return jnp.sum(jnp.cos(act(x @ w) @ w))

    tolerance = 0.03 if half == "bfloat16" else 0.005
    auto = cast(fun, half)
    for derive in (BOTH, jax.jacfwd, lambda f: jax.hessian(f, 1), lambda f: jax.vmap(f, (None, 0))):
        args = (W, X[:, None]) if derive(fun).__name__ == "vmap" else (W, X)
        assert_near(derive(auto)(*args), derive(fun)(*args), tolerance)


ATTENTIONS = {
    "softmax first": lambda s, v: jax.nn.softmax(s) @ v,
    "softmax second": lambda s, v: (v.mT @ jax.nn.softmax(s, axis=-2)).mT,
    "swapped rows": lambda s, v: jnp.einsum("bqk,bkd->dbq", jax.nn.softmax(s), v),
    "two summed": lambda s, v: jnp.einsum("bqk,bqk->b", jax.nn.softmax(s, axis=(1, 2)), v @ v.mT),
    "no batch": lambda s, v: jax.nn.softmax(s[0], axis=0).T @ v[0],
    "returned too": lambda s, v: (jax.nn.softmax(s) @ v, jax.nn.softmax(s)),
    "the same twice": lambda s, v: jax.nn.softmax(s) @ jax.nn.softmax(s),
    "dropped": lambda s, v: jnp.where(KEEP, jax.nn.softmax(s) / 0.9, 0) @ v,
    "dropped, second": lambda s, v: jnp.einsum("bqk,bqd->bkd", jax.nn.softmax(s, 1) * KEEP, v),
    "not dropped to zero": lambda s, v: jnp.where(KEEP, jax.nn.softmax(s), 0.5) @ v,
    "kept otherwise": lambda s, v: jnp.where(KEEP, 0, 2 * jax.nn.softmax(s)) @ v,
    "gated": lambda s, v: (jax.nn.softmax(s) * jnp.tanh(jnp.sum(v, -1)[:, None] / 3)) @ v,
    "gated by scores": lambda s, v: (jax.nn.softmax(s) * jnp.cos(s / 4)) @ v,
    "squared": lambda s, v: jax.nn.softmax(s) ** 2 @ v,
    "twice itself": lambda s, v: (jax.nn.softmax(s) * jax.nn.softmax(s)) @ v,
    "weighed by the values": lambda s, v: (jax.nn.softmax(s)[..., :4] * v) @ jnp.abs(v[:, :4]),
}
KEEP = np.arange(36).reshape(6, 6) % 5 > 0


@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.checkpoint])
def test_softmaxes_that_matmuls_read(name, transform):
    inner = ATTENTIONS[name]

    def fun(q, v):
        scores = jnp.einsum("bqd,bkd->bqk", q, v)
        return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(inner(scores, v)))

    q, v = normal(5, 2, 6, 4), normal(6, 2, 6, 4)
    if transform is jax.vmap:
        q, v = jnp.stack([q, v]), jnp.stack([v, q])
    auto, plain = transform(cast(fun)), transform(fun)
    assert_near(auto(q, v), plain(q, v), 0.02)
    total = lambda f: lambda *args: jnp.sum(f(*args))  # noqa: E731
    assert_near(BOTH(total(auto))(q, v), BOTH(total(plain))(q, v), 0.03)
    assert not full_matmuls(BOTH(total(auto)), q, v)
    forward = lambda f: jax.jvp(total(f), (q, v), (v, q))[1]  # noqa: E731
    assert_near(forward(auto), forward(plain), 0.05)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_softmaxes_inside_of_remat(name):
    @jax.checkpoint
    def fun(q, v):
        scores = jnp.einsum("bqd,bkd->bqk", q, v)
        outs = ATTENTIONS[name](scores - jnp.max(scores) / 2, v)
        return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(outs))

    q, v = normal(7, 2, 6, 4), normal(8, 2, 6, 4)
    assert_near(BOTH(cast(fun))(q, v), BOTH(fun)(q, v), 0.03)
    assert not full_matmuls(BOTH(cast(fun)), q, v)


def test_remat_takes_the_derivative_of_a_softmax_from_its_result():
    def fun(w, x):
        return jnp.sum(by_hand((x @ w) @ x.T / 3)[0] @ x)

    jaxpr = str(jax.make_jaxpr(BOTH(cast(jax.checkpoint(fun))))(W, X))
    assert " eq " in str(jax.make_jaxpr(BOTH(jax.checkpoint(fun)))(W, X))  # of the maximum's
    assert " eq " not in jaxpr and jaxpr.count(" exp ") == 2


def test_islands_that_wait_for_each_other_are_dropped(monkeypatch):
    from mpjax._src.autocast import islands

    def crossed(block):
        groups = [islands.Island(block.ops[i::2]) for i in (0, 1)]
        for group in groups:
            islands._set_boundary(group, block)
        return {op: group for group in groups for op in group.ops}

    monkeypatch.setattr(islands, "_islands", crossed)

    def fun(x):
        return jnp.cos(jnp.sin(jnp.cos(jnp.sin(x))))

    assert_near(cast(fun)(X), fun(X), 0.02)


def test_a_softmax_takes_its_row_sums_from_the_matmul_that_reads_it():
    def fun(w, x):
        return jnp.sum(jax.nn.softmax(x @ w) @ w[:, :3])

    hlo = jax.jit(jax.grad(cast(fun), 1)).lower(W, X).compile().as_text()
    shapes = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", hlo))
    reduced = [shapes[name] for name in re.findall(r" reduce\([^%)]*(%[\w.-]+)", hlo)]
    assert reduced.count("f32[4,8]") == 2  # the maximum, and the sum of the exponentials


def test_softmax_keeps_its_half_result():
    def fun(w, x):
        return jnp.sum(jax.nn.dot_product_attention(*[(x @ w).reshape(1, 4, 2, 4)] * 3))

    assert all(dtype != "float32" for shape, dtype in kept(cast(fun), W, X) if len(shape) > 3)


def test_dropout_of_a_softmax_keeps_one_half_array():
    def fun(w, x):
        weights = jax.nn.softmax((x @ w) @ x.T / 3)
        return jnp.sum((weights * jnp.where(jnp.tri(4, dtype=bool), 1.25, 0)) @ x)

    assert sorted(dtype for shape, dtype in kept(cast(fun), W, X) if shape == (4, 4)) == [
        "bfloat16",
        "float32",  # the mask itself
    ]


def by_hand(scores, shift=lambda m: m, axis=-1):
    """A softmax, what is taken the exponential of, and the maximum."""
    m = scores.max(axis, keepdims=True)
    z = scores - shift(m)
    e = jnp.exp(z)
    return e / e.sum(axis, keepdims=True), z, m


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("axis", [-1, 0])
def test_a_softmax_by_hand_keeps_no_more_than_that_of_jax(mask, axis):
    def fun(softmax, w, x):
        scores = (x @ w) @ x.T / 3
        if mask:
            scores = jnp.where(jnp.tri(4, dtype=bool), scores, -1e9)
        scores = scores if axis else scores.T
        return jnp.sum(jnp.einsum("ij,jk" if axis else "ji,jk", softmax(scores), x))

    ours = kept(cast(functools.partial(fun, lambda s: by_hand(s, axis=axis)[0])), W, X)
    theirs = kept(cast(functools.partial(fun, lambda s: jax.nn.softmax(s, axis=axis))), W, X)
    assert sorted(ours) == sorted(theirs)


@pytest.mark.parametrize(
    "use",
    [
        lambda p, z, m, x: p @ x,
        lambda p, z, m, x: p @ x + z @ x,
        lambda p, z, m, x: p @ x + m,
        lambda p, z, m, x: p @ x + jnp.mean(jnp.tanh(z), -1, keepdims=True),
    ],
)
@pytest.mark.parametrize("shift", [lambda m: m, lambda m: m / 2, lambda m: m + 1])
def test_a_maximum_has_its_derivative_where_it_is_not_zero(use, shift, rng):
    def fun(w, x):
        return jnp.sum(jnp.sin(use(*by_hand((x @ w) @ x.T, shift), x)))

    w, x = normal(rng, 8, 8) * 0.3, normal(rng, 4, 8) * 0.5
    for got, wanted in zip(
        jax.grad(cast(fun, "float16"), (0, 1))(w, x), jax.grad(fun, (0, 1))(w, x), strict=True
    ):
        assert_near(got, wanted, 0.03)


def test_residual_stream_is_half():
    def fun(w, x):
        h = x + x @ w
        for _ in range(3):
            h = h + layer_norm(h) @ w
        return jnp.sum(layer_norm(h) @ w)

    adds = [row for row in found(cast(fun), W, X, names=("add",)) if row[2] == "bfloat16"]
    assert len(adds) >= 3


def test_scan_over_layers_carries_half():
    (scan,) = [
        e
        for e in equations(jax.make_jaxpr(cast(PROGRAMS["layers"]))(W, X))
        if e.primitive.name == "scan"
    ]
    assert scan.outvars[0].aval.dtype == jnp.bfloat16


def test_few_casts():
    def fun(w, x):
        h = x @ w
        return jnp.sum(jax.nn.relu(h @ w) @ w + h @ w)

    jaxpr = jax.make_jaxpr(cast(fun))(W, X)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    sources = [
        (e.invars[0], e.params["new_dtype"])
        for e in casts
        if e.invars[0] is not jaxpr.jaxpr.invars[0]
    ]
    assert len(sources) == len(set(sources))
    halves = {e.outvars[0] for e in casts if e.invars[0].aval.dtype == jnp.float32}
    assert not any(e.invars[0] in halves for e in casts)


# ---- arguments, results, dtypes -----------------------------------------------------------------


def test_other_dtypes_and_objects_pass_through():
    seen = []

    def fun(x, n, flag, name, key, z, obj=None):
        seen.append((type(n), flag, name, obj))
        out = {"x": x @ W * n, "i": jnp.arange(3), "z": z * 2, "s": name, "k": key, "n": None}
        return out, jax.random.normal(key, (2,))

    marker = object()
    args = (X, 2.5, True, "name", jax.random.key(0), jnp.ones(2, jnp.complex64))
    got, noise = cast(fun)(*args, obj=marker)
    want, want_noise = fun(*args, obj=marker)
    assert seen[0] == (float, True, "name", marker)
    assert got["s"] == "name" and got["n"] is None
    assert got["z"].dtype == jnp.complex64 and got["i"].dtype == jnp.int32
    np.testing.assert_array_equal(noise, want_noise)
    np.testing.assert_array_equal(got["i"], want["i"])
    assert jax.random.key_data(got["k"]).shape == jax.random.key_data(want["k"]).shape


def test_float64_stays(x64):
    def fun(w, x):
        return x @ w, jnp.sum(x.astype(jnp.float32) @ w.astype(jnp.float32))

    w, x = np.asarray(W, np.float64), np.asarray(X, np.float64)
    got = cast(fun)(w, x)
    assert got[0].dtype == jnp.float64
    np.testing.assert_allclose(got[0], x @ w, rtol=1e-12)


def test_values_that_the_user_made_half():
    def fun(w, x):
        h = x.astype(jnp.bfloat16)
        return h * 2, jax.nn.softmax(h.astype(jnp.float32) @ w)

    got = cast(fun)(W, X)
    assert got[0].dtype == jnp.bfloat16 and got[1].dtype == jnp.float32
    assert not full_matmuls(cast(fun), W, X)


def test_half_parameters_are_used_as_they_are():
    """O2: parameters arrive half; float32 code widens them; matmuls take them as they came."""
    w = W.astype(jnp.bfloat16)

    def fun(w, x):
        return jnp.sum(jax.nn.softmax(x @ w.astype(jnp.float32)))

    jaxpr = jax.make_jaxpr(cast(fun))(w, X)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert all(e.invars[0] is not jaxpr.jaxpr.invars[0] for e in casts)
    assert not full_matmuls(jax.grad(cast(fun)), w, X)
    assert jax.grad(cast(fun))(w, X).dtype == jnp.bfloat16


def test_output_dtype():
    policy = mpjax.get_policy("p=f32,c=bf16,o=bf16")
    out = mpjax.autocast(lambda w, x: (x @ w, jnp.arange(2)), policy)(W, X)
    assert out[0].dtype == jnp.bfloat16 and out[1].dtype == jnp.int32


def test_float32_policy_changes_nothing():
    fun = PROGRAMS["mlp"]
    np.testing.assert_allclose(mpjax.autocast(fun, "float32")(W, X), jax.jit(fun)(W, X), rtol=1e-6)


def test_eager_calls_are_cached():
    traces = []

    def fun(w, x):
        traces.append(1)
        return x @ w

    auto = cast(fun)
    for _ in range(3):
        auto(W, X)
    assert len(traces) == 1
    auto(W, X[:2])
    assert len(traces) == 2


def test_closures_over_tracers():
    def fun(w, x):
        return cast(lambda x: jnp.sum(x @ w))(x)

    assert_near(jax.grad(fun)(W, X), jax.grad(lambda w, x: jnp.sum(x @ w))(W, X))
    assert_near(jax.jit(jax.grad(fun))(W, X), jax.grad(lambda w, x: jnp.sum(x @ w))(W, X))


def test_autocast_inside_autocast():
    def fun(w, x):
        exact = mpjax.autocast(lambda x: x @ w, "float32")(x)
        return jnp.sum(exact) + jnp.sum(x @ w)

    rows = found(cast(fun), W, X)
    assert sorted(row[1][0] for row in rows) == ["bfloat16", "float32"]
    assert_near(jax.grad(cast(fun))(W, X), jax.grad(fun)(W, X))


def test_effects_survive(capsys):
    def fun(w, x):
        h = x @ w
        jax.debug.print("mean {}", h.dtype)
        jax.debug.callback(lambda h: print("dtype", h.dtype), h, ordered=True)
        return jnp.sum(h)

    cast(fun)(W, X)
    jax.effects_barrier()
    out = capsys.readouterr().out
    assert out.count("mean") == 1 and "dtype float32" in out
    jax.grad(cast(fun))(W, X)
    jax.effects_barrier()
    assert capsys.readouterr().out.count("mean") == 1


def test_names_and_locations_survive():
    def fun(w, x):
        with jax.named_scope("encoder"):
            return jnp.sum(x @ w)

    eqns = [
        e for e in equations(jax.make_jaxpr(cast(fun))(W, X)) if e.primitive.name == "dot_general"
    ]
    calls = [
        e
        for e in jax.make_jaxpr(cast(fun))(W, X).eqns
        if "encoder" in str(e.source_info.name_stack)
    ]
    assert eqns and calls
    policy = jax.checkpoint_policies.save_only_these_names("h")

    def named(w, x):
        from jax.ad_checkpoint import checkpoint_name

        return jnp.sum(jnp.sin(checkpoint_name(jax.nn.gelu(x @ w), "h")) @ w)

    assert_near(
        jax.grad(cast(jax.checkpoint(named, policy=policy)))(W, X), jax.grad(named)(W, X), 0.05
    )
    names = [e for e in equations(jax.make_jaxpr(cast(named))(W, X)) if e.primitive.name == "name"]
    assert len(names) == 1


def test_donation_survives():
    def fun(x):
        return jax.jit(lambda x: x + 1, donate_argnums=0)(x)

    x = jnp.ones((4, 4))
    cast(fun)(x)
    assert x.is_deleted()


def test_sharding_constraints_survive():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d"))

    def fun(w, x):
        return lax.with_sharding_constraint(x @ w, sharding)

    auto = jax.jit(cast(fun))
    assert auto(W, X).sharding.is_equivalent_to(sharding, 2)


def test_unknown_operations_are_left_alone():
    def fun(w, x):
        out = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, jnp.float32), x @ w)
        return jnp.nextafter(out, out + 1) @ w

    assert_near(cast(fun)(W, X), fun(W, X), 0.02)


def test_custom_partitioning_is_left_alone():
    @jax.experimental.custom_partitioning.custom_partitioning
    def partitioned(x):
        return jnp.sin(x)

    partitioned.def_partition(
        partition=lambda mesh, args, result: (
            mesh,
            partitioned,
            jax.tree.map(lambda a: a.sharding, result),
            jax.tree.map(lambda a: a.sharding, args),
        ),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="... -> ...",
    )

    def fun(w, x):
        return partitioned(x @ w) @ w

    (eqn,) = [
        e
        for e in equations(jax.make_jaxpr(cast(fun))(W, X))
        if e.primitive.name == "custom_partitioning"
    ]
    assert eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype == jnp.float32
    assert_near(jax.jit(cast(fun))(W, X), fun(W, X), 0.02)


def test_linear_call_keeps_its_transpose():
    def fun(w, x):
        linear = lambda w, x: x @ w  # noqa: E731
        transpose = lambda w, g: 3 * (g @ w.T)  # noqa: E731
        return jnp.sum(jax.custom_derivatives.linear_call(linear, transpose, w, x) @ w)

    grad = jax.grad(cast(fun), 1)
    assert_near(grad(W, X), jax.grad(fun, 1)(W, X), 0.02)
    assert not full_matmuls(grad, W, X)


def test_custom_vjp_with_symbolic_zeros():
    seen = []

    @jax.custom_vjp
    def ruled(w, x):
        return x @ w, jnp.tanh(x @ w)

    def fwd(w, x):
        seen.append((w.perturbed, x.perturbed))
        return (x.value @ w.value, jnp.tanh(x.value @ w.value)), (w.value, x.value)

    def bwd(residuals, cts):
        w, x = residuals
        seen.append(tuple(type(ct) is jax.custom_derivatives.SymbolicZero for ct in cts))
        g = 2 * (cts[1] if seen[-1][0] else cts[0])  # a rule of its own: twice the gradient
        return x.T @ g, g @ w.T

    ruled.defvjp(fwd, bwd, symbolic_zeros=True)
    for used in (0, 1):
        fun = lambda w, x: jnp.sum(ruled(w, x)[used] @ w)  # noqa: B023, E731
        for derive in (jax.grad, BOTH, lambda f: jax.jit(jax.vmap(jax.grad(f), (None, 0)))):
            x = X[:, None] if derive not in (jax.grad, BOTH) else X
            assert_near(derive(cast(fun))(W, x), derive(fun)(W, x), 0.03)
        assert not full_matmuls(BOTH(cast(fun)), W, X)
    seen.clear()
    jax.grad(cast(fun))(W, X)  # the rule is told what jax.grad tells it
    told = list(seen)
    seen.clear()
    jax.grad(fun)(W, X)
    assert [told[0], told[-1]] == seen == [(True, False), (True, False)]
    assert_near(cast(fun)(W, X), fun(W, X), 0.02)


def test_explicit_meshes():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    place = lambda a, *spec: jax.device_put(  # noqa: E731
        a, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
    )

    def fun(w, x):
        h = jax.nn.gelu(x @ w + w[0])
        return jnp.sum(jax.nn.softmax(h @ w) ** 2)

    with jax.set_mesh(mesh):
        w, x = place(W), place(X, "d")
        assert jax.typeof(x).sharding.spec[0] == "d"
        got = jax.jit(BOTH(cast(fun)))(w, x)
        assert jax.typeof(got[1]).sharding.spec[0] == "d"
        assert not full_matmuls(BOTH(cast(fun)), w, x)
    assert_near(jax.device_get(got), jax.device_get(BOTH(fun)(W, X)), 0.03)


def test_pallas_is_left_alone():
    pallas = pytest.importorskip("jax.experimental.pallas")

    def kernel(x, out):
        out[...] = x[...] * 2

    def fun(w, x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return pallas.pallas_call(kernel, out_shape=shape, interpret=True)(x @ w) @ w

    assert_near(cast(fun)(W, X), fun(W, X), 0.02)


# ---- control by the user ------------------------------------------------------------------------


def test_op_lists():
    policy = mpjax.get_policy("mixed_bfloat16")

    def fun(w, x):
        return jnp.exp(jnp.tanh(x @ w)) @ w

    def dtypes(policy, name):
        return found(mpjax.autocast(fun, policy), W, X, names=(name,))[0][2]

    assert dtypes(policy, "exp") == "float32"
    assert dtypes(policy.with_ops(half=["exp"]), "exp") == "bfloat16"
    assert dtypes(policy.with_ops(full=["tanh"]), "tanh") == "float32"
    assert dtypes(policy.with_ops(follow=["exp"]), "exp") == "bfloat16"
    assert dtypes(policy.with_ops(full=["dot_general"]), "dot_general") == "float32"


def test_overrides_by_path_and_scope():
    params = {"encoder": {"kernel": W}, "decoder": {"kernel": W}}

    def fun(params, x):
        h = x @ params["encoder"]["kernel"]
        with jax.named_scope("head"):
            return jax.nn.relu(h.T.reshape(4, 8) @ params["decoder"]["kernel"].T) @ W

    def dtypes(overrides):
        policy = mpjax.get_policy("mixed_bfloat16").override(overrides)
        return [row[1][1] for row in found(mpjax.autocast(fun, policy), params, X)]

    assert dtypes({}) == ["bfloat16"] * 3
    assert dtypes({"*/decoder/*": "float32"}) == ["bfloat16", "float32", "bfloat16"]
    assert dtypes({"*encoder*": "float32"}) == ["float32", "bfloat16", "bfloat16"]
    assert dtypes({"*/head/*": "float32"}) == ["bfloat16", "float32", "float32"]
    with pytest.raises(ValueError, match=r"decodr.*decoder/kernel"):
        dtypes({"*/decodr/*": "float32"})


def test_override_reaches_scanned_parameters():
    def fun(params, x):
        return lax.scan(lambda h, p: (jnp.tanh(h @ p["w"]), None), x, params["layers"])[0]

    params = {"layers": {"w": jnp.stack([W] * 2)}}
    policy = mpjax.get_policy("mixed_bfloat16").override({"layers/*": "float32"})
    assert full_matmuls(mpjax.autocast(fun, policy), params, X)


# ---- constants and accumulators that take a detour ----------------------------------------------


@pytest.mark.parametrize("add_both", [False, True])
def test_accumulators_that_swap_places_stay_float32(add_both):
    x, w, z = normal(0, 8, 16), normal(1, 16, 16, scale=0.25), jnp.zeros((8, 16))

    def fun(x, w):
        second = (lambda s: s[0] + x @ w) if add_both else (lambda s: s[0])
        return lax.fori_loop(0, 1000, lambda i, s: (s[1] + x @ w, second(s)), (z, z))

    assert_near(jax.jit(cast(fun))(x, w), fun(x, w), rtol=0.01)


MASKS = {
    "scaled": lambda m: (1 - m) * -1e9,
    "chosen": lambda m: jnp.where(m > 0, 0.0, -1e9),
    "lowest": lambda m: jnp.where(m > 0, 0.0, jnp.finfo(jnp.float32).min),
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("mask", MASKS)
def test_a_computed_mask_is_added_in_float32(mask, half):
    x, w = normal(0, 8, 16), normal(1, 16, 16, scale=0.25)
    m = jnp.zeros((8, 16)).at[1:].set(1.0)  # the first row is masked throughout

    def fun(x, w, m):
        scores = x @ w + MASKS[mask](m)
        return jax.nn.softmax(scores), jax.nn.relu(scores) @ w

    got, want = jax.jit(cast(fun, half))(x, w, m), fun(x, w, m)
    assert jnp.isfinite(got[0]).all()
    np.testing.assert_allclose(got[0], want[0], atol=0.02)


@pytest.mark.parametrize("half", HALVES)
def test_a_constant_survives_the_way_into_control_flow(half):
    eps = jnp.float32(1e-8)

    def normalized(h):
        return h / (jnp.abs(h) + eps)

    def scanned(x, w):
        return lax.scan(lambda c, _: (normalized(c @ w * 0), None), x, None, length=2)[0]

    def branched(x, w):
        return lax.cond(x[0, 0] > -100, lambda e: normalized(x @ w * 0) @ w, lambda e: x @ w, eps)

    def again(x, w):
        return jax.checkpoint(lambda x: normalized(x @ w * 0) @ w)(x)

    x, w = normal(0, 4, 8), normal(1, 8, 8)
    for fun in (scanned, branched, again):
        assert (jax.jit(cast(fun, half))(x, w) == 0).all(), fun.__name__


@pytest.mark.parametrize("fun", [jax.nn.softmax, lambda x: jnp.exp(jax.nn.gelu(x))])
def test_a_result_that_is_read_in_half_and_returned_is_returned_as_computed(fun, rng):
    def both(x, w):
        result = fun(x @ w)
        return result, result.astype(jnp.bfloat16), result @ w

    x, w = (jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(2))
    auto = mpjax.autocast(both, "mixed_bfloat16")
    exact, half, _ = auto(x, w)
    assert exact.dtype == jnp.float32 and half.dtype == jnp.bfloat16
    assert not jnp.array_equal(exact, exact.astype(jnp.bfloat16).astype(jnp.float32))
    grads = jax.grad(lambda *args: sum(jnp.sum(r.astype(jnp.float32)) for r in auto(*args)))(x, w)
    assert grads.dtype == jnp.float32


def test_a_softmax_whose_result_nobody_reads(rng):
    def fun(x):
        jax.nn.softmax(x)
        return jnp.tanh(x)

    x = jnp.asarray(rng.normal(size=(4, 4)), jnp.float32)
    assert jnp.array_equal(mpjax.autocast(fun, "mixed_bfloat16")(x), jnp.tanh(x))


def test_a_matmul_on_the_half_list_gives_half_to_float32_readers_too():
    def fun(w, x):
        return jnp.sum(jax.nn.softmax(x @ w))

    policy = mpjax.get_policy("mixed_bfloat16")
    (row,) = found(mpjax.autocast(fun, policy), W, X, names=("dot_general",))
    assert row[2] == "float32"
    (row,) = found(mpjax.autocast(fun, policy.with_ops(half="dot_general")), W, X)
    assert row[2] == "bfloat16"
