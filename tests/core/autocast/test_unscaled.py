"""A warning of float16 gradients that nothing scales: once in a process, and not if they are."""

import warnings

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax.training.dynamic_scale import DynamicScale
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as SPEC
from problems import mesh
from support import thorough_but

import mpjax
from mpjax.errors import PrecisionWarning

W, X = np.full((4, 4), 0.5, np.float32), np.full((2, 4), 0.25, np.float32)


def model(w, x):
    return jnp.tanh(x @ w)


def loss(w, x):
    return jnp.mean(model(w, x) ** 2)


POLICY = "mixed_float16"
BOUNDARY = mpjax.autocast(loss, f"{POLICY},casting=boundary")
PLANNED, MODEL = mpjax.autocast(loss, POLICY), mpjax.autocast(model, POLICY)
REGION = mpjax.precision("float16")(model)
SCALE = np.float32(1024)


def of_model(w, x):
    return jnp.mean(MODEL(w, x) ** 2)


def in_scan(w, x):
    return jnp.mean(jax.lax.scan(lambda h, _: (MODEL(w, h), None), x, None, 2)[0])


def on_devices(loss, jit=lambda f: f):
    """Returns a call that takes the gradient on each device of a mesh."""
    grad = jax.shard_map(
        jax.grad(loss), mesh=mesh(), in_specs=(SPEC(), SPEC("data")), out_specs=SPEC()
    )
    return lambda: jit(grad)(W, X)


def over_devices(scale, jit=lambda f: f):
    """Returns a call that takes the gradient of a loss that is computed on devices."""
    loss = jax.shard_map(
        lambda w, x: PLANNED(w, x)[None],
        mesh=mesh(),
        in_specs=(SPEC(), SPEC("data")),
        out_specs=SPEC("data"),
    )
    return lambda: jit(jax.grad(lambda w, x: loss(w, x).sum() * scale))(W, X)


def inside():
    """Returns losses whose backward pass is traced by itself: what multiplies it is outside.

    They are new ones, because JAX does not trace a backward pass again.
    """
    planned, of = mpjax.autocast(lambda w, x: loss(w, x), POLICY), mpjax.autocast(model, POLICY)

    def accumulated(w, x):  # over micro-batches
        return jax.lax.scan(lambda total, x: (total + planned(w, x[None]), None), 0.0, x)[0]

    def chosen(w, x):
        return jax.lax.cond(x[0, 0] < 9, planned, lambda w, x: jnp.sum(w), w, x)

    return {
        "jit": jax.jit(planned),
        "two jits": jax.jit(lambda w, x: jax.jit(planned)(w, x) + 1),
        "a checkpoint": jax.checkpoint(planned),
        "a scan": accumulated,
        "a branch": chosen,
        "a model's jit": lambda w, x: jnp.mean(jax.jit(of)(w, x) ** 2),
    }


def state_of(params):
    return TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))


def trained(state, x):
    _, grads = jax.value_and_grad(lambda params: PLANNED(params["w"], x))(state.params)
    return state.apply_gradients(grads=grads)


def micro_batches(fun):
    def run(w, x, scale):
        total = lambda total, x: (total + jax.grad(fun)(w, x[None], scale), None)  # noqa: E731
        return jax.lax.scan(total, jnp.zeros_like(w), x)[0]

    return run


def each_inside(run):
    return {f"inside {name}": lambda name=name: run(inside()[name]) for name in inside()}


UNSCALED = {
    **each_inside(lambda f: jax.grad(f)(W, X)),
    **{"jit, " + k: f for k, f in each_inside(lambda f: jax.jit(jax.grad(f))(W, X)).items()},
    "weighted on devices": on_devices(lambda w, x: 0.5 * PLANNED(w, x), jax.jit),
    "on devices": on_devices(PLANNED),
    "over devices": over_devices(1.0, jax.jit),
    "over devices eager": over_devices(1.0),
    "large batch": lambda: jax.grad(of_model)(W, np.tile(X, (500, 1))),
    "TrainState": lambda: jax.jit(trained)(state_of({"w": W}), X),
    "examples": lambda: jax.grad(lambda w, x: jnp.mean(of_examples(w, x)))(W, X),
    "micro-batches": lambda: jax.jit(micro_batches(lambda w, x, _: PLANNED(w, x)))(W, X, SCALE),
    "grad": lambda: jax.grad(PLANNED)(W, X),
    "boundary": lambda: jax.grad(BOUNDARY)(W, X),
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


def of_examples(w, x):
    return jax.vmap(PLANNED, (None, 0))(w, x[:, None])


def by_number(fun, jit=jax.jit, mean=lambda loss: loss):
    return lambda: jit(jax.grad(lambda w, x, scale: mean(fun(w, x) * scale)))(W, X, SCALE)


def with_mixed_precision(loss_scale="auto"):
    optimizer = mpjax.mixed_precision(optax.sgd(0.1), POLICY, loss_scale)
    state = optimizer.init(W)
    return jax.jit(optimizer.value_and_grad(loss, state))(W, X)


def scaled(fun):
    return jax.grad(lambda w, x: fun(w, x) * 1024)


FINE = {
    **each_inside(lambda f: scaled(f)(W, X)),
    **{"jit, " + k: f for k, f in each_inside(lambda f: jax.jit(scaled(f))(W, X)).items()},
    **{"by a number, " + k: f for k, f in each_inside(lambda f: by_number(f)()).items()},
    "on devices": on_devices(lambda w, x: 1024 * PLANNED(w, x)),
    "on devices in jit": on_devices(lambda w, x: 1024 * PLANNED(w, x), jax.jit),
    "over devices": over_devices(1024, jax.jit),
    "over devices eager": over_devices(1024),
    "large batch": lambda: jax.grad(lambda w, x: 1024 * of_model(w, x))(W, np.tile(X, (500, 1))),
    "micro-batches": lambda: jax.jit(micro_batches(lambda w, x, s: PLANNED(w, x) * s))(W, X, SCALE),
    "examples": lambda: jax.grad(lambda w, x: jnp.mean(1024 * of_examples(w, x)))(W, X),
    "examples by a number": by_number(lambda w, x: of_examples(w, x), mean=jnp.mean),
    "cotangent": lambda: jax.vjp(PLANNED, W, X)[1](SCALE),
    "cotangent in jit": lambda: jax.jit(lambda s: jax.vjp(PLANNED, W, X)[1](s))(SCALE),
    "forward": lambda: (jax.jit(PLANNED)(W, X), MODEL(W, X)),
    "boundary": lambda: scaled(BOUNDARY)(W, X),
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


QUICK = (
    "grad",
    "boundary",
    "model eager",
    "vmap",
    "inside jit",
    "jit, inside a scan",
    "weighted on devices",
)


@pytest.mark.parametrize("name", thorough_but(UNSCALED, *QUICK))
def test_a_float16_gradient_that_nothing_scales_is_told_once(name, nothing_called):
    with pytest.warns(PrecisionWarning, match="no loss scale is seen") as heard:
        UNSCALED[name]()
    assert len(heard) == 1 and heard[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.grad(PLANNED)(W, X)


QUICK = (
    "mixed_precision",
    "boundary",
    "jmp",
    "flax",
    "inside jit",
    "jit, inside a checkpoint",
    "on devices",
)


@pytest.mark.parametrize("name", thorough_but(FINE, *QUICK))
def test_nothing_is_said_of_what_is_scaled_or_not_differentiated(name, nothing_called):
    FINE[name]()


def test_derivatives_of_all_orders_stay_what_they_are():
    for derivative in (jax.hessian, jax.jacfwd, lambda f: jax.jacrev(jax.jacrev(f))):
        got = derivative(lambda w: PLANNED(w, X))(W)
        np.testing.assert_allclose(got, derivative(lambda w: loss(w, X))(W), atol=1e-3)
