"""Rules of losses and norms that are computed in 16 bits."""

from collections.abc import Iterator
from typing import Any

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import FLOAT16, dtype_of, is_half, shown
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.casts import narrows
from mpjax._src.tools.lint.program import CHOSEN, SAME, Program
from mpjax._src.tools.lint.rule import Hit

EXPONENTIALS = rules.EXPONENTIALS | {"expm1", "logistic"}
ADDS = rules.ALL_SUMS | {"reduce_sum"}
DIVIDES = frozenset({"div", "logistic"})  # makes probabilities of exponentials
# Operations between the exponentials of a softmax and the logarithm of their sum.
SUMMED = SAME | rules.SUMS_OF_TWO | ADDS | {"abs", "div"}
# Operations between the loss of each example and the mean loss; none mixes features.
AVERAGED = CHOSEN | rules.SUMS_OF_TWO | rules.PRODUCTS | ADDS | {"neg", "max"}


def half_log_sums(program: Program) -> Iterator[Hit]:
    """Finds logarithms of sums of exponentials in 16 bits: log_softmax, logsumexp, cross entropies.

    A softmax without a logarithm is bounded, and is not found. log(1 + exp(x)), which is also an
    activation, and the logarithm of a probability are found only if they are averaged to one number
    without a matmul in between.
    """
    for op in program.named("log", "log1p"):
        value = op.ins[0]
        if not (is_half(value) and is_half(op.outs[0])):
            continue
        before = program.makers(value, SUMMED)
        halves = {each.name for each in before if is_half(each.outs[0])}
        # After a division it is the logarithm of a probability, which only a loss makes a fault.
        names = {each.name for each in before}
        summed = names & ADDS and not names & DIVIDES
        if halves & EXPONENTIALS and (summed or _is_loss(program, op)):
            yield Hit(
                f"The {op.name} of a sum of exponentials is computed in {shown(op.outs[0])}: the "
                "loss reads 16-bit logits.",
                op,
            )
    for op in program.named("cumlogsumexp"):
        if is_half(op.ins[0]):
            yield Hit(f"cumlogsumexp of {shown(op.ins[0])} is computed in 16 bits.", op)


def rounded_probabilities(program: Program) -> Iterator[Hit]:
    """Finds logarithms and reciprocals of probabilities that were rounded to float16.

    Both have a pole at 0, and a probability below 6e-8 is 0 in float16, so the precision in which
    they are computed does not matter. An epsilon that is added does not restore what was lost.
    """
    for op in program.named("log", "div", "rsqrt"):
        if program.is_backward(op):
            continue
        narrowed = filter(narrows, program.makers(op.ins[-1], PROTECTED))
        narrow = next((each for each in narrowed if dtype_of(each.outs[0]) == FLOAT16), None)
        if narrow is None:
            continue
        names = {each.name for each in program.makers(narrow.ins[0], SUMMED)}
        if names & EXPONENTIALS and names & DIVIDES:
            yield Hit(
                f"{op.name} reads probabilities that were rounded to {shown(narrow.outs[0])}: "
                "those below 6e-8 are 0 there.",
                op,
            )


# Operations that protect from a pole.
PROTECTED = SAME | {"add", "max", "clamp"}


def _is_loss(program: Program, op: Op) -> bool:
    """Returns whether the results of an operation are averaged to one number."""
    ahead = program.forward(op.outs[0], AVERAGED)
    return any(v.is_one and op.outs[0].size > 1 for v in ahead)


# Operations between the terms of a variance and its input: means.
MEANS = SAME | rules.PRODUCTS | ADDS


def half_variances(program: Program) -> Iterator[Hit]:
    """Finds variances in 16 bits as the mean of squares minus the square of the mean.

    Both terms are as large as the squared mean, so the difference is lost if the mean exceeds 11
    standard deviations in bfloat16 (2**(8 / 2 - 1/2)), or 32 in float16. In float32 this form is
    common, and is not found; neither is it inside of a library's norm, which the user cannot
    change.
    """
    for op in program.named("sub"):
        if not is_half(op.outs[0]) or program.is_backward(op) or op.lines[1]:
            continue
        means = [each.ins[0] for each in _squares_behind(program, op.ins[1], SAME)]
        if not means:
            continue
        of = {*program.back(means[0], MEANS)}
        squares = _squares_behind(program, op.ins[0], MEANS)
        sums = any(each.name in ADDS for each in program.makers(op.ins[0], MEANS))
        if sums and any(v in of for each in squares for v in each.ins):
            message = f"A variance is computed as a difference of means in {shown(op.outs[0])}."
            yield Hit(message, op)


def half_squares(program: Program) -> Iterator[Hit]:
    """Finds norms that square in float16, where the squares of 256 and more are Inf.

    jnp.mean and jnp.sum add in float32, but their operand is squared in float16 before. bfloat16
    has enough range, and its rounding errors of the squares average out.
    """
    for op in filter(squares, program.ops):
        if dtype_of(op.outs[0]) != FLOAT16 or program.is_backward(op):
            continue
        ahead = program.forward(op.outs[0], MEANS | {"add"})
        readers = [each for v in ahead for each in program.readers(v)]
        sums = any(each.name in ADDS for each in readers)
        if sums and any(each.name in rules.ROOTS for each in readers):
            yield Hit(f"The squares of a norm are computed in {shown(op.outs[0])}.", op)


def _squares_behind(program: Program, value: Value, through: Any) -> list[Op]:
    """Returns the operations that square, behind a value and operations of some names."""
    return [*filter(squares, program.makers(value, through))]


def squares(op: Op) -> bool:
    if op.name == "mul":
        return op.ins[0] is op.ins[1]
    return op.name in rules.SQUARES and op.params.get("y", 2) == 2
