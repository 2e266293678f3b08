"""Rules of sums and averages in 16 bits: over an array, in a loop, over steps, devices, or rows."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, short_name, shown, stalls_at
from mpjax._src.core.base.higher_order import SCAN, turns_of
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import (
    CHOSEN,
    SAME,
    Program,
    all_reached,
    anything,
    cases,
    walked,
)
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import alone, carried

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
    for loop, before, after in carries(program):
        if not is_half(before):
            continue
        share = share_of(program, after, before, products=False)
        op = last_sum(program, after)
        if share is None or share.factor != 1 or not share.terms or op is None:
            yield from _decaying(program, loop, after, before)
            continue
        dtype, turns = before.aval.dtype, turns_of(loop.eqn)
        grows = turns <= _limit(dtype, True) and (
            program.is_backward(op) or not share.terms.isdisjoint(_in_turns(program, loop, before))
        )
        if turns > _limit(dtype, grows):
            yield Hit(
                f"A loop of {turns} iterations carries a sum in {shown(before)}. Each iteration "
                f"rounds it to {digits(dtype)} binary digits, and late terms are lost.",
                op,
            )


def _in_turns(program: Program, loop: Op, value: Value) -> list[Value]:
    """Returns what the turns of a loop compute of a value of its body."""
    outside = {*loop.outs}

    def ahead(v: Value) -> Iterator[Value]:
        return (each for each in program.after(v, anything) if each not in outside)

    return all_reached([value], ahead)


def _decaying(program: Program, loop: Op, after: Value, before: Value) -> Iterator[Hit]:
    """Finds a carry ``c = d * c + x`` that sums more terms than half of the digits can count.

    With a constant d, the sum is that of the last 1 / (1 - d) terms: discounted returns and
    advantages, traces. Averages, whose weights sum to 1, have their own limit.
    """
    share = share_of(program, after, before)
    dtype, turns = before.aval.dtype, turns_of(loop.eqn)
    if share is None or not share.rest or not 0 < share.factor < 1 or stops(share, dtype):
        return
    step = 1 - share.factor
    # Weights that sum to about 1 are those of an average.
    if abs(share.rest - step) > step / 2 and min(turns, 1 / step) > _limit(dtype, False):
        yield Hit(
            f"A loop of {turns} iterations carries a sum in {shown(before)} that decays by "
            f"{share.factor:.4g}: a sum of the last {1 / step:.0f} terms. Each iteration rounds it "
            f"to {digits(dtype)} binary digits.",
            last_sum(program, after),
        )


def carries(program: Program) -> Iterator[tuple[Op, Value, Value]]:
    """Yields the loops with each value that they carry, as it comes in and as it goes out."""
    for loop in program.ops:
        if loop.inside.kind == SCAN:
            (inside,) = loop.subs
            body = inside.program
            yield from ((loop, body.invars[a], body.outvars[r]) for r, a in inside.carry)


def half_averages(program: Program) -> Iterator[Hit]:
    """Finds averages in 16 bits whose steps may be less than half an ulp.

    In the worst case, a step of ``m = d * m + (1 - d) * x`` is rounded away if
    ``|x - m| < 2**-digits / (1 - d)``, relative to m. It is a fault if this exceeds 1/8: d above
    0.97 in bfloat16, above 0.996 in float16. A first moment with d = 0.9 may be bfloat16.
    """
    pairs = [(each.before, each.after) for each in carried(program)]
    possible = [(each.before, each.after) for each in alone(program)]
    pairs += [(before, after) for _, before, after in carries(program)]
    for before, after in pairs + possible:
        share = share_of(program, after, before) if is_half(before) else None
        if share is None or not share.rest:
            continue
        step, dtype = 1 - share.factor, dtype_of(before)
        if (before, after) in possible and abs(share.rest - step) > step / 2:
            continue  # not an average: its weights do not sum to 1
        if stops(share, dtype):
            yield Hit(
                f"An average in {shown(before)} moves by {step:.3g} of its distance to the new "
                f"value. In {short_name(dtype)} it does not move where that distance is less than "
                f"{2.0 ** -digits(dtype) / step:.0%} of the average.",
                last_sum(program, after),
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


# ---- what a state becomes ------------------------------------------------------------------------

# The largest relative distance from its input at which an average may stop changing.
STUCK = 1 / 8

# Operations that a `Share` is followed through.
FOLLOWED = CHOSEN | rules.SUMS_OF_TWO | rules.PRODUCTS
# How many values are followed from a state to its next value; few are enough for averages.
FURTHEST = 300


class Share(NamedTuple):
    """The next value of a state as ``factor * state + rest * something``."""

    factor: float = 0.0  # the factor of the state
    rest: float = 0.0  # the factor of the added terms; 0 if there are none
    terms: frozenset[Value] = frozenset()  # the added terms


def last_sum(program: Program, after: Value) -> Op | None:
    """Returns the addition that produces a value, or what computes it if there is none."""
    sums = (op for op in program.makers(after, CHOSEN) if op.name in rules.SUMS_OF_TWO)
    return next(sums, program.maker(after))


def stops(share: Share, dtype: Any) -> bool:
    """Returns whether an average may stop changing in a dtype."""
    # A factor of 1 is a plain sum, which `half_accumulators` judges.
    return 0 < 1 - share.factor <= 2.0 ** -digits(dtype) / STUCK


def share_of(program: Program, after: Value, before: Value, products: bool = True) -> Share | None:
    """Returns the `Share` of a state in its next value, or None if it is not linear or unknown.

    Without ``products``, only sums are followed: whatever else is computed of the state is a term.
    """
    moved = _moved(program, after, before)
    share = _Reader(program, before, moved, products).read(after) if after in moved else None
    if not (products and share and share.rest and 0 < share.factor < 1):
        return share
    # An average. What is added may be computed of the state in a way that no share follows.
    ahead = walked([before], lambda v: program.after(v, anything))
    return None if any(v in share.terms for v in ahead) else share


def _moved(program: Program, after: Value, before: Value) -> set[Value]:
    """Returns what is computed of a state on the ways to its next value that a `Share` follows."""
    near = {*itertools.islice(walked([after], _followed(program.before)), FURTHEST)}
    ahead = _followed(program.after)
    return {*walked([before], lambda v: (each for each in ahead(v) if each in near))}


def _followed(step: Callable[..., Iterator[Value]]) -> Callable[[Value], Iterator[Value]]:
    return lambda value: step(value, lambda op: op.name in FOLLOWED)


@dataclasses.dataclass(eq=False)
class _Reader:
    """Reads values as the `Share` of a state."""

    program: Program
    state: Value
    moved: set[Value]  # what is computed of the state
    products: bool
    known: dict[Value, Share | None] = dataclasses.field(default_factory=dict)

    def read(self, value: Value) -> Share | None:
        if value not in self.known:
            self.known[value] = None  # computed from itself
            if len(self.known) < FURTHEST:
                self.known[value] = self._read(value)
        return self.known[value]

    def _read(self, value: Value) -> Share | None:
        op, term = self.program.maker(value), Share(rest=1.0, terms=frozenset([value]))
        if value is self.state:
            return Share(1.0)
        if value not in self.moved:
            # What is added: its factor is a number in (1 - d) * x, and 1 where none is seen.
            return (op and op.name in rules.PRODUCTS and self._product(op)) or term
        if op is not None and op.name in SAME and len(op.ins) == 1:
            return self.read(op.ins[0])
        if op is not None and op.name in rules.SUMS_OF_TWO:
            a, b = self.read(op.ins[0]), self.read(op.ins[1])
            sign = -1 if op.name == "sub" else 1
            if a is None or b is None:
                return None
            return Share(a.factor + sign * b.factor, a.rest + sign * b.rest, a.terms | b.terms)
        if not self.products:
            return term
        if op is None:
            # Several sources are the branches of a conditional, or the start of a carry and its
            # last iteration: one factor does not describe them.
            sources = self.program.sources(value)
            return self.read(sources[0]) if len(sources) == 1 else None
        if op.name in rules.PRODUCTS:
            return self._product(op)
        # A gate keeps the state in one branch: the one that adds counts.
        shares = [self.read(v) for v in cases(op)]
        return next((each for each in shares if each is None or each.rest), None)

    def _product(self, op: Op) -> Share | None:
        # The state itself may begin as a constant.
        fixed = [None if v in self.moved else v for v in op.ins]
        numbers = [v and self.program.number(v) for v in fixed]
        place = 1 if numbers[1] is not None else 0
        by = numbers[place]
        if by is None and op.name == "mul":
            # Discounted sums are multiplied by a mask such as 1 - done, whose largest number
            # counts: where nothing is masked.
            masks = [v and bounds_of(self.program, v) for v in fixed]
            parts = [(i, b.high) for i, b in enumerate(masks) if b and b.low == 0 < b.high <= 1]
            place, by = parts[0] if parts else (0, None)
        if not by or (op.name == "div" and place == 0):
            return None
        inner = self.read(op.ins[1 - place])
        times = 1 / by if op.name == "div" else by
        return inner and Share(inner.factor * times, inner.rest * times, inner.terms)
