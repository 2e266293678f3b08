"""Sums in half: over an array, over the turns of a loop, over devices."""

import jax
import jax.numpy as jnp
import pairs
import pytest
from jax.sharding import PartitionSpec as P
from pairs import Pair, bf16, f16, f32

import mpjax

AUTO = (jax.sharding.AxisType.Auto,)
MESH = jax.make_mesh((4,), ("data",), axis_types=AUTO, devices=jax.devices()[:4])


def wide(x):
    return x.astype(jnp.float32)


def summed(x):
    return jax.lax.reduce_sum(x, (0,))  # fault


def summed_wide(x):
    return jax.lax.reduce_sum(wide(x), (0,)).astype(x.dtype)


def cumulated(x):
    return jnp.cumsum(x, axis=1)  # fault


def by_reduce(x):
    zero = jnp.zeros((), x.dtype)
    return jax.lax.reduce(x, zero, jax.lax.add, (0,))  # fault


def accumulated(xs):
    zeros = jnp.zeros(xs.shape[1:], xs.dtype)
    return jax.lax.scan(lambda total, x: (total + jnp.sin(x), None), zeros, xs)[0]  # fault


def accumulated_wide(xs):
    zeros = jnp.zeros(xs.shape[1:], jnp.float32)
    return jax.lax.scan(lambda total, x: (total + wide(jnp.sin(x)), None), zeros, xs)[0]


def returns(discount):
    """Discounted returns, from the last reward to the first."""

    def run(rewards):
        def turn(c, x):
            return x + discount * c, None  # fault

        return jax.lax.scan(turn, jnp.zeros_like(rewards[0]), rewards, reverse=True)[0]

    return run


def returns_wide(rewards):
    turn = lambda c, x: (wide(x) + 0.94 * c, None)  # noqa: E731
    return jax.lax.scan(turn, jnp.zeros_like(wide(rewards[0])), rewards, reverse=True)[0]


def advantages(deltas, dones):
    def turn(c, step):
        delta, done = step
        return delta + 0.99 * 0.96 * (1 - done.astype(delta.dtype)) * c, None  # fault

    return jax.lax.scan(turn, jnp.zeros_like(deltas[0]), (deltas, dones), reverse=True)[0]


def advantages_wide(deltas, dones):
    def turn(c, step):
        delta, done = step
        return wide(delta) + 0.99 * 0.96 * (1 - wide(done)) * c, None

    start = jnp.zeros_like(wide(deltas[0]))
    return jax.lax.scan(turn, start, (deltas, dones), reverse=True)[0]


def integrated(x, w):
    def turn(x, _):
        return x + 0.01 * jnp.tanh(x @ w), None  # fault

    return jax.lax.scan(turn, x, None, 1000)[0]


def integrated_wide(x, w):
    def turn(x, _):
        return x + 0.01 * wide(jnp.tanh(x.astype(w.dtype) @ w)), None

    return jax.lax.scan(turn, wide(x), None, 1000)[0]


def replicas(mean):
    return jax.shard_map(mean, mesh=MESH, in_specs=P("data"), out_specs=P())


def averaged(x):
    return replicas(lambda x: jax.lax.pmean(x, "data"))(x)  # fault


def averaged_wide(x):
    return replicas(lambda x: jax.lax.pmean(wide(x), "data"))(x)


def scattered(x):
    def mean(x):
        return jax.lax.psum_scatter(x, "data", tiled=True)  # fault

    return jax.shard_map(mean, mesh=MESH, in_specs=P(), out_specs=P("data"), check_vma=False)(x)


def scattered_wide(x):
    def mean(x):
        return jax.lax.psum_scatter(wide(x), "data", tiled=True)

    return jax.shard_map(mean, mesh=MESH, in_specs=P(), out_specs=P("data"), check_vma=False)(x)


CASES = {
    "reduce_sum": Pair("half-sum", summed, summed_wide, (bf16(257, 4),)),
    "reduce_sum in a jit": Pair("half-sum", summed, jax.jit(summed_wide), (f16(2049, 4),)),
    "cumsum": Pair("half-sum", cumulated, lambda x: jnp.cumsum(wide(x), 1), (bf16(2, 300),)),
    "reduce": Pair("half-sum", by_reduce, summed_wide, (bf16(300, 4),)),
    "scan": Pair("half-accumulator", accumulated, accumulated_wide, (bf16(17, 4),)),
    "returns": Pair("half-accumulator", returns(0.94), returns_wide, (bf16(1024, 4),)),
    "advantages": Pair(
        *("half-accumulator", advantages, advantages_wide),
        (bf16(1024, 4), jax.ShapeDtypeStruct((1024, 4), jnp.bool_)),
    ),
    "ode": Pair("half-accumulator", integrated, integrated_wide, (bf16(4, 8), bf16(8, 8))),
    "pmean": Pair("half-collective", averaged, averaged_wide, (bf16(8, 4),)),
    "psum_scatter": Pair("half-collective", scattered, scattered_wide, (bf16(8, 4),)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_sums_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def clean(fun, *args, **options):
    report = mpjax.lint(fun, **options)(*args)
    return not report.findings


def test_as_many_terms_as_half_counts_are_no_fault():
    assert clean(summed, bf16(256, 4)) and clean(summed, f16(2048, 4)) and clean(summed, f32(9999))
    assert clean(accumulated, bf16(16, 4)) and clean(accumulated, f16(45, 4))
    assert not clean(accumulated, f16(46, 4))


def test_sums_of_jnp_are_no_fault():
    """They are taken in float32 by themselves."""
    assert clean(lambda x: (x.sum(), x.mean(0), x.var(), jnp.linalg.norm(x)), bf16(3000, 4))


def test_a_maximum_or_a_product_is_no_sum():
    def maximum(x):
        return jax.lax.reduce(x, jnp.full((), -1, x.dtype), jax.lax.max, (0,)), jnp.max(x)

    assert clean(maximum, bf16(3000, 4))


def test_layers_in_a_loop_are_no_accumulator():
    """Residual blocks add what is made of the stream itself."""

    def layers(x, ws):
        return jax.lax.scan(lambda x, w: (x + jax.nn.relu(x @ w), None), x, ws)[0].sum()

    assert clean(layers, bf16(4, 8), bf16(48, 8, 8), argnums=(0, 1))


def test_gradient_of_a_bias_is_no_half_sum():
    def loss(b, x):
        return wide(jax.nn.relu(x + b)).sum()

    assert clean(loss, bf16(8), bf16(4096, 8), argnums=0)


def test_gated_states_are_no_sum():
    """An LSTM's cell forgets: what it rounded goes with it."""

    def cell(c, xs):
        return jax.lax.scan(lambda c, x: (jax.nn.sigmoid(x) * c + jnp.tanh(x), None), c, xs)[0]

    assert clean(cell, bf16(4), bf16(400, 4))


def test_sums_that_decay_fast_are_no_fault():
    assert not mpjax.lint(returns(0.9))(bf16(1024, 4)).findings
    assert not mpjax.lint(returns(0.94))(bf16(16, 4)).findings
    assert not mpjax.lint(returns(0.94))(f16(1024, 4)).findings
    assert not mpjax.lint(returns(0.99))(f32(1024, 4)).findings
    (finding,) = mpjax.lint(returns(0.99))(f16(1024, 4)).findings
    assert finding.rule == "half-accumulator" and "a sum of the last 100 terms" in finding.message
