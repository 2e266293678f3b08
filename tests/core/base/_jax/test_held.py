"""A primitive that holds a program asks it, and nobody else, for its derivatives."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from support import assert_near, normal

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax import building, held

X = normal(0, 3)


class Squares:
    """``sum(x * x)``, which hands ``10 x`` to a backward part that divides by 5."""

    asked: ClassVar[list[str]] = []
    in_avals = (jax.core.ShapedArray((3,), np.float32),)
    out_avals = (jax.core.ShapedArray((), np.float32),)
    effects = building.NO_EFFECTS

    @functools.cached_property
    def written(self):
        return jax.make_jaxpr(lambda x: [jnp.sum(x * x)])(X)

    def jitted(self, *args):
        return _jax.eval_closed(self.written, *args)

    def cut(self, moving):
        self.asked.append("cut")
        return SquaresCut()

    def forward_mode(self, moving):
        self.asked.append("forward_mode")
        return Plain(lambda x, t: [jnp.sum(x * x), jnp.sum(2 * x * t)], X, X), [True]

    def checkpointed(self, moving, where):
        places = [where(e.primitive, [], e.params) for e in self.written.eqns]
        self.asked += [place.name for place in places if place is not None]

    def batched(self, axis, which):
        self.asked.append("batched")
        return Plain(lambda x: [jnp.sum(x * x, -1)], np.stack([X, X])), [True]


class Plain(Squares):
    """Any function of arrays, which is not differentiated."""

    def __init__(self, fun, *args):
        program = jax.make_jaxpr(fun)(*args)
        self.__dict__["written"] = program
        self.in_avals, self.out_avals = _jax.in_avals(program), program.out_avals


class SquaresCut:
    by, given, moves, moved_avals = (0,), (), (True,), Squares.out_avals

    forward = Plain(lambda x: [jnp.sum(x * x), 10 * x], X)
    tangent = Plain(lambda r, t: [jnp.sum(r / 5 * t)], X, X)

    def backward(self, nonzero):
        return Plain(lambda r, ct: [r / 5 * ct], X, np.float32(1)), (0,)


def fun(x):
    return jnp.sin(held.call_held(Squares(), x)[0])


def plain(x):
    return jnp.sin(jnp.sum(x * x))


WAYS = {
    "value": (lambda f: f(X), []),
    "grad": (lambda f: jax.grad(f)(X), ["cut"]),
    "jit of grad": (lambda f: jax.jit(jax.grad(f))(X), ["cut"]),
    "jvp": (lambda f: jax.jvp(f, (X,), (X,)), ["forward_mode"]),
    "linearize": (lambda f: jax.linearize(f, X)[1](X), ["cut"]),
    "vmap": (lambda f: jax.vmap(f)(np.stack([X, X])), ["batched"]),
    "checkpoint": (lambda f: jax.grad(jax.checkpoint(f))(X), ["cut"]),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_transformation_asks_the_program(way):
    run, expected = WAYS[way]
    Squares.asked.clear()
    assert_near(run(fun), run(plain), rtol=1e-4)
    assert {*Squares.asked} <= {*expected, "forward_mode"} and {*expected} <= {*Squares.asked}


OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)
POLICIES = {
    "none": (None, set()),
    "everything": (jax.checkpoint_policies.everything_saveable, {"Device"}),
    "one": (lambda primitive, *_, **params: primitive.name == "mul", {"Device"}),
    "offload": (OFFLOAD, {"Host"}),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_checkpoint_says_where_its_policy_saves_what(name):
    class Named(Squares):
        @functools.cached_property
        def written(self):
            return jax.make_jaxpr(lambda x: [jnp.sum(checkpoint_name(x * x, "h"))])(X)

    policy, expected = POLICIES[name]
    Squares.asked.clear()
    fun = lambda x: jnp.sin(held.call_held(Named(), x)[0])  # noqa: E731
    assert_near(jax.grad(jax.checkpoint(fun, policy=policy))(X), jax.grad(plain)(X), rtol=1e-4)
    assert {*Squares.asked} - {"cut", "forward_mode"} == expected


def test_what_is_kept_is_what_the_cut_hands_over():
    leaves = jax.tree.leaves(jax.vjp(fun, X)[1])
    assert any(np.shape(x) == (3,) and np.allclose(x, 10 * X) for x in leaves)


def test_an_equation_shows_what_it_runs():
    (held, _) = jax.make_jaxpr(fun)(X).eqns
    assert [e.primitive.name for e in held.params["jaxpr"].eqns] == ["mul", "reduce_sum"]
