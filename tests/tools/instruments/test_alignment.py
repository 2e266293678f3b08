"""compare of two functions aligns their operations: in loops or not, under casts, in any layout."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import normal

import mpjax

LAYERS, WIDTH = 3, 8


def norm(h):
    return h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)


def layer(h, w, act=jax.nn.gelu, cast=lambda x: x):
    h = h + cast(act(cast(h) @ cast(w["up"]))) @ cast(w["down"])
    return norm(h)


def scanned(w, x):
    turn = jax.checkpoint(lambda h, w: (layer(h, w), None))
    return jax.lax.scan(turn, x, w)[0]


def unrolled(w, x, **options):
    for i in range(LAYERS):
        x = layer(x, jax.tree.map(lambda y: y[i], w), **options)  # noqa: B023
    return x


def half(x):
    return x.astype(jnp.bfloat16)


@pytest.fixture
def args(rng):
    w = {"up": normal(rng, LAYERS, WIDTH, 12), "down": normal(rng, LAYERS, 12, WIDTH)}
    return w, normal(rng, 4, WIDTH)


def loss(fun):
    return lambda w, x: jnp.mean(jnp.sin(fun(w, x)))


def test_loops_are_aligned_with_their_turns_written_out(args):
    report = mpjax.compare(scanned, jax.jit(unrolled))(*args)
    assert report.agrees and report.shares == (1.0, 1.0) and not report.alone
    assert all(row.error < 1e-5 for row in report.rows)
    swapped = mpjax.compare(unrolled, scanned)(*args)
    assert swapped.shares == (1.0, 1.0)


def cast_by_hand(w, x):
    for i in range(LAYERS):
        up = half(x) @ half(w["up"][i])  # rounds its result too
        h = jax.nn.gelu(up.astype(jnp.float32))
        x = norm(x + jnp.float32(half(h) @ half(w["down"][i])))
    return x


def test_casts_are_aligned_with_what_they_cast(args):
    report = mpjax.compare(mpjax.autocast(scanned), cast_by_hand)(*args)
    assert report.shares == (1.0, 1.0) and not report.by_formula and not report.agrees
    products = [row for row in report.rows if row.primitive == "dot_general"]
    worst = max(products, key=lambda row: row.new)  # one of them rounds its result, after the sum
    assert 2**-11 < worst.new < 2**-7 and worst.other_dtypes == "bf16->bf16"
    assert worst.dtypes == "bf16->f32" and worst.source != worst.other_source
    assert worst.source.rpartition(":")[0] == worst.other_source.rpartition(":")[0]
    assert all(row.added <= row.error + row.new for row in report.rows)


def test_equal_roundings_are_no_difference(args):
    options = {"cast": half}
    report = mpjax.compare(lambda *a: unrolled(*a, **options), lambda *a: unrolled(*a, **options))
    found = report(*args)
    assert found.agrees and not found.rows and found.difference == 0


def test_errors_are_those_between_the_programs(args, rng):
    def wide(w, x):
        return jnp.tanh(x @ w["up"][0])

    def narrow(w, x):
        return jnp.tanh(jnp.float32(half(x @ w["up"][0])))  # rounds

    report = mpjax.compare(wide, narrow)(*args)
    w, x = args
    y = np.asarray(x @ w["up"][0], np.float64)
    rounded = np.asarray(half(jnp.asarray(y, jnp.float32)), np.float64)
    (row,) = (row for row in report.rows if row.new)
    want = np.linalg.norm(y - rounded) / np.linalg.norm(rounded)
    np.testing.assert_allclose([row.error, row.new], want, rtol=1e-3)
    assert row.primitive == "convert_element_type" and row.inherited < 1e-6
    (tanh,) = (row for row in report.rows if row.primitive == "tanh")
    gap = np.tanh(y) - np.tanh(rounded)
    want = np.linalg.norm(gap) / np.linalg.norm(np.tanh(rounded))
    np.testing.assert_allclose([tanh.error, tanh.inherited], want, rtol=1e-3)
    assert tanh.new == 0 and tanh.operands == row.error


def test_operations_behind_another_formula_are_aligned(args):
    relu = functools.partial(unrolled, act=jax.nn.relu)
    report = mpjax.compare(scanned, relu)(*args)
    assert report.by_formula and report.shares[0] < 0.7 < 0.9 < report.shares[1]
    assert any(
        "of scanned without a counterpart in unrolled, from" in line for line in report.alone
    )
    assert "% of the operations of scanned" in str(report)
    behind = [row for row in report.rows if row.primitive == "dot_general"]
    assert behind and all(row.error > 0.01 and row.new < 1e-6 for row in behind)


def test_gradients_are_aligned_and_compared_by_leaf(args):
    ours, theirs = (jax.grad(loss(fun)) for fun in (mpjax.autocast(scanned), unrolled))
    report = mpjax.compare(ours, theirs)(*args)
    assert report.results.keys() == {"up", "down"} and min(report.shares) > 0.95
    got, want = ours(*args), theirs(*args)
    for name, error in report.results.items():
        apart = np.linalg.norm(got[name] - want[name]) / np.linalg.norm(want[name])
        np.testing.assert_allclose(error, apart, rtol=0.3)
    assert any(row.backward for row in report.rows) and report.kl is None
    assert "Error between the results" in str(report) and not report.by_formula


@pytest.mark.parametrize("turns", [2, 5])
def test_loops_that_end_elsewhere_share_their_first_turns(turns, args):
    def fun(w, x, turns):
        def body(carry):
            i, h = carry
            return i + 1, norm(jnp.tanh(h @ w["up"][0] @ w["down"][0]))

        return jax.lax.while_loop(lambda carry: carry[0] < turns, body, (0, x))[1]

    fewer, more = (functools.partial(fun, turns=jnp.int32(n)) for n in (turns, turns + 1))
    report = mpjax.compare(fewer, more)(*args)
    assert report.by_formula and report.shares[0] == 1 and report.shares[1] == 0
    assert "operations 1 to " in report.alone[0] and "of second" in report.alone[0]


def test_one_by_one_is_aligned_with_all_at_once(args):
    w, x = args

    def whole(w, x):
        return jnp.tanh(norm(x) @ w["up"][0]) @ w["down"][0]

    def rows(w, x):
        one = lambda row: jnp.tanh(jnp.float32(half(norm(row) @ w["up"][0])))  # noqa: E731
        return jax.lax.map(lambda row: one(row) @ w["down"][0], x[:, None])[:, 0]

    report = mpjax.compare(whole, rows)(w, x)
    assert report.shares == (1.0, 1.0)
    assert report.rows[0].primitive == "convert_element_type" and report.rows[0].times == len(x)
    assert report.rows[0].new > 2**-11 and not report.by_formula


def test_devices_are_aligned_with_their_batch(args):
    w, x = args
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def split(w, x):
        def part(w, x):
            return jax.lax.pmean(jnp.mean(jnp.tanh(half(x) @ half(w["up"][0])) ** 2), "d")

        specs = (spec(), spec("d"))
        return jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=spec())(w, x)

    report = mpjax.compare(split, lambda w, x: jnp.mean(jnp.tanh(x @ w["up"][0]) ** 2))(w, x)
    assert report.shares[1] > 0.5 and not report.by_formula
    assert report.rows[0].new > 2**-11 and report.rows[0].dtypes.endswith("bf16")


def test_other_orders_of_axes_are_aligned_and_mean_no_wrong_counterpart(rng):
    x = normal(rng, 4, 4, 4)

    def heads(x):
        return jnp.sum(jnp.sin(x), 0)

    def turned(x):
        return jnp.sum(jnp.sin(x.transpose(1, 0, 2)), 1)

    def wrong(x):
        return jnp.sum(jnp.sin(x.transpose(1, 0, 2)), 0)

    assert mpjax.compare(heads, turned)(x).shares == (1.0, 1.0)
    report = mpjax.compare(heads, wrong)(x)
    assert report.by_formula and report.shares == (0.5, 0.5)


def test_each_function_may_have_its_own_arguments(args):
    w, x = args
    rounded = jax.tree.map(lambda y: half(y), w)
    mine, theirs = functools.partial(unrolled, w), functools.partial(scanned_wide, rounded)
    report = mpjax.compare(mine, theirs)(x)
    assert report.names == ("unrolled", "scanned_wide") and report.shares == (1.0, 1.0)
    changed = {row.path: row for row in report.rows if row.primitive == "argument"}
    assert changed.keys() == {"w['up']", "w['down']"}
    want = np.linalg.norm(np.float32(rounded["up"]) - w["up"]) / np.linalg.norm(w["up"])
    np.testing.assert_allclose(changed["w['up']"].error, want, rtol=1e-2)
    assert "They compute different things of different arguments" in str(report)
    # Closed-over arrays are arguments too, whose last bits may change.
    assert mpjax.compare(lambda: scanned(w, x), lambda: unrolled(w, x))().agrees


def scanned_wide(w, x):
    return scanned(jax.tree.map(lambda y: y.astype(jnp.float32), w), x)


class Model(nnx.Module):
    def __init__(self, rngs, dtype=None):
        self.norm = nnx.BatchNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 5, dtype=dtype, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return jax.nn.log_softmax(self.head(self.drop(self.norm(x))).astype(jnp.float32))


def test_modules_are_compared_and_left_as_they_are(args):
    x = args[1]
    first, second = Model(nnx.Rngs(0)), Model(nnx.Rngs(0), jnp.bfloat16)
    before = jax.tree.leaves(nnx.state(first))
    report = mpjax.compare(first, second)(x)
    assert report.meaning == "logits" and not report.by_formula and report.kl > 0
    assert report.shares == (1.0, 1.0)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(first)), strict=True))
    assert mpjax.compare(lambda m, x: m(x), lambda m, x: m(x))(first, x).agrees


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (jnp.float32(half(2 * g)),))


def test_custom_rules_are_entered(args):
    def fun(double):
        return jax.grad(lambda w, x: jnp.mean(jnp.tanh(double(x @ w["up"][0]))))

    report = mpjax.compare(fun(doubled), fun(lambda x: 2 * x))(*args)
    assert report.shares == (1.0, 1.0) and not report.by_formula
    assert report.rows[0].primitive == "convert_element_type" and report.rows[0].backward


def test_what_is_zero_in_exact_arithmetic_makes_no_difference(rng):
    def fun(b, x, mean):
        h = x + b
        return jnp.mean(jnp.tanh((h - mean(h)) * jax.lax.rsqrt(h.var(0) + 1e-5)) ** 3)

    ours = functools.partial(fun, mean=lambda h: h.mean(0))
    theirs = functools.partial(fun, mean=lambda h: jnp.ones(len(h)) @ h / len(h))
    report = mpjax.compare(jax.grad(ours), jax.grad(theirs))(jnp.ones(4), normal(rng, 16, 4))
    assert report.agrees and not report.by_formula and report.results["result"] < 1e-4


def test_float64_tells_rounding_of_float32_from_another_formula(rng):
    def one_pass(x):
        return jnp.mean(x**2, -1) - jnp.mean(x, -1) ** 2

    def two_passes(x):
        return jnp.mean((x - jnp.mean(x, -1, keepdims=True)) ** 2, -1)

    x = jnp.asarray(rng.normal(300, 1, (6, 64)), jnp.float32)
    assert mpjax.compare(one_pass, two_passes)(x).by_formula  # in float32 they are
    report = mpjax.compare(one_pass, two_passes, reference="float64")(x)
    assert not report.by_formula and not report.agrees and report.in_float32 < 1e-9
    assert "Rounding is the cause" in str(report) or "many lines" in str(report)
    assert report.partings and report.reference == "float64"
    assert not mpjax.compare(one_pass, lambda x: 1.1 * two_passes(x), reference="float64")(x).agrees


def test_integers_and_masks_are_compared_entry_by_entry(args):
    def fun(w, x):
        return {"tokens": jnp.argmax(x, -1), "scores": jnp.where(x > 0, x, -jnp.inf)}

    report = mpjax.compare(fun, lambda w, x: fun(w, x.at[0].multiply(-1)))(*args)
    assert report.results["tokens"] == 0.25 and report.results["scores"] == np.inf
    assert mpjax.compare(fun, fun)(*args).results == {"tokens": 0.0, "scores": 0.0}
