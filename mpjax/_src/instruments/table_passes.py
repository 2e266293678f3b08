"""The tables of each pass of a plan that is made of tables (`autocast.plan`)."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mpjax._src.autocast.plan import Plan, analyze
from mpjax._src.autocast.steps import Checkpoint, ops_of
from mpjax._src.autocast.tables import (
    NO_CHOICE,
    NO_RULING,
    NOT_STORED,
    NOTHING,
    UNREAD,
    Analysis,
    Why,
)
from mpjax._src.autocast.transform import Traced
from mpjax._src.base.dtypes import short_name
from mpjax._src.base.lines import short
from mpjax._src.instruments.tables import words
from mpjax._src.program.graph import Op

# The facts that are sets of values or axes, as bit masks.
MASKS = frozenset(["made", "peak", "chain", "weights", "level", "mean", "offset"])


def tables_of(traced: Traced) -> dict[str, Iterable[tuple[str, ...]]]:
    """Returns the rows of each pass's tables, by its name."""
    outline, plan = traced.outline, traced.plan
    decided = analyze(outline, [getattr(aval, "dtype", None) for aval in traced.avals])
    return {
        "classify": _of_ops(outline, lambda op: (outline.analysis.rulings[op], NO_RULING)),
        "facts": _of_values(outline, lambda v: (decided.facts[v], NOTHING)),
        "demand": _of_values(outline, lambda v: (decided.wants[v], UNREAD)),
        "decide": _decisions(outline, decided),
        "store": _steps(plan),
    }


def _of_ops(plan: Plan, row: Callable[[Op], tuple[Any, Any]]) -> Iterator[tuple[str, ...]]:
    for op in plan.block.walk():
        yield op.name, "", short(op.source), described(*row(op))


def _of_values(plan: Plan, row: Callable[[Any], tuple[Any, Any]]) -> Iterator[tuple[str, ...]]:
    for value in plan.block.invars:
        yield "argument", str(value.aval), ", ".join(value.paths), described(*row(value))
    for op in plan.block.walk():
        for out in op.outs:
            yield op.name, str(out.aval), short(op.source), described(*row(out))


def _decisions(plan: Plan, decided: Analysis) -> Iterator[tuple[str, ...]]:
    for op in plan.block.walk():
        results = ", ".join(str(out.aval) for out in op.outs)
        stored = (described(decided.stored[out], NOT_STORED) for out in op.outs)
        chosen = [described(decided.choices[op], NO_CHOICE), *stored]
        yield op.name, results, short(op.source), "; ".join(filter(None, chosen))


def _steps(plan: Plan) -> Iterator[tuple[str, ...]]:
    """Yields what runs together in each block, and the marks of operations."""
    marks = plan.analysis.marks
    tables: dict[str, Mapping[Op, Any]] = {
        "centered": marks.centered,
        "repeats": marks.repeats,
        "online": marks.online,
    }
    for number, block in enumerate(plan.block.blocks()):
        for step in plan.analysis.steps.get(block, ()):
            inside = step.steps if isinstance(step, Checkpoint) else (step,)
            ops = [*itertools.chain.from_iterable(map(ops_of, inside))]
            said: dict[str, Any] = {}
            if not isinstance(step, Op):
                said[type(step).__name__] = " ".join(op.name for op in ops)
            said |= {name: table[op] for op in ops for name, table in tables.items() if op in table}
            said["steady"] = any(map(marks.is_steady, ops))
            said["kept"] = " ".join(str(v.aval) for v in step.outs if v in plan.analysis.kept)
            text = " ".join(_entry(name, entry) for name, entry in said.items() if entry)
            results = ", ".join(str(v.aval) for v in step.outs)
            yield f"{number}: {ops[-1].name}", results, short(ops[-1].source), text


def described(row: Any, blank: Any) -> str:
    """Returns the fields of a table's row that differ from those of a blank one, as text."""
    pairs = zip(row._fields, row, blank, strict=True)
    return " ".join(_entry(name, entry) for name, entry, none in pairs if entry != none)


def _entry(name: str, entry: Any) -> str:
    if isinstance(entry, bool):
        return name if entry else f"not {name}"
    if name in MASKS:
        entry = ",".join(str(i) for i in range(entry.bit_length()) if entry >> i & 1)
    elif isinstance(entry, Why):
        entry = f'"{words(entry)}"'
    elif isinstance(entry, np.dtype):
        entry = short_name(entry)
    elif isinstance(entry, frozenset):  # readers: how many
        entry = len(entry)
    return f"{name}={entry:.3g}" if isinstance(entry, float) else f"{name}={entry}"
