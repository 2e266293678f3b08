"""Gradients through float16 of losses that nothing scales."""

import jax
import jax.numpy as jnp
import optax
import pairs
import pytest
from pairs import Pair, f16, f32

import mpjax

RULE = "unscaled-gradient"
F16, F32 = jnp.float16, jnp.float32
ALL, ROWS = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("rows")


def wide(x):
    return x.astype(jnp.float32)


def errors(w, x):
    return wide(jnp.tanh(x.astype(F16) @ w.astype(F16))) ** 2


def loss(w, x):
    return jnp.mean(errors(w, x))


def of_mean(w, x):
    return jax.grad(loss)(w, x)


def of_sum(w, x):
    return jax.grad(lambda w: jnp.sum(errors(w, x)))(w)


def over_a_number(w, x, number):
    return jax.value_and_grad(lambda w: loss(w, x) / number)(w)


def through_layers(w, x):
    def of(w):
        turn = jax.checkpoint(lambda h, _: (jnp.tanh(h @ w.astype(F16)), None))
        return jnp.mean(wide(jax.lax.scan(turn, x.astype(F16), None, 3)[0]) ** 2)

    return jax.jit(jax.grad(of))(w)


def times(factor):
    return lambda w, x: jax.grad(lambda w: loss(w, x) * factor)(w) / factor


def by_a_divisor(w, x):
    return jax.grad(lambda w: loss(w, x) / 2.0**-10)(w) * 2.0**-10


def by_a_power(w, x, power):
    grads = jax.grad(lambda w: jnp.exp2(power) * loss(w, x))(w)
    return grads / jnp.exp2(power)


def in_the_mean(w, x, scale):
    return jax.grad(lambda w: jnp.mean(errors(w, x) * scale))(w) / scale


def from_a_seed(w, x):
    value, pull = jax.vjp(lambda w: loss(w, x), w)
    return pull(jnp.full_like(value, 512.0))[0] / 512


def of_outputs(w, x, cotangents):
    return jax.vjp(lambda w: jnp.tanh(x @ w), w)[1](cotangents)


ARGS = f32(4, 4), f32(2, 4)


def on_devices(w, x):
    mesh = jax.make_mesh((1,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    each = lambda w, x: jax.lax.pmean(jax.grad(loss)(w, x).astype(F32), "rows")  # noqa: E731
    return jax.shard_map(each, mesh=mesh, in_specs=(ALL, ROWS), out_specs=ALL)(w, x)


def with_a_penalty(w, x):
    """A gradient inside of a loss is a part of it: the loss has a scale."""

    def of(w):
        slopes = jax.vmap(jax.grad(lambda x: jnp.sum(errors(w, x))))(x)
        return 512 * jnp.mean((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2)

    return jax.grad(of)(w) / 512


@pytest.mark.parametrize("fun", [of_mean, of_sum, through_layers, times(2.0), on_devices])
def test_gradients_without_a_scale_are_found_once(fun):
    found = mpjax.lint(fun)(*ARGS).findings
    assert [f.rule for f in found if f.rule != "half-collective"] == [RULE]


def of_given(w, x):
    return jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w).astype(jnp.float32) ** 2))(w)  # fault


CASES = {
    "given in float16": Pair(
        *(RULE, of_given, lambda w, x: of_given(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16))),
        (f16(4, 4), f16(2, 4)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_unscaled_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


@pytest.mark.parametrize(
    ("fun", "more"),
    [
        *((times(1024.0), ()), (by_a_divisor, ()), (by_a_power, (f32(),))),
        (with_a_penalty, ()),
        *((in_the_mean, (f32(),)), (from_a_seed, ()), (of_outputs, (f32(2, 4),))),
    ],
)
def test_scales_of_all_kinds_are_seen(fun, more):
    report = mpjax.lint(fun)(*ARGS, *more)
    assert not report.findings, str(report)


def test_a_divisor_is_no_scale():
    assert [f.rule for f in mpjax.lint(over_a_number)(*ARGS, f32()).findings] == [RULE]


def taught(w, x, teacher):
    wanted = wide(jax.lax.stop_gradient(jnp.tanh(x.astype(F16) @ teacher)))
    return jnp.mean((jnp.tanh(x @ w) - wanted) ** 2)


def test_float16_that_is_not_differentiated_is_no_fault():
    teacher = f16(4, 4)
    assert not mpjax.lint(taught, argnums=0)(*ARGS, teacher).findings
    assert not mpjax.lint(loss)(*ARGS).findings, "inference"
    assert [f.rule for f in mpjax.lint(loss, argnums=0)(*ARGS).findings] == [RULE]


POLICY = "mixed_float16"


def test_steps_of_mpjax_scale_and_plans_without_one_do_not():
    params, x = {"w": jnp.ones((4, 4))}, jnp.ones((2, 4))
    of = lambda params, x: jnp.mean(jnp.tanh(x @ params["w"]) ** 2)  # noqa: E731
    for scale in ("dynamic", 1024.0, mpjax.StaticLossScale(2.0**12)):
        init, step = mpjax.build_train_step(of, optax.sgd(0.1), POLICY, loss_scale=scale)
        report = mpjax.lint(step, run=False)(jax.eval_shape(init, params), x)
        assert not report.findings, str(report)
    planned = mpjax.autocast(of, POLICY)
    assert [f.rule for f in mpjax.lint(planned, 0, run=False)(params, x).findings] == [RULE]
    assert not mpjax.lint(mpjax.autocast(of, "mixed_bfloat16"), 0)(params, x).findings
