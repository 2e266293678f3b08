"""Numbers that half cannot hold: constants, counts, masks."""

import jax
import jax.numpy as jnp
import pairs
import pytest
from pairs import Pair, bf16, f16, f32

import mpjax


def wide(x):
    return x.astype(jnp.float32)


def decayed(m, x):
    return 0.999 * m + x  # fault


def decayed_wide(m, x):
    return (0.999 * wide(m) + wide(x)).astype(m.dtype)


def divided(x):
    return x / (jnp.sqrt(x) + 1e-8)  # fault


def divided_safely(x):
    return x / (jnp.sqrt(x) + jnp.finfo(x.dtype).tiny)


def masked(x):
    return jax.nn.softmax(jnp.where(x > 0, x, -1e9))  # fault


def masked_by_the_least(x):
    return jax.nn.softmax(jnp.where(x > 0, x, jnp.finfo(x.dtype).min))


def masked_by_float32(x):
    least = jnp.asarray(jnp.finfo(jnp.float32).min, x.dtype)  # fault
    return x + least


def masked_by_its_own(x):
    return jnp.where(x > 0, x, jnp.finfo(x.dtype).min)


def mask_cast(x, seen, own):
    return x + jnp.where(seen & own, 0, jnp.finfo(jnp.float32).min).astype(x.dtype)  # fault


def mask_of_its_own(x, seen, own):
    return x + jnp.where(seen & own, 0, jnp.finfo(x.dtype).min).astype(x.dtype)


def filled(x):
    return x + jnp.full(x.shape, 1e6, x.dtype)  # fault


def filled_less(x):
    return x + jnp.full(x.shape, 1e4, x.dtype)


def positions(x):
    return x + jnp.arange(x.shape[0]).astype(x.dtype)  # fault


def positions_wide(x):
    return wide(x) + jnp.arange(x.shape[0])


def counted(x):
    return x * jnp.arange(x.shape[0], dtype=x.dtype)  # fault


def counted_wide(x):
    return wide(x) * jnp.arange(x.shape[0], dtype=jnp.float32)


def turns(x):
    def turn(i, x):
        return x + jnp.sin(i.astype(x.dtype))  # fault

    return jax.lax.fori_loop(0, 300, turn, x)


def turns_wide(x):
    return jax.lax.fori_loop(0, 300, lambda i, x: x * jnp.sin(wide(i)).astype(x.dtype), x)


def mask(seen):
    return jnp.where(seen, 0.0, jnp.finfo(jnp.float32).min)


def masked_twice(x, seen, own):
    return jax.nn.softmax(x + (mask(seen) + mask(own)))  # fault


def masked_once(x, seen, own):
    return jax.nn.softmax(x + mask(seen & own))


def masked_in_turn(x, seen, own):
    x = x + mask(seen)
    return jax.nn.softmax(x + mask(own))  # fault


def looked_up(ids, x):
    return ids.astype(x.dtype) * x  # fault


def looked_up_wide(ids, x):
    return ids.astype(jnp.float32) * x


BOOLS = (jax.ShapeDtypeStruct((4,), bool),) * 2
IDS = jnp.array([3, 300, 511])

CASES = {
    "decay": Pair("lost-constant", decayed, decayed_wide, (bf16(4), bf16(4))),
    "epsilon": Pair("lost-constant", divided, divided_safely, (f16(4),)),
    "mask": Pair("lost-constant", masked, masked_by_the_least, (f16(4),)),
    "least": Pair("lost-constant", masked_by_float32, masked_by_its_own, (bf16(4),)),
    "mask that is cast": Pair("lost-constant", mask_cast, mask_of_its_own, (bf16(4), *BOOLS)),
    "fill": Pair("lost-constant", filled, filled_less, (f16(4),)),
    "positions": Pair("half-count", positions, positions_wide, (bf16(512),)),
    "arange": Pair("half-count", counted, counted_wide, (f16(4096),)),
    "turns": Pair("half-count", turns, turns_wide, (bf16(4),)),
    "two masks": Pair("mask-overflow", masked_twice, masked_once, (f32(4), *BOOLS)),
    "in turn": Pair("mask-overflow", masked_in_turn, masked_once, (f32(4), *BOOLS)),
    "ids": Pair("rounded-integer", looked_up, looked_up_wide, (IDS, jnp.ones(3, jnp.bfloat16))),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_constants_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def clean(fun, *args):
    return not mpjax.lint(fun)(*args).findings


def test_constants_that_half_has_or_only_rounds_are_no_fault():
    assert clean(lambda x: x * 0.9 + 0.1 * x + 1e-6 + 1 + 0, bf16(4))
    assert clean(lambda x: jnp.where(x > 0, x, -jnp.inf) + x * 1e-4, f16(4))
    assert clean(lambda x: jnp.where(x > 0, x, -1e9), bf16(4)), "bfloat16 has the range"
    assert clean(decayed, f16(4), f16(4)), "0.999 is 0.99902 in float16"
    assert clean(decayed, f32(4), f32(4)) and clean(divided, f32(4)) and clean(masked, f32(4))


def test_what_replaces_the_infinities_of_a_bounded_value_is_no_fault():
    def weighted(x, w, seen):  # a row without entries is NaN, which becomes 0
        return jnp.nan_to_num(jax.nn.softmax(jnp.where(seen, x @ w, -jnp.inf))) @ w

    def gated(x, w, seen):
        return jnp.nan_to_num(jnp.where(seen, jax.nn.sigmoid(x @ w), 0.5)) @ w

    def unbounded(x, w, seen):
        return jnp.nan_to_num(jnp.where(seen, jnp.exp(x @ w), 0.5)) @ w

    args = f32(64, 64), f32(64, 64), jax.ShapeDtypeStruct((64, 64), bool)
    for fun in (weighted, gated, unbounded):
        cast = mpjax.autocast(fun, "mixed_bfloat16")
        found = mpjax.lint(cast, select="lost-constant")(*args).findings
        assert len(found) == (fun is unbounded), fun


def test_lint_sees_constants_of_a_function_traced_before():
    jitted = jax.jit(decayed)
    jitted(jnp.ones(4, jnp.bfloat16), jnp.ones(4, jnp.bfloat16))
    for _ in range(2):
        (finding,) = mpjax.lint(jitted)(bf16(4), bf16(4)).findings
        assert finding.message == "The constant 0.999 is 1 in bf16."


def test_lint_tracing_leaves_jax_as_it_was():
    from jax._src.lax import lax

    before = lax._convert_element_type, jnp.array
    with pytest.raises(ZeroDivisionError):
        mpjax.lint(lambda x: 1 / 0)(bf16(4))
    assert (lax._convert_element_type, jnp.array) == before


def test_counts_that_half_tells_apart_are_no_fault():
    assert clean(positions, bf16(257)) and clean(counted, f16(2049)) and clean(positions, f32(9999))
    assert clean(lambda x: x + jnp.linspace(0, 1, 999).astype(x.dtype), bf16(999))
    assert clean(
        lambda ids, x: ids.astype(x.dtype) * x, jax.ShapeDtypeStruct((3,), "int32"), bf16(3)
    )
    assert clean(
        lambda image: image.astype(jnp.bfloat16) / 255, jax.ShapeDtypeStruct((9,), "uint8")
    )


def test_integers_that_stay_integers_are_no_fault():
    assert clean(looked_up, jnp.array([3, 256, 512]), jnp.ones(3, jnp.bfloat16))


def test_one_mask_is_no_overflow():
    def one(x, seen, own):
        return jax.nn.softmax(x + mask(seen)) + jax.nn.softmax(x + mask(own))

    assert clean(one, f32(4), *BOOLS)
    assert clean(lambda x: x + jnp.where(x > 0, 0, -1e9) + jnp.where(x > 1, 0, -1e9), f32(4))


def counted_places(fun, *args):
    return [f.rule for f in mpjax.lint(fun, run=False)(*args).findings]


def test_places_that_a_16_bit_number_cannot_name_are_found():
    table, ids = jax.ShapeDtypeStruct((258, 4), jnp.float32), jax.ShapeDtypeStruct((3,), "int32")
    hop = lambda t, i: t[i.astype("bfloat16").astype("float32").astype(int)]  # noqa: E731
    rounded = lambda t, i: t[jnp.round(wide(i)).astype(int)]  # noqa: E731
    bounded = lambda t, i: t[jnp.clip(i.astype(int), 0, 255)]  # noqa: E731
    assert "half-count" in counted_places(hop, table, ids)
    assert counted_places(rounded, table, bf16(3)) == ["half-count"]
    assert counted_places(lambda t, i: t.at[i.astype(int)].set(0), table, bf16(3)) == ["half-count"]
    assert not counted_places(bounded, table, bf16(3)) and not counted_places(
        rounded, table, f16(3)
    )
    assert not counted_places(rounded, jax.ShapeDtypeStruct((257, 4), jnp.float32), bf16(3))


def binned_in_half(table, x):
    half = x.astype(jnp.bfloat16)  # fault
    at = jnp.floor(half).astype(int)
    return table[at] + table[at + 1]


def binned_wide(table, x):
    at = jnp.floor(x).astype(int)
    return table[at] + table[at + 1]


def test_a_place_is_found_where_it_was_rounded():
    args = f32(302, 4), f32(3)
    pairs.check(Pair("half-count", binned_in_half, binned_wide, args))


def test_places_that_are_computed_from_real_numbers_are_no_fault():
    def binned(t, x):
        return t[((x + 1) * 128).astype(int)]

    assert not counted_places(binned, jax.ShapeDtypeStruct((512,), jnp.float32), bf16(3))


def test_integers_in_16_bits_are_followed_through_float32_and_sums():
    half = lambda i: i.astype(jnp.float32).astype(jnp.bfloat16)  # noqa: E731
    ids = jnp.array([3, 257])
    assert [f.rule for f in mpjax.lint(half)(ids).findings] == ["rounded-integer"]
    assert not mpjax.lint(half)(ids - 1).findings
    assert not mpjax.lint(lambda i, x: half(i / 3) + x)(ids, jnp.ones(2, jnp.bfloat16)).findings
    next_id = lambda i: (i.astype(jnp.bfloat16) + 1).astype(int)  # noqa: E731
    assert [f.rule for f in mpjax.lint(next_id)(ids - 1).findings] == ["rounded-integer"]
    assert not mpjax.lint(next_id)(ids - 2).findings
