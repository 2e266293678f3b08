"""What was seen of the functions that a script differentiates, and the report on it."""

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

from mpjax._src.core.autocast.transform import Traced
from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT64
from mpjax._src.core.base.errors import first_of
from mpjax._src.core.base.lines import short, where
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import HALF, rule_of
from mpjax._src.core.policy.policy import Policy, halves_of
from mpjax._src.core.program.site import equations
from mpjax._src.tools.document.model import Document, Table, share
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments.explain import matmul_flops
from mpjax._src.tools.scripts.hooks import Hook, Site
from mpjax._src.tools.scripts.missed import compiled_before
from mpjax._src.tools.scripts.moving import Moving

# How many programs of a function are counted: one that has no key gets a new one in each step.
MOST_PROGRAMS = 64
ASKING = "precision="
NAMED = 5  # how many functions one line names

PLANNED, AS_IT_IS = "planned", "as it is"


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class GradientRow:
    """A function that was differentiated, and what became of it.

    Attributes:
        name: The name of the function.
        transform: The transformation that was asked for, as ``jax`` names it, such as "grad".
        source: The line of your code that led to it, as "file:line".
        library: The line of the library that asked for it there; "" if that was your own line.
        planned: Whether it was planned. Otherwise it ran as it is.
        reason: Why it ran as it is, or why its matmuls stay float32; "" if there is nothing to say.
        calls: How often it was called outside of jit, or traced.
        programs: The number of programs that were planned: one for each set of shapes and dtypes.
        half_flops: Of the FLOPs of matmuls in its planned programs, forward and backward, the share
            on 16-bit operands; None if there are none.
        half_before: The same of the function as it is written, without its derivative.
        flops: These FLOPs, of one run of each program that was derived of it so far; 0 for what was
            not planned. Equal functions share their programs, also with those of an earlier block.
    """

    name: str
    transform: str
    source: str
    library: str
    planned: bool
    reason: str
    calls: int
    programs: int
    half_flops: float | None
    half_before: float | None
    flops: int


@public("mpjax.reports")
class GradientsReport(Report):
    """What was differentiated under `mpjax.scripts.autocast_gradients`. ``print`` it.

    It is up to date at any time until the block ends.

    Attributes:
        policy: The policy.
        rows: The functions, a `GradientRow` each, in the order of their first calls.
        half_flops: The share of the matmul FLOPs of all planned programs that run on 16-bit
            operands, from 0 to 1; None if there are none.
        missed: What holds a transformation of JAX, or a derivative, from before, and what is
            compiled ahead of time in float32, each a phrase. What calls it is not planned.
    """

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._hook: Hook | None = None
        self._ended = False
        self._missed: tuple[str, ...] | None = None  # found after the end: each look takes a while
        self._seen: dict[tuple[Site, str], Seen] = {}
        # Functions that could not be planned; why, by whether they ran outside of jit.
        self._as_it_is: dict[Any, dict[bool, str]] = {}
        self._lock = threading.Lock()

    def _of(self, site: Site, reason: str = "") -> "Seen":
        with self._lock:
            # The message of an error may name an object, and be another one at each call.
            key = site._replace(argnums=None), reason.partition(":")[0]
            return self._seen.setdefault(key, Seen(key[0], reason))

    @property
    def missed(self) -> tuple[str, ...]:
        if self._missed is not None or self._hook is None:
            return self._missed or ()
        found = *self._hook.missed, *(compiled_before() if halves_of(self.policy) else ())
        self._missed = found if self._ended else None
        return found

    @property
    def rows(self) -> tuple[GradientRow, ...]:
        return tuple(seen.row() for seen in [*self._seen.values()] if seen.calls)

    @property
    def half_flops(self) -> float | None:
        every: dict[int, tuple[int, int]] = {}  # functions that are equal share their programs
        for seen in [*self._seen.values()]:
            every |= seen.counted()[0]
        total = sum(whole for _, whole in every.values())
        return sum(half for half, _ in every.values()) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, ready for JSON."""
        return {
            "policy": str(self.policy),
            "half_flops": self.half_flops,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "missed": [*self.missed],
        }

    def document(self) -> Document:
        columns = "function", "by", "line", "", "in 16 bits", "as written", "GFLOPs"
        percent = lambda part: "" if part is None else share(part)  # noqa: E731
        table = [
            (
                row.name,
                row.transform,
                where(row.source, row.library),
                PLANNED if row.planned else AS_IT_IS,
                percent(row.half_flops),
                percent(row.half_before) if row.half_before else "",
                f"{row.flops / 1e9:.3g}" if row.flops else "",
            )
            for row in self.rows
        ]
        words = columns[:4]
        return Document(
            f"Gradients under {self.policy}",
            self._sentence(),
            tuple(self._lines()),
            (Table("functions", columns, tuple(table), words, folded=2),),
        )

    def summary(self) -> str:
        """Returns the lines that are printed at the end of a run."""
        return "\n".join(f"mpjax: {line}" for line in (self._sentence(), *self._lines()))

    def _sentence(self) -> str:
        rows = self.rows
        if not rows:
            return "no function was differentiated for the first time, so nothing was planned."
        # A function may be differentiated at several places, and is planned if it is at each.
        functions: dict[Any, bool] = {}
        for seen in [*self._seen.values()]:
            if seen.calls:
                planned = functions.get(seen.function, True)
                functions[seen.function] = planned and not seen.reason
        text = f"{_counted(len(functions), 'function')} differentiated"
        text += f", {sum(functions.values())} planned"
        halves = sorted(dtype.name for dtype in halves_of(self.policy))
        part = self.half_flops
        if part is not None:
            text += f"; {share(part)} of matmul FLOPs in {' and '.join(halves) or '16 bits'}"
        return text

    def _lines(self) -> Iterator[str]:
        """Yields what is to be said of functions that are not as a reader might expect."""
        rows = self.rows
        groups: dict[str, list[str]] = {}
        for row in rows:
            place = f"{row.name} ({short(row.source)})"
            if row.reason:
                title = "stays float32" if row.planned else "not planned"
                groups.setdefault(f"{title}, {row.reason}", []).append(place)
            if "/dynamic_scale.py" in row.library.replace("\\", "/"):
                groups.setdefault("with a loss scale, which bfloat16 needs not", []).append(place)
            if row.half_before:
                text = f"already in 16 bits as written ({share(row.half_before)} of matmul FLOPs)"
                groups.setdefault(text, []).append(place)
        for title, places in groups.items():
            yield f"{title}: {first_of([*dict.fromkeys(places)], NAMED)}"
        if missed := [_shortened(phrase) for phrase in self.missed]:
            yield f"made before and not planned where it is called: {first_of(missed, NAMED, '; ')}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _shortened(phrase: str) -> str:
    """Returns a phrase that ends in "(file:line)" with a short name of the file."""
    head, bracket, source = phrase.rpartition(" (")
    return f"{head} ({short(source[:-1])})" if bracket and source.endswith(")") else phrase


# ---- one function --------------------------------------------------------------------------------


class Seen:
    """What was seen of a function at one place."""

    def __init__(self, site: Site, reason: str = "") -> None:
        self.site, self.reason = site, reason
        self.calls = 0
        self.programs: dict[int, tuple[Any, Any]] = {}  # each with what was counted of it
        self.before = [0, 0]
        self.moving = Moving()

    @property
    def function(self) -> Any:
        """What tells the function from others."""
        return (self.site.fun, self.site.defined) if self.site.defined else self.site

    def planned(self, traced: Traced) -> None:
        """Notes a program of the function, and counts its FLOPs as it is written."""
        if traced.as_written:
            program, key = None, hash((traced.avals, traced.paths))
        else:
            program, key = traced.program, id(traced.program)
        if key in self.programs or len(self.programs) >= MOST_PROGRAMS:
            return
        counted = matmul_flops(_jax.open_jaxpr(traced.jaxpr)[0])
        self.programs[key] = program, counted
        self.before = [a + b for a, b in zip(self.before, counted, strict=True)]

    def counted(self) -> tuple[dict[int, tuple[int, int]], set[str]]:
        """Returns the FLOPs of each program that ran, in 16 bits and all; and what matmuls read."""
        found: dict[int, tuple[int, int]] = {}
        read: set[str] = set()
        for key, (program, counted) in [*self.programs.items()]:
            if program is None:
                # JAX differentiates what is cast at its boundary: its forward pass is counted.
                found[key] = counted
            for jaxpr in program.ran() if program is not None else ():
                opened = _jax.open_jaxpr(jaxpr)[0]
                found[id(jaxpr)] = matmul_flops(opened)
                read |= _of_matmuls(opened)
        return found, read

    def row(self) -> GradientRow:
        """Returns what the report says of it."""
        counted, read = self.counted()
        half, total = (sum(each) for each in zip((0, 0), *counted.values(), strict=True))
        reason = self.reason
        if self.programs and not reason:
            reason = _why(total, half, read)
        return GradientRow(
            name=self.site.fun,
            transform=self.site.transform,
            source=self.site.source,
            library=self.site.library,
            planned=not self.reason,
            reason=reason,
            calls=self.calls,
            programs=len(self.programs),
            half_flops=half / total if total else None,
            half_before=self.before[0] / self.before[1] if self.before[1] else None,
            flops=total,
        )


def _of_matmuls(jaxpr: Any) -> set[str]:
    """Returns of each matmul the precision that it asks for, or else the dtypes of its operands."""
    found: set[str] = set()
    for eqn, *_ in equations(jaxpr):
        if rule_of(eqn.primitive.name).need == HALF and _jax.flops_of(eqn):
            precision = _jax.own_precision(eqn.params)
            if precision is not None and precision != _jax.default_precision():
                asked = precision if isinstance(precision, tuple) else (precision,)
                found.add(f"{ASKING}{getattr(asked[0], 'name', asked[0])}")
            else:
                found |= {v.aval.dtype.name for v in eqn.invars[:2]}
    return found


def _why(total: int, half: int, read: set[str]) -> str:
    """Returns why no matmul of planned programs runs in 16 bits, or ""."""
    if half or not read:
        return "" if total or half else "it has no matmul"
    if FLOAT64.name in read:
        return "its matmuls are float64"
    if all(each.startswith(ASKING) for each in read):
        return f"its matmuls ask for {min(read)}"
    return "mpjax.explain says why"
