"""A rule of one real step: gradients that float16 flushes to zero, for want of a loss scale."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpjax._src.core.base.dtypes import FLOAT16, limits_of
from mpjax._src.core.base.errors import first_of
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.interpret import run_in_float32
from mpjax._src.tools.lint.program import Program
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import carried
from mpjax._src.tools.lint.updates import is_adjusted, static_scale

LIMITS = limits_of(FLOAT16)

# Below this exponent, float16 has half of its digits or none.
FEW = LIMITS.normal - LIMITS.digits // 2

# The share of entries that may be there, and the largest part of it that a scale that cures leaves.
LOST, LEFT = 0.05, 0.5
CURED = 0.01  # a share that is as good as none
LARGEST = 24  # the exponent up to which `DynamicLossScale` grows

# The powers of two that a scale keeps between the largest cotangent and overflow, as
# `recommend_loss_scale` does.
HEADROOM = 4

NAMED = 3  # how many gradients the message names

# The counted exponents: 2**e <= |g| < 2**(e + 1). float32's smallest number is 2**-149.
SMALLEST = -149
EXPONENTS = np.arange(SMALLEST, 128)


def backward_values(program, op, ins, outs) -> Iterator[Hit]:
    """Counts by magnitude what the backward pass computes in float16, as float32 would have it."""
    halves = [i for i, x in enumerate(outs) if getattr(x, "dtype", None) == FLOAT16]
    if halves and program.is_backward(op):
        wide = run_in_float32(op.eqn, ins) or outs
        for i in halves:
            counts = program.notes.setdefault("backward", {})
            counts[op] = counts.get(op, 0) + _exponents(wide[i])
    # All checks are generators. This one only counts: `flushed_gradients` reports after the step.
    yield from ()


def _exponents(x: Any) -> np.ndarray:
    """Counts the finite entries that are not zero by their exponents."""
    sizes = np.abs(np.asarray(x, np.float64)).ravel()
    exponents = np.frexp(sizes[np.isfinite(sizes) & (sizes > 0)])[1] - 1
    return np.bincount(np.maximum(exponents, SMALLEST) - SMALLEST, minlength=len(EXPONENTS))


def _share(counts: np.ndarray, below: int, shift: int = 0) -> float:
    """Returns the share below an exponent, after times 2**shift."""
    return float(counts[EXPONENTS + shift < below].sum() / max(int(counts.sum()), 1))


def _lost(counts: np.ndarray, shift: int = 0) -> float:
    return _share(counts, FEW, shift)


def flushed_gradients(program: Program) -> Iterator[Hit]:
    """Finds gradients of which float16 loses more than 5% of the entries that are not zero.

    Lost is an entry that a float16 result of the backward pass stores with half of the digits or
    none, below 2**-19. It is a fault if a larger loss scale would keep most of them, and nothing
    raises the scale: a dynamic one grows by itself.
    """
    counts: dict[Op, np.ndarray] = program.notes.get("backward", {})
    used = np.flatnonzero(np.sum([np.zeros(len(EXPONENTS), int), *counts.values()], axis=0))
    if not used.size or is_adjusted(program):
        return
    most = LIMITS.overflow - 1 - HEADROOM - int(EXPONENTS[used[-1]])
    lossy = {
        op: each
        for op, each in counts.items()
        if _lost(each) > LOST and _lost(each, most) < LEFT * _lost(each)
    }
    if most < 1 or not lossy:
        return
    worst = sorted(lossy, key=lambda op: -_lost(lossy[op]) * lossy[op].sum())
    gradients: dict[str, Op] = {}
    behind: dict[str, None] = {}
    ends = _ends(program)
    for op in worst:
        names = dict.fromkeys(_gradients_of(program, op.outs[0], ends))
        gradients.setdefault(next(iter(names), "a result"), op)
        behind |= names
    more = [name for name in behind if name not in gradients]
    first, *others = ((name, *_lost_shares(lossy[op])) for name, op in gradients.items())
    lost = "of the nonzero entries behind the gradient of {} to zero and makes {} subnormal"
    lost = f"{first[1]} {lost.format(first[0], first[2])}"
    named = (f"; for {name} {zero} and {small}" for name, zero, small in others[: NAMED - 1])
    lost += "".join(named)
    lost += f"; and {len(others) - NAMED + 1} more" if len(others) >= NAMED else ""
    lost += f". Those of {first_of(more, NAMED)} depend on them" if more else ""
    total = np.sum([*lossy.values()], axis=0)
    least = next((k for k in range(1, most) if _lost(total, k) < CURED), most)
    # Between the two: what is flushed now says nothing of smaller cotangents behind it.
    power = min((least + most) // 2, max(least, LARGEST))
    scale, left = static_scale(program), _lost(total, power)
    at = f"At a loss scale of {scale}, which nothing raises," if scale else "Without a loss scale,"
    cure = f"one that is {2**power} times as large" if scale else f"a loss scale of {2**power}"
    yield Hit(
        f"{at} float16 flushes {lost}. With {cure}, {left:.2%} have half of their digits or none.",
        worst[0],
    )


def _lost_shares(counts: np.ndarray) -> tuple[str, str]:
    """Returns the shares that float16 flushes and makes subnormal, as text."""
    flushed, small = (_share(counts, below) for below in (LIMITS.flush, LIMITS.normal))
    return f"{flushed:.0%}", f"{small - flushed:.0%}"


# ---- whose gradient it is -----------------------------------------------------------------------


def _gradients_of(program: Program, value: Value, ends: dict[Value, str]) -> Iterator[str]:
    """Yields the arguments whose gradients depend on a cotangent, by name, the nearest first."""
    results = {*program.block.outvars}
    for v in program.forward(value, program.is_backward):
        leaves = any(not program.is_backward(op) for op in program.readers(v))
        if leaves or not results.isdisjoint(program.forward(v, ())):
            entries = functools.partial(_entry_by_entry, v.size)
            yield from [ends[each] for each in program.forward(v, entries) if each in ends][:1]


def _entry_by_entry(size: int, op: Op) -> bool:
    return size > 1 and max((out.size for out in op.outs), default=0) == size


def _ends(program: Program) -> dict[Value, str]:
    """Returns what gradients end in, with the names of the parameters that they belong to.

    These are the results of lint's own gradient, or the states of a step that are read before its
    backward pass. The moments of an optimizer are not.
    """
    outs = zip(program.traced.out.keys, program.block.outvars, strict=True)
    named = {v: getattr(keys[-1], "key", None) for keys, v in outs if keys}
    ends = {v: name for v, name in named.items() if name in program.names}
    forward = {*itertools.takewhile(lambda op: not program.is_backward(op), program.ops)}
    for each in carried(program):
        if not forward.isdisjoint(program.readers(each.before)):
            ends.setdefault(each.after, each.name)
    return ends
