"""The third sweep of a plan, backwards: the demands that the readers of each value make on it.

A demand (`Want`) is an element of a small lattice, joined over all readers. Loops, also nested
ones, are iterated to a fixpoint. Layout operations pass on the demands of their own readers.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

from mpjax._src.autocast.facts import STEP, TURNS, WRITES, known_factor, offsets, reversed_offset
from mpjax._src.autocast.tables import (
    Analysis,
    Reason,
    Ruling,
    Rulings,
    Want,
    Wants,
    Why,
    both,
    joined,
    why,
)
from mpjax._src.base import _jax, rules
from mpjax._src.base.dtypes import FLOAT16, HALVES
from mpjax._src.base.higher_order import Inside
from mpjax._src.program.graph import Block, Op, Value, is_steady

# The demand of a reader that computes in float32, in 16 bits, or exactly in float32.
FULL = Want(half=False)
HALF = Want(full=False, outside=True)
EXACT = FULL._replace(needed=True)
# The demand at the end of an iteration, by whether the next iteration reads the carry in 16 bits.
CARRIED = {True: HALF._replace(half=False), False: EXACT._replace(returned=True)}
# The demand of a loop on the initial value of a carry, likewise.
TAKEN = {True: HALF._replace(half=False), False: FULL}
# All demands that go from one iteration to the one before.
ALL = Want(amplified=True, unrounded=True)


def ask(analysis: Analysis, block: Block, out_dtypes: Sequence[Any]) -> Analysis:
    """Collects the demands on every value of a program whose results have these dtypes."""
    analysis = dataclasses.replace(analysis, rulings=Rulings(analysis.rulings), wants=Wants())
    for place, (value, dtype) in enumerate(zip(block.outvars, out_dtypes, strict=True)):
        half = dtype in HALVES
        want = Want(full=not half, half=False, needed=not half, outside=half, returned=not half)
        read_by(analysis, value, place, want)
    demand(analysis, block)
    return analysis


def held_carries(analysis: Analysis, block: Block) -> set[Value]:
    """Returns the 16-bit carries whose rounding a reader would notice, in the loop or after it."""
    return {
        sub.program.invars[place]
        for op in block.walk()
        for sub in op.subs
        if sub.program in analysis.carries  # of a loop that is left alone, nothing is known
        for result, place in sub.carry
        if analysis.carries[sub.program][place]
        for read in (sub.program.invars[place], op.outs[sub.outs[result]])
        if analysis.wants[read].held
    }


def demand(analysis: Analysis, block: Block) -> None:
    """Collects the demands on every value, from the results backwards."""
    for op in reversed(block.ops):
        ruling = analysis.rulings[op]
        if ruling.rule == "program":
            for sub in reversed(op.subs):
                _program(analysis, op, sub)
            continue
        if (reason := _float32_matmul(analysis, op, ruling)) is not None:
            ruling = analysis.rulings[op] = ruling._replace(forced="full", why=reason)
        rule, want = ruling.in_force, _of_readers(analysis, op)
        passed_on = rule == "layout" or (rule == "cast" and op.outs[0].is_f32)
        want = want if passed_on else WANTS[rule](analysis, op, want)
        if rules.RANKS in op.spec.traits:  # rounding could make entries equal
            want = want._replace(whole=True)
        for place, value in enumerate(op.ins):
            if value.is_f32 and passed_on:
                analysis.wants[value] = both(analysis.wants[value], want)
            elif value.is_f32:
                own = _of_operand(analysis, op, value, want) if rule == "follow" else want
                read_by(analysis, value, (op, place), own)


def read_by(analysis: Analysis, value: Value, reader: object, want: Want) -> None:
    """Adds the demand of one reader."""
    analysis.wants[value] = both(analysis.wants[value], want._replace(readers=frozenset([reader])))


def all_in_full(analysis: Analysis, op: Op) -> bool:
    """Returns whether all readers of an op's results use float32, or one result is returned."""
    want = _of_readers(analysis, op)
    return want.full or want.returned


def _of_readers(analysis: Analysis, op: Op) -> Want:
    return joined([analysis.wants[out] for out in op.outs if out.is_f32])


# ---- one operation ------------------------------------------------------------------------------


def _full(analysis: Analysis, op: Op, readers: Want) -> Want:
    inside = [o for sub in op.subs for o in sub.program.walk()] or [op]
    amplified = any(o.spec.need == rules.FULL and o.spec.amplifies(o.params) for o in inside)
    needed = amplified or any(analysis.wants[out].needed for out in op.outs)
    phase = float(any(_is_phase(analysis, o) for o in inside))
    want = FULL._replace(needed=needed, amplified=amplified, phase=phase)
    if op.subs or op.spec.cost == rules.NEVER or rules.REDUCES in op.spec.traits:
        return want
    # An elementwise op passes an error on to its readers: log(1 - a**2).
    return want._replace(
        whole=readers.whole or readers.amplified,
        steep=readers.steep or not op.spec.steady_of(op.params),
    )


def _is_phase(analysis: Analysis, op: Op) -> bool:
    """Returns whether an op amplifies errors by much: a phase, a pole, a large exponential."""
    gain = op.spec.gain_of(op.params)
    growing = gain == rules.RANGE and not any(analysis.facts[v].negative for v in op.ins)
    return op.spec.need == rules.FULL and (gain == rules.UNBOUNDED or growing)


def _float32_matmul(analysis: Analysis, op: Op, ruling: Ruling) -> Why | None:
    """Returns the reason to compute a matmul in float32, or None.

    16 bits merge large integers, such as the positions in the angles of rotary embeddings. A
    contraction shorter than the depth of a matrix unit is no faster in 16 bits, so it stays in
    float32 if an operation amplifies its result and its operands are not 16-bit yet. A matmul
    with zeros and ones selects or sums entries of the other operand. If that is computed in
    float32, and float32 operations read the result, 16 bits would only round in between.
    Entries that are masked with a constant beyond the range of float16 would be infinite, and
    NaN if they are multiplied by zero.
    """
    if ruling.rule != "half" or ruling.forced or any(analysis.facts[v].linear for v in op.ins):
        return None
    if ruling.half == FLOAT16 and any(analysis.facts[v].huge for v in op.ins):
        return why(Reason.LOST)
    if op.name != "dot_general":
        return None
    if any(analysis.facts[v].counts for v in op.ins):
        return why(Reason.POSITIONS, ruling.half.name)
    (contracting, _), _ = op.params["dimension_numbers"]
    depth = _jax.size_of([op.ins[0].aval.shape[d] for d in contracting])
    want = analysis.wants[op.outs[0]]
    if want.beside and want.amplified:
        return why(Reason.SOLUTION)
    short = (depth == 1 and want.amplified) or (depth <= SHORT and want.phase > STEP)
    if short and not any(analysis.facts[v].half for v in op.ins):
        return why(Reason.SHORT_SUM)
    others = [v for v in op.ins if not analysis.facts[v].mask]
    computed = not any(analysis.facts[v].half or v.given or analysis.is_raw(v) for v in others)
    if len(others) == 1 and computed and (want.full or want.returned):
        return why(Reason.SELECTS)
    return None


# Matrix units add up at least this many products at once (a V100 four, later ones more).
SHORT = 4


def _follow(analysis: Analysis, op: Op, readers: Want) -> Want:
    full = readers.full or readers.returned
    return Want(
        full=full or wide_inside(analysis, op) is not None,
        half=False,
        needed=readers.needed and full,
        amplified=readers.amplified,
        phase=readers.phase * (known_factor(op) if op.spec.multiplies else 1.0),
        whole=readers.whole or _sees_rounding(analysis, op, readers),
        steep=readers.steep,
        kink=rules.KINKED in op.spec.traits and not full,
    )


def _sees_rounding(analysis: Analysis, op: Op, readers: Want) -> bool:
    """Returns whether an op must read unrounded float32 values computed from a 16-bit matmul.

    There are three cases. A difference before a pole (``sqrt(1 - sigmoid(x))``): rounding may make
    its terms equal, and the slope is then infinite. A difference that subtracts most of an operand:
    of parts of one array (``x[1:] - x[:-1]``), of two states of one stream, or of an array and a
    mean that contains one of its terms. A function that jumps (``x - floor(x)``).
    """
    if op.spec.gain_of(op.params) == rules.SUM and len(op.ins) == 2:
        subtracts = rules.SUBTRACTS in op.spec.traits
        apart = subtracts and (readers.steep or _is_of_parts(analysis, op))
        return apart or analysis.facts[op.outs[0]].centered or _takes_off(analysis, op)
    return rules.JUMPS in op.spec.traits


def _takes_off(analysis: Analysis, op: Op) -> bool:
    """Returns whether a sum may subtract what was added before: ``(273 + 10 * h) - 273``."""
    one, other = offsets(analysis.facts, op)
    return bool(one & reversed_offset(other))


def _is_of_parts(analysis: Analysis, op: Op) -> bool:
    """Returns whether the operands are states of one chain of sums, or parts of one array."""
    one, other = (analysis.facts[v] for v in op.ins)
    same_size = op.ins[0].size == op.ins[1].size
    return bool(one.chain & other.chain) and same_size and not (one.spread or other.spread)


def wide_inside(analysis: Analysis, op: Op) -> Why | None:
    """Returns the reason to compute an elementwise op in float32 even for 16-bit operands, or None.

    The derivative of some special functions is computed from the result, which rounding would
    damage. Other derivatives, such as that of ``x / (1 + |x|)``, are differences of nearly equal
    terms, which rounding of the terms would destroy.
    """
    if op.spec.need != rules.FOLLOW or op.subs:
        return None
    if op.spec.cost == rules.DEAR:
        return why(Reason.SPECIAL)
    if rules.FLATTENS not in op.spec.traits:
        return None
    # Values from the same matmul vary together.
    same = functools.reduce(operator.and_, (analysis.facts[v].made for v in op.ins))
    return why(Reason.FLATTENS) if same else None


def _of_operand(analysis: Analysis, op: Op, value: Value, want: Want) -> Want:
    """Adds the demands of an elementwise op on one operand that depend on its other operands."""
    return want._replace(
        outside=not want.full and any(analysis.facts[v].half for v in op.ins if v is not value),
        steep=want.steep or _is_steep(op, value),
        unrounded=_multiplies_a_state(analysis, op, value),
        beside=_is_beside(analysis, op, value),
    )


def _is_steep(op: Op, value: Value) -> bool:
    """Returns whether the slope of an op is unbounded near some operand."""
    inside = [(o, v) for sub in op.subs for o in sub.program.walk() for v in o.ins]
    return not all(is_steady(o, v) for o, v in inside or [(op, value)])


def _multiplies_a_state(analysis: Analysis, op: Op, value: Value) -> bool:
    """Returns whether a value decays a float32 state: h = a * h + b keeps 1 / (1 - a) steps.

    Rounding an ``a`` close to 1 to 16 bits would change the decay. States that only 16-bit
    operations read are excepted.
    """
    product = op.spec.multiplies
    states = [v for v in op.ins if analysis.facts[v].exact and analysis.facts[v].writes > WRITES]
    if product and any(v is not value for v in states) and not analysis.wants[op.outs[0]].half:
        return True
    return (product or op.name == "neg") and any(analysis.wants[out].unrounded for out in op.outs)


def _is_beside(analysis: Analysis, op: Op, value: Value) -> bool:
    """Returns whether a value is added to the result of a loop that runs unchanged.

    Such a loop solves an equation in float32. The sum may cancel, so the value must be as accurate.
    """
    linear = op.spec.linear or sum(v.entries is None for v in op.ins) == 1
    adds = op.spec.gain_of(op.params) == rules.SUM
    meets = adds and any(analysis.facts[v].solved for v in op.ins if v is not value)
    return meets or (linear and any(analysis.wants[out].beside for out in op.outs))


def _cast(analysis: Analysis, op: Op, readers: Want) -> Want:
    # A cast to an integer or float64 reads every bit.
    return HALF if op.outs[0].aval.dtype in HALVES else EXACT._replace(whole=True)


# The demands of an op on its operands, by its rule and the demands of its own readers.
WANTS: dict[str, Callable[[Analysis, Op, Want], Want]] = {
    "half": lambda analysis, op, readers: HALF,
    "full": _full,
    "follow": _follow,
    "neutral": lambda analysis, op, readers: FULL,
    "cast": _cast,
    "leave": lambda analysis, op, readers: EXACT,
    "written": lambda analysis, op, readers: EXACT,
}


# ---- programs -----------------------------------------------------------------------------------


def _program(analysis: Analysis, op: Op, sub: Inside) -> None:
    """Passes demands into a sub-program and out of it, for loops until they do not change."""
    block, carried, wants = sub.program, dict(sub.carry), analysis.wants
    in_half = analysis.carries.get(block, ())
    # Demands only grow, and of each carry two go through the turns. If a rule breaks that, all do.
    for turn in itertools.count():
        forgotten = turn > TURNS + 2 * len(carried)
        # A carry is read twice: by the next iteration, and after the last one.
        for position, (value, index) in enumerate(zip(block.outvars, sub.outs, strict=True)):
            reader = op, position, "result"
            if position in carried:
                place = carried[position]
                later = ALL if forgotten else _through_turns(wants[block.invars[place]])
                read_by(analysis, value, reader, both(CARRIED[in_half[place]], later))
            elif index is not None:
                wants[value] = both(wants[value], wants[op.outs[index]])
            else:
                read_by(analysis, value, reader, FULL)
        wanted = [wants[v] for v in block.outvars]
        if wants.results.get(block) == wanted:  # they did not change
            break
        wants.results[block] = wanted
        demand(analysis, block)
        if forgotten:
            break
    for position, (value, index) in enumerate(zip(block.invars, sub.ins, strict=True)):
        if position in carried.values():
            read_by(analysis, op.ins[index], (op, position), TAKEN[in_half[position]])
        else:
            wants[op.ins[index]] = both(wants[op.ins[index]], wants[value])


def _through_turns(want: Want) -> Want:
    """Returns the demands of the next iteration on a loop carry.

    The phase is left out: it would grow without bound by the factor of each iteration.
    """
    return Want(amplified=want.amplified, unrounded=want.unrounded)
