"""The rule of 16-bit scatter-adds that add many updates to the same row."""

import math
from collections.abc import Iterator

from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, shown, stalls_at
from mpjax._src.core.program.graph import Op
from mpjax._src.tools.lint.program import Program
from mpjax._src.tools.lint.rule import Hit


def half_scatters(program: Program) -> Iterator[Hit]:
    """Finds scatter-adds that add to a 16-bit row more often than 16 bits can count.

    If n updates go to m rows, some row gets at least n / m of them, whatever the indices are. In a
    scatter that the user wrote, half of the significant bits may be lost, as for accumulators (16
    updates in bfloat16, 46 in float16). In the gradient of a lookup, which JAX derives, the limit
    is 2**digits, where a row stops growing.
    """
    for op in program.named("scatter-add", "scatter_add", "scatter-sub"):
        value = op.ins[0]
        if not is_half(value):
            continue
        terms = _updates(op) / max(1, _rows(op))
        dtype = dtype_of(value)
        limit = stalls_at(dtype) if program.is_backward(op) else 2 ** (digits(dtype) / 2)
        if terms > limit:
            yield Hit(
                f"{op.name} adds {_updates(op)} updates to {_rows(op)} rows of {shown(value)}: at "
                f"least {terms:.0f} of them to one row, in 16 bits.",
                op,
            )


def _updates(op: Op) -> int:
    # The last axis of JAX's scatter indices has the coordinates of one update.
    return math.prod(op.ins[1].aval.shape[:-1])


def _rows(op: Op) -> int:
    # Along axes that the indices do not choose, an update adds to all entries.
    numbers = op.params["dimension_numbers"]
    return math.prod(op.ins[0].aval.shape[d] for d in numbers.scatter_dims_to_operand_dims)
