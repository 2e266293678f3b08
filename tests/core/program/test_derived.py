"""What depends on a cotangent, in every way in which one enters a program."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from mpjax._src.core.base import _jax
from mpjax._src.core.base.higher_order import higher_order
from mpjax._src.core.program.derived import derived_in, key_of
from mpjax._src.core.program.interpret import root_of
from mpjax._src.core.program.unmapped import unmapped

X = jnp.full((4, 4), 0.5, jnp.float32)


def parts(fun, *args):
    """Returns the primitives that a backward pass runs: those that depend on a cotangent, and the
    others that return floats."""
    jaxpr = jax.make_jaxpr(fun)(*args)
    keys, found = derived_in(jaxpr), ([], [])

    def walk(program, callers, back):
        for eqn in _jax.open_jaxpr(program)[0].eqns:
            here = back or "transpose" in _jax.transforms(eqn.source_info.name_stack)
            inside = [*higher_order(eqn.primitive.name).wire(eqn)]
            for each in inside:
                walk(each.program, (*callers, eqn), here)
            is_derived = key_of(eqn, callers) in keys
            assert here or not is_derived
            if here and not inside and jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.floating):
                found[not is_derived].append(eqn.primitive.name)

    walk(jaxpr, (), False)
    return found


def sines(w):
    return jnp.sum(jnp.sin(jnp.cos(w @ X)))


@jax.custom_vjp
def ruled(x):
    return jnp.sum(jnp.tanh(x))


def _back(x, ct):
    y = jnp.tanh(x * 2.0)
    return (ct * (1.0 - y**2) / (jnp.ones_like(x) + jnp.exp(x)),)


ruled.defvjp(lambda x: (ruled(x), x), _back)
AGAIN = {"tanh", "exp", "sub", "integer_pow", "add", "broadcast_in_dim"}


@pytest.mark.parametrize(
    "step",
    [
        jax.grad(sines),
        lambda w: jax.grad(lambda w: sines(w) * 1024.0)(w) / 1024.0,
        lambda w: jax.vjp(sines, w)[1](jnp.float32(1024.0)),
        lambda w: jax.vjp(lambda w: jnp.sin(jnp.cos(w)), w)[1](jnp.ones_like(w)),
        lambda w: jax.vjp(lambda w: jnp.sin(jnp.cos(w)), w)[1](w + 1),
        jax.vmap(jax.grad(lambda w: jnp.sum(jnp.sin(w)))),
        jax.jit(jax.grad(jax.jit(lambda w: jnp.mean(jnp.sin(w)) / 3))),
        lambda w: jax.linear_transpose(lambda x: 2.0 * x, w)(w),
    ],
)
def test_without_recomputation_all_of_a_backward_pass_depends_on_it(step):
    derived, others = parts(step, X)
    assert derived and not others


def test_a_checkpoint_computes_again_what_does_not():
    derived, others = parts(jax.grad(lambda w: jax.checkpoint(sines)(w) * 2), X)
    assert {"sin", "cos", "dot_general"} <= {*others}
    assert {"mul", "neg", "dot_general"} <= {*derived}


def test_so_does_one_in_a_loop_whose_carry_begins_as_zeros():
    layer = jax.checkpoint(lambda h, w: (jnp.sin(h @ w), jnp.sum(h)))
    loss = lambda w: jnp.sum(jax.lax.scan(layer, X, w)[1])  # noqa: E731
    derived, others = parts(jax.grad(loss), jnp.ones((3, 4, 4)))
    assert "cos" in others and {"add_any", "mul", "dot_general"} <= {*derived}


@pytest.mark.parametrize("more", [lambda w: 0.0, lambda w: 0.1 * jnp.sum(w**2), jnp.mean])
def test_a_rule_computes_with_residuals_until_it_reads_its_cotangent(more):
    derived, others = parts(jax.grad(lambda w: ruled(w @ X) + more(w)), X)
    assert {"tanh", "exp", "sub", "integer_pow"} <= {*others}
    assert not AGAIN & {*derived} - {"broadcast_in_dim"}
    assert {"mul", "div", "dot_general"} <= {*derived}


def test_a_rule_that_reads_no_cotangent_is_all_of_the_backward_pass():
    @jax.custom_vjp
    def fixed(x):
        return jnp.sum(x)

    fixed.defvjp(lambda x: (jnp.sum(x), x), lambda x, _: (jnp.tanh(x),))
    derived, others = parts(jax.grad(lambda w: fixed(w)), X)
    assert derived == ["tanh"] and not others


def test_a_given_cotangent_is_none_of_the_residuals():
    def step(w, g):
        return jax.vjp(jax.checkpoint(lambda w: jnp.sin(jnp.cos(w))), w)[1](g)

    derived, others = parts(step, X, X)
    assert {*others} == {"cos", "sin"} and {"mul", "neg"} <= {*derived}


def test_of_what_a_barrier_returns_only_the_cotangent_depends_on_one():
    @jax.custom_vjp
    def held(x):
        return jnp.sum(jnp.tanh(x))

    def back(x, ct):
        x, ct = jax.lax.optimization_barrier((x, ct))
        return (jnp.exp(x) * ct,)

    held.defvjp(lambda x: (held(x), x), back)
    derived, others = parts(jax.grad(lambda w: held(w) * 3.0), X)
    assert others == ["exp"] and "mul" in derived


def test_branches_and_while_loops_are_entered():
    @jax.custom_vjp
    def powered(x):
        return x

    def back(x, ct):
        turn = lambda c: (c[0] + 1, jnp.tanh(c[1]), c[2] * c[1])  # noqa: E731
        _, _, ct = jax.lax.while_loop(lambda c: c[0] < 3, turn, (0, x, ct))
        return (jax.lax.cond(x.sum() > 0, lambda a, b: jnp.exp(a) * b, lambda a, b: b, x, ct),)

    powered.defvjp(lambda x: (x, x), back)
    derived, others = parts(jax.grad(lambda w: jnp.sum(powered(w) ** 2)), X)
    assert {"tanh", "exp"} <= {*others} and derived.count("mul") >= 3


def test_programs_of_devices_are_entered_as_they_are_and_as_they_are_interpreted():
    mesh, spec = Mesh(jax.devices()[:1], "d"), PartitionSpec("d")
    layer = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))
    run = jax.shard_map(layer, mesh=mesh, in_specs=spec, out_specs=spec)
    step = jax.grad(lambda w: jnp.sum(run(w)))
    derived, others = parts(step, X)
    assert {"cos", "sin"} == {*others} and "mul" in derived
    jaxpr = jax.make_jaxpr(step)(X)
    whole = {key for key in root_of(jaxpr).derived if len(key) > 1}
    mapped = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "shard_map"][-1]
    inner = {id(eqn) for eqn in unmapped(mapped).jaxpr.eqns}
    assert {key[1] for key in whole} & inner


def test_a_program_without_a_backward_pass_has_none():
    assert not derived_in(jax.make_jaxpr(sines)(X))
    assert not derived_in(jax.make_jaxpr(lambda x: jax.jvp(sines, (x,), (x,)))(X))
