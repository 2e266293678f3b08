"""Rules of the state that a step passes on: its dtype, and whether a skipped step keeps it."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import dtype_of, is_float, short_name
from mpjax._src.core.base.higher_order import BRANCH
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.core.program.states import children, nodes
from mpjax._src.tools.lint.program import CHOSEN, SAME, Program, all_reached, anything, cases, noted
from mpjax._src.tools.lint.rule import Hit


@dataclasses.dataclass(frozen=True)
class Carried:
    """An array that is an argument and a result of a step: the names and values of both."""

    name: str
    before: Value
    after: Value


@noted
def carried(program: Program) -> list[Carried]:
    """Returns the state of a step: the trees among its results that match one of its arguments.

    They have the same structure and shapes. If several match, it is the one that is added to or
    written into, else the one of the same dtypes, else the first.
    """
    call, out = program.call, program.traced.out
    # The name and value of each leaf that is an array.
    ins = call.spread(zip(program.names, program.block.invars, strict=True))
    outs = out.spread(zip(program.results, program.block.outvars, strict=True))
    forms: dict[Any, list[slice]] = {}
    for node, where in _in_arguments(call.tree):
        forms.setdefault((node, _shapes(ins[where])), []).append(where)
    states: list[Carried] = []
    done = 0
    for node, where in nodes(out.tree):
        key = node, _shapes(outs[where])
        # A tree inside of one that matched is a part of it.
        if where.start < done or key not in forms or not any(outs[where]):
            continue
        # Each of several arguments of one form is taken once; the last may come back several times.
        places = forms[key]
        if len(places) > 1:
            best = min(places, key=functools.partial(_distance, program, ins, outs[where]))
            places = [places.pop(places.index(best))]
        (place,) = places
        pairs = zip(ins[place], outs[where], strict=True)
        states += [Carried(a[0], a[1], b[1]) for a, b in pairs if a and b]
        done = where.stop
    return states


def _distance(program: Program, ins: Any, after: Any, place: slice) -> tuple[bool, bool]:
    """Returns what says less that an argument is the state of some results: less is nearer."""
    pairs = [(a[1], b[1]) for a, b in zip(ins[place], after, strict=True) if a and b]
    # What is multiplied first, such as a gradient by a rate, is added, and not added to.
    direct = any(a in program.back(b, CHOSEN | WRITES) for a, b in pairs)
    return not direct, any(a.aval.dtype != b.aval.dtype for a, b in pairs)


def alone(program: Program) -> Iterator[Carried]:
    """Yields single arrays that may be state: an argument and a result of the same shape.

    Unlike trees, they may match by chance, so a rule needs further evidence.
    """
    given = zip(program.call.keys, program.names, program.block.invars, strict=True)
    # The first key says whether it is a positional argument, the second which one.
    arguments = [(name, before) for keys, name, before in given if len(keys) == 2]
    for keys, after in zip(program.traced.out.keys, program.block.outvars, strict=True):
        for name, before in arguments if len(keys) < 2 else ():
            if before.aval.shape == after.aval.shape:
                yield Carried(name, before, after)


def _in_arguments(tree: Any) -> Iterator[tuple[Any, slice]]:
    """Yields the trees among the arguments, of the structure of ``(args, kwargs)``."""
    for arguments, start in children(tree):
        for argument, first in children(arguments, start):
            yield from nodes(argument, first)


def _shapes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(leaf and leaf[1].aval.shape for leaf in leaves)


# Operations that make new state from old state, and those that write into it.
KEEPS = rules.having(rules.STATE) | SAME
WRITES = rules.having(rules.STATE) - rules.PRODUCTS - {"neg"}


def is_updated(program: Program, each: Carried) -> bool:
    """Returns whether a tree is state, and not only shaped like it (a gradient, cast parameters).

    The new value of state is its old value with something added or written into it. An array to
    which only constants are added, and that is scaled too, is normalized, and so are bytes that
    become fractions.
    """
    if each.before not in program.back(each.after, KEEPS):
        return False
    pixels = dtype_of(each.before) == jnp.uint8 and is_float(each.after)
    ways = WRITES - CHOSEN - rules.SUMS_OF_TWO if pixels else WRITES
    makers = program.makers(each.after, KEEPS)
    fixed = each.before.is_one or not any(op.name in rules.PRODUCTS for op in makers)
    return any(op.name in ways and _adds(program, each, op, fixed) for op in makers)


def _adds(program: Program, each: Carried, op: Op, fixed: bool) -> bool:
    """Returns whether an operation adds to an array, or selects, what comes from elsewhere.

    With ``fixed``, constants count too.
    """
    if op.name in rules.SUMS_OF_TWO:
        return fixed or _given(program).issuperset(op.ins)
    return not cases(op) or any(each.before not in program.back(v, KEEPS) for v in cases(op))


@noted
def _given(program: Program) -> set[Value]:
    """Returns the arguments and all that is computed of them; all else is constant."""
    return {*program.ahead(program.block.invars, anything)}


def drifting(program: Program) -> Iterator[Hit]:
    """Finds state whose dtype changes. Weak types are ignored."""
    drifts = [
        each
        for each in carried(program)
        if each.before.aval.dtype != each.after.aval.dtype and is_updated(program, each)
    ]
    if drifts:
        first, *others = drifts
        before, after = (short_name(v.aval.dtype) for v in (first.before, first.after))
        more = f", and {len(others)} more" if others else ""
        yield Hit(
            f"{first.name} goes in as {before} and comes out as {after}{more}.",
            program.maker(first.after),
        )


# Operations between the finite check of a number and the predicate of a gate.
VERDICTS = (
    *(CHOSEN | rules.LOGIC | rules.EQUALITIES | rules.EXTREMES | rules.ALL_SUMS),
    *("reduce_and", "reduce_or", "pmin", "pmax", "concatenate", "stack"),
)


def ungated_states(program: Program) -> Iterator[Hit]:
    """Finds states that a skipped step updates, although they are computed from checked values.

    A gate is a select of a state's new or old value, by a finite check. Every other floating state
    that is updated from the checked values must depend on the check too: by a gate, through a gated
    value (an average of the weights), or directly (a loss scale).
    """
    states = [
        each for each in carried(program) if jnp.issubdtype(each.before.aval.dtype, jnp.floating)
    ]
    gates = [gate for each in states if (gate := _gate(program, each))]
    if not gates:
        return
    asked = dict.fromkeys(_asked(program, gate) for gate in gates)
    tests = [*dict.fromkeys(op for value in asked for op in _tests(program, value))]
    checked = {*program.behind([op.ins[0] for op in tests], anything)}
    gated = _depends(program, [op.outs[0] for op in tests])
    # What is computed of other arguments alone, such as of a batch or of a game that is played,
    # says nothing of a state: it has to come from what a gated state led to, and then was checked.
    following = functools.partial(_entries_after, program)
    led = all_reached([each.before for each in states if each.after in gated], following)
    computed = [v for v in led if v in checked and program.maker(v) is not None]
    made = {*all_reached(computed, following)}
    missed = [
        each
        for each in states
        if each.after not in gated
        and each.before is not each.after
        and is_updated(program, each)
        and each.after in made
    ]
    if missed:
        names = ", ".join(each.name for each in missed[:3])
        more = f", and {len(missed) - 3} more" if len(missed) > 3 else ""
        yield Hit(
            f"A non-finite step is skipped for {len(gates)} of {len(states)} states, but not for "
            f"{names}{more}.",
            next(iter(program.makers(missed[0].after, SAME)), None),
        )


def _gate(program: Program, each: Carried) -> Op | None:
    """Returns the operation that selects the new or old value of a state by a finite test."""
    for value in program.back(each.after, SAME):
        # A step may be skipped by a select or by a branch (lax.cond).
        op = program.branch(value) or program.maker(value)
        if op is None or not (cases(op) or op.inside.kind == BRANCH):
            continue
        # One of the cases is the old value, moved or cast at most.
        ways = cases(op) or [value]
        old = any(program.is_from(v, each.before) for v in ways)
        if old and _tests(program, _asked(program, op)):
            return op
    return None


def _depends(program: Program, tests: list[Value]) -> set[Value]:
    """Returns all values that are computed from some values, or selected by them."""
    dependent: set[Value] = set()
    while tests:
        new = {*program.ahead(tests, anything)} - dependent
        dependent |= new
        chosen = {op for v in new for op in program.chooses(v)}
        tests = [v for op in chosen for v in op.outs if v not in dependent]
    return dependent


def _entries_after(program: Program, value: Value) -> Iterator[Value]:
    """Yields what is computed of a value in one step and may be Inf or NaN because it is.

    That is not what the value only chooses, nor integers.
    """
    return filter(is_float, program.after(value, lambda op: not cases(op) or value in cases(op)))


def _asked(program: Program, gate: Op) -> Value:
    """Returns the predicate of a gate, before it was given the shape of a state."""
    return program.back(gate.ins[0], rules.VIEWS)[-1]


def _tests(program: Program, predicate: Value) -> list[Op]:
    """Returns the finite tests that a predicate comes from: many states have the same."""
    known: dict[Value, list[Op]] = program.notes.setdefault("tests", {})
    if predicate not in known:
        makers = program.makers(predicate, VERDICTS)
        known[predicate] = [op for op in makers if op.name == "is_finite"]
    return known[predicate]
