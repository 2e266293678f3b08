"""jax_debug_nans, jax_debug_infs: reports report, and errors of autocast name the line."""

import contextlib
import inspect
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import thorough_but

import mpjax

W, X = np.ones((4, 4), np.float32), np.ones((2, 4), np.float32)
SWITCHES = {"nans": jax.debug_nans, "infs": jax.debug_infs}


def nan(w, x):
    return jnp.sum(jnp.log(x @ w - 100.0))


def infinite(w, x):
    return jnp.sum(jax.jit(jnp.exp)(x @ w * 100.0))


BAD = {"nans": nan, "infs": infinite}
LINES = {name: inspect.getsourcelines(fun)[1] + 1 for name, fun in BAD.items()}


@contextlib.contextmanager
def both():
    with jax.debug_nans(True), jax.debug_infs(True):
        yield


@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
@pytest.mark.parametrize("kind", BAD)
def test_errors_of_autocast_are_those_of_jax_and_name_the_line(kind, policy):
    planned = mpjax.autocast(BAD[kind], policy)
    for call in (planned, jax.jit(planned)):
        with SWITCHES[kind](True), pytest.raises(FloatingPointError) as told:
            call(W, X)
        assert any(f"{__file__}:{LINES[kind]}" in note for note in told.value.__notes__)


def test_a_jit_that_stays_one_is_named_too():
    donating = jax.jit(lambda h: jnp.log(h - 100.0), donate_argnums=0)
    loss = lambda w, x: jnp.sum(donating(x @ w))  # noqa: E731
    for policy in ("float32", "mixed_bfloat16"):
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
            mpjax.autocast(loss, policy)(W, X)


def test_what_is_finite_is_the_same_under_the_switches():
    finite = lambda w, x: jnp.mean(jax.nn.softmax(x @ w) ** 2)  # noqa: E731
    for policy in ("float32", "mixed_float16"):
        gradient = jax.jit(jax.grad(mpjax.autocast(finite, policy)))
        want = gradient(W, X)
        with both():
            np.testing.assert_array_equal(gradient(W, X), want)


REPORTS = {
    "find_nonfinite": lambda loss: mpjax.find_nonfinite(loss, "mixed_bfloat16")(W, X).found,
    "find_nonfinite float32": lambda loss: mpjax.find_nonfinite(loss)(W, X).source,
    "compare": lambda loss: mpjax.compare(loss, "mixed_float16", progress=False)(W, X).results,
    "lint": lambda loss: not mpjax.lint(loss, 0, select="stalled-update")(W, X).not_run,
    "measure": lambda loss: mpjax.debug.measure_precision(mpjax.autocast(loss))(W, X)[1],
    "histogram": lambda loss: mpjax.debug.gradient_histogram(np.float32([np.nan, np.inf])),
    "watch": lambda loss: mpjax.watch_precision(loss, every=1)(W, X) is not None,
    "explain": lambda loss: mpjax.explain(loss)(W, X).rows,
}


PAIRS = [*itertools.product(BAD, REPORTS)]
INFS = [("infs", name) for name in ("find_nonfinite", "histogram")]


@pytest.mark.parametrize(("kind", "name"), thorough_but(PAIRS, *PAIRS[: len(REPORTS)], *INFS))
def test_reports_report(name, kind):
    with both():
        assert REPORTS[name](BAD[kind])


@pytest.mark.thorough
def test_reports_on_two_functions_and_tuning_report():
    half = lambda w, x: jnp.log((x @ w).astype("bfloat16") - 100.0)  # noqa: E731
    with both():
        mpjax.compare(lambda w, x: jnp.log(x @ w - 100.0), half, progress=False)(W, X)
        finite = lambda w, x: jnp.mean((x @ w) ** 2)  # noqa: E731
        assert mpjax.debug.tune(finite, "mixed_float16", tolerance=0.1, progress=False)(W, X)
