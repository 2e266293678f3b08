"""Code whose types `make lint` checks; nothing runs it."""
# mypy: warn-unused-ignores
# pyright: reportUnnecessaryTypeIgnoreComment=true

from collections.abc import Callable
from typing import Any, assert_type

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import optax
from flax import nnx

import mpjax
import mpjax.linen
import mpjax.nnx


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (params["w"] * x).mean()


Loss = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def functions_keep_their_types(params: dict[str, jax.Array], x: jax.Array) -> None:
    assert_type(mpjax.autocast(loss_fn, "mixed_bfloat16")(params, x), jax.Array)
    assert_type(mpjax.precision("float32")(loss_fn)(params, x), jax.Array)
    assert_type(mpjax.half_inputs(loss_fn)(params, x), jax.Array)

    @mpjax.autocast(policy="mixed_float16")
    def decorated(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, int]:
        return loss_fn(params, x), 1

    assert_type(decorated(params, x), tuple[jax.Array, int])
    decorated(params, 1)  # type: ignore[arg-type]


def gradients_keep_values(params: dict[str, jax.Array], x: jax.Array) -> None:
    scaled = mpjax.scaled_value_and_grad(loss_fn, mpjax.DynamicLossScale())
    assert_type(scaled(params, x), tuple[jax.Array, Any, jax.Array])
    optimizer = mpjax.mixed_precision(optax.adam(1e-3), "O2:float16")
    assert_type(optimizer, mpjax.optim.MixedPrecision)
    opt_state = optimizer.init(params)
    assert_type(optimizer.value_and_grad(loss_fn, opt_state)(params, x), tuple[jax.Array, Any])
    optimizer.value_and_grad(loss_fn, opt_state)(params, "x")  # type: ignore[arg-type]


def reports_are_typed(params: dict[str, jax.Array], x: jax.Array) -> None:
    assert_type(mpjax.explain(loss_fn, "O1", argnums=0)(params, x), mpjax.reports.CastReport)
    assert_type(mpjax.explain(loss_fn, "O1", params, x, argnums=0), mpjax.reports.CastReport)
    assert_type(mpjax.compare(loss_fn, "O1")(params, x), mpjax.reports.Comparison)
    assert_type(mpjax.compare(loss_fn, "O1", params, x), mpjax.reports.Comparison)
    assert_type(mpjax.find_nonfinite(loss_fn, None, params, x), mpjax.reports.NonfiniteReport)
    assert_type(mpjax.lint(loss_fn, params, x, argnums=0), mpjax.reports.LintReport)
    assert_type(mpjax.lint(loss_fn, argnums=0)(params, x), mpjax.reports.LintReport)
    assert_type(mpjax.debug.tune(loss_fn, "O1", 1e-2, params, x), mpjax.reports.Tuning)
    mpjax.explain(loss_fn, "O1").rows  # type: ignore[attr-defined]  # noqa: B018
    mpjax.lint(1, params)  # type: ignore[call-overload]


def steps_are_typed(params: dict[str, jax.Array], x: jax.Array) -> None:
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "mixed_bfloat16")
    state = init(params)
    assert_type(state, mpjax.TrainState)
    state, _ = jax.jit(step)(state, x)
    assert_type(mpjax.get_policy("O2"), mpjax.Policy)
    eight = mpjax.optim.with_8bit_moments(optax.adam(1e-3), {"OwnState": {"average": "signed"}})
    assert_type(eight, optax.GradientTransformationExtraArgs)
    mpjax.optim.with_8bit_moments(optax.adam(1e-3), "signed")  # type: ignore[arg-type]
    assert_type(mpjax.cast(params, "bfloat16"), dict[str, jax.Array])


def a_loop_of_your_own(params: dict[str, jax.Array], x: jax.Array) -> None:
    optimizer = mpjax.mixed_precision(optax.adam(1e-3), "mixed_float16")
    opt_state = optimizer.init(params)
    assert_type(opt_state.metrics()["loss_scale"], jax.Array)
    loss, grads = optimizer.value_and_grad(loss_fn, opt_state)(params, x)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=loss)
    assert_type(opt_state.metrics(), dict[str, jax.Array])
    assert_type(opt_state.skipped_steps, jax.Array)
    optax.apply_updates(params, updates)
    optax.chain(optax.clip(1.0), optimizer).init(params)
    optimizer.update(grads, params, params)  # type: ignore[arg-type]


def a_loop_of_equinox(model: eqx.nn.MLP, x: jax.Array) -> None:
    def loss_fn(model: eqx.nn.MLP, x: jax.Array) -> jax.Array:
        return jax.vmap(model)(x).mean()

    optimizer = mpjax.mixed_precision(optax.adam(1e-3), "O2:bfloat16")
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    loss, grads = optimizer.value_and_grad(loss_fn, opt_state)(model, x)
    assert_type(loss, jax.Array)
    updates, opt_state = optimizer.update(grads, opt_state, model)
    model = eqx.apply_updates(model, updates)
    assert_type(opt_state.finite, jax.Array)


def a_loop_of_linen(model: linen.Module, params: dict[str, jax.Array], x: jax.Array) -> None:
    def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = jnp.asarray(model.apply({"params": params}, x))
        return out.mean(), out

    state = mpjax.linen.TrainState.create(
        apply_fn=model.apply, params=params, tx=optax.adam(1e-3), policy="16-mixed"
    )
    (loss, _), grads = state.value_and_grad(loss_fn, has_aux=True)(params, x)
    assert_type(loss, jax.Array)
    state = state.apply_gradients(grads=grads)
    assert_type(state, mpjax.linen.TrainState)
    assert_type(state.consecutive_skips, jax.Array)


def a_loop_of_nnx(model: nnx.Linear, x: jax.Array) -> None:
    def loss_fn(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return model(x).mean()

    optimizer = mpjax.nnx.Optimizer(model, optax.adam(1e-3), "mixed_bfloat16", wrt=nnx.Param)
    loss, grads = mpjax.nnx.value_and_grad(loss_fn, optimizer)(model, x)
    assert_type(loss, jax.Array)
    optimizer.update(model, grads)
    assert_type(optimizer.metrics(), dict[str, jax.Array])


def names_of_policies_are_strings(name: str) -> None:
    mpjax.autocast(loss_fn, name)
    mpjax.autocast(loss_fn, "O2:bfloat16,masters=split")
    mpjax.autocast(loss_fn, mpjax.get_policy(name).override({"*head*": "float32"}))
    mpjax.autocast(loss_fn, 16)  # pyright: ignore  (jmp has no types for mypy)


def misspelt_names_are_errors() -> None:
    mpjax.autocats  # type: ignore[attr-defined]  # noqa: B018
    mpjax.nnx.Optimiser  # type: ignore[attr-defined]  # noqa: B018
