"""Casts that round twice."""

import jax.numpy as jnp
import pairs
import pytest
from pairs import Pair, bf16, f32

import mpjax


def rounded_twice(x):
    y = x.astype(jnp.bfloat16).reshape(-1)
    return y.astype(jnp.float32).astype(jnp.float16)  # fault


def rounded_once(x):
    return x.astype(jnp.float16).reshape(-1)


def bf16_after_f16(x):
    return x.astype(jnp.float16).T.astype(jnp.bfloat16)  # fault


CASES = {
    "f16 of bf16": Pair("double-rounding", rounded_twice, rounded_once, (f32(4, 4),)),
    "bf16 of f16": Pair("double-rounding", bf16_after_f16, rounded_once, (f32(4, 4),)),
}


@pytest.mark.parametrize("name", CASES)
def test_rules_of_casts_find_the_faulty_program_and_not_the_mended_one(name):
    pairs.check(CASES[name])


def test_cast_there_and_back_is_no_double_rounding():
    def back(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32).astype(jnp.bfloat16)

    assert not mpjax.lint(back, select="double-rounding")(f32(4)).findings
    assert not mpjax.lint(lambda x: x.astype(jnp.float16))(bf16(4)).findings, "an argument of half"
