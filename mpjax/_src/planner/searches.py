"""Matmuls on which a decision rests: of routers, and of loops that end by what they compute."""

from collections.abc import Iterable, Sequence
from typing import Any

from mpjax._src.base import _jax
from mpjax._src.base._jax.held import is_inexact
from mpjax._src.base.higher_order import WHILE, higher_order
from mpjax._src.base.rules import FOLLOW, FULL, HALF, MOVE, NEVER, rule_of
from mpjax._src.planner.equations import Equation, Value, parts

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
                for m in _matmuls_behind(e.ins[0], maker)
                if depth(m) > NARROW * _jax.size_of([columns])
            )
    return found


def _matmuls_behind(v: Value, maker: dict[Value, Equation]) -> Iterable[Equation]:
    waiting, seen = [v], {v}
    while waiting:
        e = maker.get(waiting.pop())
        if e is not None and e.rule.need == HALF:
            yield e
        elif e is not None and _is_elementwise(e):
            waiting += [x for x in e.ins if x not in seen]
            seen.update(e.ins)


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
            counts.update(v for v in e.outs if not is_inexact(v.aval))
    return found


def _ends_by_matmul(eqn: Any) -> bool:
    """Returns whether an equation is a while loop whose end depends on a matmul in it.

    Or a function with such a loop and a backward rule, which may repeat its decisions.
    """
    row = higher_order(eqn.primitive.name)
    if row.backward:
        return _holds_one(eqn)
    if row.kind != WHILE:
        return False
    condition, body = row.wire(eqn)
    ins, equations, outs = parts(condition.program, rules=True)
    read, depends = _behind(equations, outs)
    carries = {i for i, v in enumerate(ins[condition.consts :]) if v in read}
    ins, equations, outs = parts(body.program, rules=True)
    while not depends:
        read, depends = _behind(equations, [outs[i] for i in carries])
        more = {i for i, v in enumerate(ins[body.consts :]) if v in read} - carries
        if not more:
            break
        carries |= more
    return depends


def _holds_one(eqn: Any) -> bool:
    inside = (each for program in _jax.inner_jaxprs(eqn) for each in program.eqns)
    return any(_ends_by_matmul(each) or _holds_one(each) for each in inside)


def _behind(equations: Sequence[Equation], wanted: Iterable[Value]) -> tuple[set[Value], bool]:
    """Returns all that some values are computed from, and whether a matmul is on the way."""
    read, multiplies = {*wanted}, False
    for e in reversed(equations):
        if not read.isdisjoint(e.outs):
            read.update(e.ins)
            multiplies |= _multiplies(e.like)
    return read, multiplies


def _multiplies(eqn: Any) -> bool:
    inner = (inside for program in _jax.inner_jaxprs(eqn) for inside in program.eqns)
    return rule_of(eqn.primitive.name).need == HALF or any(map(_multiplies, inner))
