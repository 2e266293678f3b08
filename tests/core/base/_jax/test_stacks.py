"""What loops stack: on one GPU nothing fills its memory first, and every entry is written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from support import cast, normal, thorough_but

from mpjax._src.core.base._jax import stacks

W = normal(0, 3, 4, 4)
X = normal(1, 2, 4)


def loss(w, x):
    def layer(h, w):
        h = jnp.tanh(h @ w)
        return h, h.sum()

    h, sums = jax.lax.scan(layer, x, w)
    return jnp.sum(h) + jnp.sum(sums)


def buffers(fun, *args, platform="cuda"):
    """Counts the arrays that start with anything in a lowered program."""
    text = jax.jit(fun).trace(*args).lower(lowering_platforms=(platform,)).as_text()
    return text.count("@AllocateBuffer")


@pytest.mark.parametrize(
    "around", [lambda f: f, jax.jit, jax.checkpoint, lambda f: jax.vmap(f, (None, 0))]
)
def test_loops_of_autocast_stack_in_memory_that_nothing_fills(around):
    """Forward and backward, and not the loops of others."""
    planned, x = around(cast(loss)), X[:, None]
    total = lambda w, x: jnp.sum(planned(w, x))  # noqa: E731
    assert buffers(total, W, x) >= 1
    assert buffers(jax.grad(total), W, x) >= 3
    assert buffers(jax.grad(total), W, x, platform="cpu") == 0
    others = around(loss)
    assert buffers(jax.grad(lambda w, x: jnp.sum(others(w, x))), W, x) == 0


@pytest.mark.parametrize("mapped", [False, True])
def test_what_xla_partitions_is_filled_as_by_jax(mapped):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    own, rows = jax.grad(cast(loss)), PartitionSpec("data")

    def mean(w, x):
        return jax.lax.pmean(own(jax.lax.pcast(w, "data", to="varying"), x), "data")

    specs = {"in_specs": (PartitionSpec(), rows), "out_specs": PartitionSpec()}
    gradient = jax.shard_map(mean, mesh=mesh, **specs) if mapped else own
    x = jax.ShapeDtypeStruct(X.shape, jnp.float32, sharding=NamedSharding(mesh, rows))
    assert (buffers(gradient, W, x) > 0) == mapped


def test_exported_programs_are_filled_as_by_jax():
    exported = export.export(jax.jit(jax.grad(cast(loss))), platforms=("cuda",))(W, X)
    assert "AllocateBuffer" not in exported.mlir_module()


def body(h, x):
    h = jnp.tanh(h + x)
    named = jax.ad_checkpoint.checkpoint_name(h, "kept")
    called = jax.checkpoint(lambda x, h: (h, x * h))(x, named)
    return h, (h, {"named": named, "called": called[0], "sum": h.sum()})


LENGTHS = [(7, 1), (7, 3), (6, 3), (7, 7), (1, 1), (0, 1)]
CASES = [(*pair, reverse) for pair in LENGTHS for reverse in (False, True)]


@pytest.mark.parametrize(
    ("length", "unroll", "reverse"), thorough_but(CASES, *range(0, 12, 4), *range(3, 12, 4))
)
def test_every_entry_is_written(monkeypatch, length, unroll, reverse):
    """Whatever the memory holds: here NaN."""

    def nans(prefix, length_spec, aval):
        return jnp.full((*prefix, *aval.shape), jnp.nan, aval.dtype)

    monkeypatch.setattr(stacks, "_empty", nans)
    x = normal(2, length, 4)
    run = lambda x: jax.lax.scan(body, X[0], x, reverse=reverse, unroll=unroll)  # noqa: E731
    (eqn,) = (e for e in jax.make_jaxpr(run)(x).eqns if e.primitive.name == "scan")
    got = jax.jit(lambda x: stacks._scan(*[X[0], x][: len(eqn.invars)], **eqn.params))(x)
    for a, b in zip(got, jax.tree.leaves(run(x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_results_that_are_the_same_start_as_one():
    """XLA stacks them once; apart, it could not see that they stay the same."""
    eqn = jax.make_jaxpr(lambda x: jax.lax.scan(body, X[0], x))(W[:, 0]).eqns[-1]
    text = str(jax.make_jaxpr(lambda x: stacks._scan(X[0], x, **eqn.params))(W[:, 0]))
    assert text.count("= empty[") == 2 < len(eqn.outvars) - 1


@pytest.mark.parametrize("special", ["key", "explicit"])
def test_special_results_are_filled_as_by_jax(special):
    if special == "key":

        def step(key, _):
            key = jax.random.split(key, 1)[0]
            return key, key

        eqn = jax.make_jaxpr(lambda key: jax.lax.scan(step, key, None, 3))(jax.random.key(0))
        args = [jax.random.key(0)]
    else:
        mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
        args = [jax.device_put(v, NamedSharding(mesh, PartitionSpec())) for v in (X[0], W[:, 0])]
        eqn = jax.make_jaxpr(lambda h, x: jax.lax.scan(body, h, x))(*args)
    (eqn,) = (e for e in eqn.eqns if e.primitive.name == "scan")
    assert "= empty[" not in str(jax.make_jaxpr(lambda *a: stacks._scan(*a, **eqn.params))(*args))
