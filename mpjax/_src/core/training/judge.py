"""Which results of an optimizer are judged: all, or only what plain arithmetic depends on.

An optimizer may return non-finite updates of finite gradients: it evaluates a function itself (SAM,
line searches), divides by zero, or has a learning rate of NaN. To judge all of its results, they
are computed once more or stored, before any is applied: half as many bytes again for Adam.

Most optimizers are float32 arithmetic whose divisors and roots are safe: sums of squares and a
positive constant. Their results are finite if their gradients, and the scalars that they multiply
and divide by, are, up to an overflow near 3e38. So of these only the scalars are judged, which
costs nothing. A root of what may be negative (Yogi's second moment) is judged itself: it is NaN or
finite, and NaN reaches a result.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax, rules
from mpjax._src.core.base.branches import flattened
from mpjax._src.core.base.dtypes import FLOAT16
from mpjax._src.core.base.higher_order import CALL, SCAN, higher_order

# What is known of the entries of an array. Scalars of an unknown value are taken to be positive if
# they are not zero, which is judged where it counts. No entries are certain to be HARMLESS.
ANY, NONNEGATIVE, POSITIVE, HARMLESS = range(4)
# The kinds of what a value needs to be finite, see `Fact`.
SCALAR, ROOT, NONZERO, UNSAFE, COMPARED = "scalar", "root", "nonzero", "unsafe", "compared"

# Float operations that amplify errors, or have no row, but are finite wherever their operands are.
FINITE = {"bitcast_convert_type", "cos", "reduce_precision", "sin"}
# Operations that are finite wherever their operand, of a quotient the second one, is positive.
POLES = {"div", "integer_pow", "log", "pow", "rsqrt"}
# Sums and the like, of which one positive term is enough.
MORE = {*rules.ADDITIONS, *rules.LARGEST, "clamp"}
SUMS = {*rules.MATMULS, *rules.ALL_SUMS, "reduce_sum", "cumsum"}
# The level of a result, by those of the operands; of other operations it is ANY.
LEVELS: dict[str, Callable[[list[int]], int]] = {
    **dict.fromkeys(rules.ADDITIONS, lambda of: max(of) if min(of) >= NONNEGATIVE else ANY),
    **dict.fromkeys((*SUMS, *rules.PRODUCTS, *rules.SMALLEST, "reduce_precision"), min),
    **dict.fromkeys(rules.LARGEST, max),
    **dict.fromkeys(("abs", "square", "sqrt"), lambda of: max(of[0], NONNEGATIVE)),
    **dict.fromkeys(("cbrt", "integer_pow", "pow", "rsqrt", "sign"), lambda of: of[0]),
    "clamp": lambda of: min(max(of[:2]), of[2]),
}


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        level: ANY, NONNEGATIVE or POSITIVE.
        needs: What makes it finite, as triples: a kind, what is needed, and its root. A SCALAR has
            to be finite; a square ROOT too; of a set of scalars one has to be NONZERO; or it is
            UNSAFE, by an operand of that root. For a bool, COMPARED, with the roots of what is.
        root: What it is computed of, a set: of one array, besides scalars, or else of scalars.
        given: Sets of scalars. It is positive if in each of them one differs from zero.
    """

    level: int = ANY
    needs: frozenset[Any] = frozenset()
    root: frozenset[Any] | None = None
    given: frozenset[frozenset[Any]] = frozenset()


def _unsafe(root: Any) -> frozenset[Any]:
    return frozenset(((UNSAFE, None, root),))


def judged(jaxpr: Any, states: int) -> tuple[Any, list[int], list[list[int]]] | None:
    """Returns which scalars and roots of an update are judged, or None if all of its results are.

    The first arguments of the update and all of its results are a state of ``states`` arrays.

    Returns:
        A program that returns them, of which the first are results of the update; the indices of
        these results; and lists of positions among the others, of which one must not be zero.
    """
    jaxpr = flattened(jaxpr)  # scalars may be computed in a jit or a branch
    inner, _ = _jax.open_jaxpr(jaxpr)
    scalars = _of_scalars(inner)
    levels, before = [NONNEGATIVE] * states, None
    while levels != before:  # entries that are never negative if they were not in the last step
        before, rest = levels, [ANY] * (len(inner.invars) - states)
        results = _facts(jaxpr, map(Fact, [*levels, *rest]), scalars)
        levels = [min(a, fact.level) for a, fact in zip(levels, results, strict=True)]
    own = [i for i, v in enumerate(inner.outvars) if _is_in(v, scalars)]
    needs = {
        need
        for i, (v, fact) in enumerate(zip(inner.outvars, results, strict=True))
        for need in fact.needs
        # A number of the state may be infinite and stay so, such as the best loss of all.
        if v.aval.shape or (i not in own and need[0] != SCALAR)
    }
    scalar, roots, sets, unsafe = (
        [what for kind, what, _ in needs if kind == wanted]
        for wanted in (SCALAR, ROOT, NONZERO, UNSAFE)
    )
    # The verdict computes these roots once more, which pays for elementwise operations alone.
    again = _jax.open_jaxpr(_jax.with_results(jaxpr, roots))[0].eqns
    if unsafe or not all(rules.rule_of(eqn.primitive.name).runs_again for eqn in again):
        return None
    made = (*inner.constvars, *inner.invars, *(v for eqn in inner.eqns for v in eqn.outvars))
    judged = {*scalar, *roots}.union(*sets)
    outs = [v for v in made if v in judged]  # in an order that is always the same
    nonzero = sorted([i for i, v in enumerate(outs) if v in each] for each in sets)
    outvars = [*(inner.outvars[i] for i in own), *outs]
    return _jax.with_results(jaxpr, outvars), own, nonzero


def _of_scalars(jaxpr: Any) -> set[Any]:
    """Returns the scalars that are computed of scalars alone; arrays may choose among them."""
    scalars = {v for v in (*jaxpr.constvars, *jaxpr.invars) if v.aval.shape == ()}
    for eqn in jaxpr.eqns:
        values = eqn.invars[eqn.primitive.name == "select_n" :]
        known = all(isinstance(atom, _jax.Literal) or atom in scalars for atom in values)
        if known and all(v.aval.shape == () for v in eqn.outvars):
            scalars |= {*eqn.outvars}
    return scalars


def _is_in(atom: Any, scalars: Container[Any]) -> bool:
    return not isinstance(atom, _jax.Literal) and atom in scalars


def _facts(program: Any, ins: Iterable[Fact], scalars: Container[Any] = ()) -> list[Fact]:
    """Returns the facts of a program's results, of which these scalars are judged."""

    def noted(v, fact):
        if v in scalars and _is_float(v):
            root = fact.root or frozenset((v,))
            needs, given = frozenset(((SCALAR, v, root),)), frozenset((frozenset((v,)),))
            return Fact(POSITIVE, needs, root, given)
        return fact if fact.root else fact._replace(root=frozenset((v,)))

    def results(eqn, operands):
        return map(noted, eqn.outvars, _results(eqn, operands, scalars))

    inner, consts = _jax.hoisted(program)
    known = map(noted, inner.invars, [*(Fact() for _ in consts), *ins])
    return _jax.walk(inner, [*known], results, _constant)


def _is_float(v: Any) -> bool:
    return jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact)


def _constant(value: Any) -> Fact:
    if np.iscomplexobj(value) or not np.isfinite(value):
        return Fact(needs=_unsafe(None))
    return Fact(POSITIVE if value > 0 else NONNEGATIVE if value == 0 else ANY)


def _results(eqn: Any, ins: list[Fact], scalars: Container[Any]) -> list[Fact]:
    """Returns the facts of an operation's results."""
    name, row = eqn.primitive.name, higher_order(eqn.primitive.name)
    need = rules.rule_of(name).need
    if row.kind in (CALL, SCAN):
        loops = row.kind == SCAN
        ins = [fact._replace(level=ANY) for fact in ins] if loops else ins
        (inside,) = row.wire(eqn)
        outs = _facts(inside.program, [ins[i] for i in inside.ins])
        # In a loop, each carry may depend on all.
        return [_both([*ins, *outs])] * len(eqn.outvars) if loops else outs
    if name == "optimization_barrier" or not eqn.outvars:  # such as a print
        return ins[: len(eqn.outvars)]
    if _is_bool(eqn.outvars[0]) and need == rules.COMPARE:
        fact = Fact(needs=frozenset((COMPARED, None, f.root) for f in ins if f.root))
    elif _is_bool(eqn.outvars[0]):
        fact = _both(ins)._replace(level=ANY)
    elif name == "select_n":  # a comparison guards a case that divides by what it compared
        fact, is_where = _both(ins[1:]), _is_bool(eqn.invars[0])  # and not a conditional
        compared = frozenset().union(*(root for *_, root in ins[0].needs if is_where and root))
        needs = frozenset(n for n in fact.needs if not (n[2] and n[2] <= compared))
        # A NaN that is not chosen reaches no result.
        drops = any(kind == ROOT for kind, *_ in needs)
        fact = fact._replace(needs=needs | _unsafe(None) if drops else needs)
    else:
        pairs = zip(eqn.invars, ins, strict=True)
        ins = [Fact(NONNEGATIVE) if _is_bool(atom) else fact for atom, fact in pairs]
        fact = _both(ins)
        if not any(map(_is_float, eqn.outvars)):  # such as the bits of floats
            fact = fact._replace(level=ANY)
        elif need != rules.MOVE and name != "convert_element_type":
            fact = _arithmetic(eqn, ins or [fact], fact, scalars)
    return [fact] * len(eqn.outvars)


def _is_bool(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) == np.bool_


def _both(facts: Sequence[Fact]) -> Fact:
    level = min((fact.level for fact in facts), default=ANY)
    needs = frozenset().union(*(fact.needs for fact in facts))
    given = frozenset().union(*(fact.given for fact in facts))
    roots = {fact.root for fact in facts if fact.root}
    arrays = {root for root in roots if any(v.aval.shape for v in root)}
    root = frozenset().union(*(arrays or roots))
    return Fact(level, needs, root if len(arrays) < 2 else None, given)


def _arithmetic(eqn: Any, ins: list[Fact], both: Fact, scalars: Container[Any]) -> Fact:
    """Returns the fact of a float operation's results; ``both`` is that of all operands."""
    name, power = eqn.primitive.name, eqn.params.get("y", 1)
    level = LEVELS.get(name, lambda _: ANY)([fact.level for fact in ins])
    if power % 2 == 0 or (name == "mul" and eqn.invars[0] is eqn.invars[1]):
        level = max(level, NONNEGATIVE)
    needs = _needs(eqn, ins[name == "div"], bool(scalars))
    if any(v.aval.dtype == FLOAT16 for v in eqn.outvars):  # which overflows at 65504
        needs = _unsafe(None)
    given = both.given if level == POSITIVE else frozenset()
    if given and name in MORE:  # one positive term is enough
        terms, rest = (ins[:2], ins[2:]) if name == "clamp" else (ins, [])
        sets = itertools.product(*(each.given for each in terms if each.level == POSITIVE))
        given = _both(rest).given.union(frozenset().union(*each) for each in sets)
    return Fact(level, both.needs | needs, both.root, given)


def _needs(eqn: Any, risky: Fact, outside: bool) -> frozenset[Any]:
    """Returns what an operation needs of its risky operand; ``outside`` is not in a loop."""
    name, power, rule = eqn.primitive.name, eqn.params.get("y"), rules.rule_of(eqn.primitive.name)
    if name == "sqrt" and risky.level == ANY and outside:
        return frozenset(((ROOT, eqn.outvars[0], risky.root),))
    # No entries are HARMLESS, so a wild operation is unsafe unless a case below asks for less.
    wild = rule.need == rules.PROGRAM or rules.POLE in rule.traits or rule.amplifies(eqn.params)
    wanted = HARMLESS if wild and name not in FINITE else ANY
    last = eqn.invars[-1] if eqn.invars else None  # such as a range has none
    number = getattr(last, "val", None)  # of a literal
    if name == "sqrt" or (name == "pow" and number is not None and number >= 0):
        wanted = NONNEGATIVE
    elif name in POLES:
        safe = number if name == "div" else power is not None and power >= 0
        wanted = ANY if safe else POSITIVE
    if risky.level < wanted:
        return _unsafe(risky.root)
    # What is positive only because some scalars are not zero makes them part of the verdict.
    nonzero = risky.given if wanted == POSITIVE else ()
    return frozenset((NONZERO, each, risky.root) for each in nonzero)
