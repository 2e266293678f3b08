"""Matmuls on which a decision rests: of routers, and of loops that end by what they compute."""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from mpjax._src.core.base import _jax
from mpjax._src.core.base._jax.held import is_inexact
from mpjax._src.core.base.higher_order import BRANCH, WHILE, Inside, higher_order
from mpjax._src.core.base.rules import CAST, COMPARE, FOLLOW, FULL, HALF, MOVE, NEVER, rule_of
from mpjax._src.core.planner.dependence import made_by
from mpjax._src.core.planner.equations import Equation, Value, parts

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
    return between or e.name == CAST


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
    carries, _ = _fixpoint(body, [0] * len(body.ins))
    # Both programs read the same carries, each behind constants of its own.
    given = [*[0] * condition.consts, *carries[body.consts :]]
    return bool(_fixpoint(condition, given)[1][0] & JUDGED)


def _holds_one(eqn: Any) -> bool:
    inside = (each for program in _jax.inner_jaxprs(eqn) for each in program.eqns)
    return any(_ends_by_matmul(each) or _holds_one(each) for each in inside)


# What a value depends on, as bits: on a matmul; and if it is no float, on a comparison of float32
# numbers that do.
MULTIPLIED, JUDGED = 1, 2


def _fixpoint(inside: Inside, given: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Returns what the arguments of a program, and its results, depend on after any turns.

    The arguments of the first turn are ``given``.
    """
    ins, equations, outs = parts(inside.program, rules=True)
    while True:
        found = dict(zip(ins, given, strict=True))
        for e in equations:
            kinds = zip(e.outs, _propagated(e, [found.get(v, 0) for v in e.ins]), strict=True)
            found.update((v, k & ~JUDGED if is_inexact(v.aval) else k) for v, k in kinds)
        results, later = [found.get(v, 0) for v in outs], [*given]
        for out, argument in inside.carry:
            later[argument] |= results[out]
        # What depends on a matmul only grows from turn to turn, so this ends.
        if later == given:
            return given, results
        given = later


def _propagated(e: Equation, ins: Sequence[int]) -> Sequence[int]:
    """Returns what the results of an equation depend on."""
    if e.is_barrier:
        return ins
    if e.row.params:
        ends = _ends_by_matmul(e.like)
        # What a branch returns is decided by what selects it.
        judged = ends or (e.row.kind == BRANCH and ins[0] & JUDGED)
        outs = [(MULTIPLIED if ends else 0) | (JUDGED if judged else 0)] * len(e.outs)
        for inside in e.row.wire(e.like):
            _, results = _fixpoint(inside, [ins[i] for i in inside.ins])
            for place, kind in zip(inside.outs, results, strict=True):
                if place is not None:
                    outs[place] |= kind
        return outs
    found = functools.reduce(operator.or_, ins, MULTIPLIED if _multiplies(e.like) else 0)
    if e.rule.need == COMPARE and e.outs[0].aval.dtype == bool:
        compared = (k & MULTIPLIED for v, k in zip(e.ins, ins, strict=True) if v.is_float32)
        found |= JUDGED if any(compared) else 0
    return [found] * len(e.outs)


def _multiplies(eqn: Any) -> bool:
    inner = (inside for program in _jax.inner_jaxprs(eqn) for inside in program.eqns)
    return rule_of(eqn.primitive.name).need == HALF or any(map(_multiplies, inner))
