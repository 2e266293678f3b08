"""Rules of probabilities and other saturating functions that have 16 bits where more are read.

A saturating function maps a wide range to a short one, so its rounding costs more than that of its
operand: sinh(2 z) / (2 z) times as much for tanh(z), 7 times at z = 2. Near its bound, numbers that
differ become equal. That matters only to what reads differences: a logarithm or quotient at the
bound, a difference of two such values, an order, an exponential of a multiple.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Set

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import FLOAT16, digits, dtype_of, is_float, is_half, shown
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.bounds import bounds_of
from mpjax._src.tools.lint.casts import ROUND, narrows
from mpjax._src.tools.lint.losses import (
    ABS,
    ADDS,
    AVERAGED,
    DIVIDES,
    EXPONENTIALS,
    SIGMOIDS,
    SUMMED,
    WHOLE,
    is_square,
    root_of,
    squares,
    weights,
)
from mpjax._src.tools.lint.program import CHOSEN as SELECTED
from mpjax._src.tools.lint.program import SAME as MOVED
from mpjax._src.tools.lint.program import Program, all_reached, cases, noted
from mpjax._src.tools.lint.rule import Hit

# What an op list or a region makes 16-bit is rounded once more, so that no compiler widens it.
SAME, CHOSEN = MOVED | {ROUND}, SELECTED | {ROUND}
SQUASHES = frozenset(
    rules.names_where(lambda r: (r.span, r.gain) == (rules.BOUNDED, rules.ONE) and not r.linear)
)
DIFFERENCES = rules.SUMS_OF_TWO - rules.ADDITIONS
LOGS = rules.LOGARITHMS | {"log1p"}
# Operations that keep what is near to a bound there: they limit, shift or choose.
LIMITS = frozenset(rules.names_where(lambda r: rules.KINKED in r.traits and r.need == rules.FOLLOW))
SHIFTS = SAME | rules.ADDITIONS | LIMITS | {"neg"}
# Operations between a difference and the number or the figures that it is averaged to.
JUDGED = AVERAGED | LIMITS | rules.EXTREMES | rules.SQUARES | rules.ROOTS | rules.LOGARITHMS
RANKS = rules.having(rules.RANKS) | {"approx_top_k"}
SUMS = frozenset({"cumsum"})
NOISE = CHOSEN | rules.SUMS_OF_TWO | rules.PRODUCTS | LIMITS | {"neg"}

Behind = Callable[[Value], list[Op]]


# ---- what is a probability -----------------------------------------------------------------------


@noted
def shares(program: Program) -> set[Op]:
    """Returns the operations that make probabilities: sigmoids and softmaxes, also by hand."""
    found = {op for op in program.named(*DIVIDES) if _normalizes(program, op)}
    logs = log_shares(program)
    for op in program.named(*rules.EXPONENTIALS):
        if not logs.isdisjoint(program.makers(op.ins[0], SAME)):
            found.add(op)
    return found


def _normalizes(program: Program, op: Op) -> bool:
    """Returns whether an operation divides an exponential, or 1, by a sum with exponentials."""
    if op.name in SIGMOIDS:
        return True
    below = program.makers(op.ins[1], SUMMED)
    exps = {each for each in below if each.name in rules.EXPONENTIALS}
    if not exps or not any(each.name in ADDS | rules.ADDITIONS for each in below):
        return False
    same = program.makers(op.ins[0], SAME)
    return program.number(op.ins[0]) is not None or not exps.isdisjoint(same)


@noted
def log_shares(program: Program) -> set[Op]:
    """Returns the subtractions that make log-probabilities: of the log of a sum of exponentials."""

    def of_exponentials(log: Op) -> bool:
        names = {each.name for each in program.makers(log.ins[0], SUMMED)}
        return bool(names & ADDS and names & rules.EXPONENTIALS)

    logs = program.named(*rules.LOGARITHMS)
    return {
        reader
        for log in filter(of_exponentials, logs)
        for v in program.forward(log.outs[0], SAME | rules.ADDITIONS)
        for reader in program.readers(v)
        if reader.name in DIFFERENCES
    }


def _rounded(behind: Behind, value: Value, of: Set[Op]) -> Op | None:
    """Returns what rounds to 16 bits on the way from some operations to a value, or None."""
    ops = behind(value)
    for op in ops:
        if op in of and is_half(op.outs[0]):
            return op
    return next((op for op in ops if narrows(op) and not {*behind(op.ins[0])}.isdisjoint(of)), None)


def _through(program: Program, names: Collection[str] | Callable[[Op], bool]) -> Behind:
    return lambda value: program.makers(value, names)


def _is_mask(program: Program, value: Value) -> bool:
    """Returns whether a value is 0 or 1 in each entry."""
    bounds = bounds_of(program, value)
    return bounds is not None and bounds == (0, 1, True)


def _picks(program: Program, op: Op) -> bool:
    """Returns whether an operation multiplies by a number or by a mask."""
    if op.name not in rules.PRODUCTS:
        return False
    by = op.ins[1:] if op.name in DIVIDES else op.ins
    return any(program.number(v) is not None or _is_mask(program, v) for v in by)


# ---- logarithms and quotients --------------------------------------------------------------------


def rounded_probabilities(program: Program) -> Iterator[Hit]:
    """Finds probabilities that were rounded to 16 bits before their differences are read.

    A logarithm or reciprocal has a pole at 0, and a probability below 6e-8 is 0 in float16; an
    epsilon that is added does not restore what was lost. bfloat16 has the range, but of a
    probability above 1/2 the distance to 1 has an error of 2**-9: its logarithm is a fault in a
    loss, and a pole at 1 is one anywhere. So is a difference of two probabilities that is averaged,
    because they are nearly equal where it matters; the exponential of a difference of rounded
    log-probabilities; an order of probabilities, since those whose logits differ by less than 2**-8
    in bfloat16 are equal, and all above 1 - 2**-9; and a sum that is compared with a draw.
    """
    of = shares(program)
    for op, found, at_one in _poles(program, of):
        narrow = narrows(found)
        if not narrow and is_half(op.ins[-1]) and is_half(op.outs[0]) and op.name in LOGS:
            continue  # `half_log_sums` finds it
        tiny = narrow and dtype_of(found.outs[0]) == FLOAT16
        if tiny or at_one or (op.name in LOGS and _is_likelihood(program, op)):
            lost = "those below 6e-8 are 0 there" if tiny and not at_one else _ends(found)
            what = f"probabilities that were rounded to {shown(found.outs[0])}"
            yield Hit(f"{op.name} reads {what}: {lost}.", op)
    yield from _differences(program, of | log_shares(program))
    yield from _normalizers(program)
    yield from _expectations(program, of)
    yield from _extrapolations(program, frozenset(of | log_shares(program)))
    yield from _ratios(program)
    yield from _orders(program, of | {op for op in program.ops if op.name in SQUASHES})


def _is_likelihood(program: Program, op: Op) -> bool:
    """Returns whether a logarithm is averaged, is that of a chosen entry, or is drawn from."""
    before = program.makers(op.ins[0], SHIFTS)
    chosen = any(rules.LOOKS_UP in each.spec.traits for each in before)
    ahead = program.forward(op.outs[0], NOISE)
    drawn = any(each.name in RANKS for v in ahead for each in program.readers(v))
    return chosen or drawn or _is_averaged(program, op)


def _ends(op: Op) -> str:
    return f"those above 1 - 2**-{digits(dtype_of(op.outs[0])) + 1} are 1 there"


def _poles(program: Program, of: Set[Op]) -> Iterator[tuple[Op, Op, bool]]:
    """Yields operations with a pole that read rounded values, what rounds, and whether at a bound.

    The distance to the bound is 1 - p, and 1 + t for a function with the bounds -1 and 1.
    """

    def passes(op: Op) -> bool:
        # Of two values, a difference is a fault by itself.
        if op.name in DIFFERENCES:
            return any(program.number(v) is not None for v in op.ins)
        return op.name in SHIFTS or _squares(program, op) or _picks(program, op)

    def of_logs(op: Op) -> bool:
        # The logarithm of a quotient is a difference of logarithms.
        return passes(op) or op.name in ADDS | DIVIDES - SIGMOIDS

    for op in program.ops:
        if rules.POLE not in op.spec.traits or program.is_backward(op) or not op.outs:
            continue
        if not is_float(op.outs[0]) or op.spec.cost == rules.NEVER:
            continue
        if op.name in rules.SQUARES or len(op.ins) > 1 + (op.name in rules.PRODUCTS):
            continue  # a power
        behind = _through(program, of_logs if op.name in LOGS else passes)
        found = _rounded(behind, op.ins[-1], of)
        if found is not None:
            squash = next(each for each in [found, *behind(found.ins[0])] if each in of)
            shift = _shift(program, op, behind, squash)
            if shift <= 0:
                yield op, found, shift < 0


def _squares(program: Program, op: Op) -> bool:
    """Returns whether an operation squares, perhaps with a factor: -y * y."""
    if op.name not in rules.PRODUCTS - DIVIDES:
        return squares(op)
    left, right = (root_of(program, v) for v in op.ins)
    return left[0] is right[0]


def _shift(program: Program, op: Op, behind: Behind, squash: Op) -> float:
    """Returns how the pole of an operation lies: 0 where a saturating function is 0.

    Below 0 is a bound of the function, and above 0 a place where it is not.
    """
    signed = squash.name in SQUASHES - SIGMOIDS
    between = behind(op.ins[-1])
    if op.name not in rules.PRODUCTS | rules.LOGARITHMS | rules.ROOTS:
        # atanh has its poles at the bounds, log1p at -1.
        falls = signed or any(each.name == "neg" for each in between)
        return -1.0 if falls or op.name not in LOGS else 1.0
    for each in between:
        if each.name in rules.SUMS_OF_TWO and squash in behind(each.outs[0]):
            number = next((n for v in each.ins if (n := program.number(v)) is not None), 0.0)
            if abs(number) > BOUND:
                return -1.0 if signed or each.name in DIFFERENCES else 1.0
    return 0.0


BOUND = 0.1  # smaller numbers that are added protect from a pole


# ---- differences ---------------------------------------------------------------------------------


def _differences(program: Program, of: Set[Op]) -> Iterator[Hit]:
    """Finds differences of two probabilities, or of a ratio and 1, that are averaged."""

    def passes(op: Op) -> bool:
        kept = CHOSEN | LIMITS | RANKS | rules.ROOTS | {"neg"}
        return op.name in kept or _picks(program, op)

    behind = _through(program, passes)
    for op in program.named(*rules.SUMS_OF_TWO):
        if program.is_backward(op) or not is_float(op.outs[0]):
            continue
        ratio = _ratio_less_one(program, op, of)
        ends = [{*behind(v)} & of for v in op.ins] if not ratio and op.name in DIFFERENCES else []
        found = ratio
        if ends and all(ends) and not _are_same(program, *op.ins):
            found = next(filter(None, (_rounded(behind, v, of) for v in op.ins)), None)
        if found is not None and _is_judged(program, op):
            what = "A ratio less 1" if ratio else "A difference of probabilities"
            yield Hit(f"{what} is computed from {shown(found.outs[0])}, and then averaged.", op)


def _normalizers(program: Program) -> Iterator[Hit]:
    """Finds logs of sums of exponentials that are rounded before logits are subtracted.

    Both are as large as the logits. Of logits less their maximum, the logarithm is small.
    """
    for op in log_shares(program):
        if program.is_backward(op):
            continue
        for cast in (m for v in op.ins for m in program.makers(v, SHIFTS) if narrows(m)):
            behind = program.makers(cast.ins[0], SHIFTS)
            logs = [m for m in behind if m.name in rules.LOGARITHMS and not is_half(m.outs[0])]
            sums = [m for log in logs for m in program.makers(log.ins[0], SUMMED | EXPONENTIALS)]
            shifted = any(m.name in rules.EXTREMES for m in sums)
            if logs and (not shifted or any(m.name in rules.ADDITIONS for m in behind)):
                what = f"rounded to {shown(cast.outs[0])} before logits are subtracted"
                yield Hit(f"The log of a sum of exponentials is {what}.", op)
                break


def _expectations(program: Program, of: Set[Op]) -> Iterator[Hit]:
    """Finds means of logits under rounded probabilities, less the log of the sum of exponentials.

    This is an entropy, which any number that is added to all logits leaves as it is. Rounded
    probabilities do not sum to 1, so the error is 2**-9 of the logits in bfloat16. Logits less
    their maximum are small where it matters, and are not found.
    """
    through = SUMMED | rules.EXPONENTIALS | {"neg"}
    for op in program.named(*DIFFERENCES):
        if program.is_backward(op) or not of:
            continue
        for one, other in (op.ins, op.ins[::-1]):
            logs = [m for m in program.makers(one, SHIFTS | CHOSEN) if m.name in LOGS]
            logits = {v for log in logs for v in program.back(log.ins[0], through)}
            means = program.makers(other, SAME | ADDS | {"neg"}) if logs else []
            for mean in means:
                found = _weighs(program, mean, logits, of)
                if found is not None:
                    yield Hit(
                        f"The log of a sum of exponentials is combined with the mean of logits "
                        f"under probabilities that were rounded to {shown(found.outs[0])}: those "
                        "do not sum to 1.",
                        op,
                    )


def _weighs(program: Program, op: Op, logits: Set[Value], of: Set[Op]) -> Op | None:
    """Returns what rounded the probabilities that an operation multiplies some logits by."""
    if op.name not in rules.PRODUCTS - DIVIDES | rules.MATMULS:
        return None
    for share, value in (op.ins[:2], op.ins[1::-1]):
        moved = program.back(value, SAME)
        shifts = [m for m in program.makers(value, SAME) if m.name in DIFFERENCES]
        less = [m.name for each in shifts for m in program.makers(each.ins[1], SAME)]
        if logits.isdisjoint(moved) or not rules.EXTREMES.isdisjoint(less):
            continue
        found = _rounded(_through(program, SAME), share, of)
        if found is not None:
            return found
    return None


def _extrapolations(program: Program, of: frozenset[Op]) -> Iterator[Hit]:
    """Finds weighted differences of probabilities with a weight above 1, as in guidance.

    The terms are larger than what is left of them, and so are their rounding errors.
    """
    told: set[Op] = set()
    for op in program.named(*rules.SUMS_OF_TWO):
        if program.is_backward(op) or not is_float(op.outs[0]):
            continue
        form = weights(program, op.outs[0], of=of)
        by = {v: n for v, n in form.items() if not of.isdisjoint(program.makers(v, SAME))}
        if len(by) < 2 or min(by.values()) >= 0 or max(by.values()) <= 1:
            continue
        behind, most = _through(program, NOISE), sum(map(abs, by.values()))
        found = next(filter(None, (_rounded(behind, v, of) for v in op.ins)), None)
        if found is None or found in told:
            continue
        if most >= LOST or _is_read(program, op):
            told.add(found)
            yield Hit(
                f"A difference of {max(by.values()):g} and {-min(by.values()):g} times "
                f"probabilities is computed from {shown(found.outs[0])}.",
                op,
            )


LOST = 16.0  # four digits fewer than the dtype has: a fault whatever reads the result


def _is_read(program: Program, op: Op) -> bool:
    """Returns whether values are returned in float32, drawn from, or divided by their sum."""
    ahead = program.forward(op.outs[0], NOISE | LOGS)
    if any(not is_half(v) for v in ahead if v in {*program.block.outvars}):
        return True
    read = {each.name for v in ahead for each in program.readers(v)}
    return bool(read & (RANKS | LOGS | ADDS | EXPONENTIALS)) or _is_averaged(program, op)


def _are_same(program: Program, one: Value, other: Value) -> bool:
    """Returns whether two values have the same entries, as in x - stop_gradient(x)."""
    return not {*program.back(one, WHOLE)}.isdisjoint(program.back(other, WHOLE))


def _ratio_less_one(program: Program, op: Op, of: Set[Op]) -> Op | None:
    """Returns the 16-bit ratio that 1 is subtracted from, or None.

    It is the exponential of a difference, or a quotient of two probabilities.
    """
    for one, other in (op.ins, op.ins[::-1]):
        if program.number(one) not in (1.0, -1.0):
            continue
        for ratio in filter(lambda each: is_half(each.outs[0]), program.makers(other, SAME)):
            made = [program.makers(v, SAME) for v in ratio.ins]
            if ratio.name in rules.EXPONENTIALS and DIFFERENCES & {each.name for each in made[0]}:
                return ratio
            if ratio.name in DIVIDES and len(made) == 2 and all({*each} & of for each in made):
                return ratio
    return None


def _is_judged(program: Program, op: Op) -> bool:
    """Returns whether a value is averaged, or returned in float32."""
    whole = program.forward(op.outs[0], SAME)
    results = {v for v in program.block.outvars if not is_half(v)}
    return not results.isdisjoint(whole) or _is_averaged(program, op)


def _is_averaged(program: Program, op: Op) -> bool:
    """Returns whether a value is averaged to one number, or to fewer that are returned."""

    def goes(each: Op) -> bool:
        summed = each.name in JUDGED or (each.name in rules.MATMULS and is_square(program, each))
        return summed and not program.is_backward(each)

    results, ahead = {*program.block.outvars}, program.forward(op.outs[0], goes)
    return any(v.size < op.outs[0].size and (v.is_one or v in results) for v in ahead)


def _ratios(program: Program) -> Iterator[Hit]:
    """Finds exponentials of differences of log-probabilities that were cast to 16 bits."""

    def passes(op: Op) -> bool:
        return op.name in SAME | ADDS | {"neg"} or _picks(program, op)

    of, behind = log_shares(program), _through(program, passes)
    for op in program.named(*rules.EXPONENTIALS):
        if program.is_backward(op) or not of:
            continue
        for shift in program.makers(op.ins[0], SAME | LIMITS):
            if shift.name in DIFFERENCES and shift not in of:
                found = next(filter(None, (_rounded(behind, v, of) for v in shift.ins)), None)
                if found is not None and narrows(found):
                    yield Hit(
                        f"A ratio is the {op.name} of a difference of log-probabilities that were "
                        f"rounded to {shown(found.outs[0])}.",
                        op,
                    )
                    break


# ---- orders and draws ----------------------------------------------------------------------------


def _orders(program: Program, of: Set[Op]) -> Iterator[Hit]:
    """Finds orders of rounded values, and sums of them that are compared.

    Sorted values alone are no fault: to sort and to round commute.
    """
    behind: Behind = functools.partial(_in_order, program)
    for op in program.ops:
        sums = op.name in SUMS
        if program.is_backward(op) or not (sums or op.name in RANKS):
            continue
        for value in filter(is_float, op.ins[: op.params.get("num_keys", 1)]):
            found = _rounded(behind, value, of)
            if found is not None and (_is_compared(program, op) or _gives_places(program, op)):
                what = "sums, to compare them," if sums else "orders"
                yield Hit(
                    f"{op.name} {what} values of {shown(found.outs[0])} that saturate: different "
                    "ones are equal there.",
                    op,
                )
                break


def _gives_places(program: Program, op: Op) -> bool:
    """Returns whether the program reads what an order moves along: places, or other arrays."""
    moved = op.outs if op.outs[0].aval.dtype != op.ins[0].aval.dtype else op.outs[1:]
    results = {*program.block.outvars}
    return any(program.readers(v) or not results.isdisjoint(program.forward(v, ())) for v in moved)


def _is_compared(program: Program, op: Op) -> bool:
    """Returns whether sums are compared, or sorted together with what is looked up in them."""
    through = CHOSEN | rules.SUMS_OF_TWO | rules.PRODUCTS | {rules.JOIN}
    readers = [each for v in program.forward(op.outs[0], through) for each in program.readers(v)]
    # What reads several floating arrays and returns none compares them, as JAX's own searchsorted.
    compared = any(
        each.spec.need == rules.COMPARE
        or (sum(map(is_float, each.ins)) > 1 and not any(map(is_float, each.outs)))
        for each in readers
    )
    return compared or any(each.name in RANKS and _gives_places(program, each) for each in readers)


def _in_order(program: Program, value: Value) -> list[Op]:
    """Returns the operations behind a value whose order it has: it is shifted or scaled at most."""

    def before(v: Value) -> Iterator[Value]:
        yield from program.sources(v)
        op = program.maker(v)
        if op is not None:
            yield from _ordering(program, op)

    return [op for v in all_reached([value], before) if (op := program.maker(v))]


def _ordering(program: Program, op: Op) -> tuple[Value, ...]:
    """Returns the operands that an operation orders its result by."""
    if op.name in CHOSEN | ADDS | rules.EXTREMES | LIMITS | {"neg"}:
        return cases(op) or op.ins
    if op.name in RANKS:
        return op.ins[:1]
    if op.name in rules.SUMS_OF_TWO:
        rest = tuple(v for v in op.ins if not _is_spread(program, v, op.outs[0].size))
        # Of two full arrays, the other one decides the order too, unless it is of the same kind.
        made = [{each.name for each in program.makers(v, SAME)} for v in op.ins]
        return rest if len(rest) < 2 or all(names & (SQUASHES | DIVIDES) for names in made) else ()
    if op.name in rules.PRODUCTS:
        return op.ins[:1] if op.name in DIVIDES else tuple(_scaled(program, op))
    return ()


def _scaled(program: Program, op: Op) -> Iterator[Value]:
    """Yields the operand of a product whose other one is a number, a mask or spread."""
    for v, by in (op.ins, op.ins[::-1]):
        if _is_spread(program, by, op.outs[0].size) or _is_mask(program, by):
            yield v


def _is_spread(program: Program, value: Value, size: int) -> bool:
    """Returns whether a value is one number, or an array with fewer entries that was broadcast."""
    return any(v.size < size or v.constant for v in program.back(value, rules.VIEWS))


def half_samples(program: Program) -> Iterator[Hit]:
    """Finds draws from 16-bit noise: uniform numbers are compared, or Gumbel ones ranked.

    jax.random draws 7 random bits for bfloat16, and 10 for float16. What is less likely than
    2**-7 then happens that often, or never. A comparison with a constant, as in dropout, is not
    found: it only rounds the rate; nor is normal noise, as in an initializer.
    """
    for bits in program.named("random_bits"):
        drawn = program.forward(bits.outs[0], lambda op: not any(map(is_float, op.ins)))
        for noise in filter(is_half, drawn):
            plain = {*program.forward(noise, _scales)}
            read = [op for v in plain for op in program.readers(v)]
            logs = [op for op in read if op.name in LOGS]
            gumbel = {v for op in logs for v in program.forward(op.outs[0], NOISE | LOGS)}
            hits = [op for op in read if _asks(program, op, plain)]
            hits += [op for v in gumbel for op in program.readers(v) if op.name in RANKS]
            for op in dict.fromkeys(hits):
                few = digits(dtype_of(noise)) - 1
                yield Hit(f"{op.name} reads noise of {few} random bits, {shown(noise)}.", op)


def _scales(op: Op) -> bool:
    """Returns whether an operation moves a uniform number to another interval."""
    if op.name in rules.SUMS_OF_TWO | rules.PRODUCTS:
        return any(v.is_one for v in op.ins)
    return op.name in CHOSEN | LIMITS | {"neg"}


def _asks(program: Program, op: Op, noise: set[Value]) -> bool:
    """Returns whether an operation compares noise with a probability that is no constant."""
    if program.is_backward(op) or op.name not in rules.ORDERS:
        return False
    return any(program.number(v) is None for v in op.ins if v not in noise)


# ---- saturation ----------------------------------------------------------------------------------

LARGEST_ERROR = 2.0**-8


def half_saturations(program: Program) -> Iterator[Hit]:
    """Finds tanh, erf and the like in 16 bits whose result is amplified.

    A soft cap c tanh(x / c) has an error of c 2**-digits, of the tanh and of the product. An
    exponential, as that of a softmax, makes a relative error of it. It is a fault if this exceeds
    2**-8 in a float32 softmax: caps above 1 in bfloat16, above 8 in float16. So is a logarithm,
    quotient or atanh of the distance to a bound: log(1 - tanh(x)**2) has no correct digit beyond
    |x| = 2.8 in bfloat16. An activation that a matmul or a mean reads is not found.
    """
    of = {op for op in program.named(*SQUASHES) if not program.is_backward(op)}
    for op, found, at_bound in _poles(program, {op for op in of if op.name not in SIGMOIDS}):
        if at_bound:
            where = f"was computed in {shown(found.outs[0])}"
            yield Hit(f"{op.name} reads the distance of a value to its bound, which {where}.", op)
    bounds = dict.fromkeys(of, 1.0) | _quotients(program)
    told: set[Op] = set()
    for op in program.ops:
        judge = "softmax" if op.name in rules.EXPONENTIALS else "sum of squares"
        if not (op.name in rules.EXPONENTIALS or squares(op)):
            continue
        if is_half(op.outs[0]) or program.is_backward(op) or not _is_totaled(program, op):
            continue
        for value, weight in _summands(program, op.ins[0]):
            squash, cap = _cap(program, value, weight, bounds)
            if squash is None:
                continue
            rounding = _rounded(_through(program, NOISE), op.ins[0], {squash})
            if rounding is None or rounding in told:
                continue
            if cap * 2.0 ** -digits(dtype_of(rounding.outs[0])) > LARGEST_ERROR:
                told.add(rounding)
                yield Hit(
                    f"{squash.name} saturates in {shown(rounding.outs[0])}, and a {judge} reads it "
                    f"{f'times {cap:g}' if cap < CAP else 'times a cap'} in float32.",
                    rounding,
                )


def _is_totaled(program: Program, op: Op) -> bool:
    """Returns whether exponentials are added up, or squares averaged."""
    if squares(op):
        return _is_averaged(program, op)
    return any(each.name in ADDS for each in program.final_readers(op.outs[0], SAME))


def _summands(program: Program, value: Value) -> Iterator[tuple[Value, float]]:
    """Yields the terms of a sum, also of one that an array multiplies, and their weights."""
    for v, weight in weights(program, value).items():
        yield v, weight
        op = program.maker(v)
        if op is not None and op.name in rules.PRODUCTS:
            for part, by in weights(program, op.ins[0]).items():
                yield part, weight * by


def _quotients(program: Program) -> dict[Op, float]:
    """Returns the quotients that saturate, x / (1 + |x|) and those of exponentials, and bounds."""

    def sizes(value: Value) -> dict[Value | None, float]:
        found: dict[Value | None, float] = {}
        for v, weight in weights(program, value).items():
            op, number = program.maker(v), program.number(v)
            if number is not None:
                found[None] = found.get(None, 0.0) + weight * number
            elif op is not None and op.name == ABS:
                root, factor = root_of(program, op.ins[0])
                found[root] = abs(weight * factor)
            else:
                found[v] = weight if op is not None and op.name in rules.EXPONENTIALS else 0.0
        return found

    bounds = {}
    for op in program.named(*DIVIDES - SIGMOIDS):
        below, (root, factor) = sizes(op.ins[1]), root_of(program, op.ins[0])
        above = {root: factor} if root in below else sizes(op.ins[0])
        if len(below) > 1 and min(below.values()) > 0 and above.keys() <= below.keys():
            bounds[op] = max(abs(n) / below[v] for v, n in above.items())
    return bounds


CAP = float("inf")  # a cap that the program takes as an argument


def _cap(
    program: Program, value: Value, weight: float, bounds: dict[Op, float]
) -> tuple[Op | None, float]:
    """Returns the saturating function that a term is a multiple of, and the bound of the term."""
    op = program.maker(value)
    if op in bounds:
        return op, abs(weight) * bounds[op]
    if op is None or op.name not in rules.PRODUCTS:
        return None, 0.0
    for factor, cap in (op.ins, op.ins[::-1]):
        for squash in program.makers(factor, SAME):
            # c tanh(x / c): the same value divides.
            scaled = program.makers(squash.ins[0], SAME) if squash in bounds else []
            same = {v for v in program.back(cap, SAME) if not v.literal}
            if any(not same.isdisjoint(program.back(by, SAME)) for m in scaled for by in m.ins[1:]):
                return squash, CAP
    return None, 0.0
