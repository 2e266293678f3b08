"""A policy that has no effect: its matmuls ask for a precision, and an override lifts it."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from programs import W, X
from support import found, full_matmuls

import mpjax

POLICY = mpjax.get_policy("mixed_bfloat16")


def precise(w, x):
    with jax.named_scope("body"):
        y = lax.scan(lambda y, _: (jnp.dot(y, w, precision="highest"), None), x, None, length=2)[0]
        return jnp.sum(jnp.dot(y, w, precision="highest"))


def images(w, x):
    x, w = x.reshape(1, 1, *x.shape), w[None, None, :3, :3]
    return jnp.sum(lax.conv_general_dilated(x, w, (1, 1), "SAME", precision="highest"))


SQUARE, ROWS = np.ones((4, 4), np.float32), np.ones((3, 4), np.float32)


@pytest.mark.parametrize("fun", [precise, images])
def test_warning_of_unplanned_matmuls_names_precision_and_override(fun):
    for call in (mpjax.autocast(fun), jax.grad(mpjax.autocast(fun))):
        with pytest.warns(mpjax.errors.PrecisionWarning) as heard:
            jax.eval_shape(call, SQUARE, ROWS)
        (message,) = [str(w.message) for w in heard]
        assert "precision=HIGHEST" in message and heard[0].filename == __file__
        pattern = message.split('override({"')[1].split('": "bf16"')[0]
        lifted = mpjax.autocast(fun, POLICY.override({pattern: "bf16"}))
        assert not full_matmuls(jax.grad(lifted, (0, 1)), SQUARE, ROWS)


def test_the_precision_is_lifted_where_the_override_matches():
    def two(w, x):
        return precise(w, x) + jnp.sum(jnp.dot(x, w, precision="highest"))

    lifted = mpjax.autocast(two, POLICY.override({"*body*dot_general": "bfloat16"}))
    rows = [dtypes[0] for _, dtypes, _ in found(lifted, SQUARE, ROWS)]
    assert sorted(rows) == ["bfloat16", "bfloat16", "float32"]
    assert "HIGHEST" not in str(jax.make_jaxpr(mpjax.autocast(precise, lift()))(SQUARE, ROWS))
    np.testing.assert_allclose(mpjax.autocast(precise, lift())(SQUARE, ROWS), precise(SQUARE, ROWS))


def lift():
    return POLICY.override({"*dot_general": "bfloat16"})


def _mixed(w, x):
    return precise(w, x) + jnp.sum(x @ w)


SILENT = {
    "no matmul": (lambda w, x: jnp.sum(jnp.tanh(x)), POLICY),
    "one in 16 bits": (_mixed, POLICY),
    "float32": (precise, "float32"),
    "region": (mpjax.precision("float32")(precise), POLICY),
    "override": (precise, POLICY.override({"*body*": "float32"})),
    "list": (precise, POLICY.with_ops(full="dot_general")),
    "plain matmuls in a region": (mpjax.precision("float32")(lambda w, x: jnp.sum(x @ w)), POLICY),
}


@pytest.mark.parametrize("case", SILENT)
def test_no_warning_where_the_user_asked_or_something_is_planned(case):
    fun, policy = SILENT[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(jax.grad(mpjax.autocast(fun, policy)), SQUARE, ROWS)


def test_the_default_precision_of_jax_is_no_precision_of_a_matmul():
    with jax.default_matmul_precision("highest"):
        assert not full_matmuls(mpjax.autocast(lambda w, x: x @ w), W, X)


# ---- float64 ------------------------------------------------------------------------------------

WIDE = np.ones((3, 4))


def _product(w, x):
    return jnp.sum(x @ w)


OF_WIDE = {
    "the float64 argument x": (_product, (SQUARE, WIDE)),
    "the float64 argument w": (_product, (np.ones((4, 4)), ROWS)),
    "the float64 argument batch['image'][0]": (
        lambda w, batch: jnp.sum(batch["image"][0] @ w),
        (SQUARE, {"image": [WIDE], "label": ROWS}),
    ),
    "a captured float64 array of shape (3, 4)": (lambda w: jnp.sum(WIDE @ w), (SQUARE,)),
    "a float64 number at": (lambda w, x: jnp.sum((x * np.float64(2)) @ w), (SQUARE, ROWS)),
    "a float64 number at ": (
        lambda w, x: lax.scan(lambda c, _: (c, jnp.zeros((3, 4)) @ w), 0, None, 2)[1],
        (SQUARE, ROWS),
    ),
}


@pytest.mark.parametrize("cause", OF_WIDE)
def test_float64_is_named_with_its_cause(cause, x64):
    fun, args = OF_WIDE[cause]
    planned = mpjax.autocast(fun)
    for call in (lambda: planned(*args), lambda: jax.jit(planned)(*args)):
        with pytest.warns(mpjax.errors.PrecisionWarning) as heard:
            call()
        (message,) = [str(w.message) for w in heard]
        assert cause in message and heard[0].filename == __file__
        assert "the float64 argument" in cause or "argument" not in message


def test_nothing_is_said_of_float64_that_makes_no_matmul_wide(x64):
    fine = [
        (lambda w, x, t: jnp.sum((x * t) @ w), (SQUARE, ROWS, 2.0)),  # a Python number
        (lambda w, x, t: jnp.sum(x @ w) * t, (SQUARE, ROWS, np.float64(2))),
        (lambda w, x: jnp.sum((x * jnp.full((4,), 2.0)) @ w), (SQUARE, ROWS)),  # weakly typed
        (lambda w, x: jnp.sum((x.astype("float32") @ w) @ w), (SQUARE, WIDE)),
        # Some of it is meant.
        (lambda w, x, s: jnp.sum((x @ w) @ w) + jnp.sum(s @ s), (SQUARE, ROWS, np.ones((2, 2)))),
    ]
    for fun, args in fine:
        jax.eval_shape(lambda *args, fun=fun: mpjax.autocast(fun)(*args), *args)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(mpjax.autocast(fine[0][0], "float32"), SQUARE, WIDE, 2.0)
