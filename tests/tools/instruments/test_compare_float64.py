"""Compare with float64 shows the errors of float32 itself, and leaves the process in float32."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import normal, thorough_but
from test_compare_float32 import called, kernel

import mpjax


def variance(w, x):
    h = x * w
    return jnp.mean(jnp.mean(h**2, -1) - jnp.mean(h, -1) ** 2)  # cancels


def log_sum_exp(w, x):
    return jnp.mean(jnp.log(jnp.sum(jnp.exp(w * x), -1)) - w * jnp.max(x, -1) - 1)  # by hand


def long_sum(w, x):
    def turn(total, row):
        return total + row, None  # turn

    return jnp.mean(jax.lax.scan(turn, w * jnp.full(4, 1e4), x)[0])


# Of each: what is drawn, the function in NumPy, and the primitive that loses the most.
FAULTS = {
    variance: (
        lambda rng: rng.normal(1e4, 1, (8, 64)),
        lambda w, x: np.mean(np.var(x * w, -1)),
        "sub",
    ),
    log_sum_exp: (
        lambda rng: np.concatenate([np.full((4, 1), 60.0), rng.normal(40, 1, (4, 9))], -1),
        lambda w, x: np.mean(np.log(np.sum(np.exp(w * x), -1)) - w * np.max(x, -1) - 1),
        "",
    ),
    long_sum: (
        lambda rng: rng.uniform(0.01, 0.02, (60, 4)),
        lambda w, x: np.mean(w * 1e4 + x.sum(0)),
        "add",
    ),
}


@pytest.mark.parametrize("fun", thorough_but(FAULTS, variance), ids=lambda fun: fun.__name__)
def test_float64_shows_what_float32_calls_exact(fun, rng):
    draw, exact, primitive = FAULTS[fun]
    w, x = jnp.float32(1), jnp.asarray(draw(rng), jnp.float32)
    assert set(mpjax.compare(fun, "float32")(w, x).results.values()) == {0.0}
    found = mpjax.compare(fun, "float32", reference="float64")(w, x)
    with jax.disable_jit():
        got = np.float64(fun(w, x))
    want = exact(1.0, np.asarray(x, np.float64))
    np.testing.assert_allclose(found.results["loss"], abs(got / want - 1), rtol=0.1, atol=1e-9)
    assert found.reference == "float64" and not found.float32
    assert "gradient of w" in found.results
    if primitive:
        worst = max((row for row in found.rows if not row.backward), key=lambda row: row.added)
        assert worst.primitive == primitive and "test_compare_float64.py:" in worst.source


def test_gradients_have_the_errors_of_float32(rng):
    """The gradient of the variance by w is twice the variance, at w = 1."""
    x = jnp.asarray(rng.normal(1e4, 1, (8, 64)), jnp.float32)
    found = mpjax.compare(variance, "float32", reference="float64")(jnp.float32(1), x)
    with jax.disable_jit():
        got = np.float64(jax.grad(variance)(jnp.float32(1), x))
    want = 2 * np.mean(np.var(np.asarray(x, np.float64), -1))
    error = abs(got / want - 1)  # small where the errors of rows cancel, by chance
    np.testing.assert_allclose(found.results["gradient of w"], error, rtol=0.1, atol=1e-6)
    assert max(row.added for row in found.rows) > 0.01


def drawn(w, x):
    """Random bits, integers that overflow, a loop, a branch, a remat: all as float32 has them."""
    keys = jax.random.split(jax.random.key(7), 3)
    keep = jax.random.bernoulli(keys[0], 0.5, x.shape)
    noise = jax.random.normal(keys[1], x.shape)
    hashed = (jnp.arange(x.shape[-1], dtype=jnp.int32) * 1_640_531_527) >> 16
    x = jnp.where(keep, x + noise, hashed.astype(jnp.float32) * 1e-5)

    def layer(h, key):
        h = jnp.tanh(h @ w) + 0.1 * jax.random.uniform(key, h.shape)
        return jax.lax.cond(h[0, 0] > 0, lambda h: h, lambda h: 2 * h, h), h.sum()

    h, sums = jax.lax.scan(jax.checkpoint(layer), x, jax.random.split(keys[2], 3))
    return jnp.mean(h**2) + jnp.mean(sums)


@pytest.mark.parametrize("policy", thorough_but(["float32", "mixed_bfloat16"], "mixed_bfloat16"))
def test_random_bits_and_integers_are_those_of_float32(policy, rng):
    args = normal(rng, 8, 8, scale=0.3), normal(rng, 4, 8)
    found = mpjax.compare(drawn, policy, reference="float64")(*args)
    single = found.float32 or found.results
    assert single.keys() == found.results.keys() and 0 < max(single.values()) < 1e-4
    assert not any("no float64 form" in line for line in found.document().lines)
    if found.float32:  # the policy is far worse, and its rows have both errors
        assert min(found.results.values()) > 10 * max(single.values())
        assert all(row.float32 < 1e-3 for row in found.rows if row.float32 is not None)
        assert "float32" in str(found).partition("Operations, worst first")[2]
        np.testing.assert_allclose(
            [*found.results.values()],
            [mpjax.compare(drawn, policy)(*args).results[name] for name in found.results],
            rtol=1e-2,
        )


def test_nothing_else_of_the_process_sees_float64(rng):
    traces, seen = [], []
    w, x = normal(rng, 8, 8), normal(rng, 4, 8)

    @jax.jit
    def mine(w, x):
        traces.append(jax.config.jax_enable_x64)
        return jnp.mean(jnp.tanh(x @ w))

    mine(w, x)

    def look(stop):
        while not stop.wait(0.01):
            seen.append((jax.config.jax_enable_x64, jnp.asarray(np.ones(2)).dtype))

    stop = threading.Event()
    thread = threading.Thread(target=look, args=(stop,))
    thread.start()
    found = mpjax.compare(mine, "float32", reference="float64")(w, x)
    stop.set()
    thread.join()
    mine(w, x)
    assert found.rows and not any(traces) and not jax.config.jax_enable_x64
    assert set(seen) <= {(False, np.dtype("float32"))} and seen
    assert jnp.asarray(np.ones(2)).dtype == jnp.float32


@pytest.mark.parametrize(("fun", "name"), [(kernel, "pallas_call"), (called, "pure_callback")])
def test_operations_without_a_float64_form_are_named(fun, name, rng):
    args = normal(rng, 8, 8), normal(rng, 4, 8)
    run = mpjax.compare(
        lambda w, x: jnp.tanh(fun(x @ w)), "float32", argnums=None, reference="float64"
    )
    found = run(*args)
    (row,) = [row for row in found.rows if not row.compared]
    assert row.primitive == name and "no float64 form, so its own error is unknown" in str(found)
    assert max(found.results.values()) < 1e-6


def test_sums_with_programs_of_their_own_and_algorithms_have_a_float64_form(rng):
    def fun(w, x):
        y = jnp.matmul(x, w, precision=jax.lax.DotAlgorithmPreset.F32_F32_F32)
        y = jax.lax.reduce(y, np.float32(0), lambda a, b: jax.lax.sqrt(a * a + b * b), (0,))
        return jnp.fft.fft(y).real + jnp.cumsum(y) + jnp.sort(y)

    run = mpjax.compare(fun, "float32", argnums=None, reference="float64")
    found = run(normal(rng, 8, 8), normal(rng, 4, 8))
    assert all(row.compared for row in found.rows) and 0 < found.results["result"] < 1e-5


def test_what_is_zero_in_exact_arithmetic_is_noise_in_float64_too(rng):
    def loss(b, x):
        h = x + b
        return jnp.mean(jnp.tanh((h - h.mean(0)) * jax.lax.rsqrt(h.var(0) + 1e-5)) ** 3)

    found = mpjax.compare(loss, "float32", reference="float64")(jnp.ones(4), normal(rng, 16, 4))
    assert "gradient of b" in found.noise and max(found.results.values()) < 1e-4
    assert "only rounding error in float64" in str(found)


def test_references_that_are_none_are_refused():
    with pytest.raises(
        ValueError, match="reference='bfloat16' is narrower than float32.*'float64'"
    ):
        mpjax.compare(variance, reference="bfloat16")
    with pytest.raises(ValueError, match="reference='float46'.*Did you mean 'float64'"):
        mpjax.compare(variance, reference="float46")
    assert callable(mpjax.compare(variance, reference=np.float64))
