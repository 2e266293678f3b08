"""The page of a `PrecisionReport`: a map of its tensors, coloured by risk and headroom."""

import math
from typing import Any

from mpjax._src.autocast.explain_page import PASS
from mpjax._src.document.model import (
    DTYPES,
    Colour,
    Operation,
    Page,
    Table,
    box_of,
    code_at,
    facts,
    share,
)
from mpjax._src.dtypes import canonical, short_name
from mpjax._src.reports import short
from mpjax._src.rules import HALF, rule_of
from mpjax._src.watching.figures import NEAR
from mpjax._src.watching.report import PrecisionReport, PrecisionRow

KINDS = {
    "gone": "Inf or NaN",
    "edge": "may overflow by the next sample",
    "growing": "grows towards overflow",
    "fading": "too small for its dtype",
    "": "none",
}
ROOMS = ((1.0, "less than 1"), (4.0, "1 to 4"), (8.0, "4 to 8"), (math.inf, "8 or more"))
RISK = Colour(
    "risk", "The risk of each tensor, by the first rule that applies.", tuple(KINDS.values())
)
ROOM = Colour(
    "room",
    "Powers of two between the largest magnitude and the largest number of the dtype.",
    tuple(name for _, name in ROOMS),
)
NOISE = Colour(
    "noise",
    "The rounding error relative to the values (root mean squares).",
    unit="share",
    of_box=max,
)
LOST = Colour(
    "too small",
    "The share that is rounded to zero, or subnormal with fewer bits.",
    unit="share",
    of_box=max,
)
NEARLY = Colour(
    "near overflow",
    f"The share within 2^{NEAR} of the largest number of the dtype.",
    unit="share",
    of_box=max,
)
DTYPE = Colour("dtype", "The dtype that each tensor is stored in.", tuple(DTYPES.values()))


def page_of(report: PrecisionReport) -> Page:
    """Returns what a page shows of a report."""
    rows = report.rows
    risks = [row.risk for row in rows if row.risk]
    at = f"in step {report.steps[-1]}" if report.steps else "in one step"
    columns = ("kind", "what was measured, and what to do")
    told = tuple((KINDS[risk.kind], risk.text) for risk in risks)
    order = {tensor.name: i for i, tensor in enumerate(report.tensors)}
    ordered = sorted(rows, key=lambda row: order[row.name])
    return Page(
        title="Half tensors watched",
        sentence=f"{len(rows)} half tensors were watched {at}; {len(risks)} are at risk.",
        tables=(Table("At risk", columns, told, columns),) if told else (),
        operations=tuple(_tensor(row, order[row.name]) for row in ordered),
        colours=(RISK, ROOM, NEARLY, LOST, NOISE, DTYPE, PASS),
        things="tensors",
    )


def _tensor(row: PrecisionRow, number: int) -> Operation:
    known = lambda x: "" if x is None else share(x)  # noqa: E731
    room = row.headroom
    return Operation(
        label="cast" if row.part == "cast" else f"{row.op} {row.part}",
        scope=box_of(row.scope, short(row.source)),
        facts=facts(
            name=row.name,
            risk=row.risk.text if row.risk else "",
            room="" if room is None else f"{room:.1f} powers of two",
            largest=f"{row.largest:.4g}",
            in_turn="" if row.turn is None else row.turn,
            near_overflow=known(row.near),
            flushed=known(row.flushed),
            subnormal=known(row.subnormal),
            zero=known(row.zeros),
            Inf_or_NaN=known(row.overflowed),
            noise=known(row.noise) + " on average" * (row.rounded and row.noise is not None),
            dtype=row.dtype,
            shape=list(row.shape),
            line=short(row.source),
            code=code_at(row.source),
            in_the_library=short(row.library),
            scope=row.scope,
            read_by="; ".join(row.readers),
        ),
        colours=_colours(row),
        number=number,
        backward=row.direction == "backward",
        large=rule_of(row.op).need == HALF,
    )


def _colours(row: PrecisionRow) -> dict[str, Any]:
    room = row.headroom
    return {
        "risk": KINDS[row.risk.kind if row.risk else ""],
        "room": None if room is None else next(name for most, name in ROOMS if room < most),
        "near overflow": row.near,
        "too small": row.subnormal + (row.flushed or 0.0),
        "noise": row.noise,
        "dtype": DTYPES.get(short_name(canonical(row.dtype, "dtype")), DTYPES["other"]),
        "pass": row.direction,
    }
