"""Which values exist in 16 bits: what matmuls make, and what matmuls alone read.

A matmul reads 16-bit copies of its operands and returns 16 bits; nothing else is rounded. So a
value is stored in 16 bits without another rounding if a matmul made it (`made`), perhaps in another
layout, or if matmuls alone read it (`wanted`), which would round it themselves.
"""

import contextlib
import dataclasses
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base._jax import building
from mpjax._src.core.base._jax.rounded import ROUNDED, rounded_p
from mpjax._src.core.base.dtypes import FLOAT32, HALVES
from mpjax._src.core.base.higher_order import BRANCH, MAP, SCAN
from mpjax._src.core.base.rules import FOLLOW, FULL, HALF, MOVE, NO_HALF_FORM, RANKS
from mpjax._src.core.planner.equations import Equation, Value, closed, parts
from mpjax._src.core.program.graph import AGAIN

# Operations without rounding, besides those of layout: their results are their operands' numbers.
EXACT = frozenset(("neg", "abs", "max", "min", rules.SELECT))


# A smaller array costs a kernel more to start than to read.
SMALL = 1 << 14


def is_large(v: Value) -> bool:
    """Returns whether a value has so many entries that moving them takes time."""
    return v.is_float32 and v.size >= SMALL


# Matrix units add up at least this many products at once (a V100 four, later ones more): a shorter
# sum is no faster in 16 bits, and often a coordinate or an angle. That of a derivative is neither,
# and a region of 16 bits asks for each.
SHORT = 4
# Fewer columns of a matmul's result are not rounded.
NARROW = 16
HALF_NAMES = tuple(half.name for half in HALVES)
FOLLOWING = "follow"  # in the place of a region's dtype: that of the operands
OTHER = "other."  # in front of a region's dtype: the 16-bit dtype that is not the program's


def halved(aval: Any, half: np.dtype) -> Any:
    """Returns the type of a float32 array in 16 bits."""
    return aval.update(dtype=half, weak_type=False)


def is_half_matmul(e: Equation) -> bool:
    """Returns whether an equation is a matmul that reads 16-bit copies of its operands."""
    if e.rule.need != HALF:
        return False
    # Stored in the equation, for every pass asks; `Equation.enter` resets it.
    if e.is_half_matmul is None:
        e.is_half_matmul = e.region.dtype in ("", *HALF_NAMES) and may_be_half_matmul(e)
    return e.is_half_matmul


def returns_half(e: Equation) -> bool:
    """Returns whether an equation is a matmul that returns 16 bits.

    A few columns, as of a head, leave it in float32: they are few bytes, and often the last.
    """
    return is_half_matmul(e) and (e.region.dtype in HALF_NAMES or not _is_narrow(e))


def _is_narrow(e: Equation) -> bool:
    if e.name != rules.DOT:
        return False
    (_, contracted), (_, batch) = e.params["dimension_numbers"]
    shape = e.ins[1].aval.shape
    columns = [n for d, n in enumerate(shape) if d not in (*contracted, *batch)]
    return _jax.size_of(columns) <= NARROW


def may_be_half_matmul(e: Equation) -> bool:
    """Returns whether an equation is a matmul of float32, which its author left to the policy."""
    if e.rule.need != HALF or _jax.own_precision(e.params) is not None:
        return False
    asked = e.region.dtype.removeprefix(OTHER) in HALF_NAMES
    if not (e.region.back or asked) and no_faster(e):
        return False
    return all(v.is_float32 for v in (*e.ins[:2], *e.outs))


def no_faster(e: Any) -> str:
    """Says why a matmul of a function, an equation or `Op`, is no faster in 16 bits, or "" if not.

    What adds up products entry by entry reads each entry once. It is no matmul for matrix units,
    but often a loss: log probabilities times one-hot labels, or a squared norm.
    """
    if e.name != rules.DOT:
        return ""
    (contracted, _), (batch, _) = e.params["dimension_numbers"]
    if _jax.size_of([e.ins[0].aval.shape[d] for d in contracted]) <= SHORT:
        return f"sums of {SHORT} products or fewer"
    ranks = {len(v.aval.shape) for v in e.ins}
    return "sums of products entry by entry" if ranks == {len(contracted) + len(batch)} else ""


def is_rounding(e: Equation) -> bool:
    """Returns whether an equation rounds its operand for all who read it."""
    return e.name == ROUNDED


def with_rounded(
    equations: Iterable[Equation],
    values: Collection[Value],
    half: np.dtype,
    reads: Callable[[Equation], bool] = lambda e: True,
) -> list[Equation]:
    """Returns equations that round some values where they are made, for the readers ``reads``."""
    written: list[Equation] = []
    rounded: dict[Value, Value] = {}
    for e in equations:
        written.append(e.reading(rounded) if reads(e) else e)
        for v in e.outs:
            if v in values:
                rounded[v] = out = Value(v.aval)
                # With the effects of its equation, the rounding would have an effect too.
                plain = e.like.replace(effects=building.NO_EFFECTS)
                params = {"half": half}
                written.append(Equation(rounded_p, params, [v], [out], plain, e.stack, e.again))
    return written


def is_half_operation(e: Equation) -> bool:
    """Returns whether a region asks an equation that is no matmul to read and return 16 bits."""
    return e.region.dtype in HALF_NAMES and may_be_half_operation(e)


def may_be_half_operation(e: Equation) -> bool:
    """Returns whether a region of 16 bits means an equation that is no matmul.

    Its derivative stays in float32.
    """
    row = e.rule
    if row.need not in (FULL, FOLLOW) or NO_HALF_FORM in row.traits or e.region.back:
        return False
    return any(v.is_float32 for v in e.outs)


def again(e: Equation) -> Equation:
    """Returns an equation as it runs a second time in a backward pass: in the same dtype."""
    # In a backward pass, a region asks for 16 bits in matmuls alone. A scope that names the
    # operation, and says `again`, asks for it of one that belongs to the forward pass.
    region = e.region.dtype if may_be_half_operation(e) else ""
    e = e.on(e.ins)
    e.stack = e.stack.extend(AGAIN)
    if region:
        e.enter(f"{region}:{e.name}:again")
    return e


def other_half(e: Equation) -> np.dtype | None:
    """Returns the 16-bit dtype of an equation, if it is another one than the program's."""
    if not e.region.dtype.startswith(OTHER):
        return None
    own = may_be_half_matmul(e) or may_be_half_operation(e)
    return np.dtype(e.region.dtype.removeprefix(OTHER)) if own else None


def computes_in(equations: Iterable[Equation], half: np.dtype) -> frozenset[np.dtype]:
    """Returns the 16-bit dtypes in which operations, or matmuls of their derivatives, run."""
    found: set[np.dtype] = set()
    for e in equations:
        matmul = e.rule.need == HALF and e.region.dtype in ("", *HALF_NAMES)
        if is_half_operation(e) or (matmul and _jax.own_precision(e.params) is None):
            found.add(half)
        found.update(filter(None, [other_half(e)]))
        for _, inside, _ in bodies(e):
            found |= computes_in(inside, half)
    return frozenset(found)


def is_view(e: Equation) -> bool:
    """Returns whether the results of an equation are its operands in another layout or sign."""
    if e.rule.need == MOVE or e.name in EXACT:
        return True
    return bool(e.region.dtype) and _follows(e)


def is_plain(e: Equation) -> bool:
    """Returns whether an equation is arithmetic in float32 that nothing asks to be otherwise."""
    computes = e.rule.need in (FULL, FOLLOW) and e.name not in EXACT
    return computes and not e.row.kind and not e.region.dtype


def is_full(e: Equation) -> bool:
    """Returns whether a region of float32 makes the results: nobody rounds them for all readers."""
    return e.region.dtype == FLOAT32.name


def _follows(e: Equation) -> bool:
    """Returns whether a list asks an equation to return 16 bits if it reads them."""
    asked = e.region.dtype == FOLLOWING and not e.region.back
    return asked and e.rule.need in (FULL, FOLLOW)


def is_zero(v: Value) -> bool:
    """Returns whether a value is the constant zero."""
    known = v.const is not None and not isinstance(v.const, _jax.Tracer)
    return known and not np.any(np.asarray(v.const))


def commutes(e: Equation) -> bool:
    """Returns whether a view of rounded operands is the rounded view: ranks see other ties."""
    return RANKS not in e.rule.traits and not _follows(e)


def widens(e: Equation, half: np.dtype) -> bool:
    """Returns whether an equation is the user's cast of 16-bit numbers to float32."""
    if e.name != rules.CAST or half == FLOAT32:
        return False
    return e.ins[0].aval.dtype == half and e.outs[0].is_float32


def bodies(e: Equation) -> list[tuple[list[Value], list[Equation], list[Value]]]:
    """Returns the programs of a loop, branch or map: arguments, equations and results of each.

    Of a branch, the operand that selects one is left out.
    """
    return [parts(program, rules=True, region=e.region) for program in programs(e)]


# What was found in programs, as long as they exist: each level of loops asks again.
_FOUND: weakref.WeakKeyDictionary[Any, dict[Any, list[Any]]] = weakref.WeakKeyDictionary()


def inside(e: Equation, find: Callable[..., list[Any]], *given: Any) -> list[list[Any]]:
    """Returns what is found in each program of an equation: that of `bodies`, and what is given."""
    each = []
    for program in programs(e):
        found = _FOUND.setdefault(program, {})
        key = find, e.region, *given
        if key not in found:
            found[key] = find(*parts(program, rules=True, region=e.region), *given)
        each.append(found[key])
    return each


def programs(e: Equation) -> Sequence[Any]:
    """Returns the closed jaxprs of a scan, branch, map or custom rule, which planning enters."""
    row = e.row
    if row.kind not in (SCAN, BRANCH, MAP) and not e.is_custom:
        return ()
    held = e.params[row.params[0]]
    return held if row.kind == BRANCH else (held,)


def places(e: Equation) -> tuple[int, int, int]:
    """Returns where the arguments of its programs begin, and where the carries begin and end."""
    row = e.row
    if row.kind != SCAN:
        return (1 if row.kind == BRANCH else 0), 0, 0
    consts, carry = _jax.scan_counts(e.params)
    return 0, consts, consts + carry


def info_of(e: Equation) -> Any:
    """Returns what debuggers show of a program in the place of that of a loop, branch or map."""
    return building.anonymous(programs(e)[0])


# Arguments of a loop's body, each with what the loop gets for it: constants, carries and slices.
Groups = Sequence[Collection[tuple[Value, Value]]]


def groups_of(e: Equation, ins: Sequence[Value]) -> Groups:
    """Returns the arguments of a loop's body in groups."""
    (_, start, end), pairs = places(e), [*zip(ins, e.ins, strict=True)]
    return pairs[:start], pairs[start:end], pairs[end:]


def scanned(
    e: Equation, groups: Groups, equations: Sequence[Equation], outs: Sequence[Value]
) -> tuple[list[Value], dict[str, Any]]:
    """Returns the operands and the parameters of a loop with another body."""
    inner = closed([v for group in groups for v, _ in group], equations, outs, info_of(e))
    params = building.scan_of(e.params, inner, *map(len, groups))
    return [x for group in groups for _, x in group], params


def made(equations: Iterable[Equation], given: Collection[Value], half: np.dtype) -> set[Value]:
    """Returns the values that are 16-bit numbers, if the given ones are."""
    equations = [*equations]
    found, numbers = set(given), constants(equations, half)
    for e in equations:
        # Plain arithmetic is frequent and makes float32: this question saves the others.
        if is_plain(e):
            continue
        if returns_half(e) or widens(e, half) or is_rounding(e):
            found.update(e.outs)
        elif is_half_operation(e):
            found.update(v for v in e.outs if v.is_float32)
        elif is_view(e):
            found.update(_made_views(e, found, numbers))
        elif programs(e):
            found.update(_made_results(e, found, half))
    return found


def _made_views(e: Equation, found: Collection[Value], numbers: Collection[Value]) -> list[Value]:
    # A barrier returns each operand by itself; the result of another view is made of all of them.
    if e.is_barrier:
        return [out for v, out in zip(e.ins, e.outs, strict=True) if v in found]
    floats = [v for v in e.ins if v.is_float32]
    # A constant that 16 bits hold, as the zero of a ReLU, may be among the operands, but not alone.
    moves = any(v in found for v in floats)
    return e.outs if moves and all(v in found or v in numbers for v in floats) else []


def constants(equations: Iterable[Equation], half: np.dtype) -> set[Value]:
    """Returns the constants of equations that are 16-bit numbers, as literals or views of them."""
    found: set[Value] = set()
    for e in equations:
        found.update(v for v in e.ins if v.const is not None and is_exact(v.const, half))
        # An equation without operands, as an iota, is a view of no constant.
        if e.ins and found.issuperset(e.ins) and (is_view(e) or e.name == rules.CAST):
            found.update(e.outs)
    return found


def is_exact(const: Any, half: np.dtype) -> bool:
    """Returns whether a known number is a 16-bit number."""
    if const is None or isinstance(const, _jax.Tracer) or np.ndim(const):
        return False
    if np.asarray(const).dtype.kind not in "biuf":
        return False
    with np.errstate(over="ignore"):
        return bool(np.asarray(const, half).astype(np.float32) == np.float32(const))


def _made_results(e: Equation, found: Collection[Value], half: np.dtype) -> list[Value]:
    """Returns the results of a loop, branch or map that are 16-bit numbers; no carries are."""
    first, start, end = places(e)
    # Each turn would round a carry again, so the errors of all turns would add up.
    exact = [v in found and not start <= i < end for i, v in enumerate(e.ins[first:])]
    each = inside(e, _made_inside, tuple(exact), half)
    carries = end - start
    return [
        out
        for i, (out, *flags) in enumerate(zip(e.outs, *each, strict=True))
        if all(flags) and i >= carries
    ]


def _made_inside(ins: Any, equations: Any, outs: Any, exact: Any, half: np.dtype) -> list[bool]:
    found = made(equations, {v for v, yes in zip(ins, exact, strict=True) if yes}, half)
    return [v in found for v in outs]


def wanted(
    equations: Sequence[Equation], results: Collection[Value], halved: Collection[Value]
) -> set[Value]:
    """Returns the values of which all readers take 16 bits: matmuls, or views for matmuls.

    ``halved`` are those of the results that leave the program in 16 bits.
    """
    full = {*results} - {*halved}
    # Backwards: in which dtype a view reads its operand depends on who reads the view.
    for e in reversed(equations):
        full.update(_read_in_full(e, full))
    found = {*results}.union(*(values for e in equations for values in (e.ins, e.outs))) - full
    return {v for v in found if v.is_float32}


def _read_in_full(e: Equation, full: Collection[Value]) -> list[Value]:
    """Returns the operands of an equation that it reads in float32."""
    if is_plain(e):
        return e.ins
    if is_half_matmul(e) or is_rounding(e):
        # What a matmul reads besides, as the sizes of a ragged one's groups, is not rounded.
        return e.ins[2:]
    # Rounding leaves the signs that a mask of a derivative reads: what float16 rounds to zero has
    # no derivative, as by hand.
    if is_half_operation(e) or (e.again and is_mask(e)):
        return []
    if e.is_barrier:
        return [v for v, out in zip(e.ins, e.outs, strict=True) if out in full]
    if is_view(e):
        return e.ins if not commutes(e) or any(out in full for out in e.outs) else []
    if programs(e):
        first, start, end = places(e)
        # Carries, and what selects a branch, enter as they are.
        read = _read_inside(e, _read, lambda v: v not in full)
        return [*e.ins[:first], *e.ins[start:end], *read]
    return e.ins


def is_mask(e: Equation) -> bool:
    """Returns whether an equation asks which entries are above zero."""
    return e.name == "gt" and is_zero(e.ins[1])


def fed(equations: Sequence[Equation], given: Iterable[Value] = ()) -> set[Value]:
    """Returns the values that matmuls read, as they are or in another layout, beside given ones."""
    found = {*given}
    for e in reversed(equations):
        if is_plain(e):
            continue
        moves = is_view(e) and not found.isdisjoint(e.outs)
        if moves or is_half_matmul(e) or is_rounding(e):
            found.update(e.ins)
        elif programs(e):
            found.update(_read_inside(e, _fed, found.__contains__))
    return found


def _read_inside(
    e: Equation, find: Callable[..., list[bool]], given: Callable[[Value], bool]
) -> Iterator[Value]:
    """Yields the operands that programs inside read in some way, from which results they give.

    No carries are given.
    """
    first, start, end = places(e)
    outs = tuple(given(v) and i >= end - start for i, v in enumerate(e.outs))
    for flags in inside(e, find, outs):
        yield from itertools.compress(e.ins[first:], flags)


def _fed(ins: Any, equations: Any, outs: Any, given: Any) -> list[bool]:
    found = fed(equations, itertools.compress(outs, given))
    return [v in found for v in ins]


def _read(ins: Any, equations: Any, outs: Any, halved: Any) -> list[bool]:
    low = wanted(equations, outs, {*itertools.compress(outs, halved)})
    return [v not in low for v in ins]


def with_programs(e: Equation, change: Callable[[Any], Any]) -> dict[str, Any]:
    """Returns the parameters of an equation; the programs of a loop, branch or map are changed."""
    row, inner = e.row, [*map(building.as_closed, programs(e))]
    # What is traced in the body of a shard_map needs the mesh's axes in scope.
    around = building.on_each_device(e.params) if row.kind == MAP else contextlib.nullcontext()
    with around:
        changed = [*map(change, inner)]
    if all(x is y for x, y in zip(inner, changed, strict=True)):
        return e.params
    if row.kind == MAP:
        changed = [building.as_body(e.params, program) for program in changed]
    return {**e.params, **row.holding(changed)}


@dataclasses.dataclass(frozen=True)
class Price:
    """What it costs to hand over a value, in bytes.

    Attributes:
        made: The values that are 16-bit numbers.
        wanted: The values that the backward part reads in 16 bits alone.
        half: The 16-bit dtype.
    """

    made: Collection[Value]
    wanted: Collection[Value]
    half: np.dtype

    def is_half(self, v: Value) -> bool:
        """Returns whether a value is handed over in 16 bits."""
        return v.is_float32 and (v in self.made or v in self.wanted)

    def __call__(self, v: Value) -> int:
        """Returns the bytes of a value as it is handed over."""
        return _jax.bytes_of(v.aval, self.half if self.is_half(v) else None)
