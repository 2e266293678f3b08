"""The report on the 16-bit tensors of one step."""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import canonical, short_name
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.lines import short
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import HALF, rule_of
from mpjax._src.core.base.trees import pytree_of
from mpjax._src.tools.document import model, plots
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.watching.figures import COUNTS, NEAR, Figures
from mpjax._src.tools.watching.places import Tensor
from mpjax._src.tools.watching.risk import Risk, growth_of, risk_of

MOST_ROWS, MOST_RISKS = 12, 6
COLUMNS = ("room", "largest", "near", "flushed", "small", "noise", "dtype", "tensor")
LEGEND = (
    f"room: powers of two below the dtype's largest number. near: within 2^{NEAR} of it. flushed: "
    "rounded to zero; unknown for tensors that were 16-bit already. small: subnormal, with fewer "
    "bits. noise: rounding error relative to the values (root mean squares); ~ marks an estimate."
)


# The statistics of a watched tensor that are logged if they are known.
LOGGED = ("largest", "headroom", "flushed", "subnormal", "near", "overflowed", "noise")

# The kinds of risks, as they are printed, and as a page calls them.
# The kinds of risks: as text prints them, and as the classes of a page.
KINDS = {
    "gone": ("overflowed", "Inf or NaN"),
    "edge": ("near overflow", "may overflow by the next sample"),
    "growing": ("growing", "grows toward overflow"),
    "fading": ("losing precision", "too small for its dtype"),
    "": ("", "none"),
}
ROOMS = ((1.0, "less than 1"), (4.0, "1 to 4"), (8.0, "4 to 8"), (math.inf, "8 or more"))


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class WatchedTensor:
    """A watched tensor of a program.

    Attributes:
        name: A unique name: its scope or source line, its operation and its part.
        op: The primitive that reads or computes it.
        part: Its part in that operation: "lhs", "rhs", "operand", "result" or "cast".
        scope: The named scopes around it, joined with "/".
        direction: "backward" if it depends on a cotangent; what is computed again is "forward".
        dtype: The name of the 16-bit dtype.
        shape: Its shape: in a loop, of one iteration; within shard_map, of one device.
        source: "file:line" of the user's code, or "".
        library: "file:line" of the library code that this line calls, or "".
        rounded: Whether it was 16-bit already when it was measured.
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


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class PrecisionRow(WatchedTensor):
    """A watched tensor and its statistics. Shares are from 0 to 1.

    For a tensor of 2**19 entries or more, shares and noise are measured on a part of the rows, at
    least every 16th. The largest magnitude is taken over all entries of the rounded tensor. Inf and
    NaN are searched for in all entries too, and at least one is counted if there are any.

    Attributes:
        entries: The number of entries, over all iterations and devices; 0 if the tensor was not
            computed.
        largest: The largest finite magnitude, before rounding.
        turn: The iteration of the innermost loop in which the largest magnitude occurred; None
            outside of loops.
        headroom: The powers of two between the largest magnitude and the dtype's largest number;
            None if all entries are zero or non-finite.
        zeros: The share that is exactly zero.
        flushed: The share that is not zero, but is rounded to zero; None if that is unknown,
            because the tensor was 16-bit already.
        subnormal: The share that is subnormal in the 16-bit dtype, with fewer bits.
        near: The share within 2**4 of the dtype's largest number.
        overflowed: The share that is Inf or NaN in 16 bits.
        nan: The share that is NaN.
        noise: The rounding error relative to the values, both as root mean squares of the entries
            between 2**-70 and 2**30. Measured, or if ``rounded`` the expected one. None if there
            are no such entries.
        growth: The powers of two by which the largest magnitude grew per step over the samples so
            far; None before the third sample.
        risk: The `Risk` of the tensor, or None.
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


@public("mpjax.reports")
@pytree_of("figures", "earlier")
@dataclasses.dataclass(frozen=True)
class PrecisionReport(Report):
    """A report on the 16-bit tensors of one step: of every matmul and every cast. ``print`` it.

    It is a pytree of device arrays; ``rows``, ``risks`` and ``print`` wait for the device.

    Attributes:
        figures: The measured statistics, one row for each of ``tensors``.
        tensors: The watched tensors, a `WatchedTensor` each.
        earlier: The largest magnitudes of earlier samples, the oldest first.
        steps: The numbers of the earlier sampled steps and of this one; () if steps are not
            numbered.
    """

    figures: Figures
    tensors: tuple[WatchedTensor, ...]
    earlier: tuple[jax.Array, ...] = ()
    steps: tuple[int, ...] = ()

    _without = ("figures", "tensors", "earlier", "steps")
    _also = ("step", "risks", "rows")
    _array = ("precision", "figures.largest", 1)

    @functools.cached_property
    def rows(self) -> list[PrecisionRow]:
        """The tensors with their statistics: those at risk first, then by headroom."""
        self._check_one()
        figures = self.figures
        past = np.stack([np.asarray(x) for x in (*self.earlier, figures.largest)], axis=1)
        columns = (x.tolist() for x in (np.asarray(figures.turn), np.asarray(figures.sums), past))
        rows = [
            _row(tensor, turn, sums, self.steps, largest)
            for tensor, turn, sums, largest in zip(self.tensors, *columns, strict=True)
        ]
        return sorted(rows, key=_urgency)

    @property
    def risks(self) -> list[str]:
        """The texts of all risks, the most urgent first."""
        return [row.risk.text for row in self.rows if row.risk]

    @property
    def step(self) -> int | None:
        """The number of the step, or None if steps are not numbered."""
        return self.steps[-1] if self.steps else None

    def logged(self, loss_scale: float = 1.0) -> Mapping[str, float | str]:
        risks = self.risks
        metrics: dict[str, float | str] = {"at_risk": len(risks)}
        if risks:
            metrics["risks"] = "\n".join(risks)
        for row in self.rows:
            values = ((name, getattr(row, name)) for name in LOGGED)
            metrics |= {f"{row.name}/{name}": value for name, value in values if value is not None}
        return metrics

    def plot(
        self, path: str | Path | None = None, earlier: "Iterable[PrecisionReport]" = ()
    ) -> Any:
        """Plots the headroom of watched tensors step by step, and where each is first at risk.

        Args:
            path: The path of a PNG file to write, or None.
            earlier: The reports of earlier sampled steps of the run, in order, as
                `watch_precision` puts them into the metrics.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: If matplotlib is not installed (the extra ``plot``).
            TypeError: If ``earlier`` contains anything but reports of this class.
            ValueError: If a report has no step number.

        Example:
            >>> import jax, jax.numpy as jnp, mpjax
            >>> step = mpjax.watch_precision(jax.jit(lambda x: x.astype(jnp.float16)), every=1)
            >>> *earlier, last = [(step(jnp.ones(3) * 2**i), step.latest)[1] for i in range(4)]
            >>> figure = last.plot(earlier=earlier)
        """
        reports = (*earlier, self)
        if not all(isinstance(report, PrecisionReport) for report in reports):
            raise TypeError(
                f"earlier={brief(reports[:-1])} must be a list of PrecisionReports, which "
                'mpjax.watch_precision puts into metrics["precision"].'
            )
        return plots.plot_precision(reports, path)

    def document(self) -> model.Document:
        at = f"step {self.step}: " if self.steps else ""
        rows = self.rows
        risks = tuple((KINDS[row.risk.kind][0], row.risk.text) for row in rows if row.risk)
        columns = ("risk", "what was measured, and what to do")
        cells = tuple(map(_cells, rows))
        return model.Document(
            "16-bit tensors watched",
            f"{at}{len(rows)} 16-bit tensors watched, {len(risks)} at risk",
            tables=(
                model.Table("At risk", columns, risks, columns, MOST_RISKS),
                model.Table(
                    "Those at risk first, then by room", COLUMNS, cells, COLUMNS[-2:], MOST_ROWS
                ),
            ),
            notes=(LEGEND,) if rows else (),
            drawing=self._drawing,
        )

    def _drawing(self) -> model.Drawing:
        # A map shows tensors where they are in the program; `rows` are sorted by urgency.
        order = {tensor.name: i for i, tensor in enumerate(self.tensors)}
        rows = sorted(self.rows, key=lambda row: order[row.name])
        return model.Drawing(
            operations=tuple(_tensor(row, i) for i, row in enumerate(rows)),
            colors=tuple(COLORS),
            things="tensors",
        )


def _scope_and_name(t: Tensor) -> tuple[str, str]:
    """Returns where a tensor is, and its name, which others may have too."""
    # mpjax's marks are scopes too, and say nothing to the user.
    scope = "/".join(s for s in t.scopes if not s.startswith("mpjax."))
    parts = [scope or short(t.lines[0]), "backward" * t.backward]
    parts += ["cast"] if t.part == "cast" else [t.eqn.primitive.name, t.part]
    return scope, "/".join(filter(None, parts))


def described(tensors: Sequence[Tensor]) -> tuple[WatchedTensor, ...]:
    """Returns the descriptions of tensors, each with a unique name."""
    names: collections.Counter[str] = collections.Counter()
    watched = []
    for t in tensors:
        scope, name = _scope_and_name(t)
        direction = "backward" if t.backward else "forward"
        # Layers without a scope that share their lines have equal names.
        names[name] += 1
        number = f"/{names[name]}" if names[name] > 1 else ""
        shape, lines = tuple(t.value.aval.shape), t.lines
        watched.append(
            WatchedTensor(
                *(name + number, t.eqn.primitive.name, t.part, scope, direction, t.half.name),
                *(shape, *lines, t.rounded, tuple(t.readers)),
            )
        )
    return tuple(watched)


def _row(
    tensor: WatchedTensor,
    turn: int,
    sums: Sequence[float],
    steps: Sequence[int],
    past: Sequence[float],
) -> PrecisionRow:
    # Behind the counts are the two sums of squares, which have no names.
    *counts, signal, noise = sums
    numbers = dict(zip(COUNTS, counts, strict=True))
    entries, part = (numbers.pop(name) for name in ("entries", "looked_at"))
    shares: dict[str, Any] = {name: n / max(part, 1) for name, n in numbers.items()}
    if tensor.rounded:
        shares["flushed"] = None
    if not signal and shares["flushed"]:  # the squares underflow too, so all of it is lost
        signal = noise = 1.0
    high, largest = float(jnp.finfo(canonical(tensor.dtype, "dtype")).max), past[-1]
    row = PrecisionRow(
        **vars(tensor),
        entries=entries,
        largest=largest,
        turn=turn if turn >= 0 else None,
        headroom=math.log2(high) - math.log2(largest) if largest > 0 else None,
        **shares,
        noise=math.sqrt(noise / signal) if signal > 0 else None,
        growth=growth_of(steps, past),
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


def _tensor(row: PrecisionRow, number: int) -> model.Operation:
    percent = lambda x: "" if x is None else model.share(x)  # noqa: E731
    return model.Operation(
        label="cast" if row.part == "cast" else f"{row.op} {row.part}",
        scope=model.box_of(row.scope, row.source),
        facts=model.facts(
            name=row.name,
            risk=row.risk.text if row.risk else "",
            room="" if row.headroom is None else f"{row.headroom:.1f} powers of two",
            largest=f"{row.largest:.4g}",
            in_turn=row.turn,
            near_overflow=percent(row.near),
            flushed=percent(row.flushed),
            subnormal=percent(row.subnormal),
            zero=percent(row.zeros),
            Inf_or_NaN=percent(row.overflowed),
            noise=percent(row.noise) + " on average" * (row.rounded and row.noise is not None),
            dtype=row.dtype,
            shape=list(row.shape),
            **model.place_of(row),
            read_by="; ".join(row.readers),
        ),
        colors={color.name: value(row) for color, value in COLORS.items()},
        number=number,
        backward=row.direction == "backward",
        large=rule_of(row.op).need == HALF,
    )


def _room(row: PrecisionRow) -> str | None:
    room = row.headroom
    return None if room is None else next(name for most, name in ROOMS if room < most)


def _dtype(row: PrecisionRow) -> str:
    return model.DTYPES.get(short_name(canonical(row.dtype, "dtype")), model.DTYPES["other"])


SHARE = functools.partial(model.Color, unit="share", of_box=max)
# What colors a map of tensors, with the value of each row.
COLORS: dict[model.Color, Callable[[PrecisionRow], Any]] = {
    model.Color(
        *("risk", "The risk of each tensor, by the first rule that applies."),
        tuple(name for _, name in KINDS.values()),
    ): lambda row: KINDS[row.risk.kind if row.risk else ""][1],
    model.Color(
        "room",
        "Powers of two between the largest magnitude and the largest number of the dtype.",
        tuple(name for _, name in ROOMS),
    ): _room,
    SHARE(
        "near overflow", f"The share within 2^{NEAR} of the largest number of the dtype."
    ): lambda row: row.near,
    SHARE(
        "too small", "The share that is rounded to zero, or subnormal with fewer bits."
    ): lambda row: row.subnormal + (row.flushed or 0.0),
    SHARE("noise", "The rounding error relative to the values (root mean squares)."): lambda row: (
        row.noise
    ),
    model.Color(
        "dtype", "The dtype that each tensor is stored in.", tuple(model.DTYPES.values())
    ): _dtype,
    model.PASS: lambda row: row.direction,
}
