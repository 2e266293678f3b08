"""The values that autocast keeps in float32, and the gradients that result."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from measure import run
from programs import W, X, layer_norm
from support import (
    BOTH,
    HALVES,
    assert_near,
    cast,
    found,
    full_matmuls,
    matmul_dtypes,
    normal,
    thorough_but,
)

import mpjax


def rounded(x, half):
    return np.asarray(x).astype(half).astype(np.float32)


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
    "erf_inv": lambda x: lax.erf_inv(jnp.tanh(x) / 2),  # near 1 it amplifies a last bit
}


PAIRS = [(name, half) for name in FULL for half in HALVES]
QUICK = [(name, HALVES[i % 2]) for i, name in enumerate(FULL)]


@pytest.mark.parametrize(("name", "half"), thorough_but(PAIRS, *QUICK))
def test_float32_operations_match_the_original_results(name, half):
    identity = jnp.eye(8)

    def all_ways(x):
        # The last one is of a value that is half, as a matmul's result would be.
        of_half = cast(lambda x: FULL[name](lax.stop_gradient(x @ identity)), half)
        return FULL[name](x), cast(FULL[name], half)(x), of_half(x)

    want, got, of_half = run(all_ways, rounded(X, half))
    np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(of_half, want, rtol=1e-5, atol=1e-5)


def test_layer_norm_of_large_values_is_right_in_float16():
    x = rounded(300 + X, "float16")
    np.testing.assert_allclose(cast(layer_norm, "float16")(x), jax.jit(layer_norm)(x), rtol=1e-6)
    through = cast(lambda x: layer_norm(x @ jnp.eye(8)) @ jnp.eye(8), "float16")
    np.testing.assert_allclose(through(x), layer_norm(x), atol=2e-3)


def test_matmul_read_by_float32_operations_gives_float32():
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


def test_gradient_of_a_bias_is_summed_in_float32():
    def fun(b, w, x):
        return jnp.sum(jax.nn.relu((x @ w + b) @ w))

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


MASKS = [-1e9, float(jnp.finfo(jnp.float32).min), -jnp.inf]
PAIRS = [(mask, half) for mask in MASKS for half in HALVES]


@pytest.mark.parametrize(("mask", "half"), thorough_but(PAIRS, 1, 2, 5))
def test_softmax_of_fully_masked_rows_matches_float32(mask, half):
    allowed = jnp.array([[True] * 4, [False] * 4, [True, False] * 2, [False] * 4])

    def fun(w, x):
        scores = jnp.where(allowed, (x @ w) @ x.T, mask)
        return jax.nn.softmax(scores, where=allowed if mask == -jnp.inf else None) @ x

    def added(w, x):
        return jax.nn.softmax((x @ w) @ x.T + jnp.where(allowed, 0.0, max(mask, -1e30))) @ x

    for f in (fun, added):
        got, want = run(lambda *args, f=f: (cast(f, half)(*args), f(*args)), W, X)
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
        np.testing.assert_allclose(got, want, atol=0.05)


@pytest.mark.parametrize("half", HALVES)
def test_constants_that_half_would_lose_survive(half):
    def fun(w, x):
        h = (x * 0) @ w
        return (h / (jnp.abs(h) + 1e-8)) @ w + 0.999 * (h + 1)

    got, want = run(lambda *args: (cast(fun, half)(*args), fun(*args)), W, X)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("half", HALVES)
def test_positions_and_their_angles_stay_float32(half):
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


@pytest.mark.parametrize(
    ("name", "half"),
    thorough_but([(name, half) for name in ANGLES for half in HALVES], 0, 3, 4, 7, 8),
)
def test_angles_of_rotary_embeddings_stay_float32(name, half):
    def fun(w, positions, q):
        angles = ANGLES[name](positions, 1 / 10000 ** (jnp.arange(0, 8, 2) / 8))
        return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], 1), q @ w

    q, positions = normal(3, 4096, 8), jnp.arange(4096)
    got, want = run(lambda *args: (cast(fun, half)(*args), fun(*args)), W, positions, q)
    assert_near(got[0], want[0], 1e-5)
    assert matmul_dtypes(cast(fun, half), W, positions, q)[-1] == (half, half)


def test_pixels_are_multiplied_in_16_bits():
    def fun(w, pixels):
        return jnp.sum((pixels.astype(jnp.float32) / 255 @ w) ** 2)

    args = W, jnp.arange(32, dtype=jnp.uint8).reshape(4, 8)
    assert not full_matmuls(cast(fun), *args)
    assert not full_matmuls(jax.grad(cast(fun)), *args)


@pytest.mark.parametrize("depth", [1, 4, 5])
def test_sums_of_few_products_are_float32_and_their_derivatives_are_not(depth):
    def fun(w, x):
        return jnp.sum(jnp.tanh(x @ w))

    args = W[:depth], X[:, :depth]
    assert bool(full_matmuls(cast(fun), *args)) == (depth < 5)
    assert len(full_matmuls(BOTH(cast(fun)), *args)) == (depth < 5)


def test_running_sums_in_a_scan_stay_float32():
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


def test_training_inside_a_scan_matches_float32():
    """Parameters under training are a carry that feeds matmuls, and must not be half."""

    def fun(w, x):
        def step(w, _):
            grad = jax.grad(lambda w: jnp.mean((x @ w - 1) ** 2))(w)
            return w - 1e-3 * grad, None

        return lax.scan(step, w, None, length=100)[0]

    got, want = jax.jit(lambda w, x: (cast(fun)(w, x) - w, fun(w, x) - w))(W, X)
    assert_near(got, want, 0.02)


def test_gradient_of_a_weight_in_a_loop_matches_float32():
    def fun(w, x):
        def step(h, _):
            return jnp.tanh(h @ w + x), jnp.mean(h)

        return jnp.sum(lax.scan(step, x, None, length=1000)[1])

    got, want = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (cast(fun), fun)])(W, X[0])
    assert_near(got, want, 0.02)


def test_explicit_precision_stays():
    def fun(w, x):
        return jnp.sum(jnp.dot(x, w, precision="highest"))

    with pytest.warns(mpjax.errors.PrecisionWarning, match="ask for precision=HIGHEST"):
        assert found(cast(fun), W, X)[0][1] == ("float32", "float32")


# Shapes of operands, and what is summed and shared; XLA:CPU has not all of them in half.
CONTRACTIONS = [
    ((8, 4), (12, 4, 3), (((1,), (1,)), ((), ()))),
    ((8, 40), (12, 40, 3), (((1,), (1,)), ((), ()))),
    ((40, 80), (120, 40, 30), (((0,), (1,)), ((), ()))),
    ((40, 8), (12, 3, 40), (((0,), (2,)), ((), ()))),
    ((2, 40, 8), (2, 12, 40, 3), (((1,), (2,)), ((0,), (0,)))),
    ((5, 8, 6), (12, 6, 5, 3), (((0, 2), (2, 1)), ((), ()))),
    ((6, 5, 8), (12, 5, 6, 3), (((1, 0), (1, 2)), ((), ()))),
    ((8, 40, 2), (2, 12, 40, 3), (((1,), (2,)), ((2,), (0,)))),
]


@pytest.mark.parametrize(("left", "right", "dims"), thorough_but(CONTRACTIONS, 2, 4, 5, 7))
def test_matmuls_with_float32_results_run_whatever_they_sum(left, right, dims):
    fun = lambda a, b: jnp.exp(lax.dot_general(a, b, dims) / 20)  # noqa: E731
    a, b = normal(0, *left), normal(1, *right)
    total = lambda f: lambda a, b: jnp.sum(f(a, b))  # noqa: E731
    ways = lambda f: lambda a, b: (f(a, b), BOTH(total(f))(a, b))  # noqa: E731
    got, want = jax.jit(ways(cast(fun)))(a, b), run(ways(fun), a, b)
    assert_near(got[0], want[0], 0.02)
    assert_near(got[1], want[1], 0.03)
    assert left == (8, 4) or not full_matmuls(cast(fun), a, b)
