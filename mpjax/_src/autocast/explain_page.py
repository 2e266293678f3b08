"""The HTML page of a `CastReport`: a map of the plan, and the stored bytes by scope."""

import collections
from collections.abc import Iterator

from mpjax._src.autocast.explain import COMPUTES, CastReport, Row
from mpjax._src.autocast.residuals import Kept
from mpjax._src.document.model import (
    DTYPES,
    Bar,
    Colour,
    Operation,
    Page,
    Table,
    box_of,
    code_at,
    facts,
    shares,
    size,
)
from mpjax._src.reports import short

DTYPE = Colour(
    "dtype",
    "The dtype that each operation computes in: the widest floating dtype of its operands.",
    tuple(DTYPES.values()),
)
BYTES = Colour(
    "bytes",
    "The bytes of each operation's operands and results under the plan, which it would move if it "
    "ran alone. XLA fuses small operations, which then move less.",
    unit="bytes",
)
KEPT = Colour(
    "kept",
    "The bytes of each operation's results that the forward pass keeps for the backward pass.",
    unit="bytes",
)
PASS = Colour("pass", "The pass that the operation runs in.", ("forward", "backward"))


def page_of(report: CastReport) -> Page:
    """Returns the page of a report on autocast."""
    backward = sum(row.backward for row in report.rows)
    kept: collections.Counter[int | None] = collections.Counter()
    for array in report.kept:
        kept[array.row] += array.bytes
    trains = report.stored_after is not None
    passes = f", {backward} of them in the backward pass" if trains else ""
    return Page(
        title="What autocast does",
        sentence=f"{report.half_flops:.1%} of the matmul FLOPs run in half; the program has "
        f"{len(report.rows)} operations{passes}.",
        lines=tuple(report.summary()[:2] if trains else report.summary()[:1]),
        bars=(_kept_by_scope(report, kept),) if report.kept else (),
        tables=tuple(_tables(report)),
        operations=tuple(
            _operation(report, i, row, kept.get(i, 0)) for i, row in enumerate(report.rows)
        ),
        colours=(DTYPE, BYTES, KEPT, PASS) if trains else (DTYPE, BYTES),
    )


def _operation(report: CastReport, index: int, row: Row, kept: int) -> Operation:
    source = short(row.source)
    return Operation(
        label=row.primitive,
        scope=box_of(row.scope, source),
        facts=facts(
            why=row.reason,
            stored=row.storage,
            kept_for_the_backward_pass=size(kept) if kept else "",
            attention=row.attention,
            computes_in=DTYPES[row.computes_in],
            dtypes_as_written=row.before,
            dtypes_under_the_plan=row.after,
            line=source,
            code=code_at(row.source),
            in_the_library=short(row.library),
            scope=row.scope,
            parameters=row.path,
            bytes=size(row.bytes) if row.bytes else "",
            FLOPs=f"{row.flops:,}" if row.flops else "",
            runs=f"{row.times} times" if row.times > 1 else "",
            forward_row="" if row.forward is None else f"#{row.forward}",
        ),
        colours={
            "dtype": DTYPES[row.computes_in],
            "bytes": row.bytes * row.times,
            "kept": kept,
            "pass": "backward" if row.backward else "forward",
        },
        number=index,
        backward=row.backward,
        large=row.flops > 0,
    )


def _kept_by_scope(report: CastReport, kept: "collections.Counter[int | None]") -> Bar:
    found: dict[str, float] = {}
    for index in sorted(kept, key=lambda i: -1 if i is None else i):
        row = None if index is None else report.rows[index]
        name = box_of(row.scope, short(row.source)) if row else "of no row"
        found[name] = found.get(name, 0) + kept[index]
    return Bar(
        "Kept from the forward to the backward pass",
        shares(found),
        words="Grouped by the scope of the operation that computed it.",
    )


def _tables(report: CastReport) -> Iterator[Table]:
    columns: tuple[str, ...] = ("operation", *COMPUTES)
    calls = sorted(report.calls().items())
    rows = tuple((name, *(str(cells[d] or "") for d in COMPUTES)) for name, cells in calls)
    yield Table("Operations by compute dtype", columns, rows, words=columns[:1])
    if wide := report.shortfalls():
        columns = "operation", "dtypes", "where", "why"
        rows = tuple((r.primitive, f"{r.before} to {r.after}", r.where, r.reason) for r in wide)
        yield Table("Not in half, or left as written", columns, rows, words=columns)
    if report.kept:
        columns = "size", "array", "row", "operation", "where"
        rows = tuple(_kept(report, array) for array in report.kept)
        yield Table("Arrays kept for the backward pass", columns, rows, words=columns[1:])


def _kept(report: CastReport, array: Kept) -> tuple[str, ...]:
    shape = ",".join(map(str, array.shape))
    row = None if array.row is None else report.rows[array.row]
    made_by = (str(array.row), row.primitive, row.where) if row else ("", "", "")
    return (size(array.bytes), f"{array.dtype}[{shape}]", *made_by)
