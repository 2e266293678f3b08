"""Flax NNX modules as arguments and results: only what a function changes is written back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import errors, nnx
from support import thorough_but

import mpjax

X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
W = np.eye(4, dtype=np.float32)
RESULTS = {
    "module": lambda model: {"model": model},
    "variable": lambda model: model.kernel,
    "new variable": lambda model: nnx.Param(2 * model.kernel[...]),
    "new module": lambda model: nnx.Dict(of=model, more=nnx.Param(jnp.ones(2))),
    "state": lambda model: nnx.state(model),
}


def linear():
    return nnx.Linear(4, 4, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("policy", thorough_but(["float32", "mixed_bfloat16"], "mixed_bfloat16"))
def test_a_module_of_an_outer_trace_is_read_and_returned(policy, result):
    def loss(w, teacher, x):
        return jnp.mean((x @ w - teacher(x)) ** 2), RESULTS[result](teacher)

    teacher, want = linear(), linear()
    run = jax.value_and_grad(mpjax.autocast(loss, policy), has_aux=True)
    (value, returned), grad = run(W, teacher, X)
    (plain, like), plain_grad = jax.value_and_grad(loss, has_aux=True)(W, want, X)
    np.testing.assert_allclose(value, plain, rtol=0.02)
    np.testing.assert_allclose(grad, plain_grad, atol=0.02)
    for kept, copy in ((teacher, want), (returned, like)):
        jax.tree.map(np.testing.assert_array_equal, kept, copy)


def test_one_module_changes_and_another_is_read():
    def loss(student, teacher, x):
        error = jnp.mean((student(x) - teacher(x)) ** 2)
        return error, (student.mean, teacher, nnx.List([teacher, student]))

    student, teacher = nnx.BatchNorm(4, rngs=nnx.Rngs(0)), linear()
    run = nnx.value_and_grad(mpjax.autocast(loss, "float32"), has_aux=True)
    (_, (mean, same, both)), _ = run(student, teacher, X)
    assert mean is student.mean and same is both[0] is teacher and both[1] is student
    assert float(jnp.abs(student.mean[...]).max()) > 0


def _grows(model, x):
    model.seen = nnx.Intermediate(x)
    return model(x).sum()


@pytest.mark.parametrize("fun", [lambda model, x: model(x).sum(), _grows], ids=["value", "module"])
def test_a_change_of_a_module_of_an_outer_trace_raises_and_the_module_is_whole(fun):
    model = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(model))
    with pytest.raises(errors.TraceContextError):
        jax.grad(lambda x: mpjax.autocast(fun)(model, x))(X)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(model), before)


def test_filled_container_of_a_module_is_written_back():
    class Caches(nnx.Module):
        def __init__(self):
            self.seen = nnx.data({})

        def __call__(self, x):
            self.seen["last"] = x
            return x

    model = Caches()
    mpjax.autocast(Caches.__call__)(model, X)
    np.testing.assert_array_equal(model.seen["last"], X)
