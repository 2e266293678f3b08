"""Rules of the operands of matmuls and kernels: operands of two dtypes."""

import collections
from collections.abc import Iterator

import jax

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32, dtype_of, is_half, short_name, shown
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")
KERNELS = ("pallas_call", "ffi_call", "triton_kernel_call", "custom_call", "tpu_custom_call")
CHOSEN = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)


def mixed_matmuls(program: Program) -> Iterator[Hit]:
    """Finds matmuls of a 16-bit operand and a float32 operand.

    A 16-bit matmul with a float32 result has such a matmul in its derivative, because the cotangent
    is float32. It is found only if the user wrote the matmul, because the user cannot change the
    inside of a library's function. A matmul with an explicit algorithm is not found: the algorithm
    says how both operands are rounded.
    """
    for op in program.named("dot_general"):
        left, right = op.ins
        if {is_half(left), is_half(right)} != {True, False} or not _is_matmul(op):
            continue
        if FLOAT32 not in (dtype_of(left), dtype_of(right)):
            continue
        if isinstance(op.params["precision"], CHOSEN):
            continue
        derived = program.is_backward(op)
        if derived and not _jax.is_called_directly(op.eqn):
            continue
        yield Hit(f"{_what(op, derived)}{_result(op)}", op)


def _is_matmul(op: Op) -> bool:
    """Returns whether an operation is a matmul that sums; an outer product does not."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return any(op.ins[0].aval.shape[axis] > 1 for axis in contracted)


def _what(op: Op, derived: bool) -> str:
    left, right = map(shown, op.ins)
    half = short_name(dtype_of(next(v for v in op.ins if is_half(v))))
    if derived:
        return (
            f"This {half} matmul returns float32, so a matmul in its backward pass multiplies "
            f"{left} by {right}: both are read as float32."
        )
    return f"A matmul multiplies {left} by {right}: both are read as float32."


def _result(op: Op) -> str:
    if not is_half(op.outs[0]):
        return ""
    half = short_name(dtype_of(op.outs[0]))
    return f" Its result is {half}, and so is the float32 operand's gradient before it is cast."


def recomputed_matmuls(program: Program) -> Iterator[Hit]:
    """Finds matmuls that the backward pass recomputes with another result dtype.

    JAX recomputes in the same dtypes; a custom rule of the user may not. Two matmuls are the same
    if their operands are, apart from casts and moves, and their results have the same size.
    """
    forward: dict[Value, list[Op]] = collections.defaultdict(list)
    for op in program.named(*MATMULS):
        if not program.is_backward(op):
            for value in program.back(op.ins[0], MOVES | CASTS):
                forward[value].append(op)
    for backward in program.named(*MATMULS):
        if not program.is_backward(backward):
            continue
        sources = [set(program.back(v, MOVES | CASTS)) for v in backward.ins[:2]]
        # Forward matmuls are found by their left operand, so not all pairs are compared.
        near = {op: None for each in sources for value in each for op in forward.get(value, ())}
        for op in near:
            if _same_matmul(program, op, backward, sources):
                yield Hit(
                    f"The forward pass computes {shown(op.outs[0])} here, and the backward pass "
                    f"recomputes the same matmul as {shown(backward.outs[0])}.",
                    op,
                )


def _same_matmul(program: Program, op: Op, backward: Op, sources: list[set[Value]]) -> bool:
    first, second = op.outs[0], backward.outs[0]
    if dtype_of(first) == dtype_of(second) or first.size != second.size:
        return False
    # A rule may recompute the transposed product, so the operands may be swapped.
    own = [set(program.back(v, MOVES | CASTS)) for v in op.ins[:2]]
    return any(
        not (own[0].isdisjoint(one) or own[1].isdisjoint(other))
        for one, other in (sources, sources[::-1])
    )


def mixed_kernels(program: Program) -> Iterator[Hit]:
    """Finds kernels with operands of one kind in two dtypes, or with one that was 16-bit before.

    Operands are of one kind if they are matrices with the same last axis: query, key and value.
    Float32 operands such as maxima, logarithms of sums and scales have other shapes.
    """
    for op in program.named(*KERNELS):
        if program.is_backward(op):
            continue
        wide = [v for v in op.ins if dtype_of(v) == FLOAT32 and len(v.aval.shape) > 1]
        half = [v for v in op.ins if is_half(v) and len(v.aval.shape) > 1]
        for value in wide:
            last = value.aval.shape[-1]
            # A last axis of 1 is that of stored statistics, which would all match.
            other = next((v for v in half if last > 1 and v.aval.shape[-1] == last), None)
            if other is not None:
                yield Hit(f"{op.name} has the operands {shown(value)} and {shown(other)}.", op)
                break
            widened = _widened(program, value)
            if widened:
                yield Hit(
                    f"{op.name} has the operand {shown(value)}, which is {widened} cast up.", op
                )
                break


def _widened(program: Program, value: Value) -> str:
    """Returns as text the 16-bit array that a float32 value was cast from, or ""."""
    widened = (op.ins[0] for op in program.makers(value) if op.name in CASTS)
    return next((shown(half) for half in widened if is_half(half)), "")
