"""The rule of skipped steps: whether some state is updated all the same."""

from collections.abc import Iterator

import jax.numpy as jnp

from mpjax._src.core.base.higher_order import BRANCH
from mpjax._src.core.program.graph import Op, Value
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit
from mpjax._src.tools.lint.states import Carried, carried, is_updated

# Operations between the finite check of a number and the predicate of a gate.
VERDICTS = frozenset(
    {"and", "or", "not", "reduce_and", "reduce_or", "reduce_min", "reduce_max", "eq", "ne"}
) | {"psum", "pmin", "pmax", "concatenate", "select_n", "stack"}


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
    verdicts = {op: None for gate in gates for op in _verdict(program, gate)}
    tests = [op for op in verdicts if op.name == "is_finite"]
    checked = {v for op in tests for v in program.back(op.ins[0], lambda op: True)}
    gated = _depends(program, [op.outs[0] for op in tests])
    arguments = {*program.block.invars}
    # What is computed of the arguments alone, such as of the batch, says nothing of a state: it has
    # to come from something that was computed, and then checked.
    computed = {v for v in checked if v not in arguments and program.maker(v) is not None}
    missed = [
        each
        for each in states
        if each.after not in gated
        and each.before is not each.after
        and is_updated(program, each)
        and any(v in computed for v in program.back(each.after, lambda op: True))
    ]
    if missed:
        names = ", ".join(each.name for each in missed[:3])
        more = f", and {len(missed) - 3} more" if len(missed) > 3 else ""
        yield Hit(
            f"A non-finite step is skipped for {len(gates)} of {len(states)} states, but not for "
            f"{names}{more}.",
            next(iter(program.makers(missed[0].after, MOVES | CASTS)), None),
        )


def _gate(program: Program, each: Carried) -> Op | None:
    """Returns the operation that selects the new or old value of a state by a finite test."""
    for value in program.back(each.after, MOVES | CASTS):
        # A step may be skipped by a select or by a branch (lax.cond).
        op = program.branch(value) or program.maker(value)
        if op is None or not (op.name == "select_n" or op.inside.kind == BRANCH):
            continue
        # One of the cases is the old value, moved or cast at most.
        ways = op.ins[1:] if op.name == "select_n" else [value]
        old = any(each.before in program.back(v, MOVES | CASTS) for v in ways)
        if old and any(maker.name == "is_finite" for maker in _verdict(program, op)):
            return op
    return None


def _depends(program: Program, tests: list[Value]) -> set[Value]:
    """Returns all values that are computed from some values, or selected by them."""
    dependent: set[Value] = set()
    while tests:
        new = {v for test in tests for v in program.forward(test, lambda op: True)} - dependent
        dependent |= new
        chosen = {op for v in new for op in program.chooses(v)}
        tests = [v for op in chosen for v in op.outs if v not in dependent]
    return dependent


def _verdict(program: Program, gate: Op) -> list[Op]:
    return program.makers(gate.ins[0], VERDICTS | MOVES | CASTS)
