"""The map of a compiled program."""

import pytest

from mpjax._src.tools.hardware.drawing import drawing_of

DOT = "dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
CALL = 'custom-call(%x, %w), custom_call_target="__cublas$gemm", backend_config={}'
TEXT = """HloModule m

ENTRY %main (x: bf16[8,16], w: WIDE[16,8]) -> f32[8,8] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = WIDE[16,8]{1,0} parameter(1)
  ROOT %y = f32[8,8]{1,0} PRODUCT
}
"""


@pytest.mark.parametrize("product", [DOT, CALL], ids=["dot", "library"])
@pytest.mark.parametrize(("wide", "shown"), [("bf16", "bfloat16"), ("f32", "float32")])
def test_a_matmul_has_the_color_of_the_wider_operand_as_the_legend_says(product, wide, shown):
    found = drawing_of(TEXT.replace("WIDE", wide).replace("PRODUCT", product), ())
    (matmul,) = found.operations
    assert matmul.large and matmul.colors["dtype"] == shown
