"""Rules of norms: squares, and their sums over the leaves of a tree, in 16 bits."""

from collections.abc import Iterator

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import dtype_of, is_half, short_name
from mpjax._src.core.program.graph import Op
from mpjax._src.tools.lint import losses
from mpjax._src.tools.lint.program import SAME, Program
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.sums import limit_of

ADDED = SAME | rules.ADDITIONS


def half_norms(program: Program) -> Iterator[Hit]:
    """Finds norms whose squares overflow in float16, or whose parts are added in 16 bits.

    The square of 256 is Inf in float16. bfloat16 has the range, and the rounding errors of its
    squares average out, but the norm of a tree adds the sums of its arrays, each of them rounded,
    so it depends on how the entries are divided among arrays. The limit is that of accumulators:
    16 entries in bfloat16, 45 in float16.
    """
    yield from losses.half_squares(program)
    for op in program.ops:
        if not op.outs[0:] or not _is_root(program, op) or program.is_backward(op):
            continue
        behind = program.makers(op.ins[0], ADDED)
        added = [each for each in behind if each.name in ADDED - SAME and is_half(each.outs[0])]
        parts = [n for each in behind if (n := _squared(program, each))]
        dtype = dtype_of(added[0].outs[0]) if added else None
        if added and len(parts) > 1 and sum(parts) > limit_of(dtype, False):
            yield Hit(
                f"A norm of {sum(parts)} entries adds the squares of {len(parts)} arrays, each sum "
                f"rounded, in {short_name(dtype)}.",
                added[0],
            )


def _is_root(program: Program, op: Op) -> bool:
    """Returns whether an operation is the square root of one number."""
    powers = op.name == "pow" and program.number(op.ins[1]) in (0.5, -0.5)
    return (op.name in rules.ROOTS or powers) and op.outs[0].is_one


def _squared(program: Program, op: Op) -> int:
    """Returns the number of entries whose squares an operation adds, or 0."""
    if op.name == "reduce_sum":
        before = program.makers(op.ins[0], ADDED | rules.PRODUCTS)
        return op.ins[0].size if any(map(losses.squares, before)) else 0
    if op.name in rules.MATMULS:
        same = set(program.back(op.ins[0], SAME)) & set(program.back(op.ins[1], SAME))
        return op.ins[0].size if same and op.outs[0].is_one else 0
    # The square of a norm.
    roots = program.makers(op.ins[0], SAME) if losses.squares(op) and op.outs[0].is_one else ()
    inner = (
        _squared(program, each)
        for root in roots
        if root.name in rules.ROOTS
        for each in program.makers(root.ins[0], SAME)
    )
    return sum(inner)
