"""The cut: the lightest values, and nothing dear is computed twice."""

import jax
import jax.ad_checkpoint
import jax.numpy as jnp
import pytest

from mpjax._src.core.base import _jax
from mpjax._src.core.planner.equations import Value, opened
from mpjax._src.core.planner.partition import handed, parted, runs_again


def cut_of(fun, *args, cotangents=1):
    """Returns what a function of arguments and cotangents hands over, and what it repeats."""
    program = jax.make_jaxpr(fun)(*args)
    ins = [Value(aval) for aval in _jax.in_avals(program)]
    equations = []
    outs = opened(program, ins, equations)
    early, late = parted(equations, ins[-cotangents:])
    saved, again = handed(
        early, late, outs, lambda v: _jax.bytes_of(v.aval), free=ins[:-cotangents]
    )
    maker = {out: e.name for e in equations for out in e.outs}
    return [maker[v] for v in saved], [e.name for e in again]


WIDE, NARROW = jnp.ones((8, 64)), jnp.ones((8, 1))


def test_the_lightest_value_is_kept():
    def fun(x, ct):
        mask = jnp.sum(x, 0) > 0  # a byte for each entry, of a float32 sum
        return jnp.where(mask, ct, 0)

    saved, again = cut_of(fun, WIDE, jnp.ones(64))
    assert saved == ["gt"] and "reduce_sum" not in again


def test_what_is_cheap_runs_again_from_arguments():
    saved, again = cut_of(lambda x, ct: jnp.tanh(x) * jnp.exp(x) * ct, WIDE, WIDE)
    assert not saved and {*again} == {"tanh", "exp", "mul"}


def test_matmuls_and_reductions_never_run_again():
    def fun(x, w, ct):
        return jnp.tanh(x @ w) * ct, jnp.sum(x, 1, keepdims=True) * ct

    saved, again = cut_of(fun, WIDE, jnp.ones((64, 4)), jnp.ones((8, 4)))
    assert len(saved) == 2
    assert "dot_general" not in again and "reduce_sum" not in again


@pytest.mark.parametrize(("inside", "again"), [(jnp.sin, True), (jnp.cumsum, False)])
def test_a_call_runs_again_if_all_inside_of_it_does(inside, again):
    call = jax.custom_jvp(lambda x: jnp.tanh(inside(x, 0) if inside is jnp.cumsum else inside(x)))
    call.defjvp(lambda primals, tangents: (call(*primals), tangents[0]))
    program = jax.make_jaxpr(call)(WIDE)
    equations = []
    opened(program, [Value(aval) for aval in _jax.in_avals(program)], equations)
    assert [runs_again(e) for e in equations] == [again]


def test_a_number_made_of_constants_is_not_handed_over():
    one = jax.numpy.full(3, 0.5)
    saved, again = cut_of(lambda x, ct: ct * jnp.dot(one, one) * x, WIDE, WIDE)
    assert not saved and "dot_general" in again


def test_a_recomputation_runs_late():
    def fun(x, ct):
        return jax.vjp(jax.checkpoint(lambda x: jnp.sum(jnp.sin(x @ x.T))), x)[1](ct)

    saved, again = cut_of(fun, WIDE, jnp.float32(1))
    assert not saved and not again


def test_barriers_and_effects_do_not_run_again():
    def fun(x, ct):
        y = jax.lax.optimization_barrier(x)
        jax.debug.callback(lambda y: None, y)
        return y * ct

    program = jax.make_jaxpr(fun)(WIDE, WIDE)
    equations = []
    opened(program, [Value(aval) for aval in _jax.in_avals(program)], equations)
    assert [runs_again(e) for e in equations] == [False, False, True]


JUMPING = {
    "a maximum's place": (lambda x: jnp.tanh(x) == jnp.tanh(jnp.flip(x)), "eq"),
    "the larger": (lambda x: jnp.tanh(x) > jnp.sin(x), "gt"),
    "an integer": (lambda x: jnp.round(jnp.tanh(x) * 3) > 1, None),
    "a sign": (lambda x: jnp.tanh(x) > 0, None),
}


@pytest.mark.parametrize("name", JUMPING)
def test_what_jumps_is_not_computed_again(name):
    """But a mask of a constant is, and what is computed from arguments alone by moves."""
    compare, kept = JUMPING[name]
    saved, again = cut_of(lambda x, ct: jnp.where(compare(x), ct, 0), WIDE, WIDE)
    assert [n for n in saved if n == kept] == ([kept] if kept else [])
    assert "round" not in again
    if name == "a sign":
        assert not saved


EQUAL = {
    "a maximum": (lambda h: jnp.maximum(h, 0) == h, []),
    "a clipped one, moved": (lambda h: (jnp.clip(h, -1, 1).T == h.T).T, []),
    "chosen ones": (lambda h: jnp.where(h > 0, h, -h) == jnp.abs(h), []),
    "what is rounded": (lambda h: h * 3 + 1 == jnp.maximum(h * 3 + 1, 0), ["eq"]),
    "an infinite one": (lambda h: h * 3 + 1 == jnp.inf, []),
    "no number": (lambda h: jnp.isnan(h * 3 + 1), []),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_numbers_are_compared_again_where_they_stay_the_same(name):
    """What a matmul makes is handed over as it is; what is rounded later may be another number."""
    compare, kept = EQUAL[name]

    def fun(x, w, ct):
        h = x @ w
        return jnp.where(compare(h), ct, 0) * h

    saved, _ = cut_of(fun, WIDE, jnp.ones((64, 64)), WIDE)
    assert saved == ["dot_general", *kept]


FREE = {
    "name": lambda x: jax.ad_checkpoint.checkpoint_name(x, "kept"),
    "pad": lambda x: jnp.pad(x, 1)[1:-1, 1:-1],
    "rev": lambda x: x[::-1],
    "reduce_precision": lambda x: jax.lax.reduce_precision(x, 8, 7),
}


@pytest.mark.parametrize("name", FREE)
def test_what_is_computed_where_it_is_read_is_not_handed_over(name):
    saved, again = cut_of(lambda x, ct: jnp.sin(FREE[name](jnp.tanh(x))) * ct, WIDE, WIDE)
    assert not saved and name in again
