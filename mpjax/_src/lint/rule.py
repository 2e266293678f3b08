"""What a rule of the linter is: a row of data, with a function that looks at a program."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from mpjax._src.autocast.graph import Op

# needs: what a rule looks at.
JAXPR = "jaxpr"  # the program: shapes suffice
VALUES = "values"  # what one real step computes
HLO = "hlo"  # what a compiler made of the program
NEEDS = (JAXPR, VALUES, HLO)


class Hit(NamedTuple):
    """What a rule found.

    Attributes:
        message: What is wrong here, in a sentence with the dtypes, shapes and numbers of the place.
        op: The operation at which it is wrong; its line is the finding's.
        source: "file:line", where there is no operation. Without either it is the function's own.
        scope: The scopes around the place, where there is no operation.
    """

    message: str
    op: Op | None = None
    source: str = ""
    scope: str = ""


class NotRun(NamedTuple):
    """What a rule yields where it can say nothing of this program, with the reason."""

    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """The row of a rule.

    Attributes:
        name: In kebab case, of the field's terms.
        needs: What it looks at: JAXPR, VALUES or HLO.
        summary: What it finds, in half a sentence that begins with a small letter.
        why: Why that matters: what goes wrong in silence.
        instead: What to write instead.
        check: Yields a `Hit` for each place that is wrong. Of a JAXPR rule it is called with the
            `Program`; of a VALUES rule with the program, an operation of it that just ran, what it
            read and what it made (lists of arrays); of an HLO rule with the program and what became
            of it, a `Compiled`. An HLO rule may yield a `NotRun`.
    """

    name: str
    needs: str
    summary: str
    why: str
    instead: str
    check: Callable[..., Iterable[Any]]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A program as a compiler was given it, and as it left it.

    Attributes:
        target: What it was compiled for: "cpu", or the name of an accelerator.
        before: The HLO that the compiler was given.
        after: The HLO that runs. `hardware.hlo` reads both.
        report: The `CompileReport` of an accelerator; None for "cpu".
    """

    target: str
    before: str
    after: str
    report: Any = None
