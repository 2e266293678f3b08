"""Statistics of half tensors: what NumPy says of the same arrays, wherever they stand."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import thorough_but

import mpjax
from mpjax._src.tools.watching import figures

HALVES = {"float16": jnp.float16, "bfloat16": jnp.bfloat16}
SHAPES = ((4000,), (30, 40, 50), (2, 3, 5000))
SPANS = ((-45, 25), (-149, 124), (-3, 3), (-20, -14))
# Each shape and each dtype, in the quick tier.
PAIRS = (
    ((4000,), (-149, 124), "bfloat16"),
    ((30, 40, 50), (-45, 25), "float16"),
    ((2, 3, 5000), (-20, -14), "float16"),
)


def wide(seed, shape, low=-40, high=25):
    """Returns float32 of all magnitudes between two powers of two."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * 2.0 ** rng.uniform(low, high, shape)).astype(np.float32)


def expected(x, half):
    """Returns what is to be seen of float32 that is cast to half, in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        error = x.astype(np.float64) - x.astype(half).astype(np.float64)
        kept = x.astype(half).astype(np.float64)
    size, info = np.abs(x.astype(np.float64)), jnp.finfo(half)
    fits, there = np.isfinite(kept), size != 0
    told = fits & (size >= 2.0**-70) & (size < 2.0**30)
    return {
        "entries": x.size,
        "largest": size[np.isfinite(size)].max(),
        "zeros": np.mean(~there),
        "flushed": np.mean(there & (kept == 0)),
        "subnormal": np.mean((kept != 0) & (size < float(info.smallest_normal))),
        "near": np.mean(fits & (size >= float(info.max) / 16)),
        "overflowed": np.mean(~fits),
        "nan": np.mean(np.isnan(x)),
        "noise": math.sqrt(np.sum(error[told] ** 2) / np.sum(size[told] ** 2)),
    }


def check(row, x, half):
    """Compares a row with NumPy."""
    want = expected(x, half)
    noise = want.pop("noise")
    assert row.noise == pytest.approx(noise, rel=1e-4)
    assert {name: getattr(row, name) for name in want} == pytest.approx(want, rel=1e-6, abs=0)
    high = float(jnp.finfo(half).max)
    assert row.headroom == pytest.approx(math.log2(high / want["largest"]), abs=1e-5)


def measured(fun, *args):
    out, precision = jax.jit(mpjax.debug.measure_precision(fun))(*args)
    for mine, its in zip(*map(jax.tree.leaves, (out, jax.jit(fun)(*args))), strict=True):
        assert mine.dtype == its.dtype and np.asarray(mine).tobytes() == np.asarray(its).tobytes()
    return precision


@pytest.mark.parametrize("half", HALVES.values())
def test_figures_error_of_small_numbers_equals_that_of_numpy(half):
    x = np.abs(wide(3, 256, -27, -13))  # subnormal in float16
    error = figures._error(x.view(np.uint32), figures.Limits.of(half))
    np.testing.assert_array_equal(error, x - x.astype(half).astype(np.float32))


@pytest.mark.parametrize("half", HALVES.values())
def test_limits_overflow_is_the_least_number_that_becomes_infinity(half):
    least = np.uint32(figures.Limits.of(half).overflow).view(np.float32)
    with np.errstate(over="ignore"):
        assert np.isinf(least.astype(half))
        assert np.isfinite(np.nextafter(least, np.float32(0)).astype(half))


def cast_of(precision):
    (row,) = (row for row in precision.rows if row.part == "cast")
    return row


@pytest.mark.parametrize(
    ("shape", "span", "half"), thorough_but(itertools.product(SHAPES, SPANS, HALVES), *PAIRS)
)
def test_figures_of_a_cast_equal_those_of_numpy(shape, span, half):
    x = wide(0, shape, *span)
    x.flat[:3] = 0, np.float32(65519.99), np.float32(65520)
    x.flat[3:6] = np.float32(2.0**-25), np.float32(2.0**-14), np.float32(6.09e-5)
    check(cast_of(measured(lambda x: x.astype(half), x)), x, HALVES[half])


@pytest.mark.parametrize("half", thorough_but(HALVES, "bfloat16"))
def test_figures_tell_infinities_from_nan(half):
    x = wide(1, (50, 50), -3, 3)
    x[0, :4] = np.inf, -np.inf, np.nan, 1e38
    check(cast_of(measured(lambda x: x.astype(half), x)), x, HALVES[half])


def test_measure_precision_takes_scalars_empty_arrays_and_zeros():
    def fun(x, empty, zeros):
        return [v.astype(jnp.float16) for v in (x, empty, zeros)]

    precision = measured(fun, jnp.float32(3), jnp.ones((0, 3)), jnp.zeros((5, 2)))
    entries = {row.shape: row.entries for row in precision.rows}
    assert entries == {(): 1, (0, 3): 0, (5, 2): 10}
    assert [row.headroom for row in precision.rows[1:]] == [None, None]
    assert [row.noise for row in precision.rows[1:]] == [None, None]


@pytest.mark.parametrize("half", thorough_but(HALVES, "float16"))
def test_noise_of_a_16_bit_value_is_that_of_rounding_on_average(half):
    x = wide(2, (100, 200), -10, 8).astype(half)
    rows = {r.part: r for r in measured(lambda x, w: x @ w, x, jnp.eye(200, dtype=half)).rows}
    row = rows["lhs"]
    assert row.rounded and row.flushed is None
    size = np.abs(x.astype(np.float64))
    unit = 2.0 ** (np.floor(np.log2(size)) - jnp.finfo(half).nmant)
    unit = np.maximum(unit, float(jnp.finfo(half).smallest_subnormal))
    noise = math.sqrt(np.sum(unit**2 / 12) / np.sum(size**2))
    assert row.noise == pytest.approx(noise, rel=1e-4)
    assert row.largest == size.max()
    assert rows["result"].largest == row.largest


# ---- programs inside ----------------------------------------------------------------------------

X = wide(3, (6, 8, 8), -20, 12)


def turns(fun):
    """Returns a function that casts in turns of a loop."""
    return lambda xs: jax.lax.scan(lambda c, x: (c, fun(x)), 0.0, xs)[1]


def half_sum(x):
    return jnp.sum(x.astype(jnp.float16).astype(jnp.float32))


def while_loop(xs):
    def body(carry):
        i, total = carry
        return i + 1, total + half_sum(xs[i])

    return jax.lax.while_loop(lambda carry: carry[0] < len(xs), body, (0, 0 * xs[0, 0, 0]))[1]


@jax.custom_vjp
def squared(x):
    return half_sum(x)


squared.defvjp(lambda x: (half_sum(x), x), lambda x, ct: (ct * x,))


@jax.custom_jvp
def doubled(x):
    return half_sum(x)


doubled.defjvp(lambda primals, tangents: (half_sum(*primals), jnp.sum(*tangents)))

WHERE = {
    "plain": half_sum,
    "jit": jax.jit(half_sum),
    "scan": turns(half_sum),
    "reversed": lambda xs: jax.lax.scan(lambda c, x: (c, half_sum(x)), 0.0, xs, reverse=True)[1],
    "scan of scan": turns(turns(half_sum)),
    "while": while_loop,
    "fori": lambda xs: jax.lax.fori_loop(0, 6, lambda i, c: c + half_sum(xs[i]), 0.0),
    "cond": lambda xs: jax.lax.cond(xs[0, 0, 0] < 1e9, half_sum, jnp.sum, xs),
    "switch in scan": turns(
        lambda x: jax.lax.switch((x[0, 0] < 1e9).astype(int), [lambda x: jnp.sum(x), half_sum], x)
    ),
    "map": lambda xs: jax.lax.map(half_sum, xs),
    "vmap": jax.vmap(half_sum),
    "vmap of scan": jax.vmap(turns(half_sum)),
    "remat": jax.checkpoint(half_sum),
    "custom_vjp": squared,
    "custom_jvp": doubled,
    "donating jit": jax.jit(lambda x: (x + 0, half_sum(x)), donate_argnums=0),
}


# Loops, a branch in one, a batch, and a call; rules of derivatives are asked for below.
QUICK = ("scan", "reversed", "while", "switch in scan", "vmap of scan", "remat")


@functools.cache
def found_in(place):
    return cast_of(measured(WHERE[place], jnp.asarray(X)))


@pytest.mark.parametrize("place", thorough_but(WHERE, *QUICK))
@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_figures_inside_each_transformation_equal_those_of_numpy(place):
    check(found_in(place), X, jnp.float16)


@pytest.mark.parametrize("place", ["scan", "reversed", "while"])
def test_figures_name_the_loop_turn_of_the_largest_value(place):
    found = found_in(place)
    assert found.turn == np.abs(X).max((1, 2)).argmax()


def test_figures_of_a_branch_not_taken_are_empty():
    def fun(x):
        return jax.lax.cond(
            x[0, 0] > 1e9, lambda x: x.astype(jnp.float16) @ x.astype("f2"), half, x
        )

    def half(x):
        return x.astype(jnp.float16)

    rows = measured(fun, jnp.asarray(X[0])).rows
    assert sorted(row.entries for row in rows) == [0, 0, 64]
    assert all(row.headroom is None and not row.risk for row in rows if not row.entries)


@pytest.mark.parametrize(
    ("inside", "check_vma"),
    thorough_but(
        itertools.product(["plain", "scan", "cond", "while", "remat"], [True, False]),
        *[("scan", True), ("cond", False)],
    ),
)
def test_devices_of_a_mesh_put_their_figures_together(inside, check_vma):
    mesh = jax.make_mesh((4, 2), ("a", "b"))
    x = wide(5, (24, 8, 16), -20, 12)

    def part(x):
        return jax.tree.map(lambda v: jnp.atleast_1d(v).sum()[None, None], WHERE[inside](x))

    fun = jax.shard_map(
        part, mesh=mesh, in_specs=P("a", None, "b"), out_specs=P("a", "b"), check_vma=check_vma
    )
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("a", None, "b")))
    check(cast_of(measured(fun, placed)), x, jnp.float16)


def test_figures_of_sharded_arrays_equal_those_of_numpy():
    mesh = jax.make_mesh((8,), ("a",))
    x = wide(6, (64, 32), -20, 12)
    placed = jax.device_put(x, jax.NamedSharding(mesh, P("a")))
    check(cast_of(measured(lambda x: x.astype(jnp.float16) @ jnp.ones((32, 4)), placed)), x, "f2")


def test_members_under_vmap_have_figures_each():
    x = jnp.asarray(X)
    precision = jax.jit(jax.vmap(mpjax.debug.measure_precision(half_sum)))(x)[1]
    with pytest.raises(ValueError, match="jax.tree.map"):
        precision.rows  # noqa: B018
    for i in range(len(X)):
        check(cast_of(jax.tree.map(lambda leaf, i=i: leaf[i], precision)), X[i], jnp.float16)


def test_measure_precision_works_in_the_callers_scan():
    def turn(carry, x):
        return carry, mpjax.debug.measure_precision(half_sum)(x)

    precision = jax.jit(lambda xs: jax.lax.scan(turn, 0, xs)[1][1])(jnp.asarray(X))
    check(cast_of(jax.tree.map(lambda leaf: leaf[2], precision)), X[2], jnp.float16)


def test_gradient_of_measure_precision_is_that_of_the_function():
    x = jnp.asarray(X[0])
    (grad, precision) = jax.jit(jax.grad(mpjax.debug.measure_precision(squared), has_aux=True))(x)
    np.testing.assert_array_equal(grad, jax.grad(squared)(x))
    np.testing.assert_array_equal(grad, x)  # by its own rule
    check(cast_of(precision), X[0], jnp.float16)
    outer = jax.jit(jax.grad(lambda x: mpjax.debug.measure_precision(doubled)(x)[0]))
    np.testing.assert_array_equal(outer(x), jax.grad(doubled)(x))


def test_figures_of_a_large_tensor_sample_its_rows():
    x = np.tile(wide(9, (1, 1024), -40, 10), (4096, 1))
    x[4095, 5], x[4094, 7] = 1e5, np.nan  # which are found in all rows
    found = cast_of(measured(lambda x: x.astype(jnp.float16), jnp.asarray(x)))
    assert found.entries == x.size and found.overflowed == found.nan == 2**-18
    one = expected(x[:1], jnp.float16)
    for name in ("zeros", "flushed", "subnormal", "near", "largest"):
        assert getattr(found, name) == pytest.approx(one[name], rel=1e-3), name
    assert found.noise == pytest.approx(one["noise"], rel=1e-3)
    assert found.risk.kind == "gone"


def test_the_largest_of_a_large_tensor_is_looked_for_in_all_of_it():
    x = np.ones((4096, 1024), np.float32)
    x[4095, 5] = 40000.0
    found = cast_of(measured(lambda x: x.astype(jnp.float16), jnp.asarray(x)))
    assert found.largest == 40000 and found.near == 0 and found.risk.kind == "edge"


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_the_largest_finite_value_of_a_large_tensor_with_inf_is_that_of_all_rows(bad):
    x = np.ones((4096, 1024), np.float32)
    x[4095, 5], x[4095, 6] = 40000.0, bad
    found = cast_of(measured(lambda x: x.astype(jnp.float16), jnp.asarray(x)))
    assert found.largest == 40000 and found.overflowed > 0


def test_measure_precision_returns_what_is_no_array_as_it_is():
    def fun(x, name):
        return {name: x.astype(jnp.bfloat16)}, 1.0, name

    (out, number, name), precision = mpjax.debug.measure_precision(fun)(jnp.ones(3), "activations")
    assert out["activations"].dtype == jnp.bfloat16 and len(precision.rows) == 1
    assert type(number) is float and name == "activations"
