"""Linear recurrences and their derivatives, which are recurrences too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import normal, thorough_but

from mpjax._src.core.base import _jax

A, B = 0.5 + 0.2 * normal(0, 3, 7, 2), normal(1, 3, 7, 2)


def one_by_one(a, b):
    """The recurrence along the second axis, in float64."""
    h = [np.asarray(b[:, 0], np.float64)]
    for t in range(1, a.shape[1]):
        h.append(np.asarray(a[:, t], np.float64) * h[-1] + b[:, t])
    return np.stack(h, 1)


ours = functools.partial(_jax.recurrence, axis=1)
jaxs = functools.partial(_jax.scanned, axis=1)


def loss(run, a, b):
    return jnp.sum(jnp.sin(run(a, b)) * a)


def near(got, want):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [1, 2, 3, 7])
def test_recurrence_is_computed_from_the_first_element(length):
    a, b = A[:, :length], B[:, :length]
    near(ours(a, b), one_by_one(a, b))
    near(jaxs(a, b, reverse=True)[:, ::-1], one_by_one(a[:, ::-1], b[:, ::-1]))


TRANSFORMS = {
    "reverse": lambda f: jax.grad(f, (0, 1)),
    "of the factors": jax.grad,
    "forward": lambda f: lambda a, b: jax.jvp(f, (a, b), (b, a)),
    "forward, one": lambda f: lambda a, b: jax.jvp(lambda b: f(a, b), (b,), (a,)),
    "second": lambda f: lambda a, b: jax.grad(lambda a: jnp.sum(jax.grad(f, 1)(a, b) ** 2))(a),
    "forward over reverse": lambda f: lambda a, b: jax.jvp(jax.grad(f), (a, b), (b, a)),
    "mapped": lambda f: jax.vmap(jax.grad(f, (0, 1)), (0, None)),
    "mapped, both": lambda f: jax.vmap(jax.grad(f, (0, 1)), (1, 2)),
    "remat": lambda f: jax.grad(jax.checkpoint(f), (0, 1)),
}


@pytest.mark.parametrize("name", thorough_but(TRANSFORMS, *range(0, len(TRANSFORMS), 2)))
def test_derivatives_equal_those_of_the_scan(name):
    args = (A, B)
    if name == "mapped":
        args = (jnp.stack([A, B]), B)
    if name == "mapped, both":
        args = (jnp.stack([A, B], 1), jnp.stack([B, A], 2))
    got, want = (
        jax.jit(TRANSFORMS[name](functools.partial(loss, run)))(*args) for run in (ours, jaxs)
    )
    near(got, want)


def test_the_first_factor_is_not_read():
    wild = A.at[:, 0].set(jnp.nan)
    near(ours(wild, B), ours(A, B))
    factors = jax.grad(lambda a: jnp.sum(ours(a, B) ** 2))(wild)
    assert np.isfinite(factors).all() and not factors[:, 0].any()


@pytest.mark.parametrize("check", [True, False])
def test_recurrence_runs_in_shard_map(check):
    mesh = jax.make_mesh((3,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P("i"), P("i")), "out_specs": P("i"), "check_vma": check}
    near(
        jax.jit(jax.grad(functools.partial(loss, jax.shard_map(ours, **specs))))(A, B),
        jax.jit(jax.grad(functools.partial(loss, jaxs)))(A, B),
    )
