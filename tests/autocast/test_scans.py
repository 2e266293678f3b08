"""Linear recurrences that are written as associative scans."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.jet import jet
from support import equations, normal

import mpjax

FAST, LEAN = "mixed_bfloat16", "mixed_bfloat16,storage=lean"
W, X = normal(0, 8, 8, scale=0.3), normal(1, 2, 16, 8)

THEN = {
    "plain": lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1]),
    "in another order": lambda p, q: (q[0] * p[0], q[1] + p[1] * q[0]),
}
OTHERS = {
    "a sum": lambda p, q: (p[0] + q[0], p[1] + q[1]),
    "of the first factor": lambda p, q: (p[0] * q[0], p[0] * q[1] + p[1]),
    "a difference": lambda p, q: (p[0] * q[0], q[1] - q[0] * p[1]),
}


def layer(w, x, then=THEN["plain"], read=lambda a, h: h, **options):
    """A diagonal state space layer."""
    rate = jax.nn.softplus(x @ w)
    elements = jnp.exp(-rate)[..., None] * jnp.ones(4), (rate * x)[..., None] * jnp.ones(4)
    h = read(*jax.lax.associative_scan(then, elements, **{"axis": 1, **options}))
    return jnp.mean(jnp.tanh(jnp.einsum("blds,s->bld", h, jnp.arange(4.0)) @ w))


def found(fun, policy=FAST, args=(W, X)):
    """Returns how many recurrences the gradient of a function has."""
    gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(fun, policy)))(*args)
    return [e.primitive.name for e in equations(gradient.jaxpr)].count("linear_recurrence")


def check(fun, policy, args=(W, X)):
    want = jax.jit(jax.grad(fun))(*args)
    got = jax.jit(jax.grad(mpjax.autocast(fun, policy)))(*args)
    assert np.linalg.norm(got - want) < 0.03 * np.linalg.norm(want)


@pytest.mark.parametrize("policy", [FAST, LEAN])
@pytest.mark.parametrize("name", THEN)
def test_recurrence_and_its_transpose_replace_a_scan(name, policy):
    fun = functools.partial(layer, then=THEN[name])
    assert found(fun, policy) == 2
    check(fun, policy)


@pytest.mark.parametrize("length", [2, 3, 7, 16])
def test_recurrences_of_any_length_are_found(length):
    args = W, X[:, :length]
    assert found(layer, args=args) == 2
    check(layer, FAST, args)


def test_recurrences_in_the_other_direction_and_along_other_axes_are_found():
    def along_batch(w, x):
        return layer(w, x, axis=0)

    backwards = functools.partial(layer, reverse=True)
    for fun in (along_batch, backwards):
        assert found(fun) == 2
        check(fun, FAST)


@pytest.mark.parametrize("name", OTHERS)
def test_other_scans_stay_as_they_are(name):
    assert found(functools.partial(layer, then=OTHERS[name])) == 0


def test_scan_whose_products_are_read_stays_as_it_is():
    assert found(functools.partial(layer, read=lambda a, h: a + h)) == 0
    assert found(functools.partial(layer, read=lambda a, h: a)) == 0


def test_recurrence_in_half_stays_as_it_is():
    def fun(w, x):
        with mpjax.precision("bfloat16"):
            return layer(w, x)

    assert found(fun) == 0


def test_levels_of_a_recurrence_are_not_kept():
    for policy in (FAST, LEAN):
        report = mpjax.explain(layer, policy, argnums=0)(W, X)
        shapes = {k.shape for k in report.kept}
        assert not shapes & {(2, n, 8, 4) for n in range(1, 16)}
        texts = {row.storage for row in report.rows if row.primitive == "pad"}
        assert len(texts) == 1 and "other direction" in texts.pop()


def test_recurrences_run_under_other_transformations():
    auto = mpjax.autocast(layer, FAST)
    gradient = jax.jit(jax.grad(auto))
    each = [gradient(W, x[None]) for x in X]
    mapped = jax.jit(jax.vmap(lambda x: jax.grad(auto)(W, x[None])))(X)
    np.testing.assert_allclose(mapped, jnp.stack(each), rtol=0.02, atol=1e-4)
    tangent = jax.jit(lambda w: jax.jvp(lambda w: auto(w, X), (w,), (w,))[1])(W)
    np.testing.assert_allclose(tangent, jnp.vdot(gradient(W, X), W), rtol=0.02)

    def layers(w, x):
        return jax.lax.scan(lambda x, w: (x + layer(w, x), None), x, w)[0].mean()

    assert found(layers, args=(jnp.stack([W, W]), X)) == 2
    check(layers, FAST, (jnp.stack([W, W]), X))


def test_recurrences_run_in_taylor_mode():
    def fun(x):
        return jnp.mean(jax.lax.associative_scan(THEN["plain"], (jnp.sin(x), x), axis=1)[1] ** 2)

    series = (jnp.ones_like(X), jnp.zeros_like(X))
    got, want = (
        jax.jit(lambda x, f=f: jet(f, (x,), (series,)))(X) for f in (mpjax.autocast(fun, FAST), fun)
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4)
