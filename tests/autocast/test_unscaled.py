"""A warning of float16 gradients that nothing scales: once in a process, and not if they are."""

import warnings

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale

import mpjax
from mpjax.errors import PrecisionWarning

W, X = np.full((4, 4), 0.5, np.float32), np.full((2, 4), 0.25, np.float32)


def model(w, x):
    return jnp.tanh(x @ w)


def loss(w, x):
    return jnp.mean(model(w, x) ** 2)


POLICY = "mixed_float16"
PLANNED, MODEL = mpjax.autocast(loss, POLICY), mpjax.autocast(model, POLICY)
REGION = mpjax.precision("float16")(model)
SCALE = np.float32(1024)


def of_model(w, x):
    return jnp.mean(MODEL(w, x) ** 2)


def in_scan(w, x):
    return jnp.mean(jax.lax.scan(lambda h, _: (MODEL(w, h), None), x, None, 2)[0])


UNSCALED = {
    "grad": lambda: jax.grad(PLANNED)(W, X),
    "jit": lambda: jax.jit(jax.value_and_grad(PLANNED))(W, X),
    "grad of jit": lambda: jax.grad(jax.jit(PLANNED))(W, X),
    "model": lambda: jax.jit(jax.grad(of_model))(W, X),
    "weighted": lambda: jax.jit(jax.grad(lambda w, x: 0.5 * PLANNED(w, x) + jnp.sum(w)))(W, X),
    "model eager": lambda: jax.grad(of_model)(W, X),
    "vjp": lambda: jax.vjp(PLANNED, W, X)[1](jnp.ones(())),
    "closure": lambda: jax.grad(lambda w: mpjax.autocast(lambda x: model(w, x), POLICY)(X).sum())(
        W
    ),
    "scan": lambda: jax.jit(jax.grad(in_scan))(W, X),
    "checkpoint": lambda: jax.jit(jax.grad(lambda w, x: jax.checkpoint(MODEL)(w, x).sum()))(W, X),
    "vmap": lambda: jax.vmap(jax.grad(PLANNED), (None, 0))(W, X[None]),
    "region": lambda: jax.grad(mpjax.autocast(lambda w, x: REGION(w, x).sum(), "float32"))(W, X),
    "override": lambda: jax.grad(
        mpjax.autocast(
            loss, mpjax.get_policy("mixed_bfloat16").override({"*dot_general": "float16"})
        )
    )(W, X),
}


def by_number(fun, jit=jax.jit):
    return lambda: jit(jax.grad(lambda w, x, scale: fun(w, x) * scale))(W, X, SCALE)


def with_mixed_precision(loss_scale="auto"):
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), POLICY, loss_scale)
    state = optimizer.init(W)
    return jax.jit(optimizer.value_and_grad(loss, state))(W, X)


FINE = {
    "forward": lambda: (jax.jit(PLANNED)(W, X), MODEL(W, X)),
    "bfloat16": lambda: jax.grad(mpjax.autocast(loss))(W, X),
    "float32": lambda: jax.grad(mpjax.autocast(loss, "float32"))(W, X),
    "mixed_precision": with_mixed_precision,
    "mixed_precision without": lambda: with_mixed_precision(None),  # as the user asks
    "scaled_value_and_grad": lambda: jax.jit(
        mpjax.scaled_value_and_grad(PLANNED, mpjax.StaticLossScale(1024.0))
    )(W, X),
    "our scale": lambda: jax.jit(
        jax.grad(lambda w, x: mpjax.DynamicLossScale().scale(PLANNED(w, x)))
    )(W, X),
    "jmp": lambda: jax.jit(
        jax.grad(lambda w, x, scale: scale.scale(PLANNED(w, x))),
    )(W, X, jmp.DynamicLossScale(jnp.float32(1024))),
    "flax": lambda: jax.jit(lambda w, x: DynamicScale().value_and_grad(PLANNED)(w, x)[2])(W, X),
    "number": by_number(PLANNED),
    "number of a model": by_number(of_model),
    "number in a jit": lambda: jax.grad(jax.jit(lambda w, x: PLANNED(w, x) * 1024))(W, X),
    "number eager": by_number(PLANNED, lambda fun: fun),
    "constant": lambda: jax.jit(jax.grad(lambda w, x: PLANNED(w, x) * 2.0**15))(W, X),
    "compare": lambda: mpjax.compare(PLANNED, POLICY, progress=False)(W, X),
    "find_nonfinite": lambda: mpjax.find_nonfinite(PLANNED)(W, X),
    "lint": lambda: mpjax.lint(jax.grad(PLANNED), select="half-sum")(W, X),
    "explain": lambda: mpjax.explain(PLANNED, POLICY, argnums=0)(W, X),
}


@pytest.mark.parametrize("name", UNSCALED)
def test_a_float16_gradient_that_nothing_scales_is_told_once(name, nothing_called):
    with pytest.warns(PrecisionWarning, match="no loss scale is seen") as heard:
        UNSCALED[name]()
    assert len(heard) == 1 and heard[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(PLANNED)(W, X)


@pytest.mark.parametrize("name", FINE)
def test_nothing_is_said_of_what_is_scaled_or_not_differentiated(name, nothing_called):
    FINE[name]()


def test_derivatives_of_all_orders_stay_what_they_are():
    for derivative in (jax.hessian, jax.jacfwd, lambda f: jax.jacrev(jax.jacrev(f))):
        got = derivative(lambda w: PLANNED(w, X))(W)
        np.testing.assert_allclose(got, derivative(lambda w: loss(w, X))(W), atol=1e-3)
