"""The rule of running averages that stop changing in 16 bits."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from mpjax._src.core.base.dtypes import digits, dtype_of, is_half, short_name, shown
from mpjax._src.core.base.higher_order import SCAN
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import alone, carried

# The largest relative distance from its input at which an average may stop changing.
STUCK = 1 / 8

# How many values are followed from a state to its next value; few are enough for averages.
FURTHEST = 100


class Share(NamedTuple):
    """The next value of a state as ``factor * state + rest * something``."""

    factor: float  # the factor of the state
    rest: float = 0.0  # the factor of the added term; 0 if there is none


def half_averages(program: Program) -> Iterator[Hit]:
    """Finds averages in 16 bits whose steps may be less than half an ulp.

    In the worst case, a step of ``m = d * m + (1 - d) * x`` is rounded away if
    ``|x - m| < 2**-digits / (1 - d)``, relative to m. It is a fault if this exceeds 1/8: d above
    0.97 in bfloat16, above 0.996 in float16. A first moment with d = 0.9 may be bfloat16.
    """
    pairs = [(each.before, each.after) for each in carried(program)]
    possible = [(each.before, each.after) for each in alone(program)]
    for op in program.ops:
        if op.inside.kind == SCAN:
            (inside,) = op.subs
            body = inside.program
            pairs += [(body.invars[a], body.outvars[r]) for r, a in inside.carry]
    for before, after in pairs + possible:
        if not is_half(before):
            continue
        share = share_of(program, after, before)
        if share is None or not share.rest:
            continue
        step = 1 - share.factor
        if (before, after) in possible and abs(share.rest - step) > step / 2:
            continue  # not an average: its weights do not sum to 1
        if stops(share, dtype_of(before)):
            yield Hit(
                f"An average in {shown(before)} moves by {step:.3g} of its distance to the new "
                f"value. In {short_name(dtype_of(before))} it does not move where that distance is "
                f"less than {2.0 ** -digits(dtype_of(before)) / step:.0%} of the average.",
                last_sum(program, after),
            )


def last_sum(program: Program, after: Value) -> Op | None:
    """Returns the addition that produces a value, or what computes it if there is none."""
    before = program.makers(after, MOVES | CASTS | {"select_n"})
    sums = (op for op in before if op.name in ("add", "add_any", "sub"))
    return next(sums, program.maker(after))


Known = dict[Value, Share | None]


def share_of(program: Program, after: Value, before: Value) -> Share | None:
    """Returns the `Share` of a state in its next value, or None if it is not linear or unknown."""
    moved = {*program.forward(before, lambda op: True)}
    return _share(program, after, before, moved, {}) if after in moved else None


def stops(share: Share, dtype: Any) -> bool:
    """Returns whether an average may stop changing in a dtype."""
    # A factor of 1 is a plain sum, which `half_accumulators` judges.
    return 0 < 1 - share.factor <= 2.0 ** -digits(dtype) / STUCK


def _share(
    program: Program, value: Value, state: Value, moved: set[Value], shares: Known
) -> Share | None:
    """Returns the `Share` of a state in a value, or None if it is not linear or unknown."""
    if value not in shares:
        shares[value] = None  # computed from itself
        if len(shares) < FURTHEST:
            shares[value] = _sum_of_shares(program, value, state, moved, shares)
    return shares[value]


def _sum_of_shares(
    program: Program, value: Value, state: Value, moved: set[Value], shares: Known
) -> Share | None:
    if value is state:
        return Share(1.0)
    op = program.maker(value)
    if value not in moved:
        # What is added: its factor is a number in (1 - d) * x, and 1 where none is seen.
        scaled = (
            op is not None
            and op.name in ("mul", "div")
            and _product(program, op, state, moved, shares)
        )
        return scaled or Share(0.0, 1.0)
    if op is None:
        # Several sources are the branches of a conditional, or the start of a carry and its last
        # iteration: one factor does not describe them.
        sources = program.sources(value)
        return _share(program, sources[0], state, moved, shares) if len(sources) == 1 else None
    if op.name in CASTS | MOVES and len(op.ins) == 1:
        return _share(program, op.ins[0], state, moved, shares)
    if op.name in ("add", "sub", "add_any"):
        a, b = (_share(program, v, state, moved, shares) for v in op.ins)
        if a is None or b is None:
            return None
        sign = -1 if op.name == "sub" else 1
        return Share(a.factor + sign * b.factor, a.rest + sign * b.rest)
    if op.name in ("mul", "div"):
        return _product(program, op, state, moved, shares)
    if op.name == "select_n":  # a gate keeps the state in one branch: the branch that adds counts
        cases = [_share(program, v, state, moved, shares) for v in op.ins[1:]]
        return next((each for each in cases if each is None or each.rest), None)
    return None


def _product(
    program: Program, op: Op, state: Value, moved: set[Value], shares: Known
) -> Share | None:
    # The state itself may begin as a constant.
    number = [None if v in moved else program.number(v) for v in op.ins]
    place = 1 if number[1] is not None else 0
    by = number[place]
    if by is None and op.name == "mul":
        # Discounted sums are multiplied by a mask such as 1 - done, whose largest number counts.
        masks = [None if v in moved else bounds_of(program, v) for v in op.ins]
        parts = [(i, b.high) for i, b in enumerate(masks) if b and b.low == 0 < b.high <= 1]
        place, by = parts[0] if parts else (0, None)  # where nothing is masked
    if by is None or (op.name == "div" and place == 0):
        return None
    inner = _share(program, op.ins[1 - place], state, moved, shares)
    if inner is None or not by:
        return None
    times = 1 / by if op.name == "div" else by
    return Share(inner.factor * times, inner.rest * times)
