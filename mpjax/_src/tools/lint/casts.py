"""Rules of casts: values that are rounded to both 16-bit dtypes."""

from collections.abc import Iterator

from mpjax._src.core.base.dtypes import digits, dtype_of, is_float, short_name, shown
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit


def double_rounding(program: Program) -> Iterator[Hit]:
    """Finds values that are cast from float32 or wider to one 16-bit dtype, and then to the other.

    The result has the precision of bfloat16 and the range of float16. Casts between float32 and
    only one 16-bit dtype are not found, because the second cast rounds nothing.
    """
    for op in program.named("convert_element_type"):
        target, source = dtype_of(op.outs[0]), op.ins[0]
        # float32 has 24 digits, so these are casts to what is narrower.
        if not (is_float(op.outs[0]) and is_float(source) and digits(target) < 24):
            continue
        for before in program.makers(source, MOVES | CASTS):
            if before.name not in CASTS:
                continue
            # The first cast rounds only a value that has more digits than both 16-bit dtypes.
            middle, wide = dtype_of(before.outs[0]), before.ins[0]
            halves = is_float(wide) and digits(dtype_of(wide)) > max(digits(middle), digits(target))
            if halves and digits(middle) < 24 and middle != target:
                yield Hit(
                    f"{shown(wide)} is cast to {short_name(middle)} and then to "
                    f"{short_name(target)}. It is rounded twice, and has the precision of one and "
                    "the range of the other.",
                    op,
                )
                break
