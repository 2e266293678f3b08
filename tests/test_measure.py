"""The measure itself: what the yardstick rounds, and what it calls an error."""

import dataclasses

import jax
import jax.numpy as jnp
import measure
import numpy as np
import pytest
from jax import lax
from support import normal

HALVES = pytest.mark.parametrize("half", ["bfloat16", "float16"])
W, X = normal(0, 16, 16, scale=0.3), normal(1, 4, 16)


def rounded(x, half):
    return x.astype(half).astype(jnp.float32)


def near(a, b):
    return np.allclose(a, b, rtol=1e-6, atol=1e-7)


@HALVES
def test_rounded_matmuls_round_operands_and_results(half):
    got = measure.rounded_matmuls(lambda w, x: x @ w + 1, half)(W, X)
    want = rounded(rounded(X, half) @ rounded(W, half), half) + 1
    assert near(got, want) and not near(got, X @ W + 1)


@HALVES
def test_rounded_matmuls_round_those_of_the_gradient(half):
    fun = lambda w: jnp.sum(jnp.square(X @ w))  # noqa: E731
    y = rounded(rounded(X, half) @ rounded(W, half), half)
    want = rounded(rounded(X, half).T @ rounded(2 * y, half), half)
    assert near(jax.grad(measure.rounded_matmuls(fun, half))(W), want)
    assert near(measure.rounded_matmuls(jax.grad(fun), half)(W), want)


def test_rounded_matmuls_leave_an_amplified_result_in_float32():
    long = measure.rounded_matmuls(lambda w, x: jnp.sin((2 * x @ w)[:, ::-1]), "bfloat16")(W, X)
    half = rounded(2 * X, "bfloat16") @ rounded(W, "bfloat16")
    assert np.allclose(long, jnp.sin(half[:, ::-1]), atol=1e-5)
    short = measure.rounded_matmuls(lambda w, x: jnp.sin(2 * x @ w), "bfloat16")(W[:3], X[:, :3])
    assert np.allclose(short, jnp.sin(2 * X[:, :3] @ W[:3]), atol=1e-5)


def test_rounded_matmuls_see_an_amplifying_reader_through_programs():
    def fun(w, x):
        y = jax.jit(jnp.matmul)(x, w)
        carry, _ = lax.scan(lambda c, _: (c + y, None), y, None, length=2)
        return lax.cond(x[0, 0] > 0, jnp.exp, jnp.cos, carry)

    y = 3 * (rounded(X, "bfloat16") @ rounded(W, "bfloat16"))
    want = jnp.where(X[0, 0] > 0, jnp.exp(y), jnp.cos(y))
    assert np.allclose(measure.rounded_matmuls(fun, "bfloat16")(W, X), want, rtol=1e-4)


def programs(w, x):
    def layer(h, w):
        return jax.checkpoint(lambda h: h + jax.nn.gelu(jax.nn.relu(h) @ w))(h), h.sum()

    h, sums = lax.scan(layer, x, jnp.stack([w, w.T]), reverse=True)
    h = lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, c[1] / 2), (0, h))[1]
    h = jax.nn.softmax(lax.switch(1, [jnp.sin, jnp.cos], h) @ w)
    return {"h": h, "sums": sums, "sorted": jnp.sort(h.at[1:].add(jnp.cumsum(h, 0)[1:]))}


def test_in_float64_is_closer_than_float32_and_the_yardstick_is_near():
    truth = measure.in_float64(programs, (W, X), None)[0]
    assert all(x.dtype == np.float64 for x in jax.tree.leaves(truth))
    for want, plain, hand in zip(
        *(jax.tree.leaves(t) for t in (truth, programs(W, X))),
        jax.tree.leaves(measure.rounded_matmuls(programs, "bfloat16")(W, X)),
        strict=True,
    ):
        assert 0 < np.linalg.norm(plain - want) < 1e-5 * np.linalg.norm(want)
        assert 1e-5 < np.linalg.norm(hand - want) / np.linalg.norm(want) < 0.02


def halved(h):
    return lax.while_loop(lambda h: h > 1, lambda h: h / 2, h)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w, x: jnp.imag((x + 1j) @ jnp.fft.fft(w + 1j * w.T)),
        lambda w, x: x @ jnp.linalg.solve(jnp.eye(16) + w / 8, w),
        lambda w, x: jnp.zeros_like(x).at[::2].max(x[::2] @ w),
        lambda w, x: jax.vmap(jax.vmap(halved))(x @ w),
    ],
    ids=["complex", "solve", "scatter", "turns of each"],
)
def test_in_float64_takes_what_holds_programs_of_one_dtype(fun):
    truth = measure.in_float64(fun, (W, X), None)[0]
    with jax.enable_x64(True):
        want = fun(jnp.asarray(W, jnp.float64), jnp.asarray(X, jnp.float64))
    assert truth.dtype == np.float64 and np.allclose(truth, want, rtol=1e-12, atol=1e-12)


def test_truth_of_measure_is_that_of_the_program_in_32_bits():
    def fun(x):  # under x64, a wider number, and other random ones
        noise = jax.random.normal(jax.random.key(0), (4, 1))
        return x * (noise + jnp.cumsum(jnp.full((4, 1), 9.0), 0))

    rows = measure.errors(fun, (X,), "bfloat16")
    assert {row.part for row in rows} == {"result", "gradient"}
    assert all(row.yardstick < 1e-6 for row in rows)


@HALVES
def test_float32_programs_without_matmuls_have_no_error(half):
    rows = measure.check(lambda x: jnp.sin(x) * jnp.exp(x), (X,), half)
    assert {row.part for row in rows} == {"result", "gradient"}
    assert all(row.autocast < 1e-5 and row.yardstick < 1e-5 for row in rows)


def test_judge_names_what_is_too_far_off():
    coarse = lambda x: jnp.round(x * 4) / 4  # noqa: E731

    def fun(x):  # rounded by autocast alone
        return x

    rows = measure.errors(fun, (X,), "float16", None, update=lambda args, out: coarse(out))
    assert all(row.sound for row in rows)
    wrong = measure.Error("update", "['w']", 0.001, 0.1, 0, "float16")
    with pytest.raises(AssertionError, match=r"update\['w'\] in float16: autocast is 0.1 off"):
        measure.judge([*rows, wrong])
    measure.judge([*rows, wrong], "result")
    with pytest.raises(AssertionError, match="2 new Inf or NaN"):
        measure.judge([measure.Error("result", "", 0.0, 0.0, 2, "float16")])


def test_yardstick_is_the_larger_of_two_roundings_and_at_least_float32():
    step = 2.0**-7  # between bfloat16 numbers above one
    exact, between = jnp.full((2, 1), 1 + step), jnp.full((2, 1), 1 + 0.6 * step)
    for x, y in ((exact, (1 + step) ** 2 - step**2), (between, (1 + step) ** 2)):
        (row,) = measure.errors(jnp.matmul, (x, exact[:1]), "bfloat16", None, seeds=[0])
        true = float(x[0, 0]) * (1 + step)
        assert row.yardstick == pytest.approx(abs(y - true) / true, rel=1e-3)
    exact = measure.Error("result", "", 0.0, measure.FLOOR, 0, "bfloat16")
    assert exact.sound and not dataclasses.replace(exact, autocast=1e-6).sound


def test_redrawn_changes_arguments_but_numbers_and_what_16_bits_hold():
    args = X, {"scale": jnp.float32(0.3), "mask": jnp.eye(4), "ids": jnp.arange(4)}
    same, first, second = (measure.redrawn(args, seed) for seed in range(3))
    assert np.array_equal(same[0], X) and np.allclose(first[0], X, rtol=0.02)
    changed = rounded(first[0], "bfloat16") - first[0], rounded(second[0], "bfloat16") - second[0]
    assert np.abs(np.corrcoef(*map(np.ravel, changed))[0, 1]) < 0.5
    assert all(np.array_equal(first[1][key], args[1][key]) for key in args[1])


@pytest.mark.parametrize(
    ("off", "runs"), [([0.0], [3]), ([1.0, 0.0], [3, 10]), ([1.0] * 2, [3, 10])]
)
def test_findings_are_confirmed_by_fresh_arguments(off, runs, monkeypatch):
    asked, answers = [], iter(off)

    def errors(fun, draw, half, seeds):
        asked.append(len(seeds))
        return [measure.Error("result", "", 0.0, next(answers), 0, half)]

    monkeypatch.setattr(measure, "errors", errors)
    assert len(measure.findings(None, None, "float16")) == off[-1] and asked == runs


def test_a_gradient_that_cancels_is_measured_against_the_whole():
    def attention(p):  # a bias of the keys changes no softmax
        scores = (X @ p["q"]) @ (X @ p["k"] + p["bias"]).T
        return jax.nn.softmax(scores) @ X

    p = {"q": W, "k": W.T, "bias": jnp.ones(16)}
    rows = {row.leaf: row for row in measure.errors(attention, (p,), "bfloat16")}
    assert rows["['bias']"].yardstick < 0.02


def test_new_infinities_are_counted_and_those_of_the_yardstick_are_not():
    args = (jnp.full((4, 16), 30.0), jnp.full((16, 16), 300.0))
    rows = measure.errors(lambda x, w: x @ w, args, "float16", None)
    assert [row.nonfinite for row in rows] == [0]  # both overflow


@HALVES
def test_yardstick_grows_if_the_stream_is_rounded(half):
    def model(stream):
        def fun(x):
            for _ in range(8):
                x = stream(x + 0.3 * jnp.tanh(x @ W))
            return x

        return fun

    by_hand = model(lambda x: measure.rounded(x, half))
    (plain,) = measure.errors(model(lambda x: x), (X,), half, None)
    (streamed,) = measure.errors(model(lambda x: x), (X,), half, None, by_hand=by_hand)
    assert streamed.yardstick > 1.2 * plain.yardstick
    assert streamed.autocast == plain.autocast
