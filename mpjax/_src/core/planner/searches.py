"""Matmuls on which a decision rests: of routers, and of loops that end by what they compute."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax.held import is_inexact
from mpjax._src.core.base.higher_order import BRANCH, WHILE, Inside, higher_order
from mpjax._src.core.base.rules import COMPARE, FOLLOW, FULL, HALF, MOVE, NEVER, rule_of
from mpjax._src.core.planner.equations import BARRIER, Equation, Value, made_by, parts

# Operations that rank entries, and the axis along which they do.
RANKING = {
    "top_k": lambda p: p.get("axis", -1),
    "approx_top_k": lambda p: p["reduction_dimension"],
    "argmax": lambda p: p["axes"][0],
    "argmin": lambda p: p["axes"][0],
    "sort": lambda p: p["dimension"],
}
# A router's columns are so many times fewer than its rows.
NARROW = 8


def routers(equations: Sequence[Equation]) -> set[Equation]:
    """Returns the matmuls whose few results are ranked: the choice of an expert flips.

    Elementwise operations and a softmax may stand between.
    """
    maker = {out: e for e in equations for out in e.outs}
    found: set[Equation] = set()
    for e in equations:
        if e.name in RANKING:
            columns = e.ins[0].aval.shape[RANKING[e.name](e.params)]
            found.update(
                m
                for m in made_by(e.ins[0], maker, _is_elementwise)
                if m.rule.need == HALF and depth(m) > NARROW * _jax.size_of([columns])
            )
    return found


def _is_elementwise(e: Equation) -> bool:
    row = e.rule
    between = row.need in (FOLLOW, MOVE) or (row.need == FULL and row.cost != NEVER)
    return between or e.name == "convert_element_type"


def depth(e: Equation) -> int:
    """Returns the number of products that a matmul adds up for each result."""
    if e.name == "conv_general_dilated":
        spec = e.params["dimension_numbers"].rhs_spec
        return _jax.size_of([e.ins[1].aval.shape[d] for d in spec[1:]])
    numbers = e.params.get("dimension_numbers") or e.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = getattr(numbers, "dot_dimension_numbers", numbers)
    return _jax.size_of([e.ins[0].aval.shape[d] for d in contracted])


def loops(equations: Sequence[Equation]) -> set[Equation]:
    """Returns the loops that end by a matmul, and those that turn as often as one of them did."""
    found: set[Equation] = set()
    counts: set[Value] = set()
    for e in equations:
        reads = bool(counts) and not counts.isdisjoint(e.ins)
        row = e.row
        repeats = reads and row.kind == WHILE and _multiplies(e.like)
        if repeats or (row.params and _ends_by_matmul(e.like)):
            found.add(e)
        if reads or e in found:
            # Among the integers that a loop returns is how often it turned.
            counts.update(v for v in e.outs if not is_inexact(v.aval))
    return found


def _ends_by_matmul(eqn: Any) -> bool:
    """Returns whether an equation is a while loop whose end depends on a matmul in it.

    That is a comparison of float32 numbers, which 16-bit ones might never meet. The word with the
    largest score is none: it may end a loop that writes text.

    Or whether it is a function with such a loop and a backward rule, which may repeat its
    decisions.
    """
    row = higher_order(eqn.primitive.name)
    if row.backward:
        return _holds_one(eqn)
    if row.kind != WHILE or not _multiplies(eqn):
        return False
    condition, body = row.wire(eqn)
    carries, _ = _fixpoint(body, Tainted(set(), set()))
    # Both programs read the same carries, each behind constants of its own.
    moved = condition.consts - body.consts
    given = Tainted(*({i + moved for i in places if i >= body.consts} for places in carries))
    return 0 in _fixpoint(condition, given)[1].verdicts


def _holds_one(eqn: Any) -> bool:
    inside = (each for program in _jax.inner_jaxprs(eqn) for each in program.eqns)
    return any(_ends_by_matmul(each) or _holds_one(each) for each in inside)


class Tainted(NamedTuple):
    """Some values, or their places among others.

    Attributes:
        by_matmul: Those that depend on a matmul.
        verdicts: Those that are no floats, and depend on a comparison of such float32 numbers.
    """

    by_matmul: set[Any]
    verdicts: set[Any]

    def add(self, values: Iterable[Value], by_matmul: bool, judged: bool) -> None:
        """Adds values."""
        self.by_matmul.update(v for v in values if by_matmul)
        self.verdicts.update(v for v in values if judged and not is_inexact(v.aval))

    def places(self, values: Sequence[Value]) -> "Tainted":
        """Returns the places of its values among some."""
        return Tainted(*({i for i, v in enumerate(values) if v in known} for known in self))


def _fixpoint(inside: Inside, given: Tainted) -> tuple[Tainted, Tainted]:
    """Returns the places of a program's arguments, and of its results, after any turns.

    Of the arguments of the first turn these are ``given``.
    """
    ins, equations, outs = parts(inside.program, rules=True)
    while True:
        found = Tainted(*({ins[i] for i in places} for places in given))
        for e in equations:
            _propagate(e, found)
        results = found.places(outs)
        carried = [{arg for out, arg in inside.carry if out in places} for places in results]
        later = Tainted(*(old | new for old, new in zip(given, carried, strict=True)))
        # What depends on a matmul only grows from turn to turn, so this ends.
        if later == given:
            return given, results
        given = later


def _propagate(e: Equation, found: Tainted) -> None:
    """Adds the results of an equation."""
    if e.name == BARRIER:
        for v, out in zip(e.ins, e.outs, strict=True):
            found.add([out], v in found.by_matmul, v in found.verdicts)
    elif e.row.params:
        ends = _ends_by_matmul(e.like)
        # What a branch returns is decided by what selects it.
        found.add(e.outs, ends, ends or (e.row.kind == BRANCH and e.ins[0] in found.verdicts))
        for inside in e.row.wire(e.like):
            _, results = _fixpoint(inside, found.places([e.ins[i] for i in inside.ins]))
            for i, place in enumerate(inside.outs):
                if place is not None:
                    found.add([e.outs[place]], i in results.by_matmul, i in results.verdicts)
    else:
        compares = e.rule.need == COMPARE and e.outs[0].aval.dtype == bool
        judged = compares and any(v.is_float32 and v in found.by_matmul for v in e.ins)
        judged |= not found.verdicts.isdisjoint(e.ins)
        found.add(e.outs, _multiplies(e.like) or not found.by_matmul.isdisjoint(e.ins), judged)


def _multiplies(eqn: Any) -> bool:
    inner = (inside for program in _jax.inner_jaxprs(eqn) for inside in program.eqns)
    return rule_of(eqn.primitive.name).need == HALF or any(map(_multiplies, inner))
