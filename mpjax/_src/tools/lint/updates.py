"""Rules of one real step: updates that are rounded away, and gradients that a scale loses."""

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import FLOAT16, is_half, limits_of, shown
from mpjax._src.core.base.errors import first_of
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.interpret import run_in_float32
from mpjax._src.tools.lint.program import (
    CHOSEN,
    MOVES,
    SAME,
    Program,
    all_reached,
    anything,
    noted,
)
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import Carried, alone, carried

# The share of entries that may stay unchanged. Updates of one ulp now and then still move weights.
SHARE = 0.5


def stalled_updates(program, op, ins, outs) -> Iterator[Hit]:
    """Finds 16-bit weights of which most entries do not change although their update is not zero.

    Such an update is less than half an ulp: 1/512 of the weight in bfloat16, 1/4096 in float16. A
    float32 sum that is rounded to the weight's dtype loses it too. Entries whose update is zero are
    not counted. Sums with compensation (Kahan), and those that are rounded by their bits
    (stochastically), are not found.
    """
    weights = _weights(program).get(op)
    if weights is None or ins[0].shape != ins[1].shape:
        return
    place, each = weights
    old, update = np.asarray(ins[place], np.float32), np.asarray(ins[1 - place], np.float32)
    new = jnp.asarray(outs[0]).astype(each.before.aval.dtype)
    moves = update != 0
    still = moves & (old == np.asarray(new, np.float32))
    if moves.any() and still.sum() > SHARE * moves.sum():
        yield Hit(
            f"{still.sum() / moves.sum():.0%} of the updates of {each.name}, "
            f"{shown(each.before)}, are rounded away in this step: they are less than half an ulp.",
            op,
        )


@noted
def _weights(program: Program) -> dict[Op, tuple[int, Carried]]:
    """Returns the additions that update 16-bit states, with their operand index and the state."""
    weights: dict[Op, tuple[int, Carried]] = {}
    # A single array is one of weights if something made of a gradient is added to it.
    arrays = [each for each in alone(program) if is_half(each.before)]
    bare = {id(each) for each in arrays}
    for each in (*carried(program), *arrays):
        if not (is_half(each.before) and is_half(each.after)):
            continue
        for op in program.makers(each.after, CHOSEN):
            if op.name not in ("add", "sub"):
                continue
            # One operand has to be the old weight, so that the other one is its update.
            ways = [program.is_from(v, each.before) for v in op.ins]
            if sum(ways) != 1 or is_rounded_by_bits(program, op, each.after):
                continue
            update = op.ins[1 - ways.index(True)]
            behind = program.makers(update, anything) if id(each) in bare else ()
            if id(each) in bare and not any(map(program.is_backward, behind)):
                continue
            if not is_compensated(program, op, each.before):
                weights[op] = ways.index(True), each
    return weights


def is_compensated(program: Program, op: Op, before: Value) -> bool:
    """Returns whether the old value is subtracted from a sum again, which keeps its error."""
    sums = {*program.forward(op.outs[0], SAME | {"reduce_precision"})}
    reads = [reader for v in sums for reader in program.readers(v) if reader.name == rules.SUB]
    # In a loop, the next turn subtracts its update from the sum: that is no compensation.
    pairs = (pair for each in reads for pair in (each.ins, each.ins[::-1]))
    return any(a in sums and program.is_from(b, before) for a, b in pairs)


def is_rounded_by_bits(program: Program, op: Op, after: Value) -> bool:
    """Returns whether the new state depends on the bits of a sum, and the cast for large ones."""
    return any(
        reader.name == rules.BITCAST and after in program.forward(reader.outs[0], anything)
        for value in program.forward(op.outs[0], MOVES)
        for reader in program.readers(value)
    )


# Smaller constants are not loss scales.
LEAST = 2.0


def overflowing_scales(program, op, ins, outs) -> Iterator[Hit]:
    """Finds the first Inf in 16 bits in the backward pass, under a static loss scale.

    A dynamic loss scale is a changing argument, and is lowered by the step that overflows.
    """
    # One finding is enough: what runs after it reads the same Inf.
    if program.notes.get("overflowed") or not program.is_backward(op):
        return
    half = [x for x in outs if is_half(x)]
    # An operation that reads Inf only passes it on.
    if _are_finite(half) or not _are_finite(ins):
        return
    scale = static_scale(program)
    if scale:
        program.notes["overflowed"] = True
        yield Hit(
            f"{op.name} in the backward pass produces Inf in {shown(op.outs[0])} at a loss scale "
            f"of {scale}, which nothing lowers.",
            op,
        )


@noted
def static_scale(program: Program) -> str:
    """Returns as text the constant that multiplies the cotangent of a scalar, or ""."""
    # A scale that the step returns as it came is as static as a constant.
    kept = {each.before: each.name for each in carried(program) if each.before is each.after}
    for v in _factors(program):
        constant = program.constant(v)
        if constant is not None and constant.size == 1 and float(constant) >= LEAST:
            return f"{float(constant):g}"
        if v in kept:
            given = program.call.arrays[program.block.invars.index(v)]
            return f"{float(given):g} ({kept[v]})"
    return ""


def _factors(program: Program) -> Iterator[Value]:
    """Yields what the backward pass multiplies scalars by, and where that comes from."""
    for op in program.named("mul"):
        if op.outs[0].is_one and program.is_backward(op):
            for value in op.ins:
                yield from program.back(value, SAME)


def is_adjusted(program: Program) -> bool:
    """Returns whether the cotangent of a scalar is multiplied by a state that the step changes."""
    changed = {each.before for each in carried(program) if each.before is not each.after}
    return any(v in changed for v in _factors(program))


def _are_finite(arrays: Any) -> bool:
    numbers = [x for x in arrays if jnp.issubdtype(getattr(x, "dtype", np.bool_), jnp.inexact)]
    return all(bool(jnp.isfinite(x).all()) for x in numbers)


# ---- gradients that float16 flushes to zero ------------------------------------------------------

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


def _lost(counts: np.ndarray, shift: int = 0, below: int = FEW) -> float:
    """Returns the share of the entries below an exponent, after times 2**shift."""
    return float(counts[EXPONENTS + shift < below].sum() / max(int(counts.sum()), 1))


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
    names = _gradients(program)
    nearest = _nearest(program, names)
    for op in worst:
        gradients.setdefault(nearest.get(op.outs[0], "a result"), op)
    reached = program.ahead([op.outs[0] for op in worst], program.is_backward)
    behind = dict.fromkeys(names[v] for v in reached if v in names)
    more = [name for name in behind if name not in gradients]
    first, *others = ((name, *_lost_shares(lossy[op])) for name, op in gradients.items())
    name, zero, small = first
    lost = f"{zero} of the nonzero entries behind the gradient of {name} to zero and makes {small} "
    lost += "subnormal"
    lost += "".join(f"; for {name} {zero} and {small}" for name, zero, small in others[: NAMED - 1])
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
    flushed, small = (_lost(counts, below=below) for below in (LIMITS.flush, LIMITS.normal))
    return f"{flushed:.0%}", f"{small - flushed:.0%}"


# ---- whose gradient it is -----------------------------------------------------------------------


def _gradients(program: Program) -> dict[Value, str]:
    """Returns the arguments whose gradients the backward pass ends with, by these cotangents."""
    ends, results = _ends(program), {*program.block.outvars}
    names = {}
    for v in (v for op in program.ops if program.is_backward(op) for v in op.outs):
        leaves = any(not program.is_backward(op) for op in program.readers(v))
        if leaves or not results.isdisjoint(program.forward(v, ())):
            entries = functools.partial(_entry_by_entry, v.size)
            found = (ends[each] for each in program.forward(v, entries) if each in ends)
            if name := next(found, ""):
                names[v] = name
    return names


def _nearest(program: Program, names: dict[Value, str]) -> dict[Value, str]:
    """Returns the nearest argument whose gradient depends on each cotangent."""
    nearest = {**names}

    def follow(value: Value) -> Iterator[Value]:
        for each in program.before(value, program.is_backward):
            nearest.setdefault(each, nearest[value])
            yield each

    all_reached(names, follow)
    return nearest


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
