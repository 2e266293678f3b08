"""The table of all rules of the linter, collected from the modules."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from mpjax._src.core.base.errors import brief, did_you_mean
from mpjax._src.core.base.patterns import matches
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.lint import (
    averages,
    casts,
    constants,
    exchanges,
    flushes,
    gates,
    guards,
    losses,
    matmuls,
    operands,
    reductions,
    scatters,
    states,
    undone,
    updates,
)
from mpjax._src.tools.lint.rule import Rule

SUBJECTS = (
    *(reductions, scatters, averages, constants, casts, undone, losses),
    *(matmuls, operands, exchanges, states, gates, guards, updates, flushes),
)
RULES: tuple[Rule, ...] = tuple(
    sorted((rule for module in SUBJECTS for rule in module.RULES), key=lambda rule: rule.name)
)

TEXTS = [field for field in dataclasses.fields(Rule) if field.type == "str" or field.type is str]


def chosen(select: Any = (), ignore: Any = ()) -> tuple[Rule, ...]:
    """Returns the selected rules (all if ``select`` is empty) without the ignored ones.

    Both are a name or glob, such as "half-sum" or "half-*", or several. One that matches no rule
    raises a ValueError.
    """
    wanted = _matching("select", select) if select else {rule.name for rule in RULES}
    left_out = _matching("ignore", ignore)
    return tuple(rule for rule in RULES if rule.name in wanted - left_out)


def as_data(rules: Iterable[Rule]) -> list[dict[str, str]]:
    """Returns the texts of rules as plain data."""
    return [{field.name: getattr(rule, field.name) for field in TEXTS} for rule in rules]


def listed(rules: Iterable[Rule]) -> Document:
    """Returns what is shown of rules: what each needs and what it finds."""
    columns = ("rule", "needs", "finds")
    rows = tuple((rule.name, rule.needs, rule.summary) for rule in rules)
    return Document("The rules", tables=(Table("Rules", columns, rows, columns),))


def _matching(argument: str, patterns: str | Iterable[str]) -> set[str]:
    patterns = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    names = [rule.name for rule in RULES]
    selected: set[str] = set()
    for pattern in patterns:
        matched = {name for name in names if isinstance(pattern, str) and matches(pattern, name)}
        if not matched:
            raise ValueError(
                f"{argument}={brief(pattern)} matches no rule.{did_you_mean(pattern, names)} "
                "`mpjax lint --rules` lists the rules; a glob such as 'half-*' matches several."
            )
        selected |= matched
    return selected
