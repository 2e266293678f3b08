"""What was seen of the half tensors of one step, as a report."""

import collections
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.dtypes import canonical, short_name
from mpjax._src.reports import Report, short, table, wrapped
from mpjax._src.watching.figures import COUNTS, NEAR, Figures
from mpjax._src.watching.places import Tensor
from mpjax._src.watching.risk import Risk, growth_of, risk_of

MOST_ROWS, MOST_RISKS = 12, 6
COLUMNS = ("room", "largest", "near", "flushed", "small", "noise", "dtype", "tensor")
LEGEND = (
    f"room: powers of two up to the dtype's largest number. near: within 2^{NEAR} of it. flushed: "
    "not zero, and rounded to zero; not known of what was half when it was seen. small: held with "
    "fewer bits. noise: of rounding, against the values (root mean squares); ~ where it is what "
    "rounding does on average."
)


@dataclasses.dataclass(frozen=True)
class WatchedTensor:
    """One tensor of a program that is watched.

    Attributes:
        name: A name of its own among them: its scope, or line, its operation and its part.
        op: The primitive that reads or makes it.
        part: What it is to that: "lhs", "rhs", "operand", "result" or "cast".
        scope: The named scopes it stands in, joined by "/".
        direction: "forward" or "backward".
        dtype: The half dtype.
        shape: Its shape: in a loop that of one turn, within shard_map that of one device.
        source: "file:line" of the user's code, or "".
        library: The same of the library called there, or "".
        rounded: Whether it was half already when it was measured.
        readers: The matmuls that read it, such as "lhs of dot_general, backward at
            model.py:12".
    """

    name: str
    op: str
    part: str
    scope: str
    direction: str
    dtype: str
    shape: tuple[int, ...]
    source: str
    library: str
    rounded: bool
    readers: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PrecisionRow(WatchedTensor):
    """A watched tensor, and what was seen of it.

    Of a tensor of 2**19 entries or more shares and noise are those of every so many rows, at most
    every 16th. Its largest, as it was rounded, is looked for in all of it; so are Inf and NaN, of
    which at least one is counted.

    Attributes:
        entries: How many there were: over all turns and devices; 0 if the program did not come by.
        largest: The largest finite magnitude, before it was rounded.
        turn: Of the innermost loop around it, the turn of the largest; None outside of loops.
        headroom: How many powers of two that is below the dtype's largest number; None if all are
            zero or not finite.
        zeros: The share that is exactly zero.
        flushed: The share that is not zero, and rounded to zero; None where that is not known,
            because the tensor was half already.
        subnormal: The share that is stored with fewer bits than usual.
        near: The share within 2**4 of the dtype's largest number.
        overflowed: The share that is Inf or NaN in half.
        nan: The share that is NaN.
        noise: The error of rounding over the values, both as root mean squares of the
            entries between 2**-70 and 2**30; measured, or if `rounded` what it is on average. None
            where there are none.
        growth: By how many powers of two the largest grew per step over the samples so far; None
            before there are three.
        risk: What is at risk, a `Risk`, or None.
    """

    entries: float
    largest: float
    turn: int | None
    headroom: float | None
    zeros: float
    flushed: float | None
    subnormal: float
    near: float
    overflowed: float
    nan: float
    noise: float | None
    growth: float | None
    risk: Risk | None

    def to_dict(self) -> dict[str, Any]:
        """Returns the row as plain data."""
        return {**dataclasses.asdict(self), "risk": self.risk and self.risk.text}


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["figures", "earlier"],
    meta_fields=["tensors", "steps"],
)
@dataclasses.dataclass(frozen=True)
class PrecisionReport(Report):
    """What one step's half tensors held: of each matmul and each cast. ``print`` it.

    A pytree of device arrays; `rows`, `risks` and ``print`` wait for the device.

    Attributes:
        figures: What was measured, a row for each of `tensors`.
        tensors: What was watched, a `WatchedTensor` each.
        earlier: The largest magnitudes of earlier samples, the oldest first.
        steps: The numbers of those steps, and of this one; () if steps are not numbered.
    """

    figures: Figures
    tensors: tuple[WatchedTensor, ...]
    earlier: tuple[jax.Array, ...] = ()
    steps: tuple[int, ...] = ()

    _drawn_by = "mpjax._src.watching.page"

    @functools.cached_property
    def rows(self) -> list[PrecisionRow]:
        """The tensors and what was seen of them: those at risk first, then by headroom."""
        if np.ndim(self.figures.largest) != 1:
            raise ValueError(
                f"precision holds what several steps or members saw, of shape "
                f"{np.shape(self.figures.largest)}. Pass one, such as "
                "jax.tree.map(lambda x: x[-1], precision)"
            )
        largest, turn, sums = map(
            np.asarray, (self.figures.largest, self.figures.turn, self.figures.sums)
        )
        past = [np.asarray(x) for x in (*self.earlier, largest)]
        found = [
            _row(
                tensor,
                float(largest[i]),
                int(turn[i]),
                sums[i].astype(np.float64),
                self.steps,
                [float(x[i]) for x in past],
            )
            for i, tensor in enumerate(self.tensors)
        ]
        return sorted(found, key=_urgency)

    @property
    def risks(self) -> list[str]:
        """What is at risk, a sentence each, the most urgent first."""
        return [row.risk.text for row in self.rows if row.risk]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as plain data, ready for JSON."""
        step = self.steps[-1] if self.steps else None
        return {"step": step, "risks": self.risks, "rows": [row.to_dict() for row in self.rows]}

    def __str__(self) -> str:
        if isinstance(self.figures.largest, jax.core.Tracer) or np.ndim(self.figures.largest) != 1:
            return repr(self)
        at = f"step {self.steps[-1]}: " if self.steps else ""
        rows, risks = self.rows, self.risks
        lines = [f"{at}{len(rows)} half tensors watched, {len(risks)} at risk"]
        lines += [wrapped(f"- {text}", 2) for text in risks[:MOST_RISKS]]
        if len(risks) > MOST_RISKS:
            lines.append(f"  and {len(risks) - MOST_RISKS} more")
        if rows:
            lines += ["", *table(COLUMNS, map(_cells, rows[:MOST_ROWS]), words=COLUMNS[-2:])]
            if len(rows) > MOST_ROWS:
                lines.append(f"and {len(rows) - MOST_ROWS} more")
            lines += ["", wrapped(LEGEND)]
        return "\n".join(lines)


def described(tensors: Sequence[Tensor]) -> tuple[WatchedTensor, ...]:
    """Returns what a report says of tensors, each under a name of its own."""
    names: collections.Counter[str] = collections.Counter()
    found = []
    for t in tensors:
        scope = "/".join(s for s in t.scopes if not s.startswith("mpjax."))
        direction = "backward" if t.backward else "forward"
        parts = [scope or short(t.lines[0]), *(["backward"] if t.backward else [])]
        parts += ["cast"] if t.part == "cast" else [t.op, t.part]
        name = "/".join(filter(None, parts))
        names[name] += 1
        number = f"/{names[name]}" if names[name] > 1 else ""
        readers = tuple(
            f"{part} of {op}{', backward' * back}{f' at {short(line)}' if line else ''}"
            for op, part, line, back in t.readers
        )
        found.append(
            WatchedTensor(
                *(name + number, t.op, t.part, scope, direction, t.half.name, tuple(t.shape)),
                *(*t.lines, t.rounded, readers),
            )
        )
    return tuple(found)


def _row(
    tensor: WatchedTensor,
    largest: float,
    turn: int,
    sums: np.ndarray,
    steps: Sequence[int],
    past: Sequence[float],
) -> PrecisionRow:
    numbers = dict(zip(COUNTS, map(float, sums), strict=False))
    entries, part = (numbers.pop(name) for name in ("entries", "looked_at"))
    shares: dict[str, Any] = {name: n / max(part, 1) for name, n in numbers.items()}
    if tensor.rounded:
        shares["flushed"] = None
    signal, noise = map(float, sums[-2:])
    if not signal and shares["flushed"]:  # all so small that its squares are nothing: all is lost
        signal = noise = 1.0
    high = float(jnp.finfo(canonical(tensor.dtype, "dtype")).max)
    growth = growth_of(steps, past)
    row = PrecisionRow(
        **{f.name: getattr(tensor, f.name) for f in dataclasses.fields(WatchedTensor)},
        entries=entries,
        largest=largest,
        turn=turn if turn >= 0 else None,
        headroom=math.log2(high) - math.log2(largest) if largest > 0 else None,
        **shares,
        noise=math.sqrt(noise / signal) if signal > 0 else None,
        growth=growth,
        risk=None,
    )
    return dataclasses.replace(row, risk=risk_of(row, steps, past))


def _urgency(row: PrecisionRow) -> tuple[float, float]:
    return (
        row.risk.urgency if row.risk else math.inf,
        math.inf if row.headroom is None else row.headroom,
    )


def _cells(row: PrecisionRow) -> tuple[str, ...]:
    share = lambda x: "-" if x is None else f"{x:.1%}"  # noqa: E731
    noise = "-" if row.noise is None else f"{'~' * row.rounded}{row.noise:.0e}"
    largest = f"2^{math.log2(row.largest):.1f}" if row.largest else "0"
    turn = "" if row.turn is None else f", turn {row.turn}"
    at = f" {short(row.source)}" if row.source and row.scope else ""
    return (
        *("-" if row.headroom is None else f"{row.headroom:.1f}", largest),
        *(share(row.near), share(row.flushed), share(row.subnormal), noise),
        *(short_name(canonical(row.dtype, "dtype")), f"{row.name}{turn}{at}"),
    )
