"""Rules of the state that a step passes to the next step."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import short_name
from mpjax._src.core.program.graph import Value
from mpjax._src.core.program.states import children, nodes
from mpjax._src.tools.lint.program import CASTS, MOVES, Program
from mpjax._src.tools.lint.rule import Hit


@dataclasses.dataclass(frozen=True)
class Carried:
    """An array that is an argument and a result of a step: the names and values of both."""

    name: str
    before: Value
    after: Value


def carried(program: Program) -> list[Carried]:
    """Returns the state of a step: the trees among its results that match one of its arguments.

    They have the same structure and shapes. If several match, the first is taken.
    """
    (tree, ins), (out, outs) = _ends(program)
    forms: dict[Any, list[slice]] = {}
    for node, where in _in_arguments(tree):
        forms.setdefault((node, _shapes(ins[where])), []).append(where)
    states: list[Carried] = []
    done = 0
    for node, where in nodes(out):
        key = node, _shapes(outs[where])
        # A tree inside of one that matched is a part of it.
        if where.start < done or key not in forms or not any(outs[where]):
            continue
        # Arguments of one form are taken in order; the last may come back several times.
        place = forms[key].pop(0) if len(forms[key]) > 1 else forms[key][0]
        pairs = zip(ins[place], outs[where], strict=True)
        states += [Carried(a[0], a[1], b[1]) for a, b in pairs if a and b]
        done = where.stop
    return states


def alone(program: Program) -> Iterator[Carried]:
    """Yields single arrays that may be state: an argument and a result of the same shape.

    Unlike trees, they may match by chance, so a rule needs further evidence.
    """
    (tree, ins), (out, outs) = _ends(program)
    arguments = [leaf for part, start in children(tree) for leaf in _leaves(part, ins, start)]
    for _, after in _leaves(out, outs):
        for name, before in arguments:
            if before.aval.shape == after.aval.shape:
                yield Carried(name, before, after)


def _leaves(tree: Any, values: list[Any], start: int = 0) -> list[Any]:
    """Returns the values that are the leaves of a tree, or of its parts."""
    leaf = jax.tree_util.treedef_is_leaf
    parts = [(tree, start)] if leaf(tree) else children(tree, start)
    return [values[n] for part, n in parts if leaf(part) and part.num_leaves and values[n]]


def _in_arguments(tree: Any) -> Iterator[tuple[Any, slice]]:
    """Yields the trees among the arguments, of the structure of ``(args, kwargs)``."""
    for arguments, start in children(tree):
        for argument, first in children(arguments, start):
            yield from nodes(argument, first)


def _ends(program: Program) -> tuple[tuple[Any, list[Any]], tuple[Any, list[Any]]]:
    """Returns the structure of the arguments with the name and value of each array leaf, and the
    same for the results."""
    call, out = program.call, program.traced.out
    ins = call.spread(zip(program.names, program.block.invars, strict=True))
    outs = out.spread(zip(program.results, program.block.outvars, strict=True))
    return (call.tree, ins), (out.tree, outs)


def _shapes(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(leaf and leaf[1].aval.shape for leaf in leaves)


# Operations that make new state from old state, and those that write into it.
KEEPS = rules.having(rules.STATE) | MOVES | CASTS
WRITES = frozenset({"add", "add_any", "sub", "select_n", "dynamic_update_slice", "scatter"})


def is_updated(program: Program, each: Carried) -> bool:
    """Returns whether a tree is state, and not only shaped like it (a gradient, cast parameters).

    The new value of state is its old value with something added or written into it.
    """
    through = program.back(each.after, KEEPS)
    makers = {op.name for v in through if (op := program.maker(v))}
    return each.before in through and not makers.isdisjoint(WRITES)


def drifting(program: Program) -> Iterator[Hit]:
    """Finds state whose dtype changes. Weak types are ignored."""
    drifts = [
        (each, each.before.aval.dtype, each.after.aval.dtype)
        for each in carried(program)
        if each.before.aval.dtype != each.after.aval.dtype and is_updated(program, each)
    ]
    if drifts:
        first, before, after = drifts[0]
        more = f", and {len(drifts) - 1} more" if len(drifts) > 1 else ""
        yield Hit(
            f"{first.name} goes in as {short_name(before)} and comes out as {short_name(after)}"
            f"{more}.",
            program.maker(first.after),
        )
