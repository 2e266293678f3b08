"""Rules of loss scales and guards: hidden overflow, and loss scales without a limit."""

import functools
from collections.abc import Iterator

import numpy as np

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import FLOAT16, dtype_of, is_float, shown
from mpjax._src.core.base.higher_order import BRANCH
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.program import CHOSEN, SAME, Program, cases
from mpjax._src.tools.lint.rule import Hit

# The least constant factor of a gradient that is a loss scale.
SCALE = 128
SCALED = SAME | rules.PRODUCTS
LOGIC = rules.LOGIC | SAME | {"xor"}
FINITE = rules.EQUALITIES | {"is_finite"}  # what asks whether entries are


def hidden_nonfinite(program: Program) -> Iterator[Hit]:
    """Finds gradients whose non-finite entries are replaced by a number."""
    for op in program.named("select_n"):
        values = [v for v in cases(op) if program.number(v) is None]
        numbers = [number for v in cases(op) if (number := program.number(v)) is not None]
        # As in jnp.where(jnp.isfinite(g), g, 0): one case is a number, and the other the gradient.
        if len(values) != 1 or len(numbers) != 1:
            continue
        (value,), (number,) = values, numbers
        # What becomes Inf or NaN is not hidden.
        if not is_float(value) or not np.isfinite(number):
            continue
        # A test of another value, such as the loss, skips whole steps and hides no entry.
        same = set(program.back(value, SAME))
        asked = any(_asks_finite(program, test, same) for test in program.makers(op.ins[0], LOGIC))
        if asked and is_gradient(program, value):
            message = f"Non-finite entries of a gradient, {shown(value)}, become {number:g}."
            yield Hit(message, op)


def _asks_finite(program: Program, test: Op, same: set[Value]) -> bool:
    """Returns whether an operation tests each entry for being finite, NaN or infinite."""
    if not _asks_about(program, test, same):
        return False
    if test.name == "is_finite" or asks_infinite(program, test, same):
        return True
    # x != x asks for NaN.
    return not same.isdisjoint(program.back(test.ins[1], SAME))


def asks_infinite(program: Program, test: Op, same: set[Value]) -> bool:
    """Returns whether an operation compares the entries of a value, or |x|, with an infinity."""
    about = test.name in rules.EQUALITIES and _asks_about(program, test, same)
    number = program.number(test.ins[1]) if about else None
    return number is not None and not np.isfinite(number)


def _asks_about(program: Program, test: Op, same: set[Value]) -> bool:
    return test.name in FINITE and not same.isdisjoint(program.back(test.ins[0], SAME | {"abs"}))


def is_gradient(program: Program, value: Value) -> bool:
    """Returns whether a value is a gradient, followed by elementwise arithmetic at most.

    After a cast, only products are followed: the sums of an optimizer hold gradients of old steps.
    """
    origins = program.behind(program.back(value, SCALED), _entry_by_entry)
    makers = filter(None, map(program.maker, origins))
    # A barrier makes nothing: it passes residuals on together with cotangents.
    return any(program.is_backward(op) for op in makers if op.name not in rules.BARRIERS)


def _entry_by_entry(op: Op) -> bool:
    return op.spec.need in (rules.FOLLOW, rules.MOVE) or op.name.startswith("psum")


def late_scales(program: Program) -> Iterator[Hit]:
    """Finds float16 gradients that are multiplied by a loss scale after the backward pass.

    A scale is a constant of 128 or more, or a number that the product is divided by again. The
    factors of an optimizer and of clipping are neither.
    """
    for op in program.named("mul"):
        if program.is_backward(op):
            continue
        for gradient, scale in (op.ins, op.ins[::-1]):
            source = _half_gradient(program, gradient)
            if source and _is_scale(program, op, scale) and not _is_scaled(program, source):
                yield Hit(
                    f"A gradient that was computed in {shown(source.outs[0])} is multiplied by a "
                    "loss scale here, after the backward pass.",
                    op,
                )
                break


def _half_gradient(program: Program, value: Value) -> Op | None:
    """Returns the operation of the backward pass that produced a gradient in float16, or None."""
    of_backward = filter(program.is_backward, program.makers(value, SAME))
    return next((op for op in of_backward if dtype_of(op.outs[0]) == FLOAT16), None)


def _is_scale(program: Program, op: Op, value: Value) -> bool:
    number = program.number(value)
    if number is not None:
        return number >= SCALE
    same = {v for v in program.back(value, SAME) if v.is_one}
    if not same:
        return False
    ahead = program.forward(op.outs[0], CHOSEN | rules.ADDITIONS)
    divisors = (r.ins[1] for v in ahead for r in program.readers(v) if r.name == "div")
    return any(not same.isdisjoint(program.back(v, SAME)) for v in divisors)


def _is_scaled(program: Program, gradient: Op) -> bool:
    """Returns whether a number multiplies the cotangents of a gradient, as a loss scale does."""
    return any(
        op.name == "mul"
        and op.outs[0].is_one
        and program.is_backward(op)
        and any((program.number(v) or 0) >= SCALE or program.argument(v) for v in op.ins)
        for op in program.makers(gradient.outs[0], program.is_backward)
    )


def endless_scales(program: Program) -> Iterator[Hit]:
    """Finds numbers that grow by a factor on a condition, without an upper limit."""
    # A loss scale is a state of one number, so it is an argument and a result.
    arguments = {v for v in program.block.invars if is_float(v) and v.is_one}
    results = {v for v in program.block.outvars if is_float(v) and v.is_one}
    for op in program.named(*rules.PRODUCTS):
        factor = _factor(program, op)
        if factor is None or not op.outs[0].is_one:
            continue
        number, grown = factor
        source = set(program.back(grown, CHOSEN | {"max"}))
        if source.isdisjoint(arguments):
            continue
        # A select that compares the grown number, as jnp.where(s < most, 2 * s, s), limits it.
        passes = functools.partial(_passes_on, program, {*op.outs, *op.ins})
        kept = set(program.forward(op.outs[0], passes))
        if _is_chosen(program, op, kept) and not kept.isdisjoint(results):
            names = [program.argument(v) for v in source & arguments]
            yield Hit(
                f"{next(filter(None, names), 'A number')} is multiplied by {number:g} each time "
                "its condition holds, and nothing limits it.",
                op,
            )


def _factor(program: Program, op: Op) -> tuple[float, Value] | None:
    """Returns the factor above 1 that an operation multiplies by, and the other operand."""
    left, right = op.ins
    number = _largest(program, right)
    if number:
        number = number if op.name == "mul" else 1 / number
        return (number, left) if number > 1 else None
    number = _largest(program, left) if op.name == "mul" else None
    return (number, right) if number and number > 1 else None


def _largest(program: Program, value: Value, before: tuple[Value, ...] = ()) -> float | None:
    """Returns the number of a constant value, or the largest of those that it is selected from."""
    if value in before:  # carried by a loop, and selected from itself
        return None
    for maker in program.makers(value, SAME):
        if numbers := [_largest(program, case, (*before, value)) for case in cases(maker)]:
            return None if None in numbers else max(n for n in numbers if n is not None)
    return program.number(value)


def _is_chosen(program: Program, op: Op, kept: set[Value]) -> bool:
    """Returns whether a number grows on a condition: a select after or before it, or a branch."""
    near = {maker.name for each in op.ins for maker in program.makers(each, SAME)}
    near |= {reader.name for value in kept for reader in program.readers(value)}
    return "select_n" in near or any(each.inside.kind == BRANCH for each in program.around[op])


def _passes_on(program: Program, about: set[Value], op: Op) -> bool:
    """Returns whether an operation passes a grown scale on without a limit."""
    if op.name in SAME | {"max"}:
        return True
    return bool(cases(op)) and not any(
        test.name in rules.COMPARISONS | FINITE
        and any(not about.isdisjoint(program.back(v, SAME)) for v in test.ins)
        for test in program.makers(op.ins[0], LOGIC)
    )
