"""Rules of angles: how far roundings to 16 bits turn the operand of a sine."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, shown, stalls_at
from mpjax._src.core.base.trees import widen
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.interpret import run_in_float32
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import CASTS, CHOSEN, Program, noted
from mpjax._src.tools.lint.rule import Hit

# The largest acceptable error of a phase, in radians.
PHASE = 1 / 8


def half_phases(program: Program) -> Iterator[Hit]:
    """Finds sines of angles that roundings to 16 bits may change by 1/8 radian or more.

    Half an ulp of x is 2**(e - digits), so this begins at 32 in bfloat16 and 256 in float16. The
    angle may be float32, if what it is computed from was rounded: the error grows with each factor.
    Integers that 16 bits represent are exact.
    """
    for op in _waves(program):
        bounds = bounds_of(program, op.ins[0])
        error = _error_of(program, op.ins[0])
        if bounds and bounds.low < bounds.high and error >= PHASE:
            yield Hit(
                f"{op.name} reads angles up to {bounds.largest:.4g} in {shown(op.ins[0])}. "
                f"Rounding changes them by up to {error:.2g} radians.",
                _place(program, op, functools.partial(_rounding, program)),
            )


def _waves(program: Program) -> Iterator[Op]:
    """Yields sines, and the exponentials of complex angles, which have them in both parts."""
    yield from program.named(*rules.WAVES)
    powers = program.named(*rules.EXPONENTIALS)
    yield from (op for op in powers if dtype_of(op.outs[0]).kind == "c")


def _place(program: Program, op: Op, rounds: Callable[[Op], Any]) -> Op:
    """Returns a sine of a 16-bit angle, or what rounds before one in float32."""
    makers = () if is_half(op.ins[0]) else program.makers(op.ins[0], _is_linear)
    return next((maker for maker in makers if rounds(maker)), op)


def _error_of(program: Program, value: Value) -> float:
    """Returns the largest error of a value of known bounds, by roundings to 16 bits."""
    errors: dict[Value, float] = program.notes.setdefault("errors", {})
    if value not in errors:
        errors[value] = 0.0  # of what is computed from itself
        bounds = bounds_of(program, value)
        known = bounds is not None and math.isfinite(bounds.largest)
        # The dtype of a constant was chosen for it.
        if known and program.constant(value) is None:
            op = program.maker(value)
            origins = op.ins if op else program.sources(value)
            before = [_error_of(program, v) for v in origins]
            errors[value] = max(before, default=0.0)
            if op is not None:
                errors[value] = _passed_on(program, op, before) + _rounding(program, op)
    return errors[value]


def _passed_on(program: Program, op: Op, errors: list[float]) -> float:
    """Returns the error of a result of known bounds, by the errors of its operands."""
    if not any(errors) or not _is_linear(op):
        return 0.0
    if op.name in rules.SUMS_OF_TWO:
        return sum(errors)
    ends = [bounds_of(program, v) for v in op.ins]
    a, b = (*ends, None)[:2]
    if a is None or b is None or op.name not in rules.PRODUCTS | rules.MATMULS:
        return max(errors)
    if op.name == "div":
        return errors[0] / max(min(abs(b.low), abs(b.high)), 2.0**-99)
    return a.largest * errors[1] + b.largest * errors[0]


def _rounding(program: Program, op: Op) -> float:
    """Returns half an ulp of the largest result, or 0 if nothing is rounded or known."""
    dtype, bounds = dtype_of(op.outs[0]), bounds_of(program, op.outs[0])
    if bounds is None or not math.isfinite(bounds.largest) or not _may_round(program, op):
        return 0.0
    if bounds.whole and bounds.largest <= stalls_at(dtype):
        return 0.0
    return 2.0 ** (math.floor(math.log2(max(bounds.largest, 2.0**-99))) - digits(dtype))


def _may_round(program: Program, op: Op) -> bool:
    """Returns whether an operation may round values that are not constant to 16 bits."""
    if not is_half(op.outs[0]):
        return False
    known = [program.number(v) for v in op.ins if v.is_one]
    # A factor that is a power of two moves the exponent.
    scales = op.name in rules.PRODUCTS and any(n and math.frexp(n)[0] == 0.5 for n in known)
    constant = bool(op.ins) and all(program.constant(v) is not None for v in op.ins)
    if constant or scales or op.spec.need in (rules.MOVE, rules.COMPARE):
        return False
    return op.name not in CASTS or not is_half(op.ins[0])


def _is_linear(op: Op) -> bool:
    """Returns whether an error of an operand is one of the result: moves, sums and products."""
    if op.name in CHOSEN | rules.PRODUCTS | rules.MATMULS or rules.JUMPS in op.spec.traits:
        return True
    return op.spec.linear and op.spec.need in (rules.MOVE, rules.FOLLOW)


# ---- with values ---------------------------------------------------------------------------------


def rounded_phases(program, op, ins, outs) -> Iterator[Hit]:
    """Finds sines of angles that roundings to 16 bits change by 1/8 radian or more in this step.

    What leads to an angle by moves, sums and products is computed in float32 too, from what was
    there before the first rounding. An argument in 16 bits counts as rounded where its neighbors
    are more than 1 apart: beyond 256 in bfloat16, 2048 in float16. Only turns of less than a whole
    one count.
    """
    if op not in _angles(program):
        return
    unrounded: dict[Value, Any] = program.notes.setdefault("unrounded", {})
    wide = [_unrounded(program, unrounded, v, x) for v, x in zip(op.ins, ins, strict=True)]
    if op.name not in rules.WAVES | rules.EXPONENTIALS:
        if _may_round(program, op) or any(a is not b for a, b in zip(wide, ins, strict=True)):
            found = run_in_float32(op.eqn, wide)
            unrounded |= zip(op.outs, found or (), strict=False)
        return
    of_complex = op.name in rules.EXPONENTIALS
    angles, exact = (
        np.asarray(np.imag(x) if of_complex else x, np.float64) for x in (ins[0], wide[0])
    )
    with np.errstate(invalid="ignore"):
        turned = np.abs(np.remainder(angles - exact + np.pi, 2 * np.pi) - np.pi)
    # An angle that is not finite says nothing.
    error = np.max(turned, where=np.isfinite(turned), initial=0.0)
    if error >= PHASE:
        at = np.unravel_index(np.argmax(np.where(turned == error, 1, 0)), turned.shape)
        yield Hit(
            f"{op.name} reads {angles[at]:.7g} in place of {exact[at]:.7g}, because the angle, or "
            f"what it is computed from, is rounded to 16 bits: a phase error of {error:.2g} "
            "radians.",
            _place(
                program, op, lambda maker: is_half(maker.outs[0]) and maker.outs[0] in unrounded
            ),
        )


@noted
def _angles(program: Program) -> frozenset[Op]:
    """Returns the sines whose angles are, or come from, 16-bit values, and what leads to them."""
    found: set[Op] = set()
    for op in _waves(program):
        behind = program.back(op.ins[0], _is_linear)
        if any(map(is_half, behind)):
            makers = (program.maker(v) for v in behind)
            found |= {op, *(maker for maker in makers if maker and _is_linear(maker))}
    return frozenset(found)


def _unrounded(program: Program, known: dict[Value, Any], value: Value, array: Any) -> Any:
    """Returns an array as it would be without roundings to 16 bits, or as it is."""
    shape = np.shape(array)
    sources = program.sources(value)
    # What a loop or another call reads is what is outside of it, and not a slice of that.
    for v in (value, *sources[: len(sources) == 1]):
        if v in known and np.shape(known[v]) == shape:
            return known[v]
    if is_half(value) and value in program.block.invars:
        wide = widen(jnp.asarray(array))
        dtype = dtype_of(value)
        half_ulp = 2.0 ** (jnp.frexp(wide)[1] - 1 - digits(dtype))
        far = jnp.abs(wide) > stalls_at(dtype)
        return wide + half_ulp * far if bool(far.any()) else array
    return array
