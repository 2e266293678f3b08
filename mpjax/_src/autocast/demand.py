"""What the readers of every value want of it: the third sweep of a plan, backwards."""

from collections.abc import Callable

from mpjax._src import _jax, rules
from mpjax._src.autocast.facts import STEP, WRITES, known_factor
from mpjax._src.autocast.graph import Block, Op, Value
from mpjax._src.dtypes import HALVES


def read_by(
    value: Value,
    full=True,
    needed=False,
    outside=False,
    returned=False,
    readers=1,
    only_half=False,
    amplified=False,
    phase=0.0,
    unrounded=False,
):
    value.readers += readers
    value.amplified |= amplified
    value.phase = max(value.phase, phase)
    value.unrounded |= unrounded
    value.all_full &= full
    value.needed |= needed
    value.outside |= outside
    value.returned |= returned
    value.only_half &= only_half


def demand(block: Block) -> None:
    """Collects what the readers of every value want, from the results back."""
    for op in reversed(block.ops):
        DEMAND[op.forced or op.rule](op)


def _want_full(op: Op) -> None:
    inside = [o for sub in op.subs for o in sub.block.walk()] or [op]
    amplifies = any(o.spec.need == rules.FULL and o.spec.amplifies(o.params) for o in inside)
    needed = amplifies or any(out.needed for out in op.outs)
    phase = float(any(_is_phase(o) for o in inside))
    for value in op.ins:
        read_by(value, full=True, needed=needed, amplified=amplifies, phase=phase)


def _is_phase(op: Op) -> bool:
    """Tells what amplifies by much: a phase, a pole, an exponential that may be large."""
    gain = op.spec.gain_of(op.params)
    growing = gain == rules.RANGE and not any(v.fact.negative for v in op.ins)
    return op.spec.need == rules.FULL and (gain == rules.UNBOUNDED or growing)


def _want_half(op: Op) -> None:
    if (reason := _float32_for_free(op)) is not None:
        op.forced, op.reason = "full", reason
        return _want_full(op)
    for value in op.ins:
        read_by(value, full=False, outside=True, only_half=True)


def _float32_for_free(op: Op) -> str | None:
    """Returns why a matmul had better be float32, if half would gain nothing and lose much.

    A matmul of integers, as rotary embeddings spell their angles, would merge them. A contraction
    shorter than what a matrix unit multiplies at once is no faster in half; where an operation
    amplifies its result, and its operands are not half yet, nothing speaks for it.
    """
    if op.forced or op.name != "dot_general" or any(v.fact.linear for v in op.ins):
        return None
    if any(v.fact.counts for v in op.ins):
        return f"positions or the like, which {op.half.name} would merge"
    (contracting, _), _ = op.params["dimension_numbers"]
    depth = _jax.size_of([op.ins[0].aval.shape[d] for d in contracting])
    (out,) = op.outs
    short = (depth == 1 and out.amplified) or (depth <= SHORT and out.phase > STEP)
    if short and not any(v.fact.half for v in op.ins):
        return "a short sum whose error a float32 operation would amplify"
    return None


# Matrix units add up at least this many products at once (a V100 four, later ones more).
SHORT = 4


def _want_original(op: Op) -> None:
    for value in op.ins:
        read_by(value, full=True, needed=True)


def _want_any(op: Op) -> None:
    for value in op.ins:
        read_by(value)


def _want_follow(op: Op) -> None:
    floats = [out for out in op.outs if out.is_f32]
    full = all(out.all_full for out in floats)
    op.full_by_readers = full or any(out.returned for out in floats)
    needed = any(out.needed for out in floats)
    kinked = rules.KINKED in op.spec.traits and not op.full_by_readers
    for value in op.ins:
        value.before_kink |= kinked
        beside_half = any(v.fact.half for v in op.ins if v is not value)
        read_by(
            value,
            op.full_by_readers,
            needed,
            outside=not op.full_by_readers and beside_half,
            amplified=any(out.amplified for out in floats),
            phase=max(out.phase for out in floats) * _factor(op) if floats else 0.0,
            unrounded=_multiplies_a_state(op, value),
        )


def _multiplies_a_state(op: Op, value: Value) -> bool:
    """Tells whether a value decays a float32 state: h = a * h + b keeps 1 / (1 - a) steps.

    Rounded to half, an ``a`` close to one would be another one.
    """
    product = op.spec.multiplies
    states = [v for v in op.ins if v.fact.exact and v.fact.writes > WRITES]
    if product and any(v is not value for v in states):
        return True
    return (product or op.name == "neg") and any(out.unrounded for out in op.outs)


def _factor(op: Op) -> float:
    """Returns the known factor of a product, 1 of anything else."""
    return known_factor(op) if op.spec.multiplies else 1.0


def _want_same(op: Op) -> None:
    """Layout: its readers are the readers of its operands."""
    floats = [out for out in op.outs if out.is_f32]
    for value in op.ins:
        if not value.is_f32:
            continue
        for out in floats:
            _pass_on(value, out)


def _pass_on(value: Value, reader: Value) -> None:
    if reader.readers:
        read_by(
            value,
            reader.all_full,
            reader.needed,
            reader.outside,
            reader.returned,
            reader.readers,
            reader.only_half,
            reader.amplified,
            reader.phase,
            reader.unrounded,
        )


def _want_cast(op: Op) -> None:
    value, out = op.ins[0], op.outs[0]
    if not value.is_f32:
        return
    if out.is_f32:
        _pass_on(value, out)
    elif out.aval.dtype in HALVES:
        read_by(value, full=False, outside=True, only_half=True)
    else:  # to an integer, a float64: every bit counts
        read_by(value, full=True, needed=True)


def _want_program(op: Op) -> None:
    for sub in reversed(op.subs):
        block = sub.block
        carried = dict(sub.carry)
        for position, (value, index) in enumerate(zip(block.outvars, sub.outs, strict=True)):
            if position in carried and not block.carries[carried[position]]:
                read_by(value, full=True, needed=True, returned=True)
            elif position in carried:
                read_by(value, full=False, outside=True)
            elif index is not None:
                _pass_on(value, op.outs[index])
            else:
                read_by(value)
        demand(block)
        for position, (value, index) in enumerate(zip(block.invars, sub.ins, strict=True)):
            if position not in carried.values():
                _pass_on(op.ins[index], value)
            elif block.carries and block.carries[position]:
                read_by(op.ins[index], full=False, outside=True)
            else:
                read_by(op.ins[index], full=True)


DEMAND: dict[str, Callable[[Op], None]] = {
    "half": _want_half,
    "full": _want_full,
    "follow": _want_follow,
    "layout": _want_same,
    "neutral": _want_any,
    "cast": _want_cast,
    "program": _want_program,
    "leave": _want_original,
    "written": _want_original,
}
