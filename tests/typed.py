"""Code whose types `make lint` checks; nothing runs it."""
# mypy: warn-unused-ignores

from collections.abc import Callable
from typing import Any, assert_type

import jax
import optax

import mpjax
import mpjax.linen
import mpjax.nnx


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return (params["w"] * x).mean()


Loss = Callable[[dict[str, jax.Array], jax.Array], jax.Array]


def functions_keep_their_types(params: dict[str, jax.Array], x: jax.Array) -> None:
    assert_type(mpjax.autocast(loss_fn, "mixed_bfloat16")(params, x), jax.Array)
    assert_type(mpjax.full_precision(loss_fn)(params, x), jax.Array)
    assert_type(mpjax.half_inputs(loss_fn)(params, x), jax.Array)

    @mpjax.autocast(policy="mixed_float16")
    def decorated(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, int]:
        return loss_fn(params, x), 1

    assert_type(decorated(params, x), tuple[jax.Array, int])
    decorated(params, 1)  # type: ignore[arg-type]


def gradients_keep_values(params: dict[str, jax.Array], x: jax.Array) -> None:
    scaled = mpjax.scaled_value_and_grad(loss_fn, mpjax.get_loss_scale("mixed_float16"))
    assert_type(scaled(params, x), tuple[jax.Array, Any, jax.Array])
    optimizer = mpjax.mixed_precision(optax.adam(1e-3), "O2:float16")
    assert_type(optimizer, mpjax.MixedPrecision)
    opt_state = optimizer.init(params)
    assert_type(optimizer.value_and_grad(loss_fn, opt_state)(params, x), tuple[jax.Array, Any])
    optimizer.value_and_grad(loss_fn, opt_state)(params, "x")  # type: ignore[arg-type]


def steps_are_typed(params: dict[str, jax.Array], x: jax.Array) -> None:
    init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "mixed_bfloat16")
    state = init(params)
    assert_type(state, mpjax.TrainState)
    state, _ = jax.jit(step)(state, x)
    assert_type(mpjax.get_policy("O2"), mpjax.Policy)
    eight = mpjax.with_8bit_moments(optax.adam(1e-3), {"OwnState": {"average": "signed"}})
    assert_type(eight, optax.GradientTransformationExtraArgs)
    mpjax.with_8bit_moments(optax.adam(1e-3), "signed")  # type: ignore[arg-type]
    assert_type(mpjax.cast(params, "bfloat16"), dict[str, jax.Array])
