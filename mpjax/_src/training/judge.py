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

from collections.abc import Container, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from mpjax._src.base import _jax
from mpjax._src.base.dtypes import FLOAT16
from mpjax._src.base.higher_order import CALL, SCAN, higher_order
from mpjax._src.base.rules import COMPARE, MOVE, POLE, PROGRAM, rule_of

# What is known of the entries of an array. Scalars of an unknown value are taken to be positive.
ANY, NONNEGATIVE, POSITIVE = range(3)
UNSAFE, COMPARED = "unsafe", "compared"

# Float operations that amplify errors, or have no row, but are finite wherever their operands are.
FINITE = {"bitcast_convert_type", "cos", "reduce_precision", "sin"}


class Fact(NamedTuple):
    """What is known of a value.

    Attributes:
        level: ANY, NONNEGATIVE or POSITIVE.
        needs: What makes it finite: scalars, each with whether it must also differ from zero, and
            its origin; square roots, with None instead; or `UNSAFE`, with the origin of the unsafe
            operand. For a bool, `COMPARED`, with those of the operands.
        root: The one array that it is computed of, besides numbers: its origin.
    """

    level: int = ANY
    needs: frozenset[Any] = frozenset()
    root: Any = None


def _unsafe(root: Any) -> frozenset[Any]:
    return frozenset(((UNSAFE, False, root),))


def judged(jaxpr: Any, states: int) -> tuple[Any, list[int], list[bool]] | None:
    """Returns which scalars and roots of an update are judged, or None if all of its results are.

    The first arguments of the update and all of its results are a state of ``states`` arrays.

    Returns:
        A program that returns them, of which the first are results of the update; the indices of
        these results; and for each of the others whether it must not be zero.
    """
    jaxpr = _jax.flattened(jaxpr)  # scalars may be computed in a jit or a branch
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
    kinds = {kind for kind, *_ in needs}
    roots = [root for root, divides, _ in needs if divides is None]
    again = _jax.open_jaxpr(_jax.with_results(jaxpr, roots))[0].eqns
    if UNSAFE in kinds or not all(rule_of(eqn.primitive.name).runs_again for eqn in again):
        return None
    nonzero = dict.fromkeys(kinds - {COMPARED}, False)
    nonzero |= {scalar: True for scalar, divides, _ in needs if divides}
    outvars = [*(inner.outvars[i] for i in own), *nonzero]
    return _jax.with_results(jaxpr, outvars), own, list(nonzero.values())


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


def _known(atom: Any, scalars: Container[Any]) -> int:
    """Returns the level of a scalar where it is not judged: it may be zero."""
    return NONNEGATIVE if _is_in(atom, scalars) else POSITIVE


def _facts(jaxpr: Any, ins: Sequence[Fact], scalars: Container[Any] = ()) -> list[Fact]:
    """Returns the facts of a program's results, of which these scalars are judged."""
    env: dict[Any, Fact] = {}

    def write(v, fact):
        if v in scalars and _is_float(v):
            root = fact.root or v
            fact = Fact(POSITIVE, frozenset(((v, False, root),)), root)
        env[v] = fact if fact.root is not None else fact._replace(root=v)

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
        ins = [
            fact._replace(level=ANY if loops else min(fact.level, _known(atom, scalars)))
            for atom, fact in zip(eqn.invars, ins, strict=True)
        ]
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
        is_where = _is_bool(eqn.invars[0])  # and not a conditional
        fact, compared = _both(ins[1:]), {root for *_, root in ins[0].needs if is_where}
        needs = frozenset(need for need in fact.needs if need[2] not in compared)
        # A NaN that is not chosen reaches no result.
        drops = any(divides is None for _, divides, _ in needs)
        return [fact._replace(needs=needs | _unsafe(None) if drops else needs)]
    pairs = zip(eqn.invars, ins, strict=True)
    ins = [Fact(NONNEGATIVE) if _is_bool(atom) else fact for atom, fact in pairs]
    fact = _both(ins)
    if not any(map(_is_float, eqn.outvars)):  # such as the bits of floats
        return [fact._replace(level=ANY)] * len(eqn.outvars)
    if rule_of(name).need == MOVE or name == "convert_element_type":
        level = min([fact.level, *(_known(atom, scalars) for atom in eqn.invars)])
        return [fact._replace(level=level)] * len(eqn.outvars)
    level, needs = _arithmetic(eqn, ins or [Fact()], scalars)
    if any(v.aval.dtype == FLOAT16 for v in eqn.outvars):  # which overflows at 65504
        needs = _unsafe(None)
    return [Fact(level, fact.needs | needs, fact.root)] * len(eqn.outvars)


def _is_bool(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) == np.bool_


def _both(facts: Sequence[Fact]) -> Fact:
    level = min((fact.level for fact in facts), default=ANY)
    roots = {fact.root for fact in facts} - {None}
    needs = frozenset().union(*(fact.needs for fact in facts))
    return Fact(level, needs, roots.pop() if len(roots) == 1 else None)


def _arithmetic(eqn: Any, ins: list[Fact], scalars: Container[Any]) -> tuple[int, frozenset[Any]]:
    """Returns the level of an operation's result, and what else makes it finite."""
    name, levels, risky = eqn.primitive.name, [fact.level for fact in ins], ins[0].root
    first, least, most, rule = levels[0], min(levels), max(levels), rule_of(name)
    wild = rule.need == PROGRAM or POLE in rule.traits or rule.amplifies(eqn.params)
    safe = name in FINITE or not wild
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
            safe = eqn.params["y"] >= 0 or first == POSITIVE
        case "cbrt" | "sign":
            level = first
        case "sqrt" | "rsqrt" | "log" | "pow":
            level, exponent = ANY if name == "log" else first, eqn.invars[-1]
            known = isinstance(exponent, _jax.Literal) and exponent.val >= 0
            root = known if name == "pow" else name == "sqrt"
            safe = first >= (NONNEGATIVE if root else POSITIVE)
            if not safe and name == "sqrt" and scalars:  # not in a loop
                return NONNEGATIVE, frozenset(((eqn.outvars[0], None, risky),))
        case "div":
            level, divisor, risky = least, eqn.invars[1], ins[1].root
            if _is_in(divisor, scalars):
                return level, frozenset(((divisor, True, risky),))
            known = divisor.val != 0 if isinstance(divisor, _jax.Literal) else False
            safe = known or levels[1] == POSITIVE
        case _:
            level = ANY
    return level, frozenset() if safe else _unsafe(risky)
