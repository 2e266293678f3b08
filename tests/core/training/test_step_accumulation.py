"""The training step over micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import linear_loss, linear_problem
from support import thorough_but

import mpjax

POLICIES = ["float32", "mixed_float16", "O2:bf16"]


@pytest.mark.parametrize("policy", thorough_but(POLICIES, "float32", "O2:bf16"))
@pytest.mark.parametrize("steps", thorough_but([2, 4], 1))
def test_accumulation_equals_the_full_batch(policy, steps, rng):
    params, batch = linear_problem(rng)
    metrics, states = [], []
    for count in (1, steps):
        init, step = mpjax.build_train_step(
            linear_loss, optax.sgd(0.1), policy, accumulate_steps=count, loss_scale=8.0
        )
        state, metric = jax.jit(step)(init(params), batch)
        states.append(mpjax.optim.master_params(state.opt_state, state.params))
        metrics.append(metric)
    rtol = 1e-5 if policy == "float32" else 0.02
    np.testing.assert_allclose(metrics[0]["loss"], metrics[1]["loss"], rtol=rtol)
    np.testing.assert_allclose(metrics[0]["grad_norm"], metrics[1]["grad_norm"], rtol=rtol)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol), *states)


def test_accumulation_is_in_float32():
    """256 + 1 is 256 in bfloat16; the mean over micro-batches must not lose the ones."""
    loss_fn = lambda p, batch: jnp.sum((p["w"] * batch).astype(jnp.float32))  # noqa: E731
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(1.0), "O3:bf16", accumulate_steps=4)
    _, metrics = jax.jit(step)(init({"w": jnp.zeros(1)}), jnp.array([256.0, 1, 1, 1])[:, None])
    assert float(metrics["grad_norm"]) == 259 / 4


def test_model_state_threads_through_and_aux_and_rng_are_per_micro_batch():
    def loss_fn(params, batch, model_state, rng):
        noise = jax.random.uniform(rng)
        loss = jnp.mean((batch * params["w"]) ** 2).astype(jnp.float32)
        seen = {"before": model_state["n"], "noise": noise, "x": batch[0]}
        return loss, ({"n": model_state["n"] + 1}, seen)

    init, step = mpjax.build_train_step(
        loss_fn, optax.sgd(0.1), "float32", has_aux=True, accumulate_steps=3
    )
    state = init({"w": jnp.ones(())}, {"n": jnp.int32(5)}, jax.random.key(7))
    state, metrics = jax.jit(step)(state, jnp.arange(6.0))
    aux = metrics["aux"]
    assert aux["before"].tolist() == [5, 6, 7] and int(state.model_state["n"]) == 8
    assert aux["x"].tolist() == [0, 1, 2] and len(set(aux["noise"].tolist())) == 3


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": jnp.ones((7, 2))}, r"accumulate_steps=2 must divide .*batch\['x'\].*axis of 7"),
        ({"x": jnp.ones((8, 2)), "t": jnp.float32(1)}, r"batch\['t'\], of shape \(\), is a scalar"),
    ],
)
def test_a_leading_axis_that_does_not_divide_is_an_error_while_tracing(batch, message):
    loss_fn = lambda p, batch: jnp.mean(batch["x"] @ p["w"])  # noqa: E731
    init, step = mpjax.build_train_step(loss_fn, optax.sgd(0.1), "float32", accumulate_steps=2)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, init({"w": jnp.ones(2)}), batch)
