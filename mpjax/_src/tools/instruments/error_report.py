"""What `explain` reports with ``errors=True``: each operation's contribution to the error."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.patterns import matches
from mpjax._src.core.base.public import public
from mpjax._src.core.program.derived import Key, key_of
from mpjax._src.core.program.site import shown
from mpjax._src.tools.document import model
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments.contributions import Contributions, Entry, Runner, contributions
from mpjax._src.tools.instruments.programs import GRADIENT, Program
from mpjax._src.tools.instruments.rows import Row, signature_of
from mpjax._src.tools.instruments.shadows import percent

COLUMNS = ("of gradient", "of loss", "row", "operation", "dtypes", "where", "why")

# The table names this many operations.
MOST = 12

# The first order explains an error that is within this factor of it: the standard error of the
# estimate by 8 random vectors is a quarter.
AGREES = 2.0

ERROR = model.WORST(
    "error",
    "The contribution of each operation's rounding to the relative error of the gradient.",
)


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class ErrorRow:
    """An operation that rounds, and what its rounding contributes to the error.

    Attributes:
        row: The index of its row in the report of `explain`, or None if it has none there.
        primitive: The name of its primitive.
        source: The user's line that it comes from, as "file:line".
        library: The library's line that ``source`` calls, as "file:line", or "".
        scope: The named scopes around it, joined with "/".
        path: The paths of the parameters that it reads, joined with ", ".
        backward: Whether the backward pass runs it.
        dtypes: The dtypes of its operands and result, such as "bf16,bf16->f32".
        reason: The reason for the dtype.
        gradient: The norm of what it contributes to the gradient, relative to the norm of the
            gradient in float32. Without gradients, of all results together.
        loss: What it contributes to the loss, relative to the loss in float32; 0 without one.
        measured: Whether both are measured: the errors with this operation alone in 16 bits.
            Otherwise they are estimates to first order.
        times: How often the loops around it run it. The contributions are those of all iterations.
        iteration: Of these, the iteration that contributes most, the outermost loop first.
    """

    row: int | None
    primitive: str
    source: str
    library: str
    scope: str
    path: str
    backward: bool
    dtypes: str
    reason: str
    gradient: float
    loss: float
    measured: bool
    times: int = 1
    iteration: tuple[int, ...] = ()


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class ErrorReport(Report):
    """Which operations the error of a loss and of its gradient comes from.

    Attributes:
        rows: One row per operation that rounds, the largest contribution to the gradient first.
        gradient: The measured relative error of the gradient: the norm of the difference from
            float32, over all parameters, relative to the norm of the gradient. If it comes from few
            numbers that float32 hardly knows, such as what an iterative solver returns to a
            tolerance, the function that is compiled without the report may round one of them to the
            other side, and be off by another error.
        loss: The measured relative error of the loss; 0 without one.
        first_order: The error of the gradient if every contribution is added to first order.
        squares: The root of the sum of the squares of all contributions to the gradient: the error
            if they were independent.
        results: The measured relative error of each result, by name.
        unseen: The error of the gradient from operations that the first order does not see, all
            together, where they are not in ``rows`` by a measurement of their own.
        probes: The number of random vectors of the estimate.
        loss_scale: The scale that the loss was multiplied by.
        parameters: The pattern of the parameters whose gradients count, or "".
        surprising: Whether a row is measured to be far larger than its first-order estimate.
    """

    rows: tuple[ErrorRow, ...]
    gradient: float
    loss: float
    first_order: float
    squares: float
    results: dict[str, float]
    unseen: float = 0.0
    probes: int = 8
    loss_scale: float = 1.0
    parameters: str = ""
    surprising: bool = False

    @property
    def is_first_order(self) -> bool:
        """Whether the contributions add up to the error that was measured, and none surprises."""
        low, high = sorted((self.first_order, self.gradient))
        return not self.surprising and (high <= AGREES * low or high < 2.0**-20)

    def summary(self) -> list[str]:
        """Returns the report's totals as lines of text."""
        of = f"the gradient of {self.parameters}" if self.parameters else "the gradient"
        lines = [
            f"error of {of}: {percent(self.gradient)} measured, {percent(self.first_order)} as a "
            f"sum of all contributions, {percent(self.squares)} if they were independent; "
            f"error of the loss: {percent(self.loss)}"
        ]
        if not self.is_first_order:
            lines.append(
                "The estimates do not add up to what was measured: a rounding is too large for a "
                "first-order estimate (it flips a kink such as relu's, turns a phase, or "
                "overflows), acts through an operation without a derivative, or operations act "
                "together. Rows without ~ are measured."
            )
        if self.unseen:
            lines.append(
                "operations that act through a comparison or through an operation without a "
                f"derivative, all together: {percent(self.unseen)}"
            )
        return lines

    def document(self) -> model.Document:
        sentence, *lines = self.summary()
        return model.Document("Where the error comes from", sentence, tuple(lines), tables_of(self))


def tables_of(report: ErrorReport, most: int = MOST) -> tuple[model.Table, ...]:
    """Returns the tables of a report."""
    results = sorted(report.results.items(), key=lambda item: -item[1])
    return (
        model.Table(
            "Where the error comes from",
            COLUMNS,
            tuple(map(_cells, report.rows)),
            COLUMNS[3:],
            most=most,
            note="~ estimated to first order; the others are measured",
        ),
        model.Table(
            "Error of the results",
            ("error", "result"),
            tuple((percent(error), name) for name, error in results),
            ("result",),
            most=5,
        ),
    )


def _cells(row: ErrorRow) -> tuple[str, ...]:
    about = "" if row.measured else "~"
    place = "  ".join(
        filter(None, (where(row.source, row.library), "backward" * row.backward, row.path))
    )
    turns = ", ".join(map(str, row.iteration))
    loop = f"  all {row.times} iterations, most in {turns}" if row.times > 1 else ""
    return (
        about + percent(row.gradient),
        about + percent(row.loss) if row.loss else "",
        "" if row.row is None else str(row.row),
        row.primitive,
        row.dtypes,
        place + loop,
        row.reason,
    )


def errors_of(
    program: Program,
    scale: float,
    probes: int,
    parameters: str | None,
    rows: Sequence[Row],
    backward: Mapping[Key, int],
) -> ErrorReport:
    """Returns what each operation of a program contributes to its error.

    Args:
        program: The program.
        scale: The loss scale.
        probes: The number of random vectors.
        parameters: A pattern of the parameters whose gradients count; None for all.
        rows: The rows of the report of `explain`.
        backward: The indices among them of the equations of the backward pass.
    """
    runner = Runner(program, scale, probes)
    of_loss, of_gradient = weights_of(program, runner.names, parameters)
    keys: dict[Any, int] = {}
    firsts: list[tuple[Entry, int | None]] = []  # of each group: an entry, and the index of its row
    group_of = []
    for entry in runner.entries:
        key = key_of(entry.step.eqn, entry.step.site.callers)
        index = backward.get(key, entry.step.site.op)
        group = keys.setdefault(key if index is None else index, len(keys))
        if group == len(firsts):
            firsts.append((entry, index))
        group_of.append(group)
    found = contributions(runner, group_of, of_loss, of_gradient)
    made = [
        _row(entry, index, rows, found, group)
        for group, (entry, index) in enumerate(firsts)
        if any(found.pairs[group])
    ]
    return ErrorReport(
        rows=tuple(sorted(made, key=lambda row: (-row.gradient, -row.loss))),
        gradient=found.total.gradient,
        loss=found.total.loss,
        first_order=found.first_order.gradient,
        squares=found.squares.gradient,
        results=found.results,
        unseen=found.unseen.gradient,
        probes=probes,
        loss_scale=scale,
        parameters=parameters or "",
        surprising=found.surprising,
    )


def _row(
    entry: Entry, index: int | None, rows: Sequence[Row], found: Contributions, group: int
) -> ErrorRow:
    eqn, site, pair = entry.step.eqn, entry.step.site, found.pairs[group]
    row = None if index is None else rows[index]
    source, library = (row.source, row.library) if row else site.lines(eqn)
    return ErrorRow(
        row=index,
        primitive=row.primitive if row else eqn.primitive.name,
        source=source,
        library=library,
        scope=row.scope if row else "/".join(shown(site.scopes)),
        path=row.path if row else "",
        backward=row.backward if row else site.is_derived(eqn),
        dtypes=row.after if row else signature_of(eqn.invars, eqn.outvars),
        reason=row.reason if row else "",
        gradient=pair.gradient,
        loss=pair.loss,
        measured=found.measured[group],
        times=entry.times,
        iteration=found.worst[group],
    )


def weights_of(
    program: Program, names: Sequence[str], parameters: str | None
) -> tuple[list[float], list[float]]:
    """Returns which results are the loss, and which belong to the gradient: 1 or 0 for each."""
    if not program.follows_gradient:
        return [0.0] * len(names), [1.0] * len(names)
    paths = [name.removeprefix(GRADIENT) for name in names]
    gradients = [name.startswith(GRADIENT) for name in names]
    chosen = [
        gradient and (parameters is None or matches(parameters, path))
        for gradient, path in zip(gradients, paths, strict=True)
    ]
    if not any(chosen):
        known = ", ".join(p for p, gradient in zip(paths, gradients, strict=True) if gradient)
        raise ValueError(
            f"explain: parameters={brief(parameters)} matches no differentiated parameter. "
            f"Choose among: {known}."
        )
    return [float(name == "loss") for name in names], [*map(float, chosen)]
