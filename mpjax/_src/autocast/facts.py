"""The second sweep of a plan, forwards: where values come from, and which fit into 16 bits.

A `Fact` is an element of a small lattice. It is computed from the facts of the operands and joined
where branches meet. Loops, also nested ones, are iterated to a fixpoint.

The rule of sums. If a state is rounded to 16 bits after each of n additions, the error is about
sqrt(n) rounding errors of the state, whatever the size of the terms. That is acceptable if

- the term comes from a residual block: it is computed from the state itself, by a matmul with
  weights that no earlier addition to this state used. The weights determine its size, and casts
  placed by hand round there too.
- there are at most `WRITES` other additions, which cost two roundings to 16 bits.

It is not acceptable if a term may be small compared with the state: a term scaled by less than
`STEP` or by an argument of unknown size, or a term added to an argument, which has not been rounded
yet. Such a sum is *exact*: it is never rounded for storage.
"""

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from mpjax._src.autocast.tables import (
    ADDED,
    BEYOND,
    BOUNDED,
    FITS,
    NOTHING,
    SUBTRACTED,
    Carries,
    Fact,
    Facts,
    Reason,
    Rulings,
    argument,
    join,
    union,
    why,
)
from mpjax._src.base import rules
from mpjax._src.base.dtypes import HALVES
from mpjax._src.base.higher_order import SCAN, WHILE, Inside, turns_of
from mpjax._src.program.graph import Block, Op, Value, is_float
from mpjax._src.program.views import before, is_view, own_axes

# sqrt(4) = 2 roundings to 16 bits: the error that autocast may add to that of the matmuls.
WRITES = 4

# Numbers of ordinary size, scaled by less than this, are close to float16's smallest numbers.
LEAST = 2.0**-10

EXPONENTIALS = ("exp", "exp2", "expm1")

# Rounding a state may cost four times as much as rounding the matmul behind the term.
STEP = 0.25


# A loop's facts that are not found after so many turns, and one for each carry, are forgotten.
TURNS = 16

# What may be true of any value.
FORGOTTEN: dict[str, Any] = {
    "half": False, "exact": True, "span": BEYOND, "writes": WRITES + 1, "scaled": True, "norm": "",
    "counts": True, "mask": False, "spread": False, "negative": False, "solved": True, "peak": 0,
    "made": -1, "chain": -1, "weights": -1, "shifted": True, "offset": ADDED | SUBTRACTED,
    "block": False, "level": -1, "mean": 0, "huge": True, "data": False,
}  # fmt: skip


class Sweep:
    """The sweep over a program. It numbers values, so that bit masks can represent sets of them."""

    def __init__(self, rulings: Rulings, small: set[Value]) -> None:
        self.rulings = Rulings(rulings)
        self.small = small
        self.facts = Facts()
        self.carries: Carries = {}
        self.numbers: dict[Hashable, int] = {}
        self.parted = 0  # states that are subtracted from later states of their stream
        self.most = 0  # the most turns of a loop until its facts were found
        self.held: set[Value] = set()  # carries that a reader may not read rounded

    def program_of(self, block: Block) -> None:
        """Computes the facts of a whole program: twice, if states of a stream are subtracted."""
        self.block(block)
        if self.parted:
            self.block(block)

    def hold(self, carries: set[Value], rulings: Rulings) -> bool:
        """Notes carries that have to be exact. Returns whether the facts have to be found again."""
        self.rulings |= rulings
        new = carries - self.held
        self.held |= new
        return bool(new)

    def bit(self, value: Hashable) -> int:
        """Returns the bit of a value, which is the same in every iteration to a fixpoint."""
        return 1 << self.numbers.setdefault(value, len(self.numbers))

    def block(self, block: Block) -> None:
        """Computes the facts of a block from those of its arguments."""
        for value, _ in block.consts:
            self.facts[value] = argument(self.bit(value))
        for op in block.ops:
            ruling = self.rulings[op]
            if op.subs and ruling.rule in ("program", "full", "follow"):
                self.program(op)
                continue
            terms = [v for v in op.ins if v.entries is None and (is_float(v) or self.facts[v].made)]
            constants = [v for v in op.ins if v.entries is not None]
            joined = join([self.facts[v] for v in terms or constants])
            transfer = TRANSFER[ruling.in_force]
            if (huge := _is_huge(op, joined.huge)) != joined.huge:
                joined = joined._replace(huge=huge)
            for out in op.outs:
                self.facts[out] = transfer(self, op, joined, out) if is_float(out) else joined

    def read(self, value: Value) -> Fact:
        """Returns the fact of a value as an operand."""
        if value.entries is None:
            return self.facts[value]
        largest = _largest(value)
        span = BOUNDED if largest <= 1 else FITS
        return self.facts[value]._replace(span=span, huge=largest > LARGEST)

    def program(self, op: Op) -> None:
        results: list[list[Fact]] = [[] for _ in op.outs]
        for sub in reversed(op.subs):  # a while loop's body before its condition
            for value, index in zip(sub.program.invars, sub.ins, strict=True):
                self.facts[value] = _handed(self.read(op.ins[index]), op.ins[index], value)
            if sub.carry:
                self.loop(op, sub)
            elif op.inside.kind == WHILE:
                self.condition(op, sub)
            else:
                self.block(sub.program)
            for value, place in zip(sub.program.outvars, sub.outs, strict=True):
                if place is not None:
                    results[place].append(_handed(self.read(value), value, op.outs[place]))
        inside = (self.rulings[o].why for sub in op.subs for o in sub.program.walk())
        if op.inside.backward and why(Reason.ENDS_LOOP) in inside:
            self.leave(op, Reason.REPEATS_LOOP)
        ruling = self.rulings[op]
        for out, facts in zip(op.outs, results, strict=True):
            # Any branch may run: the result is 16-bit only if all branches round it.
            half = bool(facts) and all(fact.half for fact in facts)
            self.facts[out] = join(facts)._replace(half=half)
            if "full" in (ruling.forced, ruling.rule):
                self.facts[out] = self.facts[out]._replace(half=False)
            if ruling.rule == "leave":
                self.facts[out] = self.facts[out]._replace(solved=True)

    def loop(self, op: Op, sub: Inside) -> None:
        """Iterates the body of a loop to a fixpoint, and decides which carries are 16-bit.

        A carry is 16-bit if a 16-bit operation computes it in every iteration and it is not an
        exact sum.
        """
        body = sub.program
        turns = turns_of(op.eqn) if op.inside.kind == SCAN else WRITES + 1
        carried = [(body.outvars[r], body.invars[a]) for r, a in sub.carry]
        anew = 0  # weights that differ in every iteration: slices that it gets or takes
        for position, value in enumerate(body.invars):
            bit = self.bit(value)
            self.facts[value] = self.facts[value]._replace(weights=self.facts[value].weights | bit)
            anew |= bit if position >= sub.consts else 0
        for _, value in carried:
            bit = self.bit(value)
            made = self.facts[value].made | bit
            chain = self.facts[value].chain | bit
            self.facts[value] = self.facts[value]._replace(
                half=False, made=made, chain=chain, shifted=False, block=False
            )
        bits = [self.bit(value) for _, value in carried]
        before = None
        # Facts only grow, up to a bound for each field. If a rule breaks that, they are forgotten.
        for turn in itertools.count():
            if before == (before := [self.facts[value] for _, value in carried]):
                break
            self.most = max(self.most, turn)
            self.block(body)
            if turn > TURNS + len(carried):
                self.facts |= {v: self.facts[v]._replace(**FORGOTTEN) for _, v in carried}
                self.block(body)
                break
            for inner in body.walk():
                if any(not v.is_f32 and self.facts[v].made for v in inner.ins) and _is_part(inner):
                    anew |= self.facts[inner.outs[0]].weights
            # A carry is a state if sums lead from it back to itself, over other carries too.
            states = _states(bits, [self.read(out).chain for out, _ in carried])
            for (out, value), bit in zip(carried, bits, strict=True):
                new, old = self.read(out), self.facts[value]
                writes = old.writes
                # As many in every iteration. A shift by a constant is a rounding too, if there is
                # no residual block, which rounds in any case.
                more = max(new.writes, writes + (new.shifted and not new.block))
                if states & bit and more > writes:
                    writes = more if more * turns <= WRITES else WRITES + 1
                many = writes > WRITES and bool(states & bit)
                exact = old.exact or new.exact or many or bool(self.parted & new.chain)
                # One that stops to be 16-bit stays float32: it may not come and go with the turns.
                exact |= value in self.held or (old.half and not new.half)
                self.facts[value] = join([old, new])._replace(
                    made=old.made,
                    half=new.half and not exact and value.is_f32,
                    exact=exact,
                    writes=writes,
                    weights=old.weights | new.weights & ~anew,
                    shifted=False,
                    block=False,
                )
        carries = {value for _, value in carried}
        self.carries[body] = tuple(v in carries and self.facts[v].half for v in body.invars)

    def condition(self, op: Op, sub: Inside) -> None:
        """Leaves a loop unchanged if it ends when matmuls meet a tolerance; 16-bit ones may not."""
        body = op.subs[1]
        inside = dict(zip(body.ins, body.program.invars, strict=True))
        for value, index in zip(sub.program.invars, sub.ins, strict=True):
            carried = inside.get(index)
            self.facts[value] = self.facts[carried] if carried else self.read(op.ins[index])
        self.block(sub.program)
        both = (*body.program.walk(), *sub.program.walk())
        matmuls = [o.outs[0] for o in both if o.spec.need == rules.HALF]
        if not matmuls:
            return
        matmul_bits = union(self.bit(v) for v in matmuls)
        compared = (o for o in sub.program.walk() if o.spec.need == rules.COMPARE)
        seen = union(self.facts[v].made for o in compared for v in o.ins if v.is_f32)
        verdicts = _verdicts_of_turns(self.facts, body)
        read = {v for o in sub.program.walk() for v in o.ins}.union(sub.program.outvars)
        for value, index in zip(sub.program.invars, sub.ins, strict=True):
            if value in read and index in inside:
                seen |= verdicts.get(inside[index], 0)
        for _ in body.carry:  # its values come from any earlier iteration
            for result, place in body.carry:
                if seen & self.bit(body.program.invars[place]):
                    seen |= self.facts[body.program.outvars[result]].made
        if seen & matmul_bits:
            self.leave(op, Reason.ENDS_LOOP)
        # It repeats the iterations of another loop, so it must make the same decisions in each.
        solved = any(self.facts[v].solved for v in sub.program.invars)
        if solved and matmul_bits & union(verdicts.values()):
            self.leave(op, Reason.REPLAYS_LOOP)

    def leave(self, op: Op, reason: Reason) -> None:
        """Leaves a program unchanged."""
        self.rulings[op] = self.rulings[op]._replace(rule="leave", why=why(reason))


def _verdicts_of_turns(facts: Facts, body: Inside) -> dict[Value, int]:
    """Returns the comparisons behind each value of a loop's body, over all earlier iterations."""
    block = body.program
    carried: dict[Value, int] = {}
    while True:
        verdicts = _verdicts(facts, block, carried)
        later = {
            block.invars[place]: verdicts.get(block.invars[place], 0)
            | verdicts.get(block.outvars[result], 0)
            for result, place in body.carry
        }
        if later == carried:
            return verdicts
        carried = later


def _verdicts(facts: Facts, block: Block, carried: dict[Value, int]) -> dict[Value, int]:
    """Returns, for each value that is not a float, the float32 values compared to compute it."""
    verdicts = dict(carried)
    for op in block.ops:
        verdict = union(verdicts.get(v, 0) for v in op.ins)
        if op.spec.need == rules.COMPARE and op.outs[0].aval.dtype == np.bool_:
            verdict |= union(facts[v].made for v in op.ins if v.is_f32)
        for sub in op.subs:
            verdict |= union(_verdicts(facts, sub.program, {}).values())
        for out in op.outs:
            if verdict and not is_float(out):
                verdicts[out] = verdict
    return verdicts


def _states(bits: Sequence[int], chains: Sequence[int]) -> int:
    """Returns the carries that are states: a chain of sums, over any iterations, leads back."""
    direct = dict(zip(bits, chains, strict=True))
    while True:
        further = {b: m | union(direct[o] for o in bits if m & o) for b, m in direct.items()}
        if further == direct:
            return union(b for b, mask in direct.items() if mask & b)
        direct = further


# ---- one operation ------------------------------------------------------------------------------


def _is_huge(op: Op, joined: bool) -> bool:
    """Returns whether a result contains constants beyond float16, if its operands do or not.

    It does if such a constant masks entries of an array, until they are scaled down, bounded or
    reduced to the largest one, or until the constant is subtracted again. Only elementwise
    operations and moves pass it on.
    """
    constants = [_largest(v) for v in op.ins if v.entries is not None]
    if not (joined or constants):
        return False
    constant = max(constants, default=0.0)
    if op.name in BOUNDS or (op.name == "sub" and joined and constant > LARGEST):
        return False
    if known_factor(op) < LEAST if constant else op.name == "div":
        return False
    return joined or (constant > LARGEST and op.name in MASKS)


LARGEST = float(np.finfo(np.float16).max)
BOUNDS = frozenset(["clamp", "max", "min", "reduce_max", "reduce_min"])
MASKS = frozenset(
    ["add", "sub", "mul", "select_n", "concatenate", "pad", "dynamic_update_slice", "scatter"]
)


def _largest(value: Value) -> float:
    """Returns the largest finite magnitude among the known entries of a value."""
    entries = np.abs(np.asarray(value.entries)).astype(np.float64)  # also of complex ones
    return float(np.max(entries[np.isfinite(entries)], initial=0))


def _half(sweep: Sweep, op: Op, joined: Fact, out: Value) -> Fact:
    if op.spec.need != rules.HALF:  # told to by the user
        return joined._replace(half=True, exact=False)
    bit = sweep.bit(out)
    own = union(sweep.facts[v].weights for v in op.ins if sweep.facts[v].given)
    return Fact(
        half=not any(sweep.facts[v].counts for v in op.ins),
        span=FITS,
        linear=joined.linear,
        made=joined.made | bit,
        chain=bit,
        weights=own or joined.weights,
    )


def _full(sweep: Sweep, op: Op, joined: Fact, out: Value) -> Fact:
    if op.spec.need == rules.FOLLOW:  # told to by the user
        return _follow(sweep, op, joined, out)._replace(half=False)
    span = max(joined.span, FITS)
    if joined.negative and op.name in EXPONENTIALS:
        span = BOUNDED
    elif op.spec.span != rules.KEEPS and op.spec.need != rules.HALF:  # a matmul is taken to fit
        span = BEYOND if op.spec.span == rules.GROWS else BOUNDED
    factor = joined.factor ** _power_of(op)
    if factor < LEAST:
        span = BEYOND
    inverse = op.name == "rsqrt" or (op.name == "integer_pow" and op.params["y"] < 0)
    return joined._replace(
        half=False,
        exact=False,
        span=span,
        factor=factor,
        writes=0,
        scaled=False,
        norm="scale" if inverse else "",
        mask=False,
        negative=False,
        solved=False,
        huge=False,
        peak=0,
        # What a mean subtracts, `level` says.
        offset=0 if span == BOUNDED or op.name == "reduce_sum" else joined.offset,
        spread=joined.spread and len(op.ins) == 1,
        level=_level_after(op, op.ins[0], joined.level) if op.ins else 0,
        mean=sweep.bit(op.ins[0]) if op.name == "reduce_sum" else 0,
    )


def _power_of(op: Op) -> int:
    """Returns the power to which a float32 op raises the factor that made its operand small."""
    if op.name == "integer_pow":
        return max(0, op.params["y"])
    return 2 if op.name == "square" else int(rules.REDUCES in op.spec.traits)


def _follow(sweep: Sweep, op: Op, joined: Fact, out: Value) -> Fact:
    joined = joined._replace(mask=False, counts=False, negative=False)
    if op.spec.gain_of(op.params) == rules.SUM:
        return _sum(sweep, op, joined, out)
    if op.spec.multiplies and len(op.ins) == 2:
        return _product(sweep, op, joined)
    if op.spec.linear:
        offset = joined.offset
        if op.name == "neg":
            offset = reversed_offset(_offset(sweep.facts, op.ins[0]))
        return joined._replace(peak=_peak(sweep.facts, op), offset=offset)
    span = BOUNDED if op.spec.span == rules.BOUNDED else joined.span
    return joined._replace(
        span=span, exact=False, solved=False, peak=0, huge=False,
        norm="scale" if op.name == "sqrt" else "",
        offset=0 if span == BOUNDED else joined.offset,
    )  # fmt: skip


def _peak(facts: Facts, op: Op) -> int:
    """Returns the values whose largest entry the result equals or exceeds.

    For a `select_n`, those that hold for all cases. A constant case is assumed never to be chosen
    (``where(isfinite(m), m, 0)``).
    """
    peaks = [facts[v].peak for v in op.ins if v.entries is None and is_float(v)]
    if op.name == "select_n":
        return functools.reduce(operator.and_, peaks) if peaks else 0
    return union(peaks) if op.name in NOT_BELOW else 0


NOT_BELOW = frozenset(["abs", "ceil", "max"])


def _sum(sweep: Sweep, op: Op, joined: Fact, out: Value) -> Fact:
    # ``x - max(x)``: at most zero.
    below = op.name == "sub" and sweep.facts[op.ins[1]].peak & sweep.bit(op.ins[0])
    span = max(joined.span, FITS)
    joined = joined._replace(span=span, norm="", peak=0, negative=bool(below))
    if any(_is_unknown_scalar(sweep.facts, v) for v in op.ins):
        joined = joined._replace(exact=True)
    level, centered = _level(sweep, op, out)
    offset = union(offsets(sweep.facts, op))
    joined = joined._replace(level=level, centered=centered, mean=0, offset=offset)
    terms = [sweep.facts[v] for v in op.ins if v.size == out.size and not _is_filled(v)]
    # A bias is no term of a sum of states: it shifts one.
    terms = [fact for fact in terms if not (fact.given and fact.spread)]
    if len(terms) < 2:
        constant = any(v.entries is not None and np.any(v.entries) for v in op.ins)
        scaled = joined.scaled and not constant
        norm = terms[0].norm if terms else ""
        return joined._replace(norm=norm, scaled=scaled, shifted=True)
    a, b = terms
    bit = sweep.bit(out)
    # Two states of one stream: their difference would be lost if either were rounded.
    if op.name == "sub" and a.chain != b.chain and not (a.spread or b.spread):
        sweep.parted |= a.chain & b.chain
    small = a.scaled != b.scaled  # if both terms are scaled, neither is the state
    block = not small and (_is_block(a, b) or _is_block(b, a))
    # An argument has all its digits, which a 16-bit term would have rounded.
    argument = (a.given and b.half) or (b.given and a.half)
    writes = max(a.writes, b.writes) if block else min(a.writes + b.writes + 1, WRITES + 1)
    exact = joined.exact or small or argument or writes > WRITES
    exact = exact and not joined.linear
    return joined._replace(
        half=joined.half and not exact,
        exact=exact,
        writes=writes,
        scaled=a.scaled and b.scaled,
        block=joined.block or block,
        made=joined.made | bit if joined.made else 0,
        chain=joined.chain | bit,
    )


def _level(sweep: Sweep, op: Op, out: Value) -> tuple[int, bool]:
    """Returns along which axes a term of a sum is constant, and whether it is subtracted again.

    A mean of this very array over these axes alone subtracts it.
    """
    large = _level_of_large(sweep.facts, op)
    small = [v for v in op.ins if v.size < out.size and not is_zero(v)]
    axes = union(_constant_axes(v, out) for v in small)
    taken = sweep.facts[small[0]] if op.name == "sub" and small == [op.ins[1]] else NOTHING
    if taken.mean & sweep.bit(op.ins[0]):
        return large & ~axes, not axes & ~large
    return large | axes, False


def _level_of_large(facts: Facts, op: Op) -> int:
    return union(facts[v].level for v in op.ins if v.size == op.outs[0].size)


def _handed(fact: Fact, source: Value, value: Value) -> Fact:
    """Returns the fact of a value that is another one, a slice of it or a stack of such values."""
    more = len(getattr(value.aval, "shape", ())) - len(getattr(source.aval, "shape", ()))
    if not (more and fact.level):
        return fact
    return fact._replace(level=fact.level << more if more > 0 else fact.level >> -more)


def _level_after(op: Op, first: Value, level: int) -> int:
    """Returns the axes after an op along which parts of the result have a constant term."""
    if not level:
        return 0
    if op.name == "stack":
        # The new axis comes between those before it and those after it.
        outer = level & ((1 << op.params["axis"]) - 1)
        return outer | (level ^ outer) << 1
    if op.name == "reduce_sum":
        left = [d for d in range(first.aval.ndim) if d not in op.params["axes"]]
        return union(1 << i for i, d in enumerate(left) if level >> d & 1)
    if not is_view(op):
        return level if first.aval.ndim == op.outs[0].aval.ndim else 0
    axes = before(op, own_axes(op.outs[0].aval.shape)) or ()
    places = [union(1 << place for place, *_ in axis) for axis in axes]
    # An axis that merges constant and other ones is not constant as a whole.
    others = union(there for d, there in enumerate(places) if not level >> d & 1)
    return union(there for d, there in enumerate(places) if level >> d & 1) & ~others


def _constant_axes(small: Value, large: Value) -> int:
    """Returns the axes along which a value is constant if it is read next to a larger one."""
    shape = small.aval.shape or (1,) * len(large.aval.shape)
    sizes = zip(shape, large.aval.shape, strict=True)
    return union(1 << axis for axis, (one, n) in enumerate(sizes) if one != n)


def offsets(facts: Facts, op: Op) -> list[int]:
    """Returns the `Fact.offset` of each term of a sum, or what a constant or argument adds."""
    signs = [_offset(facts, v) for v in op.ins]
    return [signs[0], reversed_offset(signs[1])] if op.name == "sub" else signs


def _offset(facts: Facts, value: Value) -> int:
    if value.entries is not None:
        signs = np.sign(np.real(value.entries))
        return (SUBTRACTED if np.all(signs <= 0) else ADDED) if np.any(signs) else 0
    return facts[value].offset or (ADDED if facts[value].given else 0)


def reversed_offset(offset: int) -> int:
    """Returns the signs of an offset after a change of sign."""
    return (offset & ADDED and SUBTRACTED) | (offset & SUBTRACTED and ADDED)


def is_zero(value: Value) -> bool:
    """Returns whether a value is a constant without other entries than zeros."""
    return value.entries is not None and not np.any(value.entries)


def _is_block(state: Fact, step: Fact) -> bool:
    """Returns whether a term comes from a residual block of the state that it is added to."""
    depends = step.made & state.chain and not state.made & step.chain
    return bool(depends and step.weights & ~state.weights)


def _is_filled(value: Value) -> bool:
    """Returns whether a value is a constant with a single number."""
    return value.entries is not None and np.size(value.entries) == 1


def _product(sweep: Sweep, op: Op, joined: Fact) -> Fact:
    terms = [v for v in op.ins if v.entries is None]
    # A statistic that scales an array, such as 1 / std, adds no constant term to it.
    level = _level_of_large(sweep.facts, op)
    joined = joined._replace(peak=0, level=level)
    if len(terms) < 2:
        return _product_with_constant(sweep, op, joined, terms)
    return _product_of_two(sweep, op, joined._replace(solved=False), terms)


def _product_with_constant(sweep: Sweep, op: Op, joined: Fact, terms: Sequence[Value]) -> Fact:
    factor, span = known_factor(op), joined.span
    smaller = min(1.0, factor) * min((sweep.facts[v].factor for v in terms), default=1.0)
    # float16 ends at 2**16: a bounded value may grow by 2**15, one of ordinary size by 2.
    if smaller < LEAST or factor > (2.0**15 if span == BOUNDED else 2):
        span = BEYOND
    signs = [np.all(np.asarray(v.entries) >= 0) for v in op.ins if v.entries is not None]
    negative = bool(terms and sweep.facts[terms[0]].negative and all(signs))
    offset = joined.offset if all(signs) else reversed_offset(joined.offset)
    inverse = op.name == "div" and op.ins[1].entries is None
    norm = "scale" if inverse else sweep.facts[terms[0]].norm if terms else ""
    mean = terms and terms[0] in sweep.small  # a sum of many terms
    scaled = joined.scaled or (factor < STEP and not mean)
    return joined._replace(
        span=max(span, FITS), scaled=scaled, norm=norm, negative=negative, factor=smaller,
        offset=offset, shifted=joined.shifted or factor != 1,
    )  # fmt: skip


def _product_of_two(sweep: Sweep, op: Op, joined: Fact, terms: Sequence[Value]) -> Fact:
    span = joined.span
    (a, b), divisor = (sweep.facts[v] for v in terms), op.name == "div"
    statistic = divisor and terms[1] in sweep.small
    if b.norm == "scale" or statistic or (a.norm == "scale" and not divisor):
        other = b if a.norm == "scale" else a
        norm = "scale" if other.given and {a.norm, b.norm} == {"scale", ""} else "unit"
        return joined._replace(span=FITS, exact=False, norm=norm, factor=1.0, offset=0)
    for arg, other, value in ((b, a, terms[1]), (a, b, terms[0])):
        if arg.given and not other.given:  # an argument: its size is not known
            known = arg.mask or other.norm
            data = not (arg.spread or known) and len({v.size for v in terms}) == 1
            return joined._replace(
                span=BEYOND if data else max(span, FITS),
                exact=joined.exact or _is_unknown_scalar(sweep.facts, value),
                scaled=other.scaled or not known,
                shifted=True,
                norm="",
                writes=other.writes,
                factor=other.factor,
            )
    factor = 1.0 if divisor else a.factor * b.factor
    if divisor or BOUNDED not in (a.span, b.span) or factor < LEAST:
        span = BEYOND
    # Each factor brings its own roundings, and the product one more.
    writes = min(a.writes + b.writes + 1, WRITES + 1)
    return joined._replace(span=span, norm="", exact=False, writes=writes, factor=factor, offset=0)


def _is_unknown_scalar(facts: Facts, value: Value) -> bool:
    """Returns whether a value is a scalar argument, such as an epsilon whose size is unknown."""
    return value.entries is None and facts[value].given and not facts[value].mask and value.is_one


def known_factor(op: Op) -> float:
    """Returns the constant factor of a product with one other operand, or 1."""
    constants = [v.entries for v in op.ins if v.entries is not None and np.size(v.entries)]
    factor = float(np.max(np.abs(constants[0]))) if len(constants) == 1 else 1.0
    if op.name == "div" and op.ins[1].entries is not None:
        return 1 / factor if factor else np.inf
    return factor


def _move(sweep: Sweep, op: Op, joined: Fact, out: Value) -> Fact:
    (first, *_) = [v for v in op.ins if is_float(v)] or [out]
    joined = joined._replace(level=_level_after(op, first, joined.level))
    if _is_part(op) and sweep.facts[first].given:
        index = tuple(str(v.entries) if v.entries is not None else v for v in op.ins[1:])
        part = str(sorted(op.params.items())), index, op.outs.index(out)
        return sweep.facts[first]._replace(weights=sweep.bit((sweep.facts[first].weights, part)))
    if rules.LOOKS_UP in op.spec.traits and sweep.facts[first].given:
        # As a matmul with one-hot rows would give it.
        bit = sweep.bit(out)
        return sweep.facts[first]._replace(made=bit, chain=bit, spread=False)
    if op.name == "reduce_max":
        joined = joined._replace(peak=sweep.bit(first))
    spread = joined.spread or (rules.SUMS_BACK in op.spec.traits and out.size > first.size)
    return joined._replace(spread=spread and len(op.ins) == 1)


def _is_part(op: Op) -> bool:
    """Returns whether an op takes one of a stack of weights, or a part of a weight."""
    one_row = rules.LOOKS_UP in op.spec.traits and all(n == 1 for n in op.ins[1].aval.shape[:-1])
    return rules.PART in op.spec.traits or one_row


def _cast(sweep: Sweep, op: Op, joined: Fact, out: Value) -> Fact:
    (value,) = op.ins
    dtype = getattr(value.aval, "dtype", np.dtype(np.float32))
    if value.is_f32 or not (dtype in HALVES or np.issubdtype(dtype, np.number)):
        mask = joined.mask or dtype == np.bool_
        return joined._replace(mask=mask, span=BOUNDED if dtype == np.bool_ else joined.span)
    integer = np.issubdtype(dtype, np.integer)
    counts = sweep.facts[value].counts or (integer and dtype.itemsize > 1)
    half = joined.half or (out.is_f32 and dtype == sweep.rulings[op].half)
    return joined._replace(half=half, counts=counts, span=FITS)


def _other(sweep: Sweep, op: Op, joined: Fact, out: Value) -> Fact:
    exact = rules.FROM_BITS in op.spec.traits
    bit = sweep.bit(out) if not joined.given else 0
    return joined._replace(
        half=False, exact=exact, span=FITS, norm="", scaled=False, writes=0, mask=False,
        made=joined.made | bit, solved=bool(op.subs), huge=False,
        level=_level_after(op, op.ins[0], joined.level) if op.ins else 0,
    )  # fmt: skip


TRANSFER: dict[str, Callable[[Sweep, Op, Fact, Value], Fact]] = {
    "half": _half,
    "full": _full,
    "follow": _follow,
    "layout": _move,
    "neutral": _other,
    "cast": _cast,
    "leave": _other,
    "written": _other,
    "program": _other,
}
