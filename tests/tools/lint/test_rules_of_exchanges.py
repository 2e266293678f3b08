"""Rules of the dtypes that devices send and compute in, after compilation."""

import jax
import jax.numpy as jnp
import pairs
import pytest
from absent import compiles
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from pairs import Pair, bf16, f16

import mpjax

HALF, WIDE = jnp.bfloat16, jnp.float32
CPU = {"target": "cpu"}


def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def placed(*spec):
    return NamedSharding(mesh(), P(*spec))


def spread(*shape, dtype=WIDE, over=()):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=placed(*over))


def on_devices(fun):
    specs = {"in_specs": (P("data"), P("data")), "out_specs": P("data")}
    return lambda *args: jax.shard_map(fun, mesh=mesh(), **specs, check_vma=False)(*args)


def gathered(w, x):
    def part(w, x):
        whole = jax.lax.all_gather(w, "data", tiled=True)  # fault
        return x @ whole.T.astype(HALF)

    return on_devices(part)(w, x)


def gathered_in_half(w, x):
    def part(w, x):
        whole = jax.lax.all_gather(w.astype(HALF), "data", tiled=True)
        return x @ whole.T

    return on_devices(part)(w, x)


def moved(x):
    y = jnp.tanh(x.astype(WIDE)).astype(HALF)  # fault
    return jax.lax.with_sharding_constraint(y, placed())


def fixed(x):
    y = jnp.tanh(x.astype(WIDE)).astype(HALF)
    return jax.lax.with_sharding_constraint(jax.lax.optimization_barrier(y), placed())


def summed(w, x):
    grads = jax.grad(lambda w: jnp.sum(jnp.sin(x @ w).astype(WIDE)))(w.astype(HALF))  # fault
    return grads.astype(WIDE)


def summed_wide(w, x):
    return jax.grad(lambda w: jnp.sum(jnp.sin(x.astype(WIDE) @ w)))(w)


CASES = {
    "a gather": Pair(
        "gather-before-cast",
        gathered,
        gathered_in_half,
        (spread(8, 8, over=("data",)), spread(8, 8, dtype=HALF, over=("data",))),
    ),
    "a cast that is moved": Pair(
        "wide-all-gather", moved, fixed, (spread(8, 8, dtype=HALF, over=("data",)),), CPU
    ),
    "a sum": Pair(
        "half-all-reduce",
        summed,
        summed_wide,
        (spread(8, 8), spread(16, 8, dtype=HALF, over=("data",))),
        CPU,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_exchanges_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_gather_of_what_is_read_as_float32_is_no_fault():
    def both(w, x):
        whole = jax.lax.with_sharding_constraint(w, placed())
        return x @ whole.astype(HALF), jnp.sum(whole)

    args = spread(8, 8, over=("data",)), spread(8, 8, dtype=HALF, over=("data",))
    assert not mpjax.lint(both)(*args).findings


def product(x, y):
    return x @ y


def test_widened_matmul_does_not_run_for_a_cpu():
    report = mpjax.lint(product, target="cpu")(f16(16, 16), f16(16, 16))
    assert not report.findings and "widened-matmul" not in report.ran
    assert "accelerators: pass one as target" in report.not_run["widened-matmul"]


@compiles("v100")
def test_widened_matmul_names_bfloat16_that_a_v100_has_no_unit_for():
    (found,) = mpjax.lint(product, target="v100")(bf16(64, 64), bf16(64, 64)).findings
    assert found.rule == "widened-matmul" and "bf16" in found.message
    assert found.source.startswith(__file__)
    assert not mpjax.lint(product, target="v100")(f16(64, 64), f16(64, 64)).findings


@compiles("h100")
def test_half_all_reduce_is_found_for_absent_devices():
    args = spread(32, 32), spread(64, 32, dtype=HALF, over=("data",))
    assert mpjax.lint(summed, select="half-all-*", target="h100 x 2")(*args).findings
    assert not mpjax.lint(summed_wide, target="h100 x 2")(*args).findings


@pytest.mark.parametrize(("before", "gathers"), [(("a", "b"), True), (("b",), False)])
def test_a_constraint_gathers_if_devices_get_more_than_they_had(before, gathers):
    axes = (jax.sharding.AxisType.Auto,) * 2
    devices = jax.make_mesh((2, 2), ("a", "b"), axis_types=axes)

    def read(w, x):
        return x @ jax.lax.with_sharding_constraint(w, NamedSharding(devices, P("a"))).astype(HALF)

    w = jax.ShapeDtypeStruct((8, 8), WIDE, sharding=NamedSharding(devices, P(*before)))
    found = mpjax.lint(read)(w, bf16(8, 8)).findings
    assert [each.rule for each in found] == ["gather-before-cast"] * gathers
