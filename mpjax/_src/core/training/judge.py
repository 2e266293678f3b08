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
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.branches import flattened
from mpjax._src.core.base.dtypes import FLOAT16
from mpjax._src.core.base.higher_order import CALL, SCAN, higher_order
from mpjax._src.core.base.rules import COMPARE, MOVE, POLE, PROGRAM, rule_of

# What is known of the entries of an array. Scalars of an unknown value are taken to be positive if
# they are not zero, which is judged where it counts. No entries are certain to be HARMLESS.
ANY, NONNEGATIVE, POSITIVE, HARMLESS = range(4)
UNSAFE, COMPARED = "unsafe", "compared"

# Float operations that amplify errors, or have no row, but are finite wherever their operands are.
FINITE = {"bitcast_convert_type", "cos", "reduce_precision", "sin"}


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        level: ANY, NONNEGATIVE or POSITIVE.
        needs: What makes it finite: scalars, with False and their root; square roots, with None;
            sets of scalars of which one must differ from zero, with True; or `UNSAFE`, with the
            root of the unsafe operand. For a bool, `COMPARED`, with those of the operands.
        root: What it is computed of, a set: of one array, besides scalars, or else of scalars.
        given: Sets of scalars. It is positive if in each of them one differs from zero.
    """

    level: int = ANY
    needs: frozenset[Any] = frozenset()
    root: frozenset[Any] | None = None
    given: frozenset[frozenset[Any]] = frozenset()


def _unsafe(root: Any) -> frozenset[Any]:
    return frozenset(((UNSAFE, False, root),))


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
        before = levels
        facts = [Fact(level) for level in [*levels, *[ANY] * (len(inner.invars) - states)]]
        results = _facts(inner, facts, scalars)
        levels = [min(a, fact.level) for a, fact in zip(levels, results, strict=True)]
    own = [i for i, v in enumerate(inner.outvars) if _is_in(v, scalars)]
    # A number of the state may be infinite and stay so, such as the best loss of all.
    needs = _both([f for f, v in zip(results, inner.outvars, strict=True) if v.aval.shape]).needs
    of_numbers = [fact.needs for i, fact in enumerate(results) if i not in own]
    needs |= {
        need for each in of_numbers for need in each if need[0] is UNSAFE or need[1] is not False
    }
    sets = [{*kind} for kind, divides, _ in needs if divides]
    single = {kind for kind, divides, _ in needs if not divides} - {COMPARED}
    roots = [kind for kind, divides, _ in needs if divides is None]
    # The verdict computes these roots once more, which pays for elementwise operations alone.
    again = _jax.open_jaxpr(_jax.with_results(jaxpr, roots))[0].eqns
    if UNSAFE in single or not all(rule_of(eqn.primitive.name).runs_again for eqn in again):
        return None
    made = (*inner.constvars, *inner.invars, *(v for eqn in inner.eqns for v in eqn.outvars))
    outs = [v for v in made if v in single.union(*sets)]  # in an order that is always the same
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


def _facts(jaxpr: Any, ins: Sequence[Fact], scalars: Container[Any] = ()) -> list[Fact]:
    """Returns the facts of a program's results, of which these scalars are judged."""
    env: dict[Any, Fact] = {}

    def write(v, fact):
        if v in scalars and _is_float(v):
            root = fact.root or frozenset((v,))
            needs, given = frozenset(((v, False, root),)), frozenset((frozenset((v,)),))
            fact = Fact(POSITIVE, needs, root, given)
        env[v] = fact if fact.root else fact._replace(root=frozenset((v,)))

    def read(atom):
        return _constant(atom.val) if isinstance(atom, _jax.Literal) else env[atom]

    for v, fact in (*((v, Fact()) for v in jaxpr.constvars), *zip(jaxpr.invars, ins, strict=True)):
        write(v, fact)
    for eqn in jaxpr.eqns:
        found = _results(eqn, list(map(read, eqn.invars)), scalars)
        for v, fact in zip(eqn.outvars, found, strict=True):
            write(v, fact)
    return [read(atom) for atom in jaxpr.outvars]


def _is_float(v: Any) -> bool:
    return jnp.issubdtype(getattr(v.aval, "dtype", bool), jnp.inexact)


def _constant(value: Any) -> Fact:
    if np.iscomplexobj(value) or not np.isfinite(value):
        return Fact(needs=_unsafe(None))
    return Fact(POSITIVE if value > 0 else NONNEGATIVE if value == 0 else ANY)


def _results(eqn: Any, ins: list[Fact], scalars: Container[Any]) -> list[Fact]:
    """Returns the facts of an operation's results."""
    name, kind = eqn.primitive.name, higher_order(eqn.primitive.name)
    if kind.kind in (CALL, SCAN):
        loops = kind.kind == SCAN
        ins = [fact._replace(level=ANY) for fact in ins] if loops else ins
        (inside,) = kind.wire(eqn)
        outs = _facts(_jax.open_jaxpr(inside.program)[0], [ins[i] for i in inside.ins])
        # In a loop, each carry may depend on all.
        return [_both([*ins, *outs])] * len(eqn.outvars) if loops else outs
    if name == "optimization_barrier" or not eqn.outvars:  # such as a print
        return ins[: len(eqn.outvars)]
    if _is_bool(eqn.outvars[0]):
        if rule_of(name).need != COMPARE:
            return [_both(ins)._replace(level=ANY)] * len(eqn.outvars)
        return [Fact(ANY, frozenset((COMPARED, False, f.root) for f in ins if f.root))]
    if name == "select_n":  # a comparison guards a case that divides by what it compared
        fact, is_where = _both(ins[1:]), _is_bool(eqn.invars[0])  # and not a conditional
        compared = frozenset().union(*(root for *_, root in ins[0].needs if is_where and root))
        needs = frozenset(n for n in fact.needs if not (n[2] and n[2] <= compared))
        # A NaN that is not chosen reaches no result.
        drops = any(divides is None for _, divides, _ in needs)
        return [fact._replace(needs=needs | _unsafe(None) if drops else needs)]
    pairs = zip(eqn.invars, ins, strict=True)
    ins = [Fact(NONNEGATIVE) if _is_bool(atom) else fact for atom, fact in pairs]
    fact = _both(ins)
    if not any(map(_is_float, eqn.outvars)):  # such as the bits of floats
        return [fact._replace(level=ANY)] * len(eqn.outvars)
    if rule_of(name).need == MOVE or name == "convert_element_type":
        return [fact] * len(eqn.outvars)
    level, needs = _arithmetic(eqn, ins or [Fact()], scalars)
    if any(v.aval.dtype == FLOAT16 for v in eqn.outvars):  # which overflows at 65504
        needs = _unsafe(None)
    given = fact.given if level == POSITIVE else frozenset()
    if given and name in ("add", "add_any", "max", "clamp"):  # one positive term is enough
        terms, rest = (ins[:2], ins[2:]) if name == "clamp" else (ins, [])
        sets = itertools.product(*(each.given for each in terms if each.level == POSITIVE))
        given = _both(rest).given.union(frozenset().union(*each) for each in sets)
    return [Fact(level, fact.needs | needs, fact.root, given)] * len(eqn.outvars)


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


def _arithmetic(eqn: Any, ins: list[Fact], scalars: Container[Any]) -> tuple[int, frozenset[Any]]:
    """Returns the level of an operation's result, and what else makes it finite."""
    name, levels, risky = eqn.primitive.name, [fact.level for fact in ins], ins[0]
    first, least, most, rule = levels[0], min(levels), max(levels), rule_of(name)
    wild = rule.need == PROGRAM or POLE in rule.traits or rule.amplifies(eqn.params)
    # No entries are HARMLESS, so a wild operation is unsafe unless a case below asks for less.
    wanted = HARMLESS if wild and name not in FINITE else ANY
    match name:
        case "add" | "add_any":
            level = most if least >= NONNEGATIVE else ANY
        case "mul":
            level = max(least, NONNEGATIVE) if eqn.invars[0] is eqn.invars[1] else least
        case "max":
            level = most
        case "min" | "reduce_sum" | "psum" | "dot_general" | "cumsum" | "reduce_precision":
            level = least
        case "clamp":
            level = min(max(levels[:2]), levels[2])
        case "abs" | "square":
            level = max(first, NONNEGATIVE)
        case "integer_pow":
            level = first if eqn.params["y"] % 2 else max(first, NONNEGATIVE)
            wanted = ANY if eqn.params["y"] >= 0 else POSITIVE
        case "cbrt" | "sign":
            level = first
        case "sqrt" | "rsqrt" | "log" | "pow":
            level, exponent = ANY if name == "log" else first, eqn.invars[-1]
            known = isinstance(exponent, _jax.Literal) and exponent.val >= 0
            root = known if name == "pow" else name == "sqrt"
            wanted = NONNEGATIVE if root else POSITIVE
            if name == "sqrt" and first == ANY and scalars:  # not in a loop
                return NONNEGATIVE, frozenset(((eqn.outvars[0], None, risky.root),))
        case "div":
            level, risky, divisor = least, ins[1], eqn.invars[1]
            wanted = ANY if isinstance(divisor, _jax.Literal) and divisor.val != 0 else POSITIVE
        case _:
            level = ANY
    if risky.level < wanted:
        return level, _unsafe(risky.root)
    # What is positive only because some scalars are not zero makes them part of the verdict.
    nonzero = risky.given if wanted == POSITIVE else ()
    return level, frozenset((each, True, risky.root) for each in nonzero)
