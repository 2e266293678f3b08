"""Programs of shard_map without devices, and instruments that look into them."""

import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from support import thorough_but

import mpjax
from mpjax._src.core.base import _jax
from mpjax._src.core.program.interpret import Plain, interpret, operations_in
from mpjax._src.core.program.unmapped import unmapped

AXES = (jax.sharding.AxisType.Auto,) * 2


def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=AXES)


def mapped(fun, in_specs, out_specs, check_vma=True):
    return jax.shard_map(
        fun, mesh=mesh(), in_specs=in_specs, out_specs=out_specs, check_vma=check_vma
    )


def exchanging(w, x):
    """What models exchange: sums, means, parts, places, in a scan, a branch and a remat."""

    @jax.checkpoint
    def layer(h, _):
        h = jnp.tanh(lax.psum(h @ w, "model"))[:, :4] + h
        return h, lax.pmean(jax.nn.relu(h).sum(), "data")

    h, sums = lax.scan(layer, x, None, length=3)
    h = lax.all_gather(h, "model", axis=1, tiled=True)
    h = lax.ppermute(h, "data", [(i, (i + 1) % 4) for i in range(4)])
    h = lax.psum_scatter(h, "model", scatter_dimension=1, tiled=True)
    h = lax.all_to_all(h, "data", 1, 0, tiled=True)
    both = lax.pmax(lax.stop_gradient(sums.sum()), "model")
    found = lax.cond(both > 0, jnp.sum, jnp.mean, h) * (1 + lax.axis_index("model"))
    return lax.pmean(found, ("data", "model"))


@pytest.mark.parametrize("check_vma", thorough_but([True, False], True))
def test_unmapped_values_and_gradients_equal_those_of_shard_map(rng, check_vma):
    loss = mapped(exchanging, (P("model"), P("data", "model")), P(), check_vma)
    w, x = (np.float32(rng.normal(size=shape)) for shape in ((8, 8), (16, 8)))
    jaxpr = jax.make_jaxpr(jax.value_and_grad(loss, (0, 1)))(w, x)
    got = interpret(jaxpr, [jnp.asarray(w), jnp.asarray(x)], Plain())
    want = jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1)))(w, x))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            assert unmapped(eqn) is not None


def test_numbers_in_a_shard_map_bring_no_mesh():
    loss = mapped(lambda x: lax.pmean(jnp.sum(jax.nn.relu(x)), "data"), P("data"), P())
    (eqn,) = (e for e in jax.make_jaxpr(loss)(jnp.ones(8)).eqns if e.primitive.name == "shard_map")
    avals = [v.aval for e in unmapped(eqn).jaxpr.eqns for v in e.outvars]
    assert len(avals) > 2 and all(aval.sharding.mesh.empty for aval in avals)


SPECS = [
    (P(("data", "model")), P(("data", "model"))),
    (P(("model", "data")), P(None, ("data", "model"))),
    (P("model", "data"), P("data", "model")),
    (P(None, "data"), P("model")),
]


@pytest.mark.parametrize(("given", "returned"), SPECS)
def test_unmapped_parts_lie_where_the_mesh_puts_them(rng, given, returned):
    def part(x):
        place = lax.axis_index("data") + 10 * lax.axis_index("model")
        return (x + place)[:4, :4]

    x = np.float32(rng.normal(size=(32, 32)))
    fun = mapped(part, given, returned, check_vma=False)
    (eqn,) = jax.make_jaxpr(fun)(x).eqns
    (got,) = _jax.eval_closed(unmapped(eqn), x)
    np.testing.assert_array_equal(got, jax.jit(fun)(x))


def test_a_mesh_axis_that_is_not_manual_stays_automatic(rng):
    x = np.float32(rng.normal(size=(8, 4)))
    fun = jax.shard_map(
        lambda x: lax.psum(x, "data"),
        mesh=mesh(),
        in_specs=P("data"),
        out_specs=P(),
        axis_names={"data"},
    )
    (eqn,) = jax.make_jaxpr(fun)(x).eqns
    (got,) = _jax.eval_closed(unmapped(eqn), x)
    np.testing.assert_allclose(got, x.reshape(4, 2, 4).sum(0), rtol=1e-6)


def test_shard_map_without_a_vmap_rule_inside_runs_as_one_operation():
    """`jax.vmap` has no rule for some operations; then the shard_map is one compiled operation."""
    inner = jax.shard_map(jnp.sin, mesh=mesh(), in_specs=P("data"), out_specs=P("data"))

    def body(x):
        return jax.pure_callback(np.sin, x, x, vmap_method=None) + 1

    fun = mapped(body, P("data"), P("data"), check_vma=False)
    x = jnp.ones(8)
    jaxpr = jax.make_jaxpr(lambda x: fun(x) + inner(x))(x)
    (got,) = interpret(jaxpr, [x], Plain())
    np.testing.assert_allclose(got, 1 + 2 * np.sin(1), rtol=1e-6)
    assert unmapped(jaxpr.eqns[0]) is None and operations_in(jaxpr) >= 2


# ---- instruments --------------------------------------------------------------------------------


def line_of(text):
    lines = Path(__file__).read_text().split("\n")
    found = [i for i, line in enumerate(lines, 1) if text in line and "line_of" not in line]
    return f"{Path(inspect.getfile(mapped)).name}:{found[0]}"


@pytest.mark.parametrize("check_vma", thorough_but([True, False], True))
def test_find_nonfinite_names_the_line_in_a_shard_map(rng, check_vma):
    def body(params, x):
        h = jnp.tanh(x @ params["w"])
        big = h @ params["v"].astype(h.dtype)
        big = (1e4 * big.astype(jnp.float16) * 4).astype(jnp.float32)  # overflows float16
        return lax.pmean(jnp.mean(jnp.cos(lax.psum(big, "model"))), "data")

    specs = {"w": P(None, "model"), "v": P("model")}
    loss = mapped(body, (specs, P("data")), P(), check_vma)
    w, v = np.full((4, 8), 0.5, np.float32), np.ones((8, 4), np.float32)
    x = np.abs(np.float32(rng.normal(size=(16, 4)))) + 1
    found = mpjax.find_nonfinite(loss, "mixed_float16")({"w": w, "v": v}, x)
    assert found.kind == "overflow" and found.primitive == "mul"
    assert found.source.endswith(line_of("# overflows float16"))
    # Its cotangents are 4e4 times the loss scale.
    small = {"w": w, "v": v * 0.1}
    assert not mpjax.find_nonfinite(loss, "mixed_float16", small, x, loss_scale=1.0)
    assert mpjax.find_nonfinite(loss, "mixed_float16", small, x).curable


@pytest.mark.thorough
def test_compare_names_the_line_in_a_shard_map(rng):
    def body(w, x):
        h = jnp.tanh(x @ w)
        h = (h + jnp.bfloat16(64).astype(h.dtype)).astype(jnp.bfloat16) - 64  # loses bits
        return lax.pmean(jnp.mean(h.astype(jnp.float32) ** 2), "data")

    loss = mapped(body, (P(), P("data")), P())
    w, x = (np.float32(rng.normal(size=shape)) for shape in ((8, 8), (16, 8)))
    top = mpjax.compare(loss, "mixed_bfloat16")(w, x).rows[0]
    assert top.source.endswith(line_of("# loses bits"))


def test_rules_that_need_values_look_into_a_shard_map():
    def body(table, ids):
        rows = table[ids.astype(jnp.bfloat16).astype(jnp.int32)]  # other rows
        return lax.pmean(jnp.mean(rows), "data")

    step = mapped(body, (P(), P("data")), P())
    table, ids = np.ones((2000, 4), np.float32), np.arange(1001, 1009)
    report = mpjax.lint(step, select="rounded-integer")(table, ids)
    (found,) = report.findings
    assert found.source.endswith(line_of("# other rows"))
    assert not mpjax.lint(step, select="rounded-integer")(table, ids % 64).findings
