"""Max pools: derivatives from positions that take a byte, equal to those that JAX derives."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import equations, normal, thorough_but

import mpjax
from mpjax._src.core.base.devices import traced_for

X = normal(1, 2, 9, 8, 3)
POLICIES = [
    "mixed_bfloat16",
    "mixed_float16",
    *(f"mixed_bfloat16,storage={s}" for s in ("lean", "8bit", "0.0")),
]


def window(select, start, size, strides, padding, x, **more):
    return jax.lax.reduce_window(x, start, select, size, strides, padding, **more)


largest = functools.partial(window, jax.lax.max, -jnp.inf)
POOLS = {
    "overlapping": lambda x: largest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", x),
    "tiles": lambda x: largest((1, 2, 2, 1), (1, 2, 2, 1), "VALID", x),
    "with gaps": lambda x: largest((1, 2, 2, 1), (1, 3, 3, 1), "VALID", x),
    "of everything": lambda x: largest((1, 8, 8, 1), (1, 1, 1, 1), "VALID", x),
    "large": lambda x: largest((1, 9, 8, 1), (1, 1, 1, 1), "SAME", x),
    "of channels": lambda x: largest((1, 1, 1, 3), (1, 1, 1, 1), "SAME", x),
    "smallest": lambda x: window(jax.lax.min, jnp.inf, (1, 3, 3, 1), (1, 2, 2, 1), "SAME", x),
    "below zero": lambda x: largest(
        (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (2, 2), (2, 2), (0, 0)), -x * x
    ),
    "equal entries": lambda x: largest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", jnp.round(x)),
    "of zeros": lambda x: largest((1, 3, 3, 1), (1, 2, 2, 1), "SAME", jax.nn.relu(x - 1)),
}


def rounded(x):
    """Returns values that 16 bits hold, so that all dtypes select the same entries."""
    return jnp.asarray(jnp.asarray(x, jnp.bfloat16), jnp.float32)


def through(pool, x):
    """A loss whose derivatives at a pool's results are all different."""
    y = pool(x)
    return jnp.sum(y * (1 + jnp.arange(y.size).reshape(y.shape) % 64))


CASES = [*itertools.product(POLICIES, POOLS)]


@pytest.mark.parametrize(("policy", "name"), thorough_but(CASES, *range(0, len(POOLS), 2)))
def test_gradients_are_those_of_jax(name, policy):
    pool, x = POOLS[name], rounded(X)
    if name in ("below zero", "of zeros"):
        x = jnp.round(x)  # squares and differences that 16 bits hold
    want = jax.grad(functools.partial(through, pool))(x)
    found = jax.jit(jax.grad(mpjax.autocast(functools.partial(through, pool), policy)))(x)
    np.testing.assert_array_equal(found, want)


def layers(w, x):
    y = jax.nn.relu(jnp.einsum("bhwi,ij->bhwj", x, w))
    return jnp.sum(jnp.sin(POOLS["overlapping"](y)) ** 2)


def test_positions_are_kept_in_a_byte_and_not_what_is_pooled():
    w, x = normal(2, 3, 128), normal(3, 2, 32, 32, 3)
    for policy in ("mixed_bfloat16", "mixed_bfloat16,storage=lean"):
        kept = mpjax.explain(layers, policy, argnums=0)(w, x).kept
        large, small = ([k.dtype for k in kept if k.shape == (2, n, n, 128)] for n in (32, 16))
        # Of what is pooled, what the relu needs: its operand, or a mask.
        assert len(large) == small.count("uint8") == 1, policy
        gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(layers, policy)))(w, x)
        assert "select_and_scatter_add" not in {e.primitive.name for e in equations(gradient)}


def test_a_tpu_runs_its_own_kernel_for_jaxs_derivative():
    w, x = normal(2, 3, 128), normal(3, 2, 32, 32, 3)
    with traced_for("v5e"):
        gradient = jax.make_jaxpr(jax.grad(mpjax.autocast(layers, "mixed_bfloat16")))(w, x)
    assert "select_and_scatter_add" in {e.primitive.name for e in equations(gradient)}


TRANSFORMED = {
    "vmap": lambda f: lambda w, x: jax.vmap(jax.grad(f), (None, 0))(w, x[:, None]),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,))[1],
    "remat": lambda f: jax.grad(jax.checkpoint(f)),
    "hessian": lambda f: lambda w, x: jax.hessian(f)(w, x[:, :4, :4]),
    "scan": lambda f: jax.grad(
        lambda w, x: jax.lax.scan(lambda c, x: (c + f(w, x[None]), None), 0.0, x)[0]
    ),
}


@pytest.mark.parametrize("name", thorough_but(TRANSFORMED, "vmap", "jvp", "scan"))
def test_transformations(name):
    w, x = normal(2, 3, 4), X
    found, want = (
        jax.jit(TRANSFORMED[name](f))(w, x)
        for f in (mpjax.autocast(layers, "mixed_bfloat16"), layers)
    )
    assert np.linalg.norm(found - want) < 2**-5 * np.linalg.norm(want)


def test_split_batches_need_no_communication():
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(X, NamedSharding(mesh, P("i")))
    loss = mpjax.autocast(functools.partial(through, POOLS["overlapping"]), "mixed_bfloat16")
    text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
    assert not [name for name in ("collective-permute", "all-gather", "all-to-all") if name in text]


def test_dilated_windows_have_a_derivative():
    """JAX has none for them."""
    dilated = functools.partial(
        largest, (1, 2, 2, 1), (1, 1, 1, 1), "VALID", window_dilation=(1, 2, 2, 1)
    )
    x = rounded(X)

    def written(x):
        corners = [x[:, i : 7 + i, j : 6 + j] for i in (0, 2) for j in (0, 2)]
        return functools.reduce(jnp.maximum, corners)

    loss = mpjax.autocast(functools.partial(through, dilated), "mixed_bfloat16")
    np.testing.assert_array_equal(
        jax.grad(loss)(x), jax.grad(functools.partial(through, written))(x)
    )
