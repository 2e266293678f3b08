"""Rules of matmuls and kernels: operands of two dtypes, and passes that compute in others."""

import collections
from collections.abc import Iterator

import jax
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT32, dtype_of, is_float, is_half, short_name, shown
from mpjax._src.core.base.lines import short
from mpjax._src.core.program.graph import PLANNED, Op, Value
from mpjax._src.tools.lint.casts import widens
from mpjax._src.tools.lint.program import CASTS, MOVES, SAME, Program, all_reached, noted
from mpjax._src.tools.lint.rule import Hit

KERNELS = rules.KERNELS | {"triton_kernel_call", "custom_call", "tpu_custom_call"}

CHOSEN = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
DEFAULT = (None, jax.lax.Precision.DEFAULT)

# Operations that keep the dtype of their operands, so that a promotion passes through them.
ELEMENTWISE = MOVES | {*rules.names_where(lambda rule: rule.need in (rules.FOLLOW, rules.MOVE))}
# What a norm does to a float32 stream besides.
REDUCTIONS = rules.EXTREMES | rules.ROOTS | {"reduce_sum", "square"}
# How many origins a message names.
MOST = 2


def promoted_matmuls(program: Program) -> Iterator[Hit]:
    """Finds float32 matmuls whose operands were 16-bit until a type promotion widened one.

    Both operands come from 16-bit values through elementwise operations only, and one of them was
    combined with a strongly typed float32 value (a NumPy constant, a table). Not found are matmuls
    of float32 operands, of operands that the author cast, or with an explicit precision. What
    autocast plans is no fault: it runs short sums in float32.
    """
    for op in program.named(*rules.MATMULS):
        operands = op.ins[:2]
        if program.is_backward(op) or FLOAT32 not in map(dtype_of, operands):
            continue
        if not _has_default_precision(op) or PLANNED in op.scopes:
            continue
        causes = [_cause(program, v) for v in operands]
        halves = [is_half(v) or _widening(program, v) for v in operands]
        was_half = all(half or cause for half, cause in zip(halves, causes, strict=True))
        if was_half and any(causes):
            yield Hit(
                f"{op.name} of {' and '.join(map(shown, operands))} runs in float32, although both "
                f"were 16-bit: {next(filter(None, causes))}.",
                op,
            )


def _widening(program: Program, value: Value) -> Op | None:
    """Returns the cast from 16 bits that made an operand float32, if it is implicit."""
    cast = next(filter(widens, program.makers(value)), None)
    return None if cast is None or _jax.is_written_cast(cast.eqn) else cast


@noted
def _promotions(program: Program) -> dict[Value, tuple[Op, list[Value]]]:
    """Returns what promoted 16 bits: the operations by their results, and the operands that did."""
    promoting = {}
    for op in program.ops:
        if op.name in ELEMENTWISE and len(op.ins) > 1 and not op.subs:
            # JAX widened the other operands because of these, which were float32 already.
            strong = [each for each in op.ins if not _is_promoted(program, each)]
            if strong and len(strong) < len(op.ins):
                promoting[op.outs[0]] = op, strong
    return promoting


@noted
def _roots(program: Program) -> dict[Value, Value]:
    """Returns the result of the nearest promotion that each promoted value comes from.

    A residual stream that is float32 promotes whatever is added to it. The cause is none of these
    additions: it is the first of them. Of several in a loop, each comes from the others.
    """
    promoting = _promotions(program)
    through = {*program.ahead(promoting, ELEMENTWISE | REDUCTIONS)}
    roots: dict[Value, Value] = {}

    def follow(value: Value) -> Iterator[Value]:
        for each in program.after(value, lambda op: op.name in ELEMENTWISE):
            roots.setdefault(each, roots[value])
            yield each

    first = [v for v, (_, strong) in promoting.items() if through.isdisjoint(strong)]
    for starts in (first, promoting):
        fresh = [v for v in starts if v not in roots]
        roots |= zip(fresh, fresh, strict=True)
        all_reached(fresh, follow)
    return roots


def _has_default_precision(op: Op) -> bool:
    precisions = np.atleast_1d(np.array(op.params.get("precision"), object))  # one, or one each
    return all(precision in DEFAULT for precision in precisions)


def _cause(program: Program, value: Value) -> str:
    """Returns in words what made a 16-bit value float32, or "": the promotion, and its origin."""
    out = _roots(program).get(value)
    if out is None or dtype_of(value) != FLOAT32:
        return ""
    root, strong = _promotions(program)[out]
    behind = program.behind(strong, ELEMENTWISE | REDUCTIONS)
    # Numbers take the dtype of what is next to them, unless nothing else is there.
    arrays = dict.fromkeys(_origin(program, v) for v in behind if not v.literal)
    numbers = dict.fromkeys(_origin(program, v) for v in behind if v.literal)
    names = [*filter(None, arrays)] or [*filter(None, numbers)]
    operands = " and ".join(names[:MOST]) or " and ".join(map(shown, strong))
    return f"{root.name} with {operands} at {_line(root)} promoted one of them"


def _line(op: Op) -> str:
    return short(_jax.source_line(op.eqn, *reversed(op.callers)))


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
    if op.name in CASTS:
        return f"a cast of {program.argument(value) or shown(op.ins[0])} to float32 ({_line(op)})"
    return f"the result {shown(value)} of {op.name} ({_line(op)})"


def _is_promoted(program: Program, value: Value) -> bool:
    cast = _widening(program, value)
    return cast is not None and _jax.is_promotion(cast.eqn)


def narrow_backward(program: Program) -> Iterator[Hit]:
    """Finds backward matmuls in 16 bits whose forward matmul is float32.

    JAX differentiates a matmul in its own dtypes, so a custom_vjp of the user casts there. Of
    what autocast plans, short sums run in float32, but their derivatives do not.
    """
    # What the forward pass multiplies in float32, and the matmul that does.
    wide = {
        value: op
        for op in program.named(*rules.MATMULS)
        if not program.runs_backward(op) and dtype_of(op.outs[0]) == FLOAT32
        if not any(map(is_half, op.ins[:2]))
        for operand in op.ins[:2]
        for value in program.back(operand)
    }
    for op in program.named(*rules.MATMULS):
        if not program.is_backward(op) or PLANNED in op.scopes:
            continue
        for operand in filter(is_half, op.ins[:2]):
            forward = next((wide[v] for v in program.back(operand, SAME) if v in wide), None)
            if forward is not None:
                yield Hit(
                    f"{op.name} in the backward pass reads {shown(operand)}, but the forward pass "
                    f"multiplied the same values in {short_name(dtype_of(forward.ins[0]))}.",
                    op,
                )
                break


def mixed_matmuls(program: Program) -> Iterator[Hit]:
    """Finds matmuls of a 16-bit operand and a float32 operand.

    A 16-bit matmul with a float32 result has such a matmul in its derivative, because the cotangent
    is float32. It is found only if the user wrote the matmul, because the user cannot change the
    inside of a library's function. A matmul with an explicit algorithm is not found: the algorithm
    says how both operands are rounded.
    """
    for op in program.named("dot_general"):
        left, right = op.ins
        half, wide = (left, right) if is_half(left) else (right, left)
        if not (is_half(half) and dtype_of(wide) == FLOAT32 and _is_matmul(op)):
            continue
        # What autocast plans is no fault of the program: it runs short sums in float32.
        derived = program.is_backward(op)
        if isinstance(op.params["precision"], CHOSEN) or PLANNED in op.scopes:
            continue
        if derived and not _jax.is_called_directly(op.eqn):
            continue
        said = f"multiplies {shown(left)} by {shown(right)}: both are read as float32."
        if derived:
            name = short_name(dtype_of(half))
            said = f"This {name} matmul returns float32, so a matmul in its backward pass {said}"
        else:
            said = f"A matmul {said}"
        if is_half(op.outs[0]):
            name = short_name(dtype_of(op.outs[0]))
            said += f" Its result is {name}, and so is the float32 operand's gradient before it is "
            said += "cast."
        yield Hit(said, op)


def _is_matmul(op: Op) -> bool:
    """Returns whether an operation is a matmul that sums; an outer product does not."""
    (contracted, _), _ = op.params["dimension_numbers"]
    return any(op.ins[0].aval.shape[axis] > 1 for axis in contracted)


def recomputed_matmuls(program: Program) -> Iterator[Hit]:
    """Finds matmuls that the backward pass recomputes with another result dtype.

    JAX recomputes in the same dtypes; a custom rule of the user may not. Two matmuls are the same
    if their operands are, apart from casts and moves, and their results have the same size.
    """
    forward: dict[Value, list[Op]] = collections.defaultdict(list)
    for op in program.named(*rules.MATMULS):
        if not program.runs_backward(op):
            for value in program.back(op.ins[0], SAME):
                forward[value].append(op)
    for backward in program.named(*rules.MATMULS):
        if not program.runs_backward(backward):
            continue
        sources = [set(program.back(v, SAME)) for v in backward.ins[:2]]
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
    own = [set(program.back(v, SAME)) for v in op.ins[:2]]
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
        matrices = [v for v in op.ins if is_float(v) and len(v.aval.shape) > 1]
        for value in (v for v in matrices if dtype_of(v) == FLOAT32):
            last = value.aval.shape[-1]
            # A last axis of 1 is that of stored statistics, which would all match.
            others = [v for v in matrices if is_half(v) and v.aval.shape[-1] == last > 1]
            halves = [cast.ins[0] for cast in filter(widens, program.makers(value))]
            if others:
                yield Hit(f"{op.name} has the operands {shown(value)} and {shown(others[0])}.", op)
            elif halves:
                what = f"{shown(value)}, which is {shown(halves[0])} cast up"
                yield Hit(f"{op.name} has the operand {what}.", op)
            if others or halves:
                break
