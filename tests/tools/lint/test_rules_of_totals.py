"""Sums that a loop carries or a step keeps, products, and scans that are written out: their limits.

`test_faults` has the programs that real ones are like.
"""

import jax
import jax.numpy as jnp
import pairs
import pytest
from pairs import Pair, bf16, f16, f32

import mpjax


def wide(x):
    return x.astype(jnp.float32)


def totaled(state, x):
    return {"total": state["total"] + jnp.mean(x), "steps": state["steps"] + 1}  # fault


def totaled_anew(state, x):
    new = state["steps"] % 100 == 0
    start = jnp.where(new, 0, state["total"])
    return {"total": start + jnp.mean(x), "steps": state["steps"] + 1}


def scanned(x):
    return jax.lax.associative_scan(jnp.add, x)  # fault


def scanned_wide(x):
    return jax.lax.associative_scan(jnp.add, wide(x)).astype(x.dtype)


def normed(tree):
    return jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(tree)))  # fault


def normed_wide(tree):
    return jnp.sqrt(sum(jnp.sum(wide(x) ** 2) for x in jax.tree.leaves(tree)))


STATE = {"total": bf16(), "steps": jax.ShapeDtypeStruct((), jnp.int32)}
CASES = {
    "calls": Pair("half-accumulator", totaled, totaled_anew, (STATE, bf16(8))),
    "scan": Pair("half-sum", scanned, scanned_wide, (bf16(300),)),
    "norm": Pair("half-norm", normed, normed_wide, ([bf16(4, 4), bf16(4)],)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_totals_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def found(fun, *args):
    return [f.rule for f in mpjax.lint(fun)(*args).findings]


def until(end):
    def run(xs):
        def turn(carry):
            i, total = carry
            return i + 1, total + jnp.max(xs[i])

        start = jnp.int32(0), jnp.zeros((), xs.dtype)
        return jax.lax.while_loop(lambda c: (c[0] < end) & (c[1] < 9), turn, start)[1]

    return run


def test_the_condition_of_a_loop_limits_its_terms():
    assert not found(until(15), bf16(400)) and found(until(16), bf16(400)) == ["half-accumulator"]
    assert not found(until(44), f16(400)) and not found(until(400), f32(400))
    unknown = lambda xs, end: until(end)(xs)  # noqa: E731
    assert found(unknown, bf16(400), jax.ShapeDtypeStruct((), "int32")) == ["half-accumulator"]


def test_scans_of_as_many_entries_as_16_bits_count_are_no_fault():
    for fun in (jnp.add, jnp.multiply):
        scan = lambda x, fun=fun: jax.lax.associative_scan(fun, x, axis=1, reverse=True)  # noqa: E731
        assert not found(scan, bf16(9, 256)) and found(scan, bf16(9, 257)) == ["half-sum"]
        assert not found(scan, f16(9, 2048)) and not found(scan, f32(9, 9999))


def test_a_transform_by_halves_is_no_scan():
    def hadamard(x):
        half = 1
        while half < len(x):
            a, b = jnp.split(x.reshape(-1, 2, half), 2, 1)
            x, half = jnp.concatenate([a + b, a - b], 1).reshape(-1), 2 * half
        return x

    assert not found(hadamard, bf16(1024))


def test_products_that_round_nothing_are_no_fault():
    assert not found(lambda x: jnp.cumprod((x > 0).astype(x.dtype)), bf16(900))
    assert not found(lambda x: x * jnp.cumprod(jnp.full(900, 2.0, x.dtype)), bf16(900))
    assert found(lambda x: jnp.cumprod(x + 1), bf16(257)) == ["half-sum"]
    assert not found(lambda x: jnp.cumprod(x + 1), bf16(256))


def test_products_of_complements_lose_digits_as_early_as_sums():
    """The rounding of 1 - x next to 1 is the same in every factor."""

    def alive(hazards):
        ones = jnp.ones_like(hazards[:1])
        return jnp.cumprod(jnp.concatenate([ones, 1 - hazards + 1e-4]), 0)

    def remaining(shares):
        turn = lambda rest, x: (rest * (1 - x), rest * x)  # noqa: E731
        return jax.lax.scan(turn, jnp.ones_like(shares[0]), shares)

    scanned = lambda x: jax.lax.associative_scan(jnp.multiply, 1 - x)  # noqa: E731
    rules = {alive: "half-sum", scanned: "half-sum", remaining: "half-accumulator"}
    for fun, rule in rules.items():
        assert found(fun, bf16(17, 4)) == found(fun, f16(46, 4)) == [rule]
        assert (
            not found(fun, bf16(15, 4)) and not found(fun, f16(44, 4)) and not found(fun, f32(99))
        )
    # A verdict is exact: a kept discount is a factor of any other product.
    assert not found(alive, jnp.zeros((40, 4), "bfloat16").at[9].set(1))
    dones = jax.ShapeDtypeStruct((40, 4), "bool")
    assert not found(lambda done: alive(done.astype("bfloat16")), dones)
    assert not found(lambda x: jnp.cumprod(0.99 * x, 0), bf16(40, 4))


def test_gates_and_loops_around_a_total_hide_nothing():
    def gated(state, x):
        new = {"total": state["total"] + jnp.mean(x)}
        return jax.lax.cond(jnp.isfinite(x).all(), lambda: new, lambda: state)

    def selected(state, x):
        new = {"total": state["total"] + jnp.mean(x)}
        return mpjax.select(jnp.isfinite(x).all(), new, state)

    def in_parts(state, xs):
        turn = lambda total, x: (total + jnp.mean(x), None)  # noqa: E731
        return {"total": jax.lax.scan(turn, state["total"], xs)[0]}

    state = {"total": bf16()}
    assert found(gated, state, bf16(8)) == found(selected, state, bf16(8)) == ["half-accumulator"]
    assert found(in_parts, state, bf16(4, 8)) == ["half-accumulator"]


def test_what_is_added_to_arrays_must_add_up():
    state = {"x": bf16(4)}
    assert found(lambda s, y: {"x": s["x"] + y * y}, state, bf16(4)) == ["half-accumulator"]
    assert not found(lambda s, y: {"x": s["x"] + y}, state, bf16(4))
    assert not found(lambda s, y: {"x": s["x"] + jnp.where(y > 0, 0, -1e4)}, state, bf16(4))
    assert not found(lambda s: {"x": s["x"] + 1}, state)


def test_gradients_that_are_an_argument_are_no_total():
    def applied(params, grads):
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    params = {"w": bf16(4, 4), "scale": bf16()}
    assert not found(applied, params, params)
    metrics = {"loss": bf16(), "tokens": bf16()}
    added = lambda totals, metrics: jax.tree.map(jnp.add, totals, metrics)  # noqa: E731
    assert found(added, metrics, metrics) == ["half-accumulator"]


def test_a_single_number_is_state_among_others():
    def step(total, count, x):
        return total + jnp.mean(x), count + 1

    assert found(step, bf16(), jax.ShapeDtypeStruct((), "int32"), bf16(8)) == ["half-accumulator"]
    assert not found(lambda loss, x: loss + jnp.mean(x), bf16(), bf16(8))


def test_a_table_of_counts_is_a_total():
    ids = jax.ShapeDtypeStruct((64,), "int32")
    one_hot = lambda table, i: jax.nn.one_hot(i, len(table), dtype=table.dtype)  # noqa: E731
    crossed = lambda t, i, j: t + one_hot(t, i).T @ one_hot(t, j)  # noqa: E731
    binned = lambda t, i: t + jnp.bincount(i, length=10).astype(t.dtype)  # noqa: E731
    in_place = lambda t, i: t.at[i].add(1)  # noqa: E731
    assert found(crossed, bf16(10, 10), ids, ids) == ["half-accumulator"]
    assert found(binned, bf16(10), ids) == found(in_place, bf16(10), ids) == ["half-accumulator"]
    assert not found(crossed, f32(10, 10), ids, ids) and not found(in_place, f32(10), ids)
    # Positions and numbers of neighbors are added to features once.
    assert not found(lambda x, i: x + one_hot(x, i), bf16(64, 64), ids)
    assert not found(lambda x, y: x + (y > 0).sum(0).astype(x.dtype), bf16(9, 4), bf16(9, 4))
