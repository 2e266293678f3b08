"""Sums into rows of half."""

import jax
import jax.numpy as jnp
import pairs
import pytest
from pairs import Pair, bf16, f16

import mpjax

IDS = jax.ShapeDtypeStruct((4096,), jnp.int32)


def segments(x, ids):
    return jax.ops.segment_sum(x, ids, 8)  # fault


def segments_wide(x, ids):
    return jax.ops.segment_sum(x.astype(jnp.float32), ids, 8).astype(x.dtype)


def looked_up(table, ids):
    return (table[ids] ** 2).astype(jnp.float32).sum()  # fault


def looked_up_wide(table, ids):
    return (table.astype(jnp.float32)[ids] ** 2).sum()


CASES = {
    "segment sum": Pair("half-scatter", segments, segments_wide, (bf16(4096, 4), IDS)),
    "gradient": Pair("half-scatter", looked_up, looked_up_wide, (bf16(2, 4), IDS), {"argnums": 0}),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_scatters_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_large_tables_and_few_updates_are_no_fault():
    assert not mpjax.lint(looked_up, 0)(bf16(512, 4), IDS).findings
    counted = mpjax.lint(looked_up, 0, select="half-scatter")(f16(2, 4), IDS)
    assert not counted.findings, "2048 each, which it counts"
    few = jax.ShapeDtypeStruct((128,), jnp.int32)
    assert not mpjax.lint(segments)(bf16(128, 4), few).findings
