"""Rules of casts that are undone: precision is lost without need, or rounding is removed."""

from collections.abc import Iterator

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_float, is_half, short_name, shown
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.hardware.hlo import parse, source_lines
from mpjax._src.tools.lint.guards import is_gradient
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import HLO, JAXPR, Compiled, Hit, Rule

# Operations that only change the shape of an array.
SHAPES = frozenset({"broadcast_in_dim", "copy", "expand_dims", "reshape", "squeeze", "transpose"})
# Operations that force a rounding, because compilers do not optimize across them.
FIXED = frozenset({"reduce_precision", "optimization_barrier"})
SUMS = ("add", "sub")


def rounds(program: Program, op: Op) -> bool:
    """Returns whether a cast to 16 bits rounds: values that were rounded before are unchanged."""
    if not narrows(op):
        return False
    mantissa = digits(dtype_of(op.outs[0])) - 1
    return not any(
        maker.name == "reduce_precision" and maker.params["mantissa_bits"] <= mantissa
        for maker in program.makers(op.ins[0], SHAPES)
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
        if program.is_backward(op) or not (rounds(program, op) and _jax.is_written_cast(op.eqn)):
            continue
        moved = program.forward(op.outs[0], SHAPES)
        makers = [program.maker(value) for value in moved]
        here = program.around[op]
        if not results.isdisjoint(moved) or any(
            maker is None or program.around[maker] != here for maker in makers
        ):
            continue
        readers = program.final_readers(op.outs[0], SHAPES)
        # Values of the forward pass that the backward pass reads are stored.
        if not readers or not all(widens(r) and not program.is_backward(r) for r in readers):
            continue
        if is_gradient(program, op.ins[0]) or all(_jax.in_one_call(op.eqn, r.eqn) for r in readers):
            yield op


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
        readers = program.final_readers(op.outs[0], SHAPES)
        wanted = bool(readers) and all(widens(r) and not program.is_backward(r) for r in readers)
        if wanted and len(op.outs[0].aval.shape) > 1:
            half = short_name(dtype_of(op.outs[0]))
            yield Hit(
                f"{half} weights are cast up here. Their gradient, {shown(op.ins[0])}, is rounded "
                f"to {half}, and its readers cast it back up.",
                op,
            )


def casts_deleted(program: Program, compiled: Compiled) -> Iterator[Hit]:
    """Finds casts to 16 bits and back that the compiler removed."""
    line_of = source_lines(compiled.after)
    # Found by line and dtype, because the compiler renames and merges instructions.
    kept = {
        (line_of(op), op.shapes[0].dtype)
        for op in parse(compiled.after).ops()
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
        terms = set(program.back(term, SHAPES))
        for maker in program.makers(total, SHAPES):
            # Of x - y only x counts: (x - y) - y is no rounding error.
            added = maker.ins[: 2 if maker.name == "add" else 1] if maker.name in SUMS else ()
            if any(not terms.isdisjoint(program.back(v, SHAPES)) for v in added):
                return (
                    f"One term of a {short_name(dtype_of(total))} sum is subtracted again, to see "
                    "what rounding left of the other. Compilers may compute both in float32, where "
                    "nothing is rounded."
                )
    return ""


def _of_rounded(program: Program, op: Op) -> str:
    """Says what is wrong if a value is ``half(z) - f(z)``: one side rounded, the other not."""
    for rounded, other in (op.ins, op.ins[::-1]):
        narrow = _narrowed(program, rounded)
        if narrow is None:
            continue
        before = set(program.back(narrow.ins[0], SHAPES))
        if not before.isdisjoint(program.back(other, _elementwise_unrounded)):
            half = short_name(dtype_of(narrow.outs[0]))
            return (
                f"{shown(narrow.ins[0])} is read here after rounding to {half}, together with a "
                "value that was computed from it before rounding."
            )
    return ""


def _narrowed(program: Program, value: Value) -> Op | None:
    """Returns the cast to 16 bits of a value that was only widened and moved since, or None."""
    if is_half(value):
        return None
    before = program.makers(value, (MOVES | CASTS) - FIXED)
    return next((op for op in before if rounds(program, op)), None)


def _elementwise_unrounded(op: Op) -> bool:
    """Returns whether an operation is arithmetic or a sum, not a matmul or a rounding."""
    return op.spec.need in (rules.FOLLOW, rules.FULL, rules.MOVE) and not narrows(op)


RULES = (
    Rule(
        "cast-undone",
        JAXPR,
        "a cast to 16 bits that every reader casts back up",
        "The cast loses digits, and saves neither memory nor time. XLA may or may not delete such "
        "casts, so the program rounds on one device and not on another.",
        "Remove the cast. If you want the rounding itself, write jax.lax.reduce_precision, which "
        "no compiler removes.",
        casts_undone,
    ),
    Rule(
        "rounded-gradient",
        JAXPR,
        "a float32 gradient that is rounded because the weights are 16-bit, and then cast back up",
        "Gradients from jax.grad have the dtype of the weights. A gradient that was computed in "
        "float32 is rounded to 16 bits before it is summed, averaged or clipped.",
        "Cast the weights to float32 first, and differentiate with respect to the result: "
        "jax.grad(loss)(mpjax.cast(params, 'float32'), batch).",
        rounded_gradients,
    ),
    Rule(
        "cast-deleted",
        HLO,
        "a cast to 16 bits and back that the compiler deletes",
        "Where a program rounds to 16 bits and casts back, XLA may keep the float32 value "
        "(xla_allow_excess_precision, on by default). Simulated rounding then does nothing, and "
        "results differ with and without jit.",
        "Write jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7) for bfloat16, or 5 "
        "and 10 for float16. No compiler removes it.",
        casts_deleted,
    ),
    Rule(
        "rounding-error",
        JAXPR,
        "a difference between a rounded value and the value before rounding",
        "Compilers may skip a rounding whose result is cast back up (xla_allow_excess_precision). "
        "An error measured this way is then 0 under jit, and compensated sums and residuals of "
        "weights compensate nothing. A backward pass that combines the saved 16-bit value with a "
        "float32 one is wrong by an amount that depends on the device.",
        "Round with jax.lax.reduce_precision, which no compiler removes, and compute everything "
        "that belongs together from the rounded value.",
        rounding_errors,
    ),
)
