"""Contract: tracebacks show who asked for a cast and who wrote a matmul."""

import ast
import functools
import inspect
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from support import equations

import mpjax
from mpjax._src.core.base import _jax

HALF, WIDE = jnp.bfloat16, jnp.float32
X = jax.ShapeDtypeStruct((4, 4), WIDE)
H = jax.ShapeDtypeStruct((4, 4), HALF)


MASTERS = mpjax.optim.with_master_weights(optax.sgd(0.1))
NORM = nn.LayerNorm(dtype=HALF, use_bias=False, use_scale=False)


def made(fun, *args, name="convert_element_type"):
    jaxpr = jax.make_jaxpr(fun)(*args).jaxpr
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == name]


def in_a_tree(x):
    return jax.tree.map(lambda leaf: leaf.astype(HALF), [x])


WRITTEN = {
    "astype": (lambda x: x.astype(HALF), X),
    "asarray": (lambda x: jnp.asarray(x, HALF), X),
    "a dtype that is called": (lambda x: HALF(x), X),
    "lax": (lambda x: jax.lax.convert_element_type(x, HALF), X),
    "a tree": (in_a_tree, X),
    "mpjax.cast": (lambda x: mpjax.cast({"w": x}, HALF), X),
    "within jit": (jax.jit(lambda x: x.astype(HALF)), X),
    "a derivative": (jax.grad(lambda h: jnp.vdot(h.astype(WIDE), jnp.ones((4, 4)))), H),
}
NOT_WRITTEN = {
    "a mean": (jnp.mean, H),
    "a softmax": (jax.nn.softmax, H),
    "promotion": (lambda h, x: h * x, H, X),
    "an optimizer": (lambda h: MASTERS.update(h, MASTERS.init(h), h), H),
    "a layer": (lambda x: NORM.apply({}, x), X),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_is_written_cast_is_true_for_casts_that_were_asked_for(name):
    fun, *args = WRITTEN[name]
    eqns = made(fun, *args)
    assert eqns and all(map(_jax.is_written_cast, eqns))


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_is_written_cast_is_false_for_other_casts(name):
    fun, *args = NOT_WRITTEN[name]
    eqns = made(fun, *args)
    assert eqns and not any(map(_jax.is_written_cast, eqns))


def test_is_called_directly_tells_matmuls_of_the_users_line():
    def own(x):
        return jnp.sum(jnp.einsum("ij,jk->ik", x, x))

    def theirs(x):
        return jnp.sum(jax.nn.dot_product_attention(*[x.reshape(1, 4, 1, 4)] * 3))

    def layer(x):
        return nn.Dense(4, use_bias=False).apply({"params": {"kernel": x}}, x)

    for fun, direct in ((own, True), (jax.grad(own), True), (theirs, False), (layer, False)):
        eqns = made(fun, X, name="dot_general")
        assert eqns and {_jax.is_called_directly(eqn) for eqn in eqns} == {direct}


def test_in_one_call_tells_equations_of_one_call():
    def half(x):
        y = x.astype(HALF)
        return y.astype(WIDE)

    def twice(x):
        x = half(x)
        return half(x)

    (down, up), (first, _, _, last) = made(half, X), made(twice, X)
    assert _jax.in_one_call(down, up) and not _jax.in_one_call(first, last)


def test_errors_of_debug_nans_name_the_line_of_the_equation_that_runs():
    jitted = jax.jit(lambda x: jnp.log(x))
    for fun in (lambda x: jax.lax.log(x), lambda x: jitted(x)):
        eqn = jax.make_jaxpr(fun)(jnp.float32(1)).jaxpr.eqns[-1]
        place, wrong = _jax.location(eqn, eqn.source_info.name_stack), [jnp.float32(-1)]
        with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan") as told, place:
            _jax.bind(eqn, wrong)
        assert any("test_sources.py" in note for note in told.value.__notes__)


def test_the_line_that_runs_is_the_users():
    line = _jax.line_of_caller()
    assert line == f"{__file__}:{inspect.currentframe().f_lineno - 1}"
    # A function of a library calls this one: the line of the user who calls the library counts.
    assert functools.reduce(lambda _, call: call(), [_jax.line_of_caller], "").startswith(__file__)


@pytest.mark.parametrize("file", [jax.__file__, _jax.__file__, np.__file__, ast.__file__])
def test_files_of_libraries_are_not_the_users(file):
    assert not _jax.is_users_file(file) and _jax.is_users_file(__file__)
    assert not _jax.is_users_file(f"{Path(sys.executable).parent}/mpjax")


def test_what_jax_traced_for_another_call_has_the_line_of_this_one():
    @jax.custom_vjp
    def ruled(x):
        return x

    where = lambda g: jnp.where(jnp.isfinite(g), g, 7.5)  # noqa: E731
    ruled.defvjp(lambda x: (x, None), lambda _, g: (where(g),))
    jax.make_jaxpr(jax.grad(lambda x: ruled(x).sum()))(jnp.ones(5))
    jaxpr = jax.make_jaxpr(lambda g: jnp.where(jnp.isfinite(g), g, 7.5))(jnp.ones(5))
    line = inspect.currentframe().f_lineno - 1
    (call,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit")
    for eqn in call.params["jaxpr"].eqns:
        assert _jax.source_lines(eqn, call) == (f"{__file__}:{line}", "")


def test_a_call_is_told_by_its_place_in_a_line():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + jnp.sin(x))(1.0)
    first, second, _ = map(_jax.call_of, jaxpr.eqns)
    assert first != second and len(first) == 1


@pytest.mark.parametrize("policy", ["float32", "O3:bfloat16"])
def test_a_function_that_autocast_runs_as_written_has_its_own_lines(policy):
    def fun(x):
        return jnp.sin(x)

    line = fun.__code__.co_firstlineno + 1
    jaxpr = jax.make_jaxpr(mpjax.autocast(fun, policy))(jnp.ones(5))
    calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    found = [_jax.source_lines(eqn, call)[0] for call in calls for eqn in call.params["jaxpr"].eqns]
    assert {*found} == {f"{__file__}:{line}"}
