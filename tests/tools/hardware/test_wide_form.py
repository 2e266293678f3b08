"""The half matmuls that return their float32 accumulators, on absent hardware.

Other matmuls widen their operands instead, which costs the bytes that half would save.
"""

import jax.numpy as jnp
import numpy as np
import pytest
from absent import compiles, shape
from jax import lax

import mpjax
from mpjax._src.core.base import rules

WIDE = {"preferred_element_type": np.dtype("float32")}
LAYOUT = ("NHWC", "HWIO", "NHWC")
MATMULS = {
    "dot_general": (
        lambda a, b: lax.dot(a, b, **WIDE),
        *(shape(512, 512, dtype=jnp.bfloat16), shape(512, 512, dtype=jnp.bfloat16)),
    ),
    "ragged_dot_general": (
        lambda a, b: lax.ragged_dot(a, b, jnp.array([256, 256]), **WIDE),
        *(shape(512, 256, dtype=jnp.bfloat16), shape(2, 256, 256, dtype=jnp.bfloat16)),
    ),
    "conv_general_dilated": (
        lambda a, b: lax.conv_general_dilated(
            a, b, (1, 1), "SAME", dimension_numbers=LAYOUT, **WIDE
        ),
        *(shape(8, 32, 32, 64, dtype=jnp.bfloat16), shape(3, 3, 64, 64, dtype=jnp.bfloat16)),
    ),
}


@compiles("h100", "v5e")
@pytest.mark.parametrize("name", MATMULS)
def test_wide_form_trait_matches_what_hardware_compiles(name):
    fun, *args = MATMULS[name]
    reports = [mpjax.compile_for(target, fun, *args) for target in ("h100", "v5e")]
    rows = [row for report in reports for row in report.matmuls]  # a kernel has none
    assert rows
    has_wide_form = all(row.operands == "bf16" for row in rows)
    assert has_wide_form == (rules.HAS_WIDE_FORM in rules.rule_of(name).traits)


def test_wide_form_is_tried_for_all_matmuls():
    assert set(rules.names_where(lambda rule: rule.need == rules.HALF)) == MATMULS.keys()
