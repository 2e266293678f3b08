"""Rules of sums in 16 bits: over an array, in a loop, over devices, into the rows of a table."""

import math
from collections.abc import Iterator
from typing import Any

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, short_name, shown, stalls_at
from mpjax._src.core.base.higher_order import turns_of
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.averages import carries, last_sum, share_of, stops
from mpjax._src.tools.lint.program import Program, anything
from mpjax._src.tools.lint.rule import Hit

# Reductions with a program of their own, which may compute anything.
GENERAL = ("reduce", "reduce_window")
SUMS = ("reduce_sum", "cumsum", "cumlogsumexp", "reduce_window_sum", *GENERAL)


def half_sums(program: Program) -> Iterator[Hit]:
    """Finds sums of more terms than 16 bits can count.

    A running sum of n equal terms stops growing at n = 2**digits: 256 in bfloat16, 2048 in float16.
    Sums that JAX derives for a broadcast (the gradient of a bias) are not written by the user, and
    compilers compute them in at least two levels, so their limit is the square of that.
    """
    for op in program.named(*SUMS):
        value = op.ins[0]
        if not (is_half(value) and is_half(op.outs[0]) and _adds(op)):
            continue
        terms = _terms(op)
        limit = stalls_at(value.aval.dtype)
        if terms > (limit**2 if program.is_backward(op) else limit):
            yield Hit(
                f"{op.name} adds {terms} terms of {shown(value)} in "
                f"{short_name(value.aval.dtype)}, where a running sum of equal terms stops growing "
                f"after {limit}.",
                op,
            )


def _adds(op: Op) -> bool:
    program = op.params.get("jaxpr")
    if op.name not in GENERAL or program is None:
        return True
    eqns = getattr(program, "jaxpr", program).eqns
    return len(eqns) == 1 and eqns[0].primitive.name in rules.ADDITIONS


def _terms(op: Op) -> int:
    """Returns the number of entries that are summed to one."""
    if op.name.startswith("cum"):
        return int(op.ins[0].aval.shape[op.params["axis"]])
    if "window_dimensions" in op.params:
        return math.prod(map(int, op.params["window_dimensions"]))
    before, after = (_jax.size_of(v.aval.shape) for v in (op.ins[0], op.outs[0]))
    return before // max(1, after)


def _limit(dtype: Any, grows: bool) -> float:
    """Returns how many terms may be added: until a sum stops growing, or half of its digits go."""
    return stalls_at(dtype) if grows else 2 ** (digits(dtype) / 2)


def half_accumulators(program: Program) -> Iterator[Hit]:
    """Finds sums that a loop carries in 16 bits.

    If the added term does not depend on the sum (gradients over micro-batches, a metric), the sum
    is an accumulator. n iterations lose log2(n) of its significant bits, and the limit is half of
    them: 16 iterations in bfloat16, 46 in float16. If it depends on the sum (residual blocks, whose
    terms are as large as the sum), or JAX derived the sum, the limit is 2**digits, where such a sum
    stops growing. A sum that decays counts as many terms as it remembers.
    """
    for loop, carried, returned in carries(program):
        if not is_half(carried):
            continue
        share = share_of(program, returned, carried, products=False)
        op = last_sum(program, returned)
        if share is None or share.factor != 1 or not share.terms or op is None:
            yield from _decaying(program, loop, returned, carried)
            continue
        depends = any(carried in program.back(v, anything) for v in share.terms)
        dtype, turns = carried.aval.dtype, turns_of(loop.eqn)
        if turns > _limit(dtype, depends or program.is_backward(op)):
            yield Hit(
                f"A loop of {turns} iterations carries a sum in {shown(carried)}. Each iteration "
                f"rounds it to {digits(dtype)} binary digits, and late terms are lost.",
                op,
            )


def _decaying(program: Program, loop: Op, out: Value, carried: Value) -> Iterator[Hit]:
    """Finds a carry ``c = d * c + x`` that sums more terms than half of the digits can count.

    With a constant d, the sum is that of the last 1 / (1 - d) terms: discounted returns and
    advantages, traces. Averages, whose weights sum to 1, have their own limit.
    """
    share = share_of(program, out, carried)
    dtype, turns = carried.aval.dtype, turns_of(loop.eqn)
    if share is None or not share.rest or not 0 < share.factor < 1 or stops(share, dtype):
        return
    step = 1 - share.factor
    # Weights that sum to about 1 are those of an average.
    if abs(share.rest - step) > step / 2 and min(turns, 1 / step) > _limit(dtype, False):
        yield Hit(
            f"A loop of {turns} iterations carries a sum in {shown(carried)} that decays by "
            f"{share.factor:.4g}: a sum of the last {1 / step:.0f} terms. Each iteration rounds it "
            f"to {digits(dtype)} binary digits.",
            last_sum(program, out),
        )


def half_collectives(program: Program) -> Iterator[Hit]:
    """Finds sums over devices in 16 bits, where each device rounds its partial sum.

    The usual case is gradients: an average over replicas is small relative to its terms if they
    cancel.
    """
    for op in program.named(*rules.ALL_SUMS):
        value = op.ins[0]
        if is_half(value):
            axes = op.params.get("axes", op.params.get("axis_name", ()))
            names = ", ".join(map(repr, axes if isinstance(axes, tuple) else (axes,)))
            yield Hit(
                f"{op.name} over {names} sums {shown(value)} over devices in "
                f"{short_name(value.aval.dtype)}.",
                op,
            )


def half_scatters(program: Program) -> Iterator[Hit]:
    """Finds scatter-adds that add to a 16-bit row more often than 16 bits can count.

    If n updates go to m rows, some row gets at least n / m of them, whatever the indices are. In a
    scatter that the user wrote, half of the significant bits may be lost, as for accumulators (16
    updates in bfloat16, 46 in float16). In the gradient of a lookup, which JAX derives, the limit
    is 2**digits, where a row stops growing.
    """
    for op in program.named("scatter-add", "scatter-sub"):
        value = op.ins[0]
        if not is_half(value):
            continue
        # The last axis of JAX's scatter indices has the coordinates of one update.
        updates = math.prod(op.ins[1].aval.shape[:-1])
        # Along axes that the indices do not choose, an update adds to all entries.
        chosen = op.params["dimension_numbers"].scatter_dims_to_operand_dims
        rows = math.prod(value.aval.shape[axis] for axis in chosen)
        terms = updates / max(1, rows)
        if terms > _limit(dtype_of(value), program.is_backward(op)):
            yield Hit(
                f"{op.name} adds {updates} updates to {rows} rows of {shown(value)}: at least "
                f"{terms:.0f} of them to one row, in 16 bits.",
                op,
            )
