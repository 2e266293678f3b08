"""Every instrument names the user's lines, and tells what is computed again from a gradient."""

import functools
import inspect

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from recomputed import LOSSES, W, X
from support import thorough_but

import mpjax
from mpjax._src.core.base import _jax

KEY = jax.random.key(0)
TREE, STATIC = eqx.partition(
    eqx.nn.MLP(4, 4, 8, 2, activation=jax.nn.softplus, key=KEY), eqx.is_array
)
LINEN = nn.Sequential([nn.Dense(8), nn.LayerNorm(), nn.gelu, nn.Dense(4)])


def of_equinox(w, x):
    return jnp.mean(jax.vmap(eqx.combine(w, STATIC))(x) ** 2)


def of_linen(w, x):
    logits = jax.checkpoint(lambda w, x: LINEN.apply(w, x))(w, x)
    return jnp.mean(optax.softmax_cross_entropy(logits, jax.nn.one_hot(jnp.zeros(2, int), 4)))


def of_a_jitted_library(w, x):
    return jnp.mean(jax.jit(optax.losses.log_cosh)(x @ w, jax.nn.mish(x)))


PROGRAMS = {
    **{name: (LOSSES[name], W) for name in ("where", "scan", "eqx_loop", "rule_inside")},
    "equinox": (of_equinox, TREE),
    "linen": (of_linen, LINEN.init(KEY, X)),
    "jitted": (of_a_jitted_library, W),
}
HALF = "mixed_bfloat16,storage=lean"


def compared(loss, w):
    return [row.source for row in mpjax.compare(loss, HALF)(w, X).rows]


def watched(loss, w):
    step = jax.value_and_grad(mpjax.autocast(loss, HALF))
    return [row.source for row in mpjax.debug.measure_precision(step)(w, X)[1].rows]


def explained(loss, w):
    return [row.source for row in mpjax.explain(loss, HALF)(w, X).rows]


def searched(loss, w):
    """Divides by zero in the loss, and multiplies by infinity in its derivative."""
    reports = []
    for pole in (lambda x: 1 / (0 * x), lambda x: jnp.sqrt(0 * x)):
        lost = lambda w, x, pole=pole: loss(w, x) + pole(loss(w, x))  # noqa: E731
        reports.append(mpjax.find_nonfinite(lost, HALF)(w, X))
    return [report.source for report in reports if report.found]


PAIRS = [(tool, name) for tool in (compared, watched, explained, searched) for name in PROGRAMS]
QUICK = ((compared, "jitted"), (watched, "jitted"), (explained, "rule_inside"))


@pytest.mark.parametrize(("instrument", "name"), thorough_but(PAIRS, *QUICK, (searched, "where")))
def test_each_row_is_at_a_line_of_the_user(instrument, name):
    sources = instrument(*PROGRAMS[name])
    assert sources and all(map(_jax.is_users_file, sources))


@pytest.mark.parametrize("name", thorough_but(["where", "scan", "eqx_loop"], "where", "scan"))
def test_rows_of_the_forward_pass_are_no_gradients(name):
    rows = mpjax.compare(LOSSES[name], "mixed_bfloat16")(W, X).rows
    # The logarithm and the exponentials of a softplus, and the tests of what is finite.
    again = {"log1p", "exp", "max", "abs", "tanh", "sin"}
    assert not [row for row in rows if row.primitive in again and row.backward]
    assert any(row.backward and row.primitive == "dot_general" for row in rows)


def test_an_overflow_that_is_computed_again_is_of_the_forward_pass():
    def overflowing(scale, w, x):
        act = jax.checkpoint(lambda h: jnp.tanh(jnp.exp(h)))
        return jnp.mean(act((x @ w) * scale)).astype(jnp.float32)

    report = mpjax.find_nonfinite(functools.partial(overflowing, 1e3))(W, X)
    assert (report.primitive, report.backward) == ("exp", False)


def test_tensors_of_a_library_in_a_checkpoint_are_at_its_line():
    half = nn.Sequential(
        [nn.Dense(8, dtype=jnp.bfloat16), nn.relu, nn.Dense(4, dtype=jnp.bfloat16)]
    )
    shapes = jax.eval_shape(half.init, KEY, X)
    params = jax.tree.map(lambda x: np.full(x.shape, 0.1, x.dtype), shapes)
    loss = lambda params: jnp.sum(jax.checkpoint(half.apply)(params, X))  # noqa: E731
    line = inspect.currentframe().f_lineno - 1
    _, report = mpjax.debug.measure_precision(jax.grad(loss))(params)
    matmuls = [row for row in report.rows if row.op == "dot_general"]
    assert matmuls and {row.source for row in matmuls} == {f"{__file__}:{line}"}


def test_tensors_that_a_rule_computes_again_are_of_the_forward_pass():
    @jax.custom_vjp
    def act(x, w):
        return jnp.tanh(x @ w)

    def back(kept, ct):
        x, w = kept
        inner = ct * (1 - jnp.tanh(x @ w) ** 2)
        return inner @ w.T, x.T @ inner

    act.defvjp(lambda x, w: (act(x, w), (x, w)), back)
    step = jax.grad(lambda w, x: jnp.sum(act(x.astype(w.dtype), w).astype(jnp.float32)))
    _, report = mpjax.debug.measure_precision(step)(W.astype(jnp.bfloat16), X)
    products = [row for row in report.rows if row.op == "dot_general" and row.part == "result"]
    assert {row.direction for row in products} == {"backward", "forward"}
    assert [row.direction for row in products].count("backward") == 1
