"""The tensors that are reported at risk before the first overflow, and those that are not."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support import normal, thorough_but

import mpjax

X = normal(0, 8, 16)


def growing(rate, policy="mixed_float16"):
    """Returns a loop's step, by which one matmul's result grows; a state, and what it starts at."""

    def loss(params, x):
        with jax.named_scope("calm"):
            h = jnp.tanh(x @ params["w"])
        with jax.named_scope("grows"):
            return jnp.mean((h @ params["v"]).astype(jnp.float32))

    def step(params, x):
        grads = jax.grad(mpjax.autocast(loss, policy))(params, x)
        return {"w": params["w"] - 0 * grads["w"], "v": params["v"] * rate}, {}

    return jax.jit(step), {"w": jnp.eye(16), "v": jnp.ones((16, 4))}


def overflow_and_warnings(rate, every, steps=400):
    """Returns the first step of an overflow, and the samples that name something at risk."""
    step, state = growing(rate)
    watched = mpjax.watch_precision(step, every)
    named, first = {}, None
    for i in range(steps):
        if first is None and not np.isfinite(state["v"].astype(jnp.float16)).all():
            first = i
        state, metrics = watched(state, X)
        if metrics:
            found = [row for row in metrics["precision"].rows if row.risk]
            if found:
                named[i] = found
    return first, named


@pytest.mark.parametrize(
    ("rate", "every"),
    thorough_but([(1.05, 10), (1.2, 5), (1.05, 40), (1.5, 2)], (1.2, 5)),
)
def test_risk_names_a_growing_tensor_before_the_first_overflow(rate, every):
    first, named = overflow_and_warnings(rate, every)
    warned = min(named)
    assert warned < first
    assert {row.risk.kind for row in named[warned]} == {"growing"}
    assert "grows" in {row.scope for row in named[warned]}
    left = named[warned][0].risk.steps_left
    assert warned + left == pytest.approx(first, abs=2 + 0.1 * left)
    text = named[warned][0].risk.text
    assert "float16's 65504" in text and "override" in text and "grew" in text
    last = max(named)
    assert "gone" in {row.risk.kind for row in named[last]}


def test_tensor_that_stands_still_is_no_risk():
    step, state = growing(1.0)
    watched = mpjax.watch_precision(step, 1)
    for _ in range(10):
        state, metrics = watched(state, X)
        assert metrics["precision"].risks == []
    assert watched.latest.rows[0].growth == pytest.approx(0, abs=1e-6)
    assert len(watched.latest.steps) == 8


def seen(x, half="float16"):
    return jax.jit(mpjax.debug.measure_precision(lambda x: x.astype(half)))(jnp.asarray(x))[1]


def kinds(report):
    return [row.risk.kind for row in report.rows if row.risk]


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (jnp.full(9, 1.0), []),
        (jnp.full(9, 30000.0), []),
        (jnp.full(9, 33000.0), ["edge"]),
        (jnp.array([1e5, 60000.0]), ["gone"]),
        (jnp.array([jnp.nan, 1.0]), ["gone"]),
        (jnp.full(9, jnp.inf), ["gone"]),
        (jnp.array([-jnp.inf, 0.0]), []),  # a mask
        (jnp.array([1e-4, 1.0]), []),
        (jnp.full(9, 1.05e-6), ["fading"]),
        (jnp.full(9, 1e-9), ["fading"]),
        (jnp.full(9, 1e-30), ["fading"]),
        (jnp.zeros(9), []),
    ],
)
def test_risk_kinds_of_one_sample_follow_its_values(x, found):
    assert kinds(seen(x)) == found


def test_bfloat16_is_at_the_edge_only_near_its_own_limit():
    assert kinds(seen(jnp.array([1e5, 1e-9]), "bfloat16")) == []
    assert kinds(seen(jnp.array([3e38]), "bfloat16")) == ["edge"]


def test_risk_of_a_backward_pass_advises_on_the_loss_scale():
    def grads(x):
        def loss(w):
            return jnp.sum((x @ w.astype(jnp.float16)).astype(jnp.float32)) * 1e-10

        return jax.grad(loss)(jnp.ones((16, 2)))

    (text,) = jax.jit(mpjax.debug.measure_precision(grads))(X.astype(jnp.float16))[1].risks[:1]
    assert "Raise the loss scale" in text


def test_risk_keeps_room_for_the_rise_between_two_samples():
    report = seen(jnp.full(9, 8000.0))
    for past, found in (((8000.0, 8000.0), []), ((500.0, 8000.0), ["edge"])):
        earlier = tuple(jnp.full(1, value) for value in past)
        told = dataclasses.replace(report, earlier=earlier, steps=(0, 10, 20))
        assert kinds(told) == found


def test_a_step_that_is_skipped_for_its_scale_names_the_backward_pass():
    init, step = mpjax.build_train_step(
        lambda p, x: jnp.mean((x @ p) ** 2), optax.sgd(0.1), "mixed_float16", loss_scale=2.0**24
    )
    step = mpjax.watch_precision(jax.jit(step))
    _, metrics = step(init(jnp.ones((16, 4))), X * 100)
    assert not metrics["grads_finite"]
    gone = [row for row in metrics["precision"].rows if row.risk and row.risk.kind == "gone"]
    assert gone and {row.direction for row in gone} == {"backward"}
    assert (
        "loss scale" in gone[0].risk.text
        and max(map(len, str(metrics["precision"]).splitlines())) <= 80
    )
