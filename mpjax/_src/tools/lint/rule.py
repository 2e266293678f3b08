"""A rule of the linter: a row of data with a function that checks a program."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mpjax._src.core.base.public import public
from mpjax._src.core.program.graph import Op

# What a rule checks, as `Rule.needs`.
JAXPR = "jaxpr"  # the traced program; shapes are enough
VALUES = "values"  # the values of one real step
HLO = "hlo"  # the compiled program
NEEDS = (JAXPR, VALUES, HLO)


class Hit(NamedTuple):
    """A fault that a rule found."""

    message: str  # what is wrong, in a sentence with its dtypes, shapes and numbers
    op: Op | None = None  # the operation; its line is that of the finding
    # "file:line" if there is no operation. Without either, the line of the function.
    source: str = ""
    scope: str = ""  # the scopes around it if there is no operation


class NotRun(NamedTuple):
    """Yielded by a rule that cannot check this program, with the reason."""

    reason: str


def nothing(program: Any) -> tuple[()]:
    return ()


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The row of a rule.

    Attributes:
        name: The name in kebab case, of standard terms.
        needs: What it checks: JAXPR, VALUES or HLO.
        summary: What it finds, a phrase that begins with a lower-case letter.
        why: Why that matters: what goes wrong silently.
        instead: What to write instead.
        check: Yields a `Hit` for each fault. A JAXPR rule is called with the `Program`; a VALUES
            rule with the program, an operation that has just run, its operands and its results
            (lists of arrays); an HLO rule with the program and a `Compiled`. An HLO rule may yield
            a `NotRun`.
        after: For a VALUES rule: yields a `Hit` for each fault that the whole step shows. It is
            called with the program when the step has run.
    """

    name: str
    needs: str
    summary: str
    why: str
    instead: str
    check: Callable[..., Iterable[Any]]
    after: Callable[..., Iterable[Any]] = nothing


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program before and after compilation."""

    target: str  # the target: "cpu", or the name of an accelerator
    before: str  # the HLO that the compiler received
    # The optimized HLO that runs. `hardware.hlo` reads both.
    after: str
