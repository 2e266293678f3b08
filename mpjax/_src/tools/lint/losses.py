"""Rules of losses, norms and distances that are computed in 16 bits, and of losses not scaled."""

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import FLOAT16, dtype_of, is_float, is_half, shown
from mpjax._src.core.program.affine import terms, total
from mpjax._src.core.program.graph import AGAIN, Op, Value
from mpjax._src.tools.lint.casts import ROUND, narrows
from mpjax._src.tools.lint.program import CHOSEN, SAME, Program, cases
from mpjax._src.tools.lint.rule import Hit

ABS = "abs"
SIGMOIDS = frozenset({"logistic"})
EXPONENTIALS = rules.EXPONENTIALS | SIGMOIDS | {"expm1"}
ADDS = rules.ALL_SUMS | {"reduce_sum"}
# What makes probabilities of exponentials.
DIVIDES = rules.PRODUCTS & rules.having(rules.POLE) | SIGMOIDS
# Operations between the exponentials of a softmax and the logarithm of their sum.
SUMMED = SAME | rules.SUMS_OF_TWO | ADDS | DIVIDES - SIGMOIDS | {ABS}
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
        squared = _squares_behind(program, op.ins[0], MEANS)
        sums = any(each.name in ADDS for each in program.makers(op.ins[0], MEANS))
        if sums and any(v in of for each in squared for v in each.ins):
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


# ---- distances -----------------------------------------------------------------------------------

# Moves of all entries.
WHOLE = SAME - rules.having(rules.PART) - rules.having(rules.LOOKS_UP)
# The algorithms of a matmul that round float32 operands to 16 bits.
ROUNDS = (jax.lax.DotAlgorithmPreset.BF16_BF16_F32, jax.lax.DotAlgorithmPreset.F16_F16_F32)
# How many operations a sum is followed through, and how many terms it may have: a distance has
# three, and a stream of residuals as many as layers.
DEEP, MOST = 24, 8


def weights(
    program: Program, value: Value, depth: int = DEEP, of: frozenset[Op] = frozenset()
) -> dict[Value, float]:
    """Returns the values that a value is the sum of, entry by entry or reduced, and their weights.

    A select with one case that is no number counts as that case. What some operations return
    (``of``) is not taken apart.
    """
    known: dict[Value, dict[Value, float]] = program.notes.setdefault(("weights", of), {})
    if value not in known:
        known[value] = {value: 1.0}  # computed from itself
        parts = _terms(program, value) if depth and program.maker(value) not in of else ()
        form = total((weights(program, v, depth - 1, of), by) for v, by in parts)
        if parts and len(form) <= MOST:
            known[value] = form
    return known[value]


def _terms(program: Program, value: Value) -> list[tuple[Value, float]]:
    op, sources = program.maker(value), program.sources(value)
    if op is None:
        return [(sources[0], 1.0)] if len(sources) == 1 else []
    if op.name in WHOLE | ADDS | {ROUND}:
        return [(op.ins[0], 1.0)]
    chosen = [v for v in cases(op) if program.number(v) is None]
    if cases(op):
        return [(chosen[0], 1.0)] if len(chosen) == 1 else []
    return [(op.ins[place], by) for place, by in terms(op, program.number)]


def half_distances(program: Program) -> Iterator[Hit]:
    """Finds squared distances |x|**2 - 2 x y + |y|**2 with a product that is rounded to 16 bits.

    The terms are as large as the squared norms, so the difference is lost if a distance is less
    than 2**-4 of the norm in bfloat16, 2**-5.5 in float16: as near as neighbors, codes and the
    points of a cluster are. With a float32 result and the same operands in all terms, the distance
    is that of the rounded points, and is not found; nor is a single norm with another weight.
    """
    told: set[Op] = set()
    for op in program.named(*rules.SUMS_OF_TWO):
        if program.is_backward(op) or not is_float(op.outs[0]):
            continue
        form = weights(program, op.outs[0])
        for value, weight in form.items():
            dot = program.maker(value)
            if dot is None or dot.name not in rules.MATMULS or dot in told:
                continue
            rest = {v: by for v, by in form.items() if v is not value}
            if any(_cancels(program, dot, weight, v, by) for v, by in rest.items()):
                told.add(dot)
                yield Hit(
                    f"A distance is the difference of squared norms and twice a {dot.name} of "
                    f"{' and '.join(shown(v) for v in dot.ins[:2])} to {shown(dot.outs[0])}.",
                    op,
                )


def _cancels(program: Program, dot: Op, weight: float, value: Value, by: float) -> bool:
    """Returns whether a term is the squared norm of an operand of a rounded product.

    ``weight`` and ``by`` are the weights of the product and of the term in a sum.
    """
    norm = _norm(program, value, dot)
    if norm is None:
        return False
    root, square, factor = norm
    (x, a), (y, b) = (root_of(program, v) for v in dot.ins[:2])
    if root not in (x, y):
        return False
    # Of points with themselves, both norms may be one term, broadcast in two ways.
    ratios = (-2.0, -1.0) if x is y else (-2.0,)
    # The points are what is squared, or what that is a multiple of, as a mean is of a sum.
    found = (weight * a * b / (by * each) for each in (factor, factor * factor))
    near = any(math.isclose(r, each, rel_tol=1e-3) for r in found for each in ratios)
    return near and _is_rounded_product(program, dot, square)


def _is_rounded_product(program: Program, dot: Op, square: Op) -> bool:
    """Returns whether a product is rounded, or its operands are while those of a norm are not."""
    narrowed = [any(map(narrows, program.makers(v, SAME | rules.PRODUCTS))) for v in dot.ins[:2]]
    exact = not any(map(narrows, program.makers(square.ins[0], SAME | rules.PRODUCTS)))
    rounds = any(narrowed) or dot.params.get("precision") in ROUNDS or is_half(square.outs[0])
    return is_half(dot.outs[0]) or (exact and rounds)


def root_of(program: Program, value: Value) -> tuple[Value, float]:
    """Returns what a value is a multiple of, entry by entry, and the factor."""
    factor, seen = 1.0, {value}
    while len(parts := _terms(program, value)) == 1 and value.size == parts[0][0].size:
        ((value, by),) = parts
        if value in seen:  # carried by a loop
            break
        seen.add(value)
        factor *= by
    return value, factor


def _norm(program: Program, value: Value, dot: Op) -> tuple[Value, Op, float] | None:
    """Returns whose squared norm a term is, what squares, and the multiple that it squares."""
    op = program.maker(value)
    if op is not None and squares(op):
        roots = [each for each in program.makers(op.ins[0], WHOLE) if each.name in rules.ROOTS]
        if roots:  # the square of a norm
            (inner, _), *_ = weights(program, roots[0].ins[0]).items()
            return _norm(program, inner, dot)
    elif op is not None and op.name in rules.MATMULS:
        op = op if is_square(program, op) else None
    else:  # the diagonal of all products
        diagonal = dot in program.makers(value, SAME | rules.PRODUCTS | ADDS)
        op = dot if diagonal and is_square(program, dot) else None
    if op is None:
        return None
    root, factor = root_of(program, op.ins[0])
    return root, op, factor


def is_square(program: Program, dot: Op) -> bool:
    """Returns whether both operands of a matmul are the same, moved or cast at most."""
    known: dict[Op, bool] = program.notes.setdefault("squares", {})
    if dot not in known:
        left, right = (root_of(program, v) for v in dot.ins[:2])
        known[dot] = left == right
    return known[dot]


# ---- loss scales ---------------------------------------------------------------------------------

# The least number that is a loss scale: in float16, 8 was enough for a first detector to train.
LEAST = 8.0


def unscaled_gradients(program: Program) -> Iterator[Hit]:
    """Finds gradients that are computed through float16 of a loss that no scale multiplies.

    The derivative of a loss with respect to itself is 1, and cotangents shrink from there as the
    loss does; below 6e-8 they are 0 in float16. A scale is a number of 8 or more, or one that the
    program is given, which multiplies the cotangent while all of its entries are equal, or which
    the backward pass starts from. Float16 in a forward pass is not found, nor is a backward pass
    that starts from given cotangents.
    """

    cotangents: set[Value] = set()
    for op in program.ops:
        if not _pulls_back(program, op):
            continue
        behind = {each for v in op.ins for each in program.back(v, ())}
        if cotangents.isdisjoint(behind) and not any(_is_seed(program, v) for v in behind):
            continue
        cotangents.update(op.outs)
        half = next((v for v in op.outs if dtype_of(v) == FLOAT16 and not v.is_one), None)
        if half is not None:
            pulls = functools.partial(_pulls_back, program)
            made = filter(pulls, program.makers(half, pulls))
            if not any(_scales(program, each) for each in made):
                yield Hit(
                    f"The backward pass computes {shown(half)} by {op.name}, and no loss scale "
                    "multiplies the loss.",
                    op,
                )
            return  # one tells of the whole backward pass


def _pulls_back(program: Program, op: Op) -> bool:
    """Returns whether an operation is of the last backward pass, and does not compute again.

    What a gradient inside of a loss computes is differentiated again: it belongs to the loss.
    """
    if op.subs or not program.is_backward(op) or AGAIN in op.scopes:
        return False
    stacks = (each.stack for each in (*program.around[op], op))
    names = [name for stack in stacks for name in _jax.transforms(stack) if name in PASSES]
    return names[:1] != ["jvp"]


PASSES = ("jvp", "transpose")


def _is_seed(program: Program, value: Value) -> bool:
    return value.is_one and program.number(value) == 1.0


def _scales(program: Program, op: Op) -> bool:
    """Returns whether an operation of a backward pass multiplies all of a cotangent by a scale."""
    if not all(_is_uniform(program, v) for v in op.ins):
        return False
    factors = op.ins[:1] if op.name in DIVIDES else op.ins
    if op.name in DIVIDES and abs(program.number(op.ins[1]) or 1.0) <= 1 / LEAST:
        return True
    # What the backward pass makes is the cotangent.
    given = (v for v in factors if not any(map(program.is_backward, program.makers(v, ()))))
    return any(_is_scale(program, v) for v in given)


def _is_uniform(program: Program, value: Value) -> bool:
    """Returns whether all entries of a value are one number, or a product of such values."""
    behind = program.back(value, rules.VIEWS | rules.PRODUCTS)
    return all(v.is_one for v in behind if not program.sources(v) and _begins(program, v))


def _begins(program: Program, value: Value) -> bool:
    op = program.maker(value)
    return op is None or op.name not in rules.VIEWS | rules.PRODUCTS


def _is_scale(program: Program, value: Value) -> bool:
    """Returns whether a value is a number of 8 or more, or made of numbers that are given."""
    number = program.number(value)
    if number is not None:
        return abs(number) >= LEAST
    arguments = {*program.block.invars}
    behind = program.back(value, lambda op: all(v.is_one for v in op.ins))
    return any(v in arguments and v.is_one for v in behind)
