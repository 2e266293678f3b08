"""The goals of the suites: all of them in a table of each suite, and one summary of their kinds."""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

from benchmarks.page.tables import Cell, prose, table

RANGE = "in the range"


@dataclasses.dataclass(frozen=True)
class Goal:
    """A goal, and what was measured.

    Attributes:
        kind: What is measured. The summary has one row for each kind.
        of: What tells it from the others of its kind, such as a model; "" if it is the only one.
        sense: "<=", ">=" or `RANGE`.
        bound: The bound: one number, or two of a range. None if even that was not measured.
        found: The measured number, or None.
        met: Whether the goal is met, or None if it was not measured.
        unit: What follows the numbers: "x" if they are ratios.
        sure: Whether the interval of the measured number leaves no doubt.
        interval: The ends of that interval.
        same: Whether the numbers of all goals of this kind have the same meaning.
    """

    kind: str
    of: str
    sense: str
    bound: float | tuple[float, float] | None
    found: float | None
    met: bool | None
    unit: str = "x"
    sure: bool = True
    interval: tuple[float, float] | None = None
    same: bool = True

    @property
    def bounds(self) -> tuple[float, ...]:
        if self.bound is None:
            return ()
        return self.bound if isinstance(self.bound, tuple) else (self.bound,)


def recorded(row: dict[str, Any], kind: str, of: str, sense: str, unit: str, same: bool) -> Goal:
    """Returns the goal of a row of results: its bound, and one number or a median and its ends."""
    found, bound = row["found"], row["bound"]
    spread = isinstance(found, dict)
    return Goal(
        kind,
        of,
        sense,
        tuple(bound) if isinstance(bound, list | tuple) else bound,
        found["median"] if spread else found,
        row["met"],
        unit,
        row.get("sure", True),
        (found["low"], found["high"]) if spread else None,
        same,
    )


def every(goals: Iterable[Goal]) -> str:
    """Returns the table of all goals that were measured."""
    rows = []
    for goal in goals:
        if goal.met is None:
            continue
        found = _number(goal.found, goal.unit)
        if goal.interval:
            found += " ({} to {})".format(*(_number(end, goal.unit) for end in goal.interval))
        name = f"{goal.kind}: {goal.of}" if goal.of else goal.kind
        rows.append((name, _limit([goal]), found, verdict(goal)))
    return table(("goal", "bound", "result", "met"), rows)


def verdict(goal: Goal) -> str:
    """Says whether a goal is met, and whether the interval leaves a doubt."""
    if goal.met is None:
        return "not measured"
    return ("met" if goal.met else "**not met**") + ("" if goal.sure else ", within noise")


def summary(suites: Iterable[tuple[str, list[Goal]]]) -> str:
    """Returns the table of the kinds of goals, each with how many of its goals are met."""
    rows = []
    for where, goals in suites:
        for kind, found in _kinds(goals).items():
            known = [goal for goal in found if goal.met is not None]
            if known:
                of = f": {known[0].of}" if len(known) == 1 and known[0].of else ""
                rows.append((f"{where}: {kind}{of}", *_row(known)))
    return prose(("goal", "bound", "result", "met"), rows)


def unmeasured(goals: list[Goal]) -> str:
    """Returns a list of the goals that were not measured, by their kind."""
    lines = []
    for kind, found in _kinds(goals).items():
        left = [goal for goal in found if goal.met is None]
        if left:
            models = list(dict.fromkeys(goal.of.partition(",")[0] for goal in left if goal.of))
            lines.append(f"- {kind}" + (f": {', '.join(models)}" if models else ""))
    return "\n".join(lines) + "\n"


def _row(goals: list[Goal]) -> tuple[Cell, ...]:
    values = [goal.found for goal in goals if goal.found is not None]
    ends = dict.fromkeys(_number(end, goals[0].unit) for end in (min(values), max(values)))
    result = " to ".join(ends) if goals[0].same else "-"
    if len(goals) == 1:
        return _limit(goals), result, verdict(goals[0])
    failed = [goal.of for goal in goals if not goal.met]
    met = f"{len(goals) - len(failed)} of {len(goals)}"
    return (
        _limit(goals),
        result,
        f"**{met}** met, not {'; '.join(failed)}" if failed else f"{met} met",
    )


def _limit(goals: list[Goal]) -> str:
    if not goals[0].same and len(goals) > 1:
        return "the range of float32's seeds"
    ends = sorted(set(itertools.chain.from_iterable(goal.bounds for goal in goals)))
    numbers = " to ".join(
        dict.fromkeys(_number(end, goals[0].unit) for end in ends[:: len(ends) - 1 or 1])
    )
    return numbers if goals[0].sense == RANGE else f"{goals[0].sense} {numbers}"


def _number(value: float | None, unit: str) -> str:
    if isinstance(value, int):
        return str(value)
    return f"{value:.2f}x" if unit == "x" else f"{value:.4g}"


def _kinds(goals: Iterable[Goal]) -> dict[str, list[Goal]]:
    found: dict[str, list[Goal]] = {}
    for goal in goals:
        found.setdefault(goal.kind, []).append(goal)
    return found
