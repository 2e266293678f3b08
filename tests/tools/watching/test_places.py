"""The watched tensors of a program, and their names."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.tools.watching.places import watch

X, W, V = jnp.ones((4, 8)), jnp.full((8, 32), 0.1), jnp.full((32, 2), 0.1)


def loss(params, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ params["w"])
    with jax.named_scope("second"):
        return jnp.mean((h @ params["v"]) ** 2)


PARAMS = {"w": W, "v": V}


def watched(fun, *args):
    return jax.eval_shape(mpjax.debug.measure_precision(fun), *args)[1].tensors


def kinds(tensors):
    return sorted((t.op, t.part, t.scope, t.direction) for t in tensors)


def halved(fun):
    return lambda params, x: fun(*jax.tree.map(lambda v: v.astype(jnp.float16), (params, x)))


def test_each_matmul_of_forward_and_backward_is_watched():
    tensors = watched(jax.grad(mpjax.autocast(loss, "mixed_float16")), PARAMS, X)
    results = [
        (t.scope, t.direction) for t in tensors if (t.op, t.part) == ("dot_general", "result")
    ]
    # Few columns, and gradients of weights, may be float32 accumulators.
    assert {("first", "forward"), ("second", "backward")} <= {*results}
    reads = [r.split(",")[0].split(" at")[0] for t in tensors for r in t.readers]
    assert sorted(reads) == ["lhs of dot_general"] * 5 + ["rhs of dot_general"] * 5
    assert all(t.source.startswith(__file__) for t in tensors)


def test_tensor_that_several_read_is_watched_once():
    def fun(x):
        half = x.astype(jnp.bfloat16)
        return half.T @ half, jnp.transpose(half) @ half.reshape(4, 8), x.astype(jnp.bfloat16)

    tensors = watched(fun, X)
    assert kinds(tensors) == [
        ("convert_element_type", "cast", "", "forward"),
        *[("dot_general", "result", "", "forward")] * 2,
    ]
    (cast,) = (t for t in tensors if t.part == "cast")
    reads = [r.split(" at ")[0] for r in cast.readers]
    assert reads == ["lhs of dot_general", "rhs of dot_general"] * 2


def test_concatenation_is_watched_as_its_first_part():
    def fun(x, y, w):
        first, w = x.astype(jnp.float16), w.astype(jnp.float16)
        return first @ w, jnp.concatenate([first, y.astype(jnp.float16)]) @ w

    reads = [[r for r in t.readers if r.startswith("lhs")] for t in watched(fun, X, X, W)]
    assert max(map(len, reads)) == 2


def test_a_float32_program_and_dead_code_have_nothing_to_watch():
    assert watched(jax.grad(loss), PARAMS, X) == ()

    def fun(x):
        _ = x.astype(jnp.float16) @ W.astype(jnp.float16)
        return x

    assert watched(fun, X) == ()


def test_half_values_that_are_handed_on_are_watched_and_others_are_not():
    def residual(x):
        h = x.astype(jnp.float16)
        h = h + jnp.tanh(h * 2) * 3  # read twice below; what it is made of is read once
        return h.astype(jnp.float32) + jax.nn.relu(h).sum()

    tensors = watched(residual, X)
    assert [(t.op, t.part) for t in tensors if t.op == "add"] == [("add", "result")]
    assert not [t for t in tensors if t.op in ("tanh", "mul")]


def test_remat_does_not_double_watched_tensors():
    plain = halved(loss)
    again = jax.checkpoint(plain)
    first = watched(jax.value_and_grad(plain), PARAMS, X)
    second = watched(jax.value_and_grad(again), PARAMS, X)
    matmuls = [[t for t in found if t.op == "dot_general"] for found in (first, second)]
    assert kinds(matmuls[0]) == kinds(matmuls[1])
    assert len(watched(jax.value_and_grad(jax.checkpoint(loss)), PARAMS, X)) == 0


def test_readers_after_a_recomputation_are_named_in_the_order_of_the_program():
    def fun(w, x):
        return (jnp.tanh(x @ w) @ w @ x).sum()

    lean = jax.checkpoint(mpjax.autocast(fun, "mixed_bfloat16,storage=lean"))
    jaxpr = jax.make_jaxpr(jax.value_and_grad(lean, (0, 1)))(jnp.ones((4, 4)), jnp.ones((4, 4)))
    found = [watch(jaxpr) for _ in range(50)]
    assert len({str([t.readers for t in each.tensors]) for each in found}) == 1


@pytest.mark.parametrize("half", ["float16", "bfloat16"])
def test_convolutions_and_their_cotangents_are_watched(half):
    """The gradient of a kernel is the float32 accumulator, so what it reads is watched."""
    kernel = jnp.ones((3, 3, 2, 4))

    def fun(kernel, x):
        out = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC")
        )
        return jnp.sum(out**2)

    step = jax.grad(mpjax.autocast(fun, f"mixed_{half}"), (0, 1))
    tensors = watched(step, kernel, jnp.ones((2, 8, 8, 2)))
    results = [t.direction for t in tensors if (t.op, t.part) == ("conv_general_dilated", "result")]
    assert sorted(results) == ["backward", "forward"]
    casts = [t.direction for t in tensors if t.part == "cast"]
    assert sorted(casts) == ["backward", "forward", "forward"]
    assert {t.dtype for t in tensors} == {half}


def test_accumulator_that_is_cast_at_once_is_watched_as_rounded():
    def fun(x, w):
        return jax.lax.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)

    tensors = watched(fun, X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
    result = [t for t in tensors if t.part == "result"]
    assert [(t.op, t.rounded) for t in result] == [("dot_general", True)]
    assert not [t for t in tensors if t.part == "cast"]


def test_watched_tensors_of_a_step_have_unique_names():
    init, step = mpjax.build_train_step(loss, optax.adamw(1e-2), "mixed_float16")
    names = [t.name for t in watched(step, jax.eval_shape(init, PARAMS), X)]
    assert len({*names}) == len(names) and "first/dot_general/result" in names


def test_measure_precision_never_calls_the_host():
    init, step = mpjax.build_train_step(loss, optax.adamw(1e-2), "mixed_float16")
    jaxpr = jax.make_jaxpr(mpjax.debug.measure_precision(step))(jax.eval_shape(init, PARAMS), X)

    def primitives(jaxpr):
        for eqn in jaxpr.eqns:
            yield eqn.primitive.name
            for inner in _jax.inner_jaxprs(eqn):
                yield from primitives(inner)

    assert not jaxpr.effects
    assert not [name for name in primitives(jaxpr.jaxpr) if "callback" in name or "print" in name]


def test_static_arguments_and_keywords_reach_the_function():
    def fun(x, *, power, name):
        assert name == "n"
        return x.astype(jnp.float16) ** power

    given = functools.partial(mpjax.debug.measure_precision(fun), power=2, name="n")
    out, precision = jax.jit(given)(X)
    np.testing.assert_array_equal(out, X.astype(jnp.float16) ** 2)
    assert precision.rows[-1].entries == X.size
    with pytest.raises(TypeError, match="fun="):
        mpjax.debug.measure_precision("mixed_float16")
