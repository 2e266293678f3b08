"""Constants and accumulators that take a detour."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from measure import run
from programs import W, X
from support import HALVES, assert_near, cast, found, normal, thorough_but

import mpjax


@pytest.mark.parametrize("add_both", [False, True])
def test_accumulators_that_swap_places_stay_float32(add_both):
    x, w, z = normal(0, 8, 16), normal(1, 16, 16, scale=0.25), jnp.zeros((8, 16))

    def fun(x, w):
        second = (lambda s: s[0] + x @ w) if add_both else (lambda s: s[0])
        return lax.fori_loop(0, 1000, lambda i, s: (s[1] + x @ w, second(s)), (z, z))

    got, want = jax.jit(lambda x, w: (cast(fun)(x, w), fun(x, w)))(x, w)
    assert_near(got, want, rtol=0.01)


MASKS = {
    "scaled": lambda m: (1 - m) * -1e9,
    "chosen": lambda m: jnp.where(m > 0, 0.0, -1e9),
    "lowest": lambda m: jnp.where(m > 0, 0.0, jnp.finfo(jnp.float32).min),
}


PAIRS = [(mask, half) for mask in MASKS for half in HALVES]


@pytest.mark.parametrize(("mask", "half"), thorough_but(PAIRS, 1, 2, 5))
def test_a_computed_mask_is_added_in_float32(mask, half):
    x, w = normal(0, 8, 16), normal(1, 16, 16, scale=0.25)
    m = np.ones((8, 16), np.float32)
    m[0] = 0  # the first row is masked throughout

    def fun(x, w, m):
        scores = x @ w + MASKS[mask](m)
        return jax.nn.softmax(scores), jax.nn.relu(scores) @ w

    got, want = run(lambda *args: (cast(fun, half)(*args), fun(*args)), x, w, m)
    assert np.isfinite(got[0]).all()
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
        assert np.all(run(cast(fun, half), x, w) == 0), fun.__name__


@pytest.mark.parametrize("fun", [jax.nn.softmax, lambda x: jnp.exp(jax.nn.gelu(x))])
def test_result_that_is_returned_and_read_in_half_is_returned_unrounded(fun, rng):
    def both(x, w):
        result = fun(x @ w)
        return result, result.astype(jnp.bfloat16), result @ w

    x, w = (jnp.asarray(rng.normal(size=(4, 4)), jnp.float32) for _ in range(2))
    auto = mpjax.autocast(both, "mixed_bfloat16")
    exact, half, _ = run(auto, x, w)
    assert exact.dtype == jnp.float32 and half.dtype == jnp.bfloat16
    assert not np.array_equal(exact, exact.astype(jnp.bfloat16).astype(np.float32))
    total = lambda *args: sum(jnp.sum(r.astype(jnp.float32)) for r in auto(*args))  # noqa: E731
    assert jax.eval_shape(jax.grad(total), x, w).dtype == jnp.float32


def test_unread_softmax_changes_no_result(rng):
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


def test_float0_tangent_passes_through_control_flow():
    x, w, zero = normal(0, 8, 16), normal(1, 16, 16), np.zeros((), jax.dtypes.float0)

    def fun(x):
        def body(i, carry):
            h, tangent = carry
            return lax.cond(i > 0, lambda h, _: h @ w, lambda h, _: h, h, tangent), tangent

        return lax.fori_loop(0, 2, body, (x, zero))[0]

    assert_near(run(cast(fun), x), run(fun, x), rtol=0.02)


def batch_norm(x):
    axes = tuple(range(x.ndim - 1))
    centered = x - jnp.mean(x, axes)
    return centered * jax.lax.rsqrt(jnp.mean(centered**2, axes) + 1e-5)


def layer_norm(epsilon):
    def norm(x):
        centered = x - jnp.mean(x, -1, keepdims=True)
        return centered / jnp.sqrt(jnp.mean(centered**2, -1, keepdims=True) + epsilon)

    return norm


NORMS = {
    "over more entries than float16 counts": (batch_norm, (1040, 64, 64)),
    "with an epsilon that float16 loses": (layer_norm(1e-12), (8, 16, 64)),
}


@pytest.mark.parametrize(
    ("name", "half"),
    thorough_but([(name, half) for name in NORMS for half in HALVES], 1, 2),
)
def test_gradient_of_a_norm_matches_float32_whatever_is_divided_and_added(name, half):
    norm, shape = NORMS[name]
    x, w, v = normal(0, *shape), normal(1, 64, 64), normal(2, 64, 64)

    def loss(w, x):
        return jnp.mean((jax.nn.relu(norm(x @ w) * 1.5 + 0.5) @ v) ** 2)

    ours, true = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (cast(loss, half), loss)])(w, x)
    assert np.linalg.norm(ours - true) <= 0.02 * np.linalg.norm(true)
