"""The report of `survey`: what each policy would make of the training steps of a script."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import replace

from mpjax._src.core.base.lines import short
from mpjax._src.core.base.public import public
from mpjax._src.tools.document.model import Document, Drawing, Table, share, size
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.document.text import text_of
from mpjax._src.tools.hardware.times import figure
from mpjax._src.tools.instruments.explain import CastReport
from mpjax._src.tools.lint.report import LintReport

COLUMNS = ("policy", "in 16 bits", "gradient's error", "ms", "speed", "note")
COSTS = (
    *("policy", "memory", "temporary", "GB moved", "roofline, ms", "bound by"),
    *("largest batch", "note"),
)
WORDS = ("policy", "bound by", "note")

MOST_BATCH = 2**16  # which is the largest batch that is looked for, whatever the step


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class SurveyedLoss:
    """A function that a training step differentiates.

    Attributes:
        name: Its name.
        source: "file:line" where it is differentiated.
        transform: The name of JAX's transformation, such as "value_and_grad".
        parameters: How many numbers it is differentiated with respect to.
        parameter_bytes: Their size in bytes.
    """

    name: str
    source: str
    transform: str
    parameters: int
    parameter_bytes: int


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class SurveyedProgram:
    """A training step under one policy, compiled for one target.

    Attributes:
        target: The name of the target, as for `compile_for`, or of this machine's device.
        total_bytes: The memory of the whole step, in bytes; None if it was refused.
        temp_bytes: The memory of its temporary arrays.
        bytes_accessed: The bytes that it moves.
        roofline_ms: The lower bound on its time; None where the device's peaks are not known.
        bound: The longest part of the roofline: "compute", "memory" or "host".
        fits: Whether ``total_bytes`` is at most the memory of the device; None if not known.
        largest_batch: The largest batch that fits, up to 65,536; None if it was not looked for, or
            not found.
        refused: Why something is missing; "" if nothing is.
    """

    target: str
    total_bytes: int | None = None
    temp_bytes: int | None = None
    bytes_accessed: float | None = None
    roofline_ms: float | None = None
    bound: str = ""
    fits: bool | None = None
    largest_batch: int | None = None
    refused: str = ""


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class SurveyRow:
    """A training step under one policy.

    Attributes:
        policy: The policy, as a string; "float32", or "as written" for a step with 16-bit matmuls
            of its own, for the step as the script has it.
        half_flops: The share of the step's matmul FLOPs that run in 16 bits, from 0 to 1; None if
            the step could not be traced under the policy.
        gradient_error: The error of the worst gradient on the script's own batch, relative to
            float32, both compiled; None if it was not measured.
        worst: The name of this gradient.
        loss_scale: The loss scale with which it was measured.
        time_ms: The time of a step on this machine, in milliseconds; None if it was not timed.
        speed: How many times faster than the step as written; None if it was not timed.
        programs: The step, compiled for each target.
        notes: What is missing, and why.
    """

    policy: str
    half_flops: float | None = None
    gradient_error: float | None = None
    worst: str = ""
    loss_scale: float = 1.0
    time_ms: float | None = None
    speed: float | None = None
    programs: tuple[SurveyedProgram, ...] = ()
    notes: tuple[str, ...] = ()


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class SurveyedStep(Report):
    """A training step of a script. ``print`` it, or read ``rows``.

    Attributes:
        name: The name of the function that is the step.
        source: "file:line" of this function.
        losses: The functions that it differentiates.
        matmul_flops: The FLOPs of its matmuls and convolutions.
        batch: The size of the batch with which the script calls it; None if it was not found.
        rows: The step under each policy; the first row is the step as written.
        lint: What `lint` finds in the step as written; None if it did not run.
        calls: How often the script called it.
        notes: What is missing, and why.
        explained: What `explain` says of its first differentiated function, under the first 16-bit
            policy.
    """

    name: str
    source: str
    losses: tuple[SurveyedLoss, ...]
    matmul_flops: int
    batch: int | None
    rows: tuple[SurveyRow, ...]
    lint: LintReport | None
    calls: int
    notes: tuple[str, ...] = ()
    explained: CastReport | None = dataclasses.field(default=None, repr=False)

    _without = ("explained",)
    _also = ("parameters", "parameter_bytes")

    @property
    def parameters(self) -> int:
        """How many numbers its losses are differentiated with respect to."""
        return sum(loss.parameters for loss in self.losses)

    @property
    def parameter_bytes(self) -> int:
        """The size of these in bytes."""
        return sum(loss.parameter_bytes for loss in self.losses)

    def document(self) -> Document:
        """Returns what the report shows."""
        batch = f", a batch of {self.batch:,}" if self.batch else ""
        parameters = (
            f"{_count(self.parameters, 'parameter')} ({size(self.parameter_bytes)}), "
            if self.losses
            else ""
        )
        sentence = (
            f"{self.name} ({short(self.source)}): {parameters}{figure(self.matmul_flops / 1e9)} "
            f"GFLOP in matmuls{batch}"
        )
        lines = [
            f"differentiates {loss.name or 'a function'} at {short(loss.source)} "
            f"({loss.transform}, {_count(loss.parameters, 'parameter')})"
            for loss in self.losses
        ]
        first = self.rows[0] if self.rows else None
        if first and first.half_flops:
            lines.append(
                f"already in 16 bits: {share(first.half_flops)} of the matmul FLOPs as written"
            )
        targets = dict.fromkeys(p.target for row in self.rows for p in row.programs)
        tables = [
            Table("Policies", COLUMNS, tuple(map(_cells, self.rows)), WORDS),
            *(Table(f"On {t}", COSTS, tuple(self._costs(t)), WORDS) for t in targets),
        ]
        notes = list(self.notes)
        if self.lint is not None:
            lint = self.lint.document()
            notes += [f"lint: {lint.notes[0]}", *(f.replace("\n", " ") for f in lint.lines)]
        return Document(
            f"{self.name} under each policy",
            sentence,
            tuple(lines),
            tuple(tables),
            tuple(notes),
            drawing=self._drawing,
        )

    def _drawing(self) -> Drawing:
        return self.explained.document().drawing() if self.explained else Drawing()

    def _costs(self, target: str) -> Iterator[tuple[str, ...]]:
        for row in self.rows:
            for p in row.programs:
                if p.target == target:
                    yield (row.policy, *_of_program(p))


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Survey(Report):
    """The report of `survey`. ``print`` it, or read ``steps``.

    Attributes:
        command: What was run.
        steps: The training steps, in the order in which the script called them first.
        ended: How the run ended: "stopped", "ended", "interrupted" or "failed".
        error: The error that ended the script, as one line; "" if there was none.
        not_covered: What was not looked at, and why, each a sentence.
        diff: A unified diff of the script for the first 16-bit policy, which ``git apply`` takes in
            ``root``; "" if there is none.
        root: The folder that the paths in ``diff`` are relative to.
        missing: What ``diff`` could not change, each a sentence.
        compilations: How many programs were compiled.
        traces: How often steps were traced.
    """

    command: str
    steps: tuple[SurveyedStep, ...]
    ended: str
    error: str = ""
    not_covered: tuple[str, ...] = ()
    diff: str = ""
    root: str = ""
    missing: tuple[str, ...] = ()
    compilations: int = 0
    traces: int = 0

    def __bool__(self) -> bool:
        return bool(self.steps)

    def document(self) -> Document:
        """Returns what the report shows of the script and of all steps."""
        lines = [f"{self.ended}: {self.error}"] if self.error else []
        lines += self.not_covered
        tables: list[Table] = []
        notes: list[str] = []
        for step in self.steps:
            shown = step.document()
            lines += [shown.sentence, *shown.lines]
            titled = (replace(t, title=f"{step.name}: {t.title}") for t in shown.tables)
            tables += titled if len(self.steps) > 1 else shown.tables
            notes += shown.notes
        return Document(
            f"Survey of {self.command}",
            f"{self.command}: {_count(len(self.steps), 'training step')}; "
            f"{_count(self.traces, 'trace')}, {_count(self.compilations, 'compilation')}",
            tuple(lines),
            tuple(tables),
            tuple(notes),
            drawing=self.steps[0]._drawing if self.steps else Drawing,
        )

    def changes(self) -> str:
        """Returns the diff, and what it could not change, as text."""
        lines = [f"To apply, in {self.root}:\n\n{self.diff}"] if self.diff else []
        return "\n".join([*lines, *self.missing])

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (text_of(self.document()), self.changes())))


def _count(number: int, thing: str) -> str:
    return (
        f"{number or 'no'} {thing}{'s' * (number != 1)}"
        if number < 1000
        else (f"{number:,} {thing}s")
    )


def _cells(row: SurveyRow) -> tuple[str, ...]:
    error = row.gradient_error
    return (
        row.policy,
        "-" if row.half_flops is None else share(row.half_flops),
        "-" if error is None else share(error) if math.isfinite(error) else "not finite",
        "" if row.time_ms is None else figure(row.time_ms),
        "" if row.speed is None else f"{row.speed:.2f}x",
        "; ".join(row.notes),
    )


def _of_batch(size: int | None) -> str:
    more = " or more" * (size is not None and size >= MOST_BATCH)
    return "" if size is None else f"{size:,}{more}"


def _of_program(p: SurveyedProgram) -> tuple[str, ...]:
    missing = "-"
    return (
        missing if p.total_bytes is None else size(p.total_bytes),
        missing if p.temp_bytes is None else size(p.temp_bytes),
        missing if p.bytes_accessed is None else figure(p.bytes_accessed / 1e9),
        missing if p.roofline_ms is None else figure(p.roofline_ms),
        p.bound,
        _of_batch(p.largest_batch),
        "; ".join(filter(None, ["does not fit" if p.fits is False else "", p.refused])),
    )
