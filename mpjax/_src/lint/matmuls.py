"""Rules of matmuls: float32 by type promotion, and backward passes narrower than the forward."""

from collections.abc import Iterator

import jax
import numpy as np

from mpjax._src import _jax, rules
from mpjax._src.autocast.graph import Op, Value
from mpjax._src.dtypes import FLOAT32, short_name
from mpjax._src.lint.halves import dtype_of, is_half, shown
from mpjax._src.lint.program import CASTS, MOVES, Program
from mpjax._src.lint.rule import JAXPR, Hit, Rule
from mpjax._src.reports import short

MATMULS = ("dot_general", "conv_general_dilated", "ragged_dot_general")

DEFAULT = (None, jax.lax.Precision.DEFAULT)

# Operations that keep the dtype of their operands, so that a promotion passes through them.
ELEMENTWISE = frozenset(
    {*rules.names_where(lambda rule: rule.need in (rules.FOLLOW, rules.MOVE)), *MOVES}
)


def promoted_matmuls(program: Program) -> Iterator[Hit]:
    """Finds float32 matmuls whose operands were half until a type promotion widened one.

    Both operands come from half values through elementwise operations only, and one of them was
    combined with a strongly typed float32 value (a NumPy constant, a table). Not found are matmuls
    of float32 operands, of operands that the author cast, or with an explicit precision.
    """
    for op in program.named(*MATMULS):
        operands = op.ins[:2]
        if program.is_backward(op) or FLOAT32 not in map(dtype_of, operands):
            continue
        precision = op.params.get("precision")
        if any(p not in DEFAULT for p in np.atleast_1d(np.array(precision, object))):
            continue
        causes = [_cause(program, v) for v in operands]
        was_half = [
            is_half(v) or bool(cause) or bool(_widening(program, v))
            for v, cause in zip(operands, causes, strict=True)
        ]
        if any(causes) and all(was_half):
            yield Hit(
                f"{op.name} of {' and '.join(map(shown, operands))} runs in float32, although both "
                f"were half: {next(filter(None, causes))}.",
                op,
            )


def _widening(program: Program, value: Value) -> Op | None:
    """Returns the cast from half that made an operand float32, if it is implicit."""
    for v in program.back(value, MOVES):
        op = program.maker(v)
        if op and op.name in CASTS and is_half(op.ins[0]) and dtype_of(v) == FLOAT32:
            return None if _jax.is_written_cast(op.eqn) else op
    return None


def _cause(program: Program, value: Value) -> str:
    """Returns in words the value that caused the promotion, or ""."""
    for v in program.back(value, ELEMENTWISE) if dtype_of(value) == FLOAT32 else ():
        op = program.maker(v)
        if op is None or op.name not in ELEMENTWISE or len(op.ins) < 2:
            continue
        strong = [each for each in op.ins if not _is_promoted(program, each)]
        if strong and len(strong) < len(op.ins):
            names = [program.argument(each) or f"a constant {shown(each)}" for each in strong]
            where = short(_jax.source_line(op.eqn, *reversed(op.callers)))
            return f"{op.name} with {' and '.join(names)} at {where} promoted one of them"
    return ""


def _is_promoted(program: Program, value: Value) -> bool:
    cast = _widening(program, value)
    return cast is not None and _jax.is_promotion(cast.eqn)


def narrow_backward(program: Program) -> Iterator[Hit]:
    """Finds backward matmuls in half whose forward matmul is float32.

    JAX differentiates a matmul in its own dtypes, so a custom_vjp of the user casts there.
    """
    forward = [op for op in program.named(*MATMULS) if not program.is_backward(op)]
    wide = {
        value: op
        for op in forward
        if dtype_of(op.outs[0]) == FLOAT32 and not any(is_half(v) for v in op.ins[:2])
        for operand in op.ins[:2]
        for value in program.back(operand, MOVES)
    }
    for op in program.named(*MATMULS):
        if not program.is_backward(op):
            continue
        for operand in op.ins[:2]:
            if not is_half(operand):
                continue
            found = next((wide[v] for v in program.back(operand, MOVES | CASTS) if v in wide), None)
            if found is not None:
                yield Hit(
                    f"{op.name} in the backward pass reads {shown(operand)}, but the forward pass "
                    f"multiplied the same values in {short_name(dtype_of(found.ins[0]))}.",
                    op,
                )
                break


RULES = (
    Rule(
        "promoted-matmul",
        JAXPR,
        "a matmul of half values that type promotion made float32",
        "JAX promotes half and float32 to float32, and NumPy constants are float32. One such "
        "constant makes every matmul after it run in float32, at a fraction of the speed and with "
        "twice the memory.",
        "Give the constant the dtype of the other operand: jnp.asarray(c, x.dtype), or use a "
        "Python number, which promotes nothing. jax.numpy_dtype_promotion('strict') finds other "
        "promotions.",
        promoted_matmuls,
    ),
    Rule(
        "narrow-backward",
        JAXPR,
        "a backward pass with less precision than its forward pass",
        "Gradients have less precision than the loss. A check of the loss does not notice it, "
        "because the loss is right, and training stalls late.",
        "In the rule of custom_vjp, compute in the dtypes of the forward pass, and return "
        "cotangents in the dtypes of the arguments.",
        narrow_backward,
    ),
)
