"""One real step: updates that rounding takes, loss scales that overflow."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from pairs import Pair
from support import thorough_but

import mpjax


def wide(x):
    return x.astype(jnp.float32)


X = jnp.full((4, 8), 0.5)
HALF = {"w": jnp.linspace(1, 2, 64).reshape(8, 8).astype(jnp.bfloat16)}
WIDE = mpjax.cast(HALF, "float32")


def loss(params, x):
    return jnp.mean(wide(x.astype(params["w"].dtype) @ params["w"]) ** 2)


def descended(params, x):
    grads = jax.grad(loss)(params, x)
    return {"w": params["w"] - 1e-5 * grads["w"]}  # fault


def descended_fast(params, x):
    grads = jax.grad(loss)(params, x)
    return {"w": params["w"] - 0.5 * grads["w"]}


def scaled(scale):
    def step(params, x):
        def scaled_loss(params):
            h = x.astype(jnp.float16) @ params["w"].astype(jnp.float16)  # fault
            return scale * jnp.sum(wide(h) ** 2)

        grads = jax.grad(scaled_loss)(params)
        return {"w": params["w"] - 1e-3 * grads["w"] / scale}

    return step


CASES = {
    "small steps": Pair("stalled-update", descended, descended_fast, (HALF, X)),
    "static scale": Pair(
        "overflowing-loss-scale", scaled(2.0**15), scaled(2.0**4), (WIDE, X.at[0].set(9))
    ),
}


def test_small_steps_are_found_and_mended_ones_are_not():
    pairs.check(CASES["small steps"])


def test_overflowing_static_loss_scale_is_found():
    pair = CASES["static scale"]
    (finding,) = mpjax.lint(pair.faulty)(*pair.args).findings
    assert (finding.rule, "32768" in finding.message) == ("overflowing-loss-scale", True)
    assert finding.source.startswith(__file__)
    assert not mpjax.lint(pair.mended)(*pair.args).findings
    params, x = pair.args
    found = mpjax.lint(pair.faulty)(params, x.at[0, 0].set(jnp.inf)).findings
    assert "overflowing-loss-scale" not in {finding.rule for finding in found}  # not by the scale


def test_steps_in_a_loop_are_looked_at():
    def trained(step):
        return lambda params, xs: jax.lax.scan(lambda p, x: (step(p, x), None), params, xs)[0]

    def compensated(params, rest, xs):
        def turn(carry, x):
            w, rest = carry
            update = rest - 1e-5 * jax.grad(loss)({"w": w}, x)["w"]
            total = w + update
            return (total, update - (total - w)), None

        (w, rest), _ = jax.lax.scan(turn, (params["w"], rest), xs)
        return {"w": w}, rest

    xs = jnp.stack([X] * 3)
    (finding,) = mpjax.lint(trained(descended))(HALF, xs).findings
    assert finding.rule == "stalled-update"
    assert not mpjax.lint(trained(descended_fast))(HALF, xs).findings
    assert not mpjax.lint(trained(descended))(WIDE, xs).findings
    found = mpjax.lint(compensated)(HALF, jnp.zeros_like(HALF["w"]), xs).findings
    assert "stalled-update" not in {finding.rule for finding in found}


POLICIES = [
    *("O2:bfloat16", "O2:bfloat16,masters=split", "mixed_float16"),
    *("O3:bfloat16,rounding=stochastic", "O3:float16,rounding=stochastic"),
]


@pytest.mark.parametrize(
    "policy",
    thorough_but(
        POLICIES,
        *("mixed_float16", "O3:bfloat16,rounding=stochastic"),
    ),
)
def test_build_train_step_loses_no_updates_and_lowers_its_scale(policy):
    init, step = mpjax.build_train_step(loss, optax.adamw(1e-5), policy)
    state = init(WIDE)
    report = mpjax.lint(step)(state, X * 1e3)
    assert not report.findings, str(report)


def test_float32_weights_and_compensated_sums_are_no_fault():
    assert not mpjax.lint(descended)(WIDE, X).findings
    optimizer = mpjax.optim.with_kahan_summation(optax.sgd(1e-5))

    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    assert not mpjax.lint(step)(HALF, optimizer.init(HALF), X).findings
