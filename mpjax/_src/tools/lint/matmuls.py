"""Rules of matmuls: float32 by type promotion, and backward passes narrower than the forward."""

from collections.abc import Iterator

import jax
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, dtype_of, is_half, short_name, shown
from mpjax._src.core.base.lines import short
from mpjax._src.core.program.graph import PLANNED, Op, Value
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

DEFAULT = (None, jax.lax.Precision.DEFAULT)

# Operations that keep the dtype of their operands, so that a promotion passes through them.
ELEMENTWISE = frozenset(
    {*rules.names_where(lambda rule: rule.need in (rules.FOLLOW, rules.MOVE)), *MOVES}
)
# What a norm does to a float32 stream besides.
REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "rsqrt", "sqrt", "square"})
# How many origins a message names.
MOST = 2


def promoted_matmuls(program: Program) -> Iterator[Hit]:
    """Finds float32 matmuls whose operands were 16-bit until a type promotion widened one.

    Both operands come from 16-bit values through elementwise operations only, and one of them was
    combined with a strongly typed float32 value (a NumPy constant, a table). Not found are matmuls
    of float32 operands, of operands that the author cast, or with an explicit precision. What
    autocast plans is no fault: it runs short sums in float32.
    """
    for op in program.named(*MATMULS):
        operands = op.ins[:2]
        if program.is_backward(op) or FLOAT32 not in map(dtype_of, operands):
            continue
        if not _has_default_precision(op) or PLANNED in op.scopes:
            continue
        causes = [_cause(program, v) for v in operands]
        was_half = [
            is_half(v) or bool(cause) or bool(_widening(program, v))
            for v, cause in zip(operands, causes, strict=True)
        ]
        if any(causes) and all(was_half):
            yield Hit(
                f"{op.name} of {' and '.join(map(shown, operands))} runs in float32, although both "
                f"were 16-bit: {next(filter(None, causes))}.",
                op,
            )


def _widening(program: Program, value: Value) -> Op | None:
    """Returns the cast from 16 bits that made an operand float32, if it is implicit."""
    for op in program.makers(value):
        if op.name in CASTS and is_half(op.ins[0]) and dtype_of(op.outs[0]) == FLOAT32:
            return None if _jax.is_written_cast(op.eqn) else op
    return None


def _promotions(program: Program, value: Value) -> dict[Value, tuple[Op, list[Value]]]:
    """Returns the operations behind a value that promoted 16 bits, and the operands that did."""
    promoting = {}
    for v in program.back(value, ELEMENTWISE) if dtype_of(value) == FLOAT32 else ():
        op = program.maker(v)
        if op is not None and op.name in ELEMENTWISE and len(op.ins) > 1:
            # JAX widened the other operands because of these, which were float32 already.
            strong = [each for each in op.ins if not _is_promoted(program, each)]
            if strong and len(strong) < len(op.ins):
                promoting[v] = op, strong
    return promoting


def _has_default_precision(op: Op) -> bool:
    precisions = np.atleast_1d(np.array(op.params.get("precision"), object))  # one, or one each
    return all(precision in DEFAULT for precision in precisions)


def _multiplied_in_float32(program: Program) -> dict[Value, Op]:
    """Returns what the forward pass multiplies in float32, and the matmul that does."""
    forward = [op for op in program.named(*MATMULS) if not program.is_backward(op)]
    return {
        value: op
        for op in forward
        if dtype_of(op.outs[0]) == FLOAT32 and not any(is_half(v) for v in op.ins[:2])
        for operand in op.ins[:2]
        for value in program.back(operand, MOVES)
    }


def _cause(program: Program, value: Value) -> str:
    """Returns in words what made a 16-bit value float32, or "".

    A residual stream that is float32 promotes whatever is added to it. The cause is none of these
    additions: it is the first of them, and what the stream came from.
    """
    promoting = _promotions(program, value)
    if not promoting:
        return ""
    for out, (_, strong) in promoting.items():
        behind = [v for each in strong for v in program.back(each, ELEMENTWISE | REDUCTIONS)]
        if not {*behind} & promoting.keys() - {out}:
            break  # of several in a loop, each is behind the others: then the last
    # Numbers take the dtype of what is next to them, unless nothing else is there.
    arrays = dict.fromkeys(_origin(program, v) for v in behind if not v.literal)
    numbers = dict.fromkeys(_origin(program, v) for v in behind if v.literal)
    names = [*filter(None, arrays)] or [*filter(None, numbers)]
    operands = " and ".join(names[:MOST]) or " and ".join(map(shown, strong))
    root, _ = promoting[out]
    where = short(_jax.source_line(root.eqn, *reversed(root.callers)))
    return f"{root.name} with {operands} at {where} promoted one of them"


def _origin(program: Program, value: Value) -> str:
    """Returns in words what a strongly typed float32 value is, if that is why others are too."""
    # A weakly typed number promotes nothing. What has sources only enters or leaves a loop, branch
    # or call, and its origin is among them.
    if dtype_of(value) != FLOAT32 or value.aval.weak_type or program.sources(value):
        return ""
    op = program.maker(value)
    if op is None:
        return program.argument(value) or f"a constant {shown(value)}"
    if op.name in ELEMENTWISE | REDUCTIONS or _is_promoted(program, value):
        return ""
    where = short(_jax.source_line(op.eqn, *reversed(op.callers)))
    if op.name in CASTS:
        return f"a cast of {program.argument(value) or shown(op.ins[0])} to float32 ({where})"
    return f"the result {shown(value)} of {op.name} ({where})"


def _is_promoted(program: Program, value: Value) -> bool:
    cast = _widening(program, value)
    return cast is not None and _jax.is_promotion(cast.eqn)


def narrow_backward(program: Program) -> Iterator[Hit]:
    """Finds backward matmuls in 16 bits whose forward matmul is float32.

    JAX differentiates a matmul in its own dtypes, so a custom_vjp of the user casts there. Of
    what autocast plans, short sums run in float32, but their derivatives do not.
    """
    wide = _multiplied_in_float32(program)
    for op in program.named(*MATMULS):
        if not program.is_backward(op) or PLANNED in op.scopes:
            continue
        for operand in op.ins[:2]:
            if not is_half(operand):
                continue
            forward = next(
                (wide[v] for v in program.back(operand, MOVES | CASTS) if v in wide), None
            )
            if forward is not None:
                yield Hit(
                    f"{op.name} in the backward pass reads {shown(operand)}, but the forward pass "
                    f"multiplied the same values in {short_name(dtype_of(forward.ins[0]))}.",
                    op,
                )
                break
