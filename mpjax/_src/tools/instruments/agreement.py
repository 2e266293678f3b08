"""Finds where two programs that should agree diverge: training and rollout, a port, two versions.

Both programs run one operation at a time, each with a shadow run in float32. If the shadows agree,
the difference is rounding. Then one line of code after another is given float32 results, and the
line whose float32 results reduce the difference most is the cause. If the shadows differ, so do the
formulas. Then equal values of the two programs are matched by their entries (`likeness`), and the
programs diverge at the first values without a match whose operands all have one.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.public import public
from mpjax._src.core.program.interpret import interpret
from mpjax._src.core.program.site import Site, shown
from mpjax._src.core.program.trace import Flat, trace
from mpjax._src.tools.document import plots
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments import shadows
from mpjax._src.tools.instruments.likeness import Pool, alike, pool_of
from mpjax._src.tools.instruments.programs import check_concrete
from mpjax._src.tools.instruments.rows import HALF, signature_of
from mpjax._src.tools.instruments.shadows import CompareRow, Shadowed

# The meanings that results can have.
MEANINGS = ("log_probs", "logits", "values")

# How many lines are tried, beginning with those that add the most error.
TRIED = 12

# A difference is float32 rounding if it is at most NOISE times the change of the results when the
# last bits of the arguments change, and below NEVER.
NOISE, NEVER = 16.0, 1e-3

# If float32 leaves more than this share of the difference, the formulas differ.
LEFT = 0.5

# How many rows are printed.
SHOWN = 6

# Longer names of functions are not used as titles of columns.
LONGEST = 16

# How many lines of each program are named where formulas differ.
ROOTS = 3

# Tolerances for matching values of float32 runs, relative to the root mean square of the entries:
# the largest one at which the results do not match is used.
TOLERANCES = (2e-5, 4e-6, 8e-7, 1.6e-7)

# A line that reduces the difference by less than this share is not its cause.
CAUSE = 0.25


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Parting:
    """An operation at which two programs diverge.

    Attributes:
        source: "file:line" of the user's code.
        library: "file:line" of the library code that this line calls, or "".
        primitive: The operation of the line that adds the most error, or that differs.
        scope: The named scopes around it, joined with "/".
        dtypes: The dtypes of its operands and result, in the first and the second program, such as
            ("f32->f32", "bf16->bf16"); "" for a program without this line.
        left: The share of the difference that remains if the results of this line are float32; None
            if the formulas differ.
    """

    source: str
    library: str
    primitive: str
    scope: str
    dtypes: tuple[str, str]
    left: float | None = None


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Agreement(Report):
    """A report on where two programs diverge. ``print`` it, or read ``partings``.

    Attributes:
        names: The names of the two programs.
        meaning: The meaning of the results: "log_probs", "logits" or "values".
        difference: The mean magnitude of the difference of the results: for log-probabilities and
            logits the log-ratio of a token, for values relative to their root mean square.
        worst: The largest magnitude of the difference.
        worst_at: The index of the largest difference in the results.
        kl: The mean over tokens of the KL divergence of the first program from the second, in nats.
            Exact for logits. For log-probabilities of tokens that the second program sampled, the
            estimate ``exp(r) - 1 - r`` of the log-ratio r (Schulman, 2020). None for values.
        in_float32: The value of ``difference`` if both programs compute in float32.
        agrees: Whether the difference is no larger than float32 rounding.
        by_formula: Whether the programs differ in float32 too.
        partings: The operations where they diverge, the cause first. If the cause is rounding, the
            lines sorted by the difference that remains if they return float32. If the formulas
            differ, the first operations of each program whose results the other does not have.
        differences: The results of the first program minus those of the second, a float64 array of
            their shape: for log-probabilities the log-ratio of each token.
    """

    names: tuple[str, str]
    meaning: str
    difference: float
    worst: float
    worst_at: tuple[int, ...]
    kl: float | None
    in_float32: float
    agrees: bool
    by_formula: bool
    partings: tuple[Parting, ...]
    differences: np.ndarray = dataclasses.field(compare=False, repr=False)

    def plot(self, path: str | Path | None = None) -> Any:
        """Plots the difference of the programs at each token, and the share left for each line.

        Args:
            path: The path of a PNG file to write, or None.

        Returns:
            A ``matplotlib.figure.Figure``.

        Raises:
            ImportError: If matplotlib is not installed (the extra ``plot``).

        Example:
            >>> import jax, jax.numpy as jnp, mpjax
            >>> half = lambda x: jnp.sin(x).astype(jnp.bfloat16).astype(jnp.float32)
            >>> report = mpjax.compare(jnp.sin, half)(jnp.linspace(0, 1, 12).reshape(3, 4))
            >>> figure = report.plot()
        """
        return plots.plot_agreement(self, path)

    def document(self) -> Document:
        first, second = self.names
        at = f", at {list(self.worst_at)}" if self.worst_at else ""
        what = "relative difference" if self.meaning == "values" else "|log ratio| per token"
        kl = "" if self.kl is None else f"; KL {self.kl:.2g}"
        rows = tuple(
            (
                "" if p.left is None else f"{p.left:.0%}",
                p.primitive,
                *p.dtypes,
                "  ".join(filter(None, (where(p.source, p.library), p.scope))),
            )
            for p in self.partings
        )
        columns = ("left", "operation", *self.names, "where")
        return Document(
            "Where two programs diverge",
            f"{first} and {second}: {what} {self.difference:.2g} "
            f"(at most {self.worst:.2g}{at}){kl}",
            (f"both in float32: {self.in_float32:.2g}. {self._verdict()}",),
            (Table("Partings", columns, rows, columns[1:], SHOWN),),
        )

    def _verdict(self) -> str:
        if self.agrees:
            return "They agree up to float32 rounding."
        if self.by_formula:
            where = " They diverge here:" if self.partings else ""
            return f"They compute different things; rounding is not the cause.{where}"
        best = self.partings[0].left if self.partings else None
        if best is None:
            return "Rounding is the cause, in operations without a source line or a float32 form."
        cause = "Rounding in many lines is" if best > 1 - CAUSE else "Rounding is"
        return f"{cause} the cause. Share of the difference left if a line returns float32:"


def agreement(
    functions: tuple[Callable[..., Any], Callable[..., Any]], meaning: str, args: Any, kwargs: Any
) -> Agreement:
    """Compares two functions for `compare`."""
    runs = [_Run(fun, args, kwargs) for fun in functions]
    names = _names(functions)
    first, second = (run.result for run in runs)
    meaning = _checked(meaning, names, first, second)
    own = _parting_of(meaning, first.array, second.array)
    wide = _parting_of(meaning, first.shadow, second.shadow)
    noise = NOISE * runs[1].noise(meaning) if own.mean < NEVER else 0.0
    agrees = own.mean <= noise
    by_formula = not agrees and wide.mean > max(noise, LEFT * own.mean)
    partings: list[Parting] = []
    if by_formula:
        partings = _of_formulas(*runs)
    elif not agrees:
        partings = _of_rounding(runs, meaning, own.mean)
    return Agreement(
        *(names, meaning, own.mean, own.worst, own.worst_at, own.kl, wide.mean, agrees, by_formula),
        *(tuple(partings), own.entries),
    )


# ---- the difference of the results --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Difference:
    mean: float
    worst: float
    worst_at: tuple[int, ...]
    kl: float | None
    entries: np.ndarray


def _parting_of(meaning: str, first: Any, second: Any) -> _Difference:
    """Returns the difference of two results, in float64."""
    a, b = (np.asarray(x, np.float64) for x in (first, second))
    kl = None
    if meaning == "logits":
        a, b = (x - _log_sum(x) for x in (a, b))
        kl = float(np.mean(np.sum(np.exp(b) * np.where(a == b, 0, b - a), -1)))
    ratio = np.where(a == b, 0, a - b)  # 0 for equal infinities too
    sizes = np.abs(ratio)
    if meaning == "log_probs":
        kl = float(np.mean(np.expm1(ratio) - ratio))
    if meaning == "values":
        finite = b[np.isfinite(b)]
        sizes = sizes / (np.sqrt(np.mean(finite**2)) if np.any(finite) else 1.0)
    at = np.unravel_index(np.argmax(np.nan_to_num(sizes, nan=np.inf)), sizes.shape)
    weights = np.exp(b) if meaning == "logits" else None  # unlikely tokens count less
    mean = float(np.average(np.where(weights == 0, 0, sizes), weights=weights))
    return _Difference(mean, float(sizes[at]), tuple(map(int, at)), kl, ratio)


def _log_sum(x: np.ndarray) -> np.ndarray:
    top = np.max(x, -1, keepdims=True)  # taken out, so that no exponential overflows
    return top + np.log(np.sum(np.exp(x - top), -1, keepdims=True))


def _checked(meaning: str, names: tuple[str, str], first: Shadowed, second: Shadowed) -> str:
    """Returns the meaning of the results. Raises if they cannot be compared."""
    shapes = [np.shape(x.array) for x in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"compare: {names[0]} returned the shape {shapes[0]}, but {names[1]} the shape "
            f"{shapes[1]}. Both must return arrays of the same shape, for the same tokens in the "
            "same order."
        )
    if meaning != "auto":
        return meaning
    arrays = [np.asarray(x.shadow, np.float64) for x in (first, second)]
    # Rows whose exponentials sum to 1, up to rounding, are the probabilities of all tokens.
    if all(x.ndim > 1 and x.shape[-1] > 1 and np.all(np.abs(_log_sum(x)) < 1e-3) for x in arrays):
        return "logits"  # log-probabilities of all tokens are logits too
    return "log_probs" if all(np.all(x <= 0) for x in arrays) else "values"


def _names(functions: Sequence[Callable[..., Any]]) -> tuple[str, str]:
    names = [getattr(inspect.unwrap(f), "__name__", "<") for f in functions]
    unfit = [name.startswith("<") or len(name) > LONGEST for name in names]  # lambdas
    first, second = names
    same = first == second
    return "first" if same or unfit[0] else first, "second" if same or unfit[1] else second


# ---- the runs -----------------------------------------------------------------------------------


def _is_traced(leaf: Any) -> bool:
    """Returns whether a program gets a leaf; a NumPy scalar may be a size, so it is a constant."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


class _Run:
    """A function as a program that was run once, with its float32 shadow."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any):
        call = Flat.of((args, kwargs), _is_traced)
        self.arrays = check_concrete("compare", call.arrays)
        traced = trace(call.on(fun), [_jax.aval_of(x) for x in self.arrays], "compare")
        self.jaxpr = traced.jaxpr
        self.watcher = _Recorder()
        outs = interpret(self.jaxpr, [self.watcher.constant(x) for x in self.arrays], self.watcher)
        floats = [i for i, out in enumerate(outs) if is_float(out.array)]
        if len(floats) != 1:
            paths = [path_of(keys) or "result" for keys in traced.out.keys]
            arrays = [f"{aval.dtype}{list(aval.shape)}" for aval in self.jaxpr.out_avals]
            returned = ", ".join(map(": ".join, zip(paths, arrays, strict=True))) or "nothing"
            raise ValueError(
                f"compare: {brief(fun)} must return one floating array, such as the "
                f"log-probabilities of tokens, but returned {returned}. Wrap it in a function that "
                "returns only the array to compare."
            )
        (self.which,) = floats
        self.result: Shadowed = outs[self.which]  # what is compared

    def noise(self, meaning: str) -> float:
        """Returns the change of the float32 result when the arguments change in the last bit."""
        perturbed = shadows.results_of_perturbed(self.jaxpr, self.arrays)
        if perturbed is None:
            return 0.0
        return _parting_of(meaning, perturbed[self.which], self.result.shadow).mean

    def without(self, line: tuple[str, str]) -> Any:
        """Returns the result of the program if the results of one line are float32."""
        heals = lambda eqn, place: place.lines(eqn) == line  # noqa: E731
        return shadows.run_healed(self.jaxpr, self.arrays, heals)[self.which]


@dataclasses.dataclass(frozen=True)
class _Step:
    """An operation with a floating result, in one iteration of the loops around it."""

    eqn: Any
    place: Site
    given: frozenset[int]  # the steps that its operands come from
    shadow: np.ndarray

    @functools.cached_property
    def pool(self) -> Pool:
        """The entries of the result, for matching."""
        return pool_of([self.shadow])


class _Recorder(shadows.Comparer):
    """A `Comparer` that records the float32 result of each operation and its predecessors."""

    def __init__(self) -> None:
        super().__init__(lambda eqn, place: place.lines(eqn))
        self.steps: list[_Step] = []

    def operation(self, eqn: Any, ins: list[Shadowed], place: Site) -> list[Shadowed]:
        given = frozenset().union(*(v.steps for v in ins))
        results = super().operation(eqn, ins, place)
        for i, value in enumerate(results):
            if is_float(value.shadow):
                results[i] = dataclasses.replace(value, steps=frozenset({len(self.steps)}))
                self.steps.append(_Step(eqn, place, given, np.asarray(value.shadow)))
        return results


# ---- causes -------------------------------------------------------------------------------------


def _lines_in_half(
    runs: Sequence[_Run],
) -> dict[tuple[str, str], tuple[list[CompareRow], list[CompareRow]]]:
    """Returns the rows of both runs that round to 16 bits, by their lines."""
    lines: dict[tuple[str, str], tuple[list[CompareRow], list[CompareRow]]] = {}
    for i, run in enumerate(runs):
        for row in run.watcher.rows.values():
            if row.source and row.new and row.dtypes.endswith(HALF):
                lines.setdefault((row.source, row.library), ([], []))[i].append(row)
    return lines


def _of_rounding(runs: Sequence[_Run], meaning: str, difference: float) -> list[Parting]:
    """Returns lines, sorted by the difference that remains if their results are float32."""
    lines = _lines_in_half(runs)
    added = {line: sum(row.blame for rows in both for row in rows) for line, both in lines.items()}
    own = [run.result.array for run in runs]
    partings = []
    for line in sorted(lines, key=lambda line: -added[line])[:TRIED]:
        outs = [
            run.without(line) if rows else out
            for run, rows, out in zip(runs, lines[line], own, strict=True)
        ]
        left = _parting_of(meaning, *outs).mean / difference
        worst = [max(rows, key=lambda row: row.blame, default=None) for rows in lines[line]]
        here = max(filter(None, worst), key=lambda row: row.blame)
        dtypes = [row.dtypes if row else "" for row in worst]
        partings.append(Parting(*line, here.primitive, here.scope, (dtypes[0], dtypes[1]), left))
    return sorted(partings, key=lambda parting: parting.left or 0.0)


def _of_formulas(first: _Run, second: _Run) -> list[Parting]:
    """Returns the first lines of each program whose results the other program does not have."""
    pools = [_pools(run) for run in (first, second)]
    for tolerance in TOLERANCES:
        sides = zip((first, second), reversed(pools), strict=True)
        lost = [_unmatched(run, others, tolerance) for run, others in sides]
        if any(lost):
            return [*_roots(first, lost[0], 0), *_roots(second, lost[1], 1)]
    return []


def _roots(run: _Run, lost: set[int], side: int) -> Iterator[Parting]:
    """Yields the lines of the unmatched steps whose operands are all matched."""
    roots: dict[tuple[str, str], _Step] = {}
    for step in (run.watcher.steps[number] for number in sorted(lost)):
        if not step.given & lost:
            roots.setdefault(step.place.lines(step.eqn), step)
    # Steps without a line, which the user cannot look up, count only if no step has one.
    lined = {line: step for line, step in roots.items() if line[0]} or roots
    for line, step in [*lined.items()][:ROOTS]:
        dtypes = signature_of(step.eqn.invars, step.eqn.outvars)
        scope = "/".join(shown(step.place.scopes))
        sides = ("", dtypes) if side else (dtypes, "")
        yield Parting(*line, step.eqn.primitive.name, scope, sides)


def _pools(run: _Run) -> list[Pool]:
    """Returns the values of a program: arguments, loop iterations, and all iterations joined."""
    turns: dict[Any, list[np.ndarray]] = {}
    for step in run.watcher.steps:
        key = id(step.eqn), step.place.scopes, len(step.place.loops), step.shadow.shape
        turns.setdefault(key, []).append(step.shadow)
    arguments = [[np.asarray(x)] for x in run.arrays if is_float(x)]
    # One program may have in one array what the other computes iteration by iteration.
    alone = [step.pool for step in run.watcher.steps if step.place.loops]
    return [*alone, *map(pool_of, [*arguments, *turns.values()])]


def _unmatched(run: _Run, others: Sequence[Pool], tolerance: float) -> set[int]:
    """Returns the unmatched steps that reach the result through unmatched steps only."""
    lost: set[int] = set()
    ahead, seen = [*run.result.steps], set[int]()
    while ahead:
        number = ahead.pop()
        if number not in seen:
            seen.add(number)
            step = run.watcher.steps[number]
            if not any(alike(step.pool, other, tolerance) for other in others):
                lost.add(number)
                ahead += step.given
    return lost
