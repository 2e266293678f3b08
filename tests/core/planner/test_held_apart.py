"""What waits behind one barrier waits for nothing else that does."""

import jax
import jax.numpy as jnp
import pytest
from support import assert_near, normal, thorough_but

import mpjax
from mpjax._src.core.planner.dependence import dependents, in_order
from mpjax._src.core.planner.equations import parts
from mpjax._src.core.planner.held_apart import _of_arguments

X, W = normal(0, 4, 8), normal(1, 8, 8) / 3


def listed(fun):
    ins, equations, _ = parts(jax.make_jaxpr(fun)(X, W))
    return ins, equations


@pytest.mark.parametrize(
    "fun",
    [
        lambda x, w: (jnp.sin(x) @ w, x @ w),
        lambda x, w: (x @ w, jnp.sin(x) @ w),
        lambda x, w: (x @ w) @ w,
        lambda x, w: jax.lax.optimization_barrier((x, x @ w))[0] @ jnp.cos(x).T,
    ],
    ids=["first made", "first read", "of its result", "behind a barrier"],
)
def test_values_that_wait_together_do_not_depend_on_each_other(fun):
    _, equations = listed(fun)
    together = _of_arguments(equations, [])
    matmuls = [e for e in equations if e.name == "dot_general"]
    assert together and all(not dependents(equations, together).isdisjoint(e.ins) for e in matmuls)
    for v in together:
        made = {v}
        for e in equations:  # a barrier waits for all that it holds
            made.update(e.outs if not made.isdisjoint(e.ins) else ())
        assert made & {*together} == {v}


def test_equations_that_wait_for_each_other_have_no_order():
    (_, w), (matmul, sine) = listed(lambda x, w: jnp.sin(x @ w))
    assert in_order([sine, matmul]) == [matmul, sine]
    with pytest.raises(AssertionError, match="dot_general waits for its own result"):
        in_order([matmul.on([sine.outs[0], w]), sine])


@pytest.mark.parametrize("storage", thorough_but(["lean", 0.0], "lean"))
def test_second_derivatives_of_what_stores_little(storage):
    def fun(w):
        h = jnp.tanh(X @ w) @ w
        h = h - jnp.mean(h, -1, keepdims=True)
        return jnp.mean(jnp.tanh(h * jax.lax.rsqrt(jnp.mean(h * h, -1, keepdims=True))) ** 2)

    def second(fun):
        return jax.jit(jax.grad(lambda w: jnp.sum(jax.grad(fun)(w) * w)))(W)

    got = second(mpjax.autocast(fun, f"mixed_bfloat16,storage={storage}"))
    assert_near(got, second(fun), 2**-5)
