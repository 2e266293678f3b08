"""find_nonfinite takes the loss scale from the state that it is given, and says which it used."""

import dataclasses

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from support import thorough_but

import mpjax
import mpjax.linen
import mpjax.nnx
from mpjax import find_nonfinite

PARAMS = {"w": np.full((8, 4), 0.5, np.float32)}
BATCH = np.ones((16, 8), np.float32)
F16 = "mixed_float16"


def loss(params, batch):
    """Its cotangents in float16 overflow at a loss scale above 8."""
    return jnp.mean((batch @ params["w"]) ** 2) * 6e4


def scaled(at):
    return mpjax.DynamicLossScale(at)


init, step = mpjax.build_train_step(loss, optax.sgd(0.1), F16)
STATE = init(PARAMS)
optimizer = mpjax.mixed_precision(optax.adam(1e-3), F16)


def at(scale):
    return dataclasses.replace(STATE, loss_scale=scaled(scale))


def own_step(params, opt_state, batch):
    value, grads = optimizer.value_and_grad(loss, opt_state)(params, batch)
    updates, opt_state = optimizer.update(grads, opt_state, params, value=value)
    return optax.apply_updates(params, updates), opt_state, value


def opt_state_at(scale):
    return optimizer.init(PARAMS)._replace(loss_scale=scaled(scale))


# What is called with a loss scale somewhere among its arguments, and the name of the scale.
HELD = {
    "a loss of the state": (
        lambda s: find_nonfinite(lambda state, x: loss(state.params, x), F16, at(s), BATCH),
        "state.loss_scale",
    ),
    "a loss of a scale": (
        lambda s: find_nonfinite(lambda p, scale, x: loss(p, x), F16, PARAMS, scaled(s), BATCH),
        "scale",
    ),
    "a loss that scales itself": (
        lambda s: find_nonfinite(
            lambda p, scale, x: scale.scale(loss(p, x)), F16, PARAMS, scaled(s), BATCH
        ),
        "scale",
    ),
    "a step": (lambda s: find_nonfinite(step, None, at(s), BATCH), "state.loss_scale"),
    "a jitted step": (
        lambda s: find_nonfinite(jax.jit(step), None, at(s), BATCH),
        "state.loss_scale",
    ),
    "a step without metrics": (
        lambda s: find_nonfinite(lambda state, x: step(state, x)[0], None, at(s), BATCH),
        "state.loss_scale",
    ),
    "a step that returns the loss first": (
        lambda s: find_nonfinite(
            lambda t, x: (step(t, x)[1]["loss"], step(t, x)[0]), None, at(s), BATCH
        ),
        "t.loss_scale",
    ),
    "a loop of one's own": (
        lambda s: find_nonfinite(own_step, None, PARAMS, opt_state_at(s), BATCH),
        "opt_state.loss_scale",
    ),
    "in a dict, passed by name": (
        lambda s: find_nonfinite(lambda p, x, kept: loss(p, x), F16)(
            PARAMS, BATCH, kept={"opt": (opt_state_at(s), 1)}
        ),
        "kept['opt'][0].loss_scale",
    ),
}


@pytest.mark.parametrize(
    "name",
    thorough_but(
        HELD,
        *("a loss of the state", "a loss that scales itself", "a step", "a loop of one's own"),
        "in a dict, passed by name",
    ),
)
def test_find_nonfinite_takes_the_loss_scale_of_the_state(name):
    find, held = HELD[name]
    low, high = find(2.0), find(2.0**13)
    assert not low and low.advice.startswith("Nothing found: ")
    assert (low.loss_scale, low.loss_scale_from) == (2.0, f"from {held}")
    assert f"\nloss scale 2, from {held}" in str(low)
    assert high.found and high.kind == "overflow" and high.backward and high.curable
    assert (high.loss_scale, high.safe_loss_scale) == (2.0**13, 8.0)
    assert f"\nloss scale 8192, from {held}" in str(high)
    assert "Use a lower loss scale: the compiled program is finite at 2^3" in high.advice


def test_find_nonfinite_reports_a_step_that_only_counts_what_it_skips():
    report = find_nonfinite(own_step, None, PARAMS, opt_state_at(2.0**16), BATCH)
    assert report.reaches == ("result 1/consecutive_skips",)
    # A skip in the state as it was given is none of this step.
    skipped = opt_state_at(2.0)._replace(consecutive_skips=jnp.int32(3))
    assert not find_nonfinite(own_step, None, PARAMS, skipped, BATCH)


def test_find_nonfinite_says_that_no_loss_scale_helps_a_step_whose_loss_is_bad():
    batch = BATCH.copy()
    batch[0, 0] = 1e20
    report = find_nonfinite(step, None, at(2.0), batch)
    assert report.curable is False and report.loss_scale_from == "from state.loss_scale"
    assert "Lowering the loss scale does not help" in report.advice


def apply(model, x):
    return jnp.mean(model(x) ** 2) * 6e4


def nnx_step(model, optimizer, x):
    value, grads = mpjax.nnx.value_and_grad(apply, optimizer)(model, x)
    optimizer.update(model, grads)
    return value


def test_find_nonfinite_takes_the_loss_scale_of_an_nnx_optimizer():
    model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    held = mpjax.nnx.Optimizer(model, optax.sgd(0.1), F16, wrt=nnx.Param)
    for fun, args in ((nnx_step, (None,)), (lambda model, optimizer, x: apply(model, x), (F16,))):
        report = find_nonfinite(fun, *args, model, held, BATCH)
        assert report.found and report.backward and report.curable
        assert report.loss_scale_from == "from optimizer.opt_state.loss_scale"
        assert report.loss_scale == 2.0**16
    assert int(held.opt_state.consecutive_skips[...]) == 0  # nothing was written to it


def test_find_nonfinite_takes_the_loss_scale_of_a_linen_state():
    model = linen.Dense(4)
    state = mpjax.linen.TrainState.create(
        apply_fn=model.apply, params=PARAMS, tx=optax.sgd(0.1), policy=F16
    )
    report = find_nonfinite(lambda state, x: loss(state.params, x), F16, state, BATCH)
    assert report.loss_scale_from == "from state.opt_state.loss_scale"


@pytest.mark.parametrize(
    ("policy", "settings", "scale", "said"),
    [
        (F16, {}, 65536.0, "assumed: the scale that float16 starts with; pass loss_scale= or"),
        ("mixed_bfloat16", {}, 1.0, "assumed: no policy computes in float16; pass loss_scale= or"),
        (None, {}, 1.0, "assumed: no policy computes in float16"),
        (F16, {"loss_scale": 4.0}, 4.0, "as given"),
        (F16, {"loss_scale": None}, 1.0, "as given"),
        (F16, {"loss_scale": "dynamic"}, 65536.0, "as given"),
        (F16, {"loss_scale": STATE.loss_scale}, 65536.0, "as given"),
        (F16, {"argnums": None}, 65536.0, ""),
    ],
)
def test_find_nonfinite_says_where_a_loss_scale_is_from(policy, settings, scale, said):
    report = find_nonfinite(loss, policy, **settings)(PARAMS, BATCH)
    assert report.loss_scale == scale
    assert report.loss_scale_from.startswith(said) and bool(report.loss_scale_from) == bool(said)
    assert (f"\nloss scale {scale:g}, {said[:8]}" in str(report)) == bool(said)
    assert report.to_dict()["loss_scale_from"] == report.loss_scale_from


def test_the_given_loss_scale_wins_over_that_of_the_state_and_the_smallest_of_several():
    def of_two(p, first, second, x):
        return loss(p, x)

    args = (PARAMS, scaled(64.0), scaled(2.0), BATCH)
    assert find_nonfinite(of_two, F16, *args).loss_scale_from == "from second"
    assert find_nonfinite(of_two, F16, *args, loss_scale=16.0).loss_scale == 16
    none = (PARAMS, mpjax.NoOpLossScale(), scaled(2.0), BATCH)
    assert find_nonfinite(of_two, F16, *none).loss_scale_from == "from second"
