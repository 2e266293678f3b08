"""Rules of casts: to both 16-bit dtypes, undone by their readers, or removed by the compiler."""

from collections.abc import Iterator

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_float, is_half, short_name, shown
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.hardware.hlo import parse
from mpjax._src.tools.lint.guards import is_gradient
from mpjax._src.tools.lint.program import CASTS, SAME, Program
from mpjax._src.tools.lint.rule import Compiled, Hit

ROUND = "reduce_precision"  # rounds, and keeps the dtype
# A barrier forces a rounding, because compilers do not optimize across it.
UNFIXED = SAME - rules.BARRIERS


def rounds(program: Program, op: Op) -> bool:
    """Returns whether a cast to 16 bits rounds: values that were rounded before are unchanged."""
    if not narrows(op):
        return False
    mantissa = digits(dtype_of(op.outs[0])) - 1
    return not any(
        maker.name == ROUND and maker.params["mantissa_bits"] <= mantissa
        for maker in program.makers(op.ins[0], rules.VIEWS)
    )


def narrows(op: Op) -> bool:
    """Returns whether an operation casts a wider float to 16 bits."""
    return op.name in CASTS and _is_wider(op.ins[0], op.outs[0])


def widens(op: Op) -> bool:
    """Returns whether an operation casts 16 bits to a wider float."""
    return op.name in CASTS and _is_wider(op.outs[0], op.ins[0])


def _is_wider(value: Value, half: Value) -> bool:
    return is_half(half) and is_float(value) and digits(dtype_of(value)) > digits(dtype_of(half))


def undone(program: Program) -> Iterator[Op]:
    """Yields casts to 16 bits that the user wrote and that every reader undoes at once.

    Nothing is stored in 16 bits, read by a matmul in 16 bits or sent to a device in 16 bits. A
    value that is passed to a loop, another program or the caller counts as stored. Casts inside of
    JAX or a library's layer are not the user's. One function may return 16 bits and another read
    float32 by design (a norm its scale, cast with all other parameters). So both casts must be in
    one call of one function, except for gradients, which no layer passes on.
    """
    results = set(program.block.outvars)
    for op in program.named(*CASTS):
        if program.runs_backward(op) or not (rounds(program, op) and _jax.is_written_cast(op.eqn)):
            continue
        moved = program.forward(op.outs[0], rules.VIEWS)
        makers = [program.maker(value) for value in moved]
        here = [maker and program.around[maker] for maker in makers]
        stays = results.isdisjoint(moved) and all(each == program.around[op] for each in here)
        readers = _widening_readers(program, op) if stays else []
        if readers and (
            is_gradient(program, op.ins[0])
            or all(_jax.in_one_call(op.eqn, reader.eqn) for reader in readers)
        ):
            yield op


def _widening_readers(program: Program, op: Op) -> list[Op]:
    """Returns the readers of a cast, if all widen it again, and not in the backward pass.

    Values of the forward pass that the backward pass reads are stored.
    """
    readers = program.final_readers(op.outs[0], rules.VIEWS)
    undo = all(widens(reader) and not program.runs_backward(reader) for reader in readers)
    return readers if undo else []


def double_rounding(program: Program) -> Iterator[Hit]:
    """Finds values that are cast from float32 or wider to one 16-bit dtype, and then to the other.

    The result has the precision of bfloat16 and the range of float16. Casts between float32 and
    only one 16-bit dtype are not found, because the second cast rounds nothing.
    """
    for op in program.named(*CASTS):
        target, source = dtype_of(op.outs[0]), op.ins[0]
        # float32 has 24 digits, so these are casts to what is narrower.
        if not (is_float(op.outs[0]) and is_float(source) and digits(target) < 24):
            continue
        for before in program.makers(source, SAME):
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


def casts_undone(program: Program) -> Iterator[Hit]:
    """Finds casts to 16 bits that every reader casts back."""
    for op in undone(program):
        half = short_name(dtype_of(op.outs[0]))
        yield Hit(
            f"{shown(op.ins[0])} is rounded to {half}, and every reader casts it back up: "
            f"{digits(dtype_of(op.outs[0]))} binary digits are left, and nothing is saved.",
            op,
        )


def rounded_gradients(program: Program) -> Iterator[Hit]:
    """Finds float32 gradients that are rounded because the weights are 16-bit, and widened again.

    Only gradients of matrices are found. A value that the backward pass reads again is the
    cotangent of an activation, not a gradient. A gradient that is left in 16 bits is not found,
    because that may be intended.
    """
    for op in program.named(*CASTS):
        if not (program.is_backward(op) and narrows(op) and _jax.is_written_cast(op.eqn)):
            continue
        if len(op.outs[0].aval.shape) > 1 and _widening_readers(program, op):
            half = short_name(dtype_of(op.outs[0]))
            yield Hit(
                f"{half} weights are cast up here. Their gradient, {shown(op.ins[0])}, is rounded "
                f"to {half}, and its readers cast it back up.",
                op,
            )


def casts_deleted(program: Program, compiled: Compiled) -> Iterator[Hit]:
    """Finds casts to 16 bits and back that the compiler removed."""
    module = parse(compiled.after)
    # Found by line and dtype, because the compiler renames and merges instructions.
    kept = {
        (module.line_of(op), op.shapes[0].dtype)
        for op in module.ops()
        if op.opcode in ("convert", "reduce-precision")
    }
    for op in undone(program):
        half = short_name(dtype_of(op.outs[0]))
        if (op.source, half) not in kept:
            yield Hit(
                f"The program compiled for {compiled.target} has no cast to {half} here: the value "
                "is not rounded.",
                op,
            )


def rounding_errors(program: Program) -> Iterator[Hit]:
    """Finds differences between a rounded value and the value before rounding."""
    for op in program.named("sub"):
        hit = _of_half_sum(program, op) or _of_rounded(program, op)
        if hit:
            yield Hit(hit, op)


def _of_half_sum(program: Program, op: Op) -> str:
    """Says what is wrong if a value is ``(x + y) - x`` in 16 bits or its negative (Kahan sums)."""
    for total, term in (op.ins, op.ins[::-1]) if is_half(op.outs[0]) else ():
        terms = set(program.back(term, rules.VIEWS))
        for maker in program.makers(total, rules.VIEWS):
            # Of x - y only x counts: (x - y) - y is no rounding error.
            added = maker.ins[: {"add": 2, "sub": 1}.get(maker.name, 0)]
            if any(not terms.isdisjoint(program.back(v, rules.VIEWS)) for v in added):
                return (
                    f"One term of a {short_name(dtype_of(total))} sum is subtracted again, to see "
                    "what rounding left of the other. Compilers may compute both in float32, where "
                    "nothing is rounded."
                )
    return ""


def _of_rounded(program: Program, op: Op) -> str:
    """Says what is wrong if a value is ``half(z) - f(z)``: one side rounded, the other not."""
    for rounded, other in (op.ins, op.ins[::-1]):
        # A cast to 16 bits, where the value was only widened and moved since.
        casts = [] if is_half(rounded) else program.makers(rounded, UNFIXED)
        narrow = next((cast for cast in casts if rounds(program, cast)), None)
        if narrow is None:
            continue
        before = set(program.back(narrow.ins[0], rules.VIEWS))
        if not before.isdisjoint(program.back(other, _elementwise_unrounded)):
            half = short_name(dtype_of(narrow.outs[0]))
            return (
                f"{shown(narrow.ins[0])} is read here after rounding to {half}, together with a "
                "value that was computed from it before rounding."
            )
    return ""


def _elementwise_unrounded(op: Op) -> bool:
    """Returns whether an operation is arithmetic or a sum, not a matmul or a rounding."""
    return op.spec.need in (rules.FOLLOW, rules.FULL, rules.MOVE) and not narrows(op)
