"""The pages of the instruments' reports: errors, a NaN, gradients, a tuned policy."""

import functools
import math
from typing import Any

import jax

from mpjax._src.autocast.explain import computed_in
from mpjax._src.autocast.explain_page import DTYPE, PASS
from mpjax._src.document.model import (
    DTYPES,
    Colour,
    Histogram,
    Operation,
    Page,
    Table,
    box_of,
    code_at,
    facts,
    size,
)
from mpjax._src.dtypes import FLOAT16
from mpjax._src.instruments.compare import ZERO, Comparison, percent
from mpjax._src.instruments.histogram import EXPONENTS, GradientHistogram, HistogramRow, limits_of
from mpjax._src.instruments.nonfinite import NonfiniteReport, Range
from mpjax._src.instruments.shadows import BROKEN, CompareRow
from mpjax._src.instruments.tune import TuneStep, Tuning
from mpjax._src.reports import short
from mpjax._src.rules import HALF, rule_of

# An error of all of a result: more is as bad.
WRONG = 3.0

worst_share = functools.partial(Colour, unit="share", most=WRONG, of_box=max)

ADDED = worst_share(
    "added error",
    "The relative error that each operation adds, by rounding or by amplifying operands' errors.",
)
ERROR = worst_share(
    "error",
    "The relative error of each operation's result, including the error of its operands.",
)
BYTES = Colour("bytes", "The bytes of each operation's operands and result.", unit="bytes")


@functools.singledispatch
def page_of(report: Any) -> Page:
    """Returns what a page shows of a report."""
    raise TypeError(f"report={report!r} has no page.")


# ---- compare -------------------------------------------------------------------------------------


@page_of.register
def _(report: Comparison) -> Page:
    worst = report.worst_results()
    told = f"The worst result is {worst[0][0]}: error {percent(worst[0][1])}. " if worst else ""
    blamed = report.rows[0] if report.rows and not report.rows[0].noise else None
    adds = f"{blamed.primitive} at {_line(blamed)} adds the most to it." if blamed else ""
    order = report.order or range(len(report.rows))
    rows = sorted(zip(order, report.rows, strict=True), key=lambda pair: pair[0])
    scaled = f"Gradients were scaled by {report.loss_scale:g}." if report.loss_scale != 1 else ""
    named = report.named(None)
    tables = [Table("Error of the results", ("error", "result"), tuple(named), ("result",))]
    if report.diverged:
        lines = tuple((line,) for line in report.diverged)
        tables.append(Table("Where float32 would have taken another path", ("at",), lines, ("at",)))
    return Page(
        title="The error that each operation adds",
        sentence=told + (adds or "No operation adds an error."),
        lines=(scaled,) if scaled else (),
        tables=tuple(tables),
        operations=tuple(_compared(row, n) for n, (_, row) in enumerate(rows)),
        colours=(ADDED, ERROR, DTYPE, BYTES, PASS),
    )


def _compared(row: CompareRow, number: int) -> Operation:
    known = row.compared and not row.noise
    ran = DTYPES[computed_in(row.dtypes)]
    return Operation(
        label=row.primitive,
        scope=box_of(row.scope, short(row.source)),
        facts=facts(
            why=_why(row),
            adds=percent(row.added) if known else "",
            error_of_the_result=percent(row.error) if known else "",
            inherited=percent(row.inherited) if known else "",
            error_of_the_operands=percent(row.operands) if known else "",
            underflow=f"{percent(row.underflow)} of the entries became zero" * bool(row.underflow),
            overflow=f"{percent(row.overflow)} of the entries overflowed" * bool(row.overflow),
            magnitudes=f"{row.low:.3g} to {row.high:.3g}",
            computed_in=ran,
            dtypes=row.dtypes,
            line=short(row.source),
            code=code_at(row.source),
            in_the_library=short(row.library),
            scope=row.scope,
            parameters=row.path,
            worst_in=_turns(row.iteration),
            ran=f"{row.times} times" if row.times > 1 else "",
            bytes=size(row.bytes),
            row_of_explain=row.op,
        ),
        colours={
            "added error": row.added if known else None,
            "error": (row.error if row.error < BROKEN else math.inf) if known else None,
            "dtype": ran,
            "bytes": row.bytes * row.times,
            "pass": "backward" if row.backward else "forward",
        },
        number=number,
        backward=row.backward,
        large=rule_of(row.primitive).need == HALF,
    )


def _why(row: CompareRow) -> str:
    if not row.compared:
        return "It has no float32 form, so its own error is unknown."
    if row.noise:
        return f"{ZERO}."
    if row.overflow:
        return "Its result overflows its dtype, but would not overflow float32."
    if row.new > row.inherited:
        return "Most of its error is its own rounding."
    return "Most of its error comes from its operands."


# ---- find_nonfinite ------------------------------------------------------------------------------


@page_of.register
def _(report: NonfiniteReport) -> Page:
    if not report.found:
        return Page("The first NaN or Inf", report.advice)
    last = "slope" if report.derivative_of else "result"
    held = [*((f"operand {i}", x) for i, x in enumerate(report.inputs)), (last, report.result)]
    verb = f"made {report.made}:"
    if report.derivative_of:
        verb = f"its derivative is {report.derivative}:"
    columns = ("", "dtype", "shape", "least", "greatest", "NaN", "Inf", "parameter")
    rows = tuple((name, *_held(x)) for name, x in held if x is not None)
    made = report.primitive and Operation(
        label=report.derivative_of or report.primitive,
        scope=box_of(report.scope, short(report.source)),
        facts=facts(
            why=f"{verb} {KINDS.get(report.kind, report.kind)}",
            derivative=report.expression,
            line=short(report.source),
            code=code_at(report.source),
            in_the_library=short(report.library),
            scope=report.scope,
            parameters=report.path,
            iteration=_turns(report.loops),
            row_of_explain=report.op,
        ),
        colours={
            "dtype": DTYPES.get(report.result.dtype if report.result else "", DTYPES["other"]),
            "pass": "backward" if report.backward else "forward",
        },
        backward=report.backward,
    )
    most = []
    if report.largest is not None:
        most.append(f"In float32 its largest magnitude would be {report.largest:.4g}.")
    return Page(
        title="The first NaN or Inf",
        sentence=f"{report.headline}.",
        lines=(
            *most,
            f"Results that are not finite: {', '.join(report.reaches)}.",
            *report.advice.splitlines(),
        ),
        tables=(Table("Its operands and its result", columns, rows, columns[:3]),) if rows else (),
        operations=(made,) if made else (),
        colours=(DTYPE, PASS) if made else (),
    )


KINDS = {
    "overflow": "its dtype is too narrow for the result",
    "undefined": "the result is not finite in float32 either",
}


def _held(x: Range) -> tuple[str, ...]:
    ends = ("-", "-") if math.isnan(x.low) else (f"{x.low:.4g}", f"{x.high:.4g}")
    return (x.dtype, str(list(x.shape)), *ends, str(x.nans), str(x.infs), x.path)


# ---- gradient_histogram --------------------------------------------------------------------------

FLUSHED = worst_share(
    "flushed",
    "The share of a parameter's gradients that float16 flushes to zero at scale 1.",
)
OVERFLOWED = worst_share(
    "overflow",
    "The share of a parameter's gradients that overflows to infinity in float16 at scale 1.",
)
ZEROS = Colour(
    "zero", "The share of a parameter's gradients that is zero.", unit="share", of_box=max
)


@page_of.register
def _(report: GradientHistogram) -> Page:
    if isinstance(report.counts, jax.core.Tracer):
        raise TypeError(
            "A histogram that is being traced has no values. Make its page outside of jit."
        )
    *rows, whole = report.rows("float16")
    counts = report.numbers().sum(0)[1:-1]
    used = [i for i, n in enumerate(counts) if n]
    inside = range(used[0], used[-1] + 1) if used else ()
    bins = tuple((int(EXPONENTS[i]), int(counts[i])) for i in inside)
    limits = limits_of(FLOAT16)
    marks = (
        (limits.flush, "float16 flushes below"),
        (limits.overflow, "float16 overflows from here"),
    )
    columns = ("parameter", "entries", "least", "median", "greatest", "zero", "Inf, NaN", "flushed")
    return Page(
        title="Gradient magnitudes",
        sentence=f"float16 flushes {whole.flushed:.2%} of the gradients to zero without a loss "
        f"scale; {whole.zeros:.2%} are zero already, {whole.nonfinite:.2%} are Inf or NaN.",
        lines=("least, median, greatest: of log2|g|.",),
        histograms=(Histogram("All gradients, by magnitude", bins, "log2|g|", marks),)
        if bins
        else (),
        tables=(
            Table("By parameter", columns, tuple(_cells(r) for r in (*rows, whole)), columns[:1]),
        ),
        operations=tuple(map(_of_parameter, rows)),
        colours=(FLUSHED, ZEROS, OVERFLOWED),
        things="parameters",
    )


def _cells(row: HistogramRow) -> tuple[str, ...]:
    ends = ("-" if e is None else str(e) for e in (row.smallest, row.median, row.largest))
    parts = (f"{x:.2%}" for x in (row.zeros, row.nonfinite, row.flushed))
    return (row.path, f"{row.entries:,}", *ends, *parts)


def _of_parameter(row: HistogramRow) -> Operation:
    scope, _, label = row.path.rpartition("/")
    names = ("entries", "least", "median", "greatest", "zero", "Inf or NaN", "flushed")
    return Operation(
        label=label or "gradient",
        scope=scope or "all parameters",
        facts=(("parameter", row.path), *zip(names, _cells(row)[1:], strict=True)),
        colours={"flushed": row.flushed, "zero": row.zeros, "overflow": row.overflowed},
    )


# ---- tune ----------------------------------------------------------------------------------------

ALONE = worst_share(
    "error without it",
    "The largest error of a result if only this place is left in half.",
)
WORK = Colour("work", "The share of the matmul FLOPs that a place moves to float32.", unit="share")


@page_of.register
def _(report: Tuning) -> Page:
    first, *others = str(report).split("\npolicy")[0].splitlines()
    columns = "float32 for", "operations", "FLOPs", "error before", "after", "if left out"
    results = sorted(report.results.items(), key=lambda item: -item[1])
    bought = tuple(map(_bought, report.steps))
    named = tuple((f"{error:.3g}", name) for name, error in results)
    return Page(
        title="The fewest float32 places that meet a tolerance",
        sentence=f"{first.capitalize()}.",
        lines=(*([" ".join(others)] if others else []), f"policy: {report.policy}"),
        tables=(
            *(
                [Table("The effect of each override", columns, bought, columns[:1])]
                if bought
                else []
            ),
            Table("Error of the results", ("error", "result"), named, ("result",)),
        ),
        operations=tuple(map(_step, report.steps)),
        colours=(ALONE, WORK),
        things="places",
    )


def _bought(step: TuneStep) -> tuple[str, ...]:
    errors = (step.error_before, step.error, step.alone)
    told = ("-" if error is None else f"{error:.3g}" for error in errors)
    return (step.pattern, str(step.operations), f"{step.flops:.1%}", *told)


def _step(step: TuneStep) -> Operation:
    scope, _, label = step.pattern.removesuffix("/*").rpartition("/")
    label += "/*" * step.pattern.endswith("/*")
    names = "override", "operations", "FLOPs", "error before", "error after", "error if left out"
    return Operation(
        label=label,
        scope=scope or "anywhere",
        facts=tuple(zip(names, _bought(step), strict=True)),
        colours={"error without it": step.alone, "work": step.flops},
    )


# ---- both ----------------------------------------------------------------------------------------


def _turns(loops: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{loop} {i}" for loop, i in loops)


def _line(row: CompareRow) -> str:
    return short(row.source) or row.scope or "no line"
