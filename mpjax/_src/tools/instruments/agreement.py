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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import _jax
from mpjax._src.core.base.dtypes import FLOAT32, is_float, short_name
from mpjax._src.core.base.errors import brief
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.public import public
from mpjax._src.core.program.interpret import WIDER, handling, interpret
from mpjax._src.core.program.modules import has_modules
from mpjax._src.core.program.site import shown
from mpjax._src.core.program.trace import Flat, parameters_of, trace
from mpjax._src.tools.document import plots
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments import shadows
from mpjax._src.tools.instruments.alignment import AlignedRow, Node, Recorder, align, gap
from mpjax._src.tools.instruments.likeness import Pool, alike, pool_of
from mpjax._src.tools.instruments.programs import check_concrete
from mpjax._src.tools.instruments.rows import signature_of, turns_of
from mpjax._src.tools.instruments.shadows import SUSPICIOUS, CompareRow, Shadowed, percent

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
    """A report on where two programs diverge. ``print`` it, or read ``partings`` and ``rows``.

    Attributes:
        names: The names of the two programs.
        meaning: The meaning of the results: "log_probs", "logits" or "values".
        difference: The mean magnitude of the difference of the results: for log-probabilities and
            logits the log-ratio of a token, for values relative to their root mean square.
        worst: The largest magnitude of the difference.
        worst_at: The index of the largest difference in the results.
        kl: The mean over rows of KL(p || q), in nats, where p are the probabilities of the first
            program and q those of the second. Exact for logits; values whose last axis has several
            entries are read as logits. For log-probabilities of tokens that the second program
            sampled, the estimate ``exp(r) * r - exp(r) + 1`` of the log-ratio r (Schulman, 2020).
            None for other values.
        in_float32: The value of ``difference`` if both programs compute in the reference.
        agrees: Whether all differences are no larger than float32 rounding.
        by_formula: Whether the programs differ in the reference too.
        partings: The operations where they diverge, the cause first. If the cause is rounding, the
            lines sorted by the difference that remains if they return float32. If the formulas
            differ, the first operations of each program whose results the other does not have.
        differences: The results of the first program minus those of the second, a float64 array of
            their shape: for log-probabilities the log-ratio of each token.
        result: The name of the result that these fields describe. Of several, that of
            log-probabilities or else the one that differs the most.
        results: The relative error between each of the results, by name; for integers the share of
            entries that differ.
        kl_worst: The largest KL divergence of a row, or None.
        ratio: The largest ratio of the two probabilities of a token that was taken, either way.
            None without log-probabilities of tokens, or logits and ``labels``.
        other_argmax: The share of rows whose most likely tokens differ, or None without rows.
        rows: The operations that both programs have, where their results differ, the worst first.
        shares: The shares of the operations of each program that the other one has.
        alone: Which operations the other program does not have, as text.
        reference: The dtype of the parallel runs. Where this page says float32 of them, it is
            float64 if the reference is.
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
    result: str = "result"
    results: dict[str, float] = dataclasses.field(default_factory=dict)
    kl_worst: float | None = None
    ratio: float | None = None
    other_argmax: float | None = None
    rows: tuple[AlignedRow, ...] = ()
    shares: tuple[float, float] = (1.0, 1.0)
    alone: tuple[str, ...] = ()
    reference: str = "float32"

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
        of = f" of {self.result}" if len(self.results) > 1 else ""
        kl = "" if self.kl is None or self.meaning == "values" else f"; KL {self.kl:.2g}"
        columns = ("left", "operation", *self.names, "where")
        partings = tuple(
            (
                "" if p.left is None else f"{p.left:.0%}",
                p.primitive,
                *p.dtypes,
                "  ".join(filter(None, (where(p.source, p.library), p.scope))),
            )
            for p in self.partings
        )
        results = sorted(self.results.items(), key=lambda item: -item[1])
        errors = tuple((percent(error), name) for name, error in results)
        shared = ("added", "error", "inherited", *columns[1:])
        return Document(
            "Where two programs diverge",
            f"{first} and {second}: {what}{of} {self.difference:.2g} "
            f"(at most {self.worst:.2g}{at}){kl}",
            (
                *filter(None, [self._of_probabilities()]),
                *self._of_operations(),
                f"both in {self.reference}: {self.in_float32:.2g}. {self._verdict()}",
            ),
            (
                Table("Partings", columns, partings, columns[1:], SHOWN),
                Table(
                    "Error between the results",
                    ("error", "result"),
                    errors if len(errors) > 1 else (),
                    ("result",),
                    SHOWN,
                ),
                Table(
                    "Operations of both, worst first",
                    shared,
                    tuple(map(_cells, self.rows)),
                    columns[1:],
                    SHOWN,
                ),
            ),
        )

    def _of_probabilities(self) -> str:
        """Returns what the difference means for the probabilities of tokens, as a sentence."""
        kl, ratio, argmax = self.kl_worst, self.ratio, self.other_argmax
        words = [
            *([] if kl is None else [f"KL of a row at most {kl:.2g}"]),
            *([] if ratio is None else [f"probabilities of a token at most {ratio:.4g}:1"]),
            *([] if argmax is None else [f"another argmax in {percent(argmax)} of rows"]),
        ]
        if self.meaning == "values" and words:
            words = [f"Read as logits: mean KL {self.kl:.2g}", *words]
        return ", ".join(words)

    def _of_operations(self) -> Iterator[str]:
        """Yields which operations are aligned, as sentences."""
        (first, second), (mine, theirs) = self.names, self.shares
        yield (
            f"aligned: {percent(mine)} of the operations of {first}, {percent(theirs)} of those "
            f"of {second}"
        )
        yield from self.alone
        yield from (f"argument {row.path} differs" for row in self.rows if row.path)

    def _verdict(self) -> str:
        if self.agrees:
            return "They agree up to float32 rounding."
        if self.by_formula:
            where = " They diverge here:" if self.partings else ""
            of = " of different arguments" * any(row.path for row in self.rows)
            return f"They compute different things{of}; rounding is not the cause.{where}"
        best = self.partings[0].left if self.partings else None
        if best is None:
            return "Rounding is the cause, in operations without a source line or a float32 form."
        cause = "Rounding in many lines is" if best > 1 - CAUSE else "Rounding is"
        return (
            f"{cause} the cause. Share of the difference left if a line returns {self.reference}:"
        )


def _cells(row: AlignedRow) -> tuple[str, ...]:
    errors = (row.added, row.error, row.inherited)
    here, there = where(row.source, row.library), where(row.other_source, row.other_library)
    place = [
        f"{here} | {there}" if there != here else here or row.path,
        "backward" * row.backward,
        row.scope,
        turns_of(row.iteration),
    ]
    return (
        *("noise" if row.noise else percent(error) for error in errors),
        *(row.primitive, row.dtypes, row.other_dtypes),
        "  ".join(filter(None, place)),
    )


def agreement(
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    meaning: str,
    labels: Any,
    wide: Any,
    args: Any,
    kwargs: Any,
) -> Agreement:
    """Compares two functions for `compare`."""
    first, second = runs = tuple(_Run(fun, args, kwargs, wide) for fun in functions)
    names = _names(functions)
    _pair(runs, names)
    leaves = [_Leaf.of(runs, name, meaning, labels) for name in first.floats]
    told = next((leaf for leaf in leaves if leaf.meaning in ("logits", "log_probs")), None)
    worst = max(leaves, key=lambda leaf: (not leaf.agrees, leaf.by_formula, leaf.own.mean))
    shown = told if told and (worst.agrees or not told.agrees) else worst
    partings: list[Parting] = []
    if shown.by_formula:
        partings = _of_formulas(first, second, shown.name)
    elif not shown.agrees:
        partings = _of_rounding(runs, shown)
    own = shown.own
    return Agreement(
        names=names,
        meaning=shown.meaning.replace("rows", "values"),
        difference=own.mean,
        worst=own.worst,
        worst_at=own.worst_at,
        **own.figures,
        in_float32=shown.wide.mean,
        agrees=all(leaf.agrees for leaf in leaves),
        by_formula=any(leaf.by_formula for leaf in leaves),
        partings=tuple(partings),
        differences=own.entries,
        result=shown.name,
        results={leaf.name: leaf.error for leaf in leaves} | _of_others(first, second),
        reference=wide.name,
        **align(first.watcher, second.watcher, names),
    )


# ---- the difference of the results --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Difference:
    mean: float
    worst: float
    worst_at: tuple[int, ...]
    entries: np.ndarray
    error: float  # relative, of the whole array
    figures: dict[str, Any]  # of probabilities: fields of an `Agreement`


@np.errstate(all="ignore")
def _parting_of(
    meaning: str, first: Any, second: Any, terms: float = 0.0, labels: Any = None
) -> _Difference:
    """Returns the difference of two results, in float64.

    "rows" are values that may be logits too, along the last axis.
    ``terms`` is the size of the terms of values that are only rounding error.
    """
    a, b = (np.asarray(x, np.float64) for x in (first, second))
    rows: Any = None
    figures: dict[str, Any] = {"kl": None}
    if meaning == "logits":
        a, b = (x - _log_sum(x) for x in (a, b))
    ratio = gap(a, b)
    sizes = np.abs(ratio)
    finite = b[np.isfinite(b)]
    size = max(np.sqrt(np.mean(finite**2)) if np.any(finite) else 1.0, terms)
    error = float(np.sqrt(np.mean(ratio**2)) / size)
    if meaning == "log_probs":
        rows = np.exp(ratio) * ratio - np.expm1(ratio)
        figures["ratio"] = float(np.exp(np.max(sizes)))
    elif meaning in ("logits", "rows") and a.ndim and a.shape[-1] > 1:
        p, q = (x - _log_sum(x) for x in (a, b))
        rows = np.sum(np.where(np.exp(p) == 0, 0, np.exp(p) * gap(p, q)), -1)
        figures["other_argmax"] = float(np.mean(np.argmax(p, -1) != np.argmax(q, -1)))
        if labels is not None:
            taken = np.take_along_axis(ratio, np.asarray(labels)[..., None], -1)
            figures["ratio"] = float(np.exp(np.max(np.abs(taken))))
    if rows is not None:
        figures |= {"kl": float(np.mean(rows)), "kl_worst": float(np.max(rows))}
    if meaning in ("values", "rows"):
        sizes = sizes / size
    at = np.unravel_index(np.argmax(np.nan_to_num(sizes, nan=np.inf)), sizes.shape)
    weights = np.exp(b) if meaning == "logits" else None  # unlikely tokens count less
    mean = float(np.average(np.where(weights == 0, 0, sizes), weights=weights))
    return _Difference(mean, float(sizes[at]), tuple(map(int, at)), ratio, error, figures)


@dataclasses.dataclass(frozen=True)
class _Leaf:
    """A floating result of both programs."""

    name: str
    meaning: str
    own: _Difference
    wide: _Difference
    noise: float  # differences up to this one are float32 rounding
    error: float  # relative, of the whole array

    @classmethod
    def of(cls, runs: Sequence["_Run"], name: str, meaning: str, labels: Any) -> "_Leaf":
        first, second = (run.floats[name] for run in runs)
        alone = len(runs[0].floats) == 1
        meaning, rows = _meaning(meaning, first, second, alone), np.shape(first.array)[:-1]
        if meaning != "logits" or (np.shape(labels) != rows and not alone):
            labels = None
        elif labels is not None and np.shape(labels) != rows:
            raise ValueError(
                f"compare: labels have the shape {np.shape(labels)}, but the logits "
                f"{np.shape(first.array)}: there must be one for each row of logits, of the shape "
                f"{rows}."
            )
        own = _parting_of(meaning, first.array, second.array, 0.0, labels)
        wide, noise, terms = _parting_of(meaning, first.shadow, second.shadow), 0.0, 0.0
        if own.mean > SUSPICIOUS:
            terms = runs[1].terms(name)
        if terms:
            own = _parting_of(meaning, first.array, second.array, terms, labels)
            wide = _parting_of(meaning, first.shadow, second.shadow, terms)
        if 0 < own.mean < NEVER:
            noise = NOISE * runs[1].noise(meaning, name, terms)
        whole = _parting_of("values", first.array, second.array, terms)
        return cls(name, meaning, own, wide, noise, whole.error)

    @property
    def agrees(self) -> bool:
        return self.own.mean <= self.noise

    @property
    def by_formula(self) -> bool:
        least = max(self.noise, LEFT * self.own.mean)
        return not self.agrees and self.wide.mean > least


@np.errstate(all="ignore")
def _log_sum(x: np.ndarray) -> np.ndarray:
    top = np.max(x, -1, keepdims=True)  # taken out, so that no exponential overflows
    return top + np.log(np.sum(np.exp(x - top), -1, keepdims=True))


def _meaning(meaning: str, first: Shadowed, second: Shadowed, alone: bool) -> str:
    """Returns the meaning of results. Of several, those have it that may have it."""
    arrays = [np.asarray(x.shadow, np.float64) for x in (first, second)]
    shape, below = first.array.shape, all(np.all(x <= 0) for x in arrays)
    may = {"logits": len(shape) > 1 and shape[-1] > 1, "log_probs": below and bool(shape)}
    if meaning != "auto":
        return meaning if alone or may.get(meaning) else "values"
    # Rows whose exponentials sum to 1, up to rounding, are the probabilities of all tokens.
    if may["logits"] and all(np.all(np.abs(_log_sum(x)) < 1e-3) for x in arrays):
        return "logits"  # log-probabilities of all tokens are logits too
    if alone and may["log_probs"]:
        return "log_probs"
    return "rows" if alone and may["logits"] else "values"


def _names(functions: Sequence[Callable[..., Any]]) -> tuple[str, str]:
    bare = [f.func if isinstance(f, functools.partial) else f for f in functions]
    names = [getattr(inspect.unwrap(f), "__name__", "<") for f in bare]
    unfit = [name.startswith("<") or len(name) > LONGEST for name in names]  # lambdas
    first, second = names
    same = first == second
    return "first" if same or unfit[0] else first, "second" if same or unfit[1] else second


# ---- the runs -----------------------------------------------------------------------------------


def _is_traced(leaf: Any) -> bool:
    """Returns whether a program gets a leaf; a NumPy scalar may be a size, so it is a constant."""
    return isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


class _Run:
    """A function as a program that was run once, with its shadow."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any, wide: Any):
        self.wide = wide
        self.fun, args, kwargs = _bound(fun, args, kwargs)
        call = Flat.of((args, kwargs), _is_traced)
        arrays = check_concrete("compare", call.arrays)
        traced = trace(call.on(self.fun), [_jax.aval_of(x) for x in arrays], "compare")
        # What a function closes over is an argument like others: its last bits may change too.
        self.jaxpr, constants = _jax.hoisted(traced.jaxpr)
        self.arrays = [*check_concrete("compare", constants), *arrays]
        self.watcher = Recorder(wide)
        names = call.names(parameters_of(self.fun, args))
        inputs = [*map(self.watcher.constant, self.arrays[: len(constants)])]
        inputs += map(self.watcher.argument, names, arrays)
        self.outs: list[Shadowed] = interpret(self.jaxpr, inputs, self.watcher)
        self.names = [path_of(keys) or "result" for keys in traced.out.keys]
        returned = list(zip(self.names, self.outs, strict=True))
        self.floats = {name: x for name, x in returned if is_float(x.array) and np.size(x.array)}
        self.others = {n: x.array for n, x in returned if not is_float(x.array)}

    def described(self) -> str:
        """Returns what the function returns, as text."""
        named = zip(self.names, self.outs, strict=True)
        each = (f"{n}: {x.array.dtype}{list(x.array.shape)}" for n, x in named)
        return ", ".join(each) or "nothing"

    @functools.cache  # noqa: B019 - of a run that lives as long as its report is made
    def _changed(self, last: Any) -> dict[str, Any]:
        """Returns the results in the reference when the arguments change in their last bit."""
        outs = shadows.results_of_perturbed(self.jaxpr, self.arrays, wide=self.wide, last=last)
        return {} if outs is None else dict(zip(self.names, outs, strict=True))

    def noise(self, meaning: str, name: str, terms: float) -> float:
        """Returns the change of a result when the arguments change in the last bit of float32."""
        changed, wanted = self._changed(FLOAT32), self.floats[name].shadow
        return _parting_of(meaning, changed[name], wanted, terms).mean if changed else 0.0

    def terms(self, name: str) -> float:
        """Returns the size of the terms of a result that is only rounding error, and else 0."""
        changed, wanted = self._changed(self.wide), self.floats[name].shadow
        if not changed:
            return 0.0
        with handling(self.wide):
            size = shadows.size_of_terms(wanted, changed[name], self.wide)
        return size / float(np.sqrt(np.size(wanted)))

    def without(self, line: tuple[str, str], name: str) -> Any:
        """Returns a result of the program if the results of one line are those of the reference."""
        heals = lambda eqn, place: self.watcher.lines(eqn, place) == line  # noqa: E731
        outs = shadows.run_healed(self.jaxpr, self.arrays, heals, self.wide)
        return dict(zip(self.names, outs, strict=True))[name]


def _bound(fun: Any, args: Any, kwargs: Any) -> tuple[Callable[..., Any], Any, Any]:
    """Returns a pure function and its arguments: those of a partial, and modules, are some."""
    if isinstance(fun, functools.partial):
        fun, args, kwargs = fun.func, (*fun.args, *args), {**fun.keywords, **kwargs}
    owner = getattr(fun, "__self__", fun)
    if has_modules(owner):
        fun, args = getattr(fun, "__func__", type(fun).__call__), (owner, *args)
    if not has_modules((args, kwargs)):
        return fun, args, kwargs
    from flax import nnx

    graph, state = nnx.split((args, kwargs))

    def pure(state: Any) -> Any:  # changes copies of the modules
        args, kwargs = nnx.merge(graph, state)
        return fun(*args, **kwargs)

    return functools.update_wrapper(pure, fun), (state,), {}


def _pair(runs: tuple["_Run", ...], names: tuple[str, str]) -> None:
    """Gives the floating results of the second program the names of the first. Raises if they
    cannot be compared."""
    first, second = runs
    for run in runs:
        if not run.floats:
            raise ValueError(
                f"compare: {brief(run.fun)} must return a floating array, such as the "
                f"log-probabilities of tokens, but returned {run.described()}."
            )
    if first.floats.keys() != second.floats.keys():
        if len(first.floats) != len(second.floats):
            raise ValueError(
                f"compare: {names[0]} returned {first.described()}, but {names[1]} "
                f"{second.described()}. Wrap both in functions that return the arrays to compare, "
                "in the same order."
            )
        own = dict(zip(second.floats, first.floats, strict=True))
        second.names = [own.get(name, name) for name in second.names]
        second.floats = {own[name]: x for name, x in second.floats.items()}
    for name, mine in first.floats.items():
        shapes = [np.shape(x.array) for x in (mine, second.floats[name])]
        if shapes[0] != shapes[1]:
            of = f" in {name}" * (len(first.floats) > 1)
            raise ValueError(
                f"compare: {names[0]} returned the shape {shapes[0]}, but {names[1]} the shape "
                f"{shapes[1]}{of}. Both must return arrays of the same shape, for the same tokens "
                "in the same order."
            )


def _of_others(first: _Run, second: _Run) -> dict[str, float]:
    """Returns the share of entries that differ of each result without floats; complex ones have a
    relative error."""
    errors = {}
    for name, mine in first.others.items():
        theirs = second.others.get(name)
        if theirs is None or not np.size(mine) or np.shape(mine) != np.shape(theirs):
            continue
        if jnp.issubdtype(mine.dtype, jnp.complexfloating):
            apart, size = (np.linalg.norm(np.asarray(x)) for x in (mine - theirs, theirs))
            errors[name] = float(apart / size) if apart else 0.0
        elif jnp.issubdtype(mine.dtype, np.number) or mine.dtype == bool:
            errors[name] = float(jnp.mean(mine != theirs))
    return errors


# ---- causes -------------------------------------------------------------------------------------


def _lines_that_round(
    runs: Sequence[_Run],
) -> dict[tuple[str, str], tuple[list[CompareRow], list[CompareRow]]]:
    """Returns the rows of both runs whose results are narrower than the reference, by lines."""
    narrow = tuple(map(short_name, WIDER[runs[0].wide]))
    lines: dict[tuple[str, str], tuple[list[CompareRow], list[CompareRow]]] = {}
    for i, run in enumerate(runs):
        for row in run.watcher.rows.values():
            if row.source and row.new and row.dtypes.endswith(narrow):
                lines.setdefault((row.source, row.library), ([], []))[i].append(row)
    return lines


def _of_rounding(runs: Sequence[_Run], leaf: _Leaf) -> list[Parting]:
    """Returns lines, sorted by the difference that remains if their results are float32."""
    lines = _lines_that_round(runs)
    added = {line: sum(row.blame for rows in both for row in rows) for line, both in lines.items()}
    own = [run.floats[leaf.name].array for run in runs]
    partings = []
    for line in sorted(lines, key=lambda line: -added[line])[:TRIED]:
        outs = [
            run.without(line, leaf.name) if rows else out
            for run, rows, out in zip(runs, lines[line], own, strict=True)
        ]
        left = _parting_of(leaf.meaning, *outs).mean / leaf.own.mean
        worst = [max(rows, key=lambda row: row.blame, default=None) for rows in lines[line]]
        here = max(filter(None, worst), key=lambda row: row.blame)
        dtypes = [row.dtypes if row else "" for row in worst]
        partings.append(Parting(*line, here.primitive, here.scope, (dtypes[0], dtypes[1]), left))
    return sorted(partings, key=lambda parting: parting.left or 0.0)


def _of_formulas(first: _Run, second: _Run, name: str) -> list[Parting]:
    """Returns the first lines of each program whose results the other program does not have."""
    pools = [_pools(run) for run in (first, second)]
    scale = float(jnp.finfo(first.wide).eps) / float(jnp.finfo(FLOAT32).eps)
    for tolerance in TOLERANCES:
        sides = zip((first, second), reversed(pools), strict=True)
        lost = [_unmatched(run, name, others, tolerance * scale) for run, others in sides]
        if any(lost):
            return [*_roots(first, lost[0], 0), *_roots(second, lost[1], 1)]
    return []


def _roots(run: _Run, lost: set[int], side: int) -> Iterator[Parting]:
    """Yields the lines of the unmatched steps whose operands are all matched."""
    roots: dict[tuple[str, str], Node] = {}
    for number in sorted(lost):
        node = run.watcher.nodes[number]
        if not {*_made(run, node.ins)} & lost:
            roots.setdefault(node.line, node)
    # Steps without a line, which the user cannot look up, count only if no step has one.
    lined = {line: node for line, node in roots.items() if line[0]} or roots
    for line, node in [*lined.items()][:ROOTS]:
        dtypes = signature_of(node.eqn.invars, node.eqn.outvars)
        scope = "/".join(shown(node.place.scopes))
        sides = ("", dtypes) if side else (dtypes, "")
        yield Parting(*line, node.eqn.primitive.name, scope, sides)


def _made(run: _Run, ahead: Iterable[int]) -> Iterator[int]:
    """Yields the results of operations that values are, or are slices and stacks of."""
    left, seen = [*ahead], set[int]()
    while left:
        number = left.pop()
        if number in seen:
            continue
        seen.add(number)
        node = run.watcher.nodes[number]
        if node.eqn is None:
            left += node.ins
        elif is_float(node.array):
            yield number


def _pools(run: _Run) -> list[Pool]:
    """Returns the values of a program: arguments, loop iterations, and all iterations joined."""
    turns: dict[Any, list[np.ndarray]] = {}
    alone = []
    for node in run.watcher.nodes:
        if node.eqn is None or not is_float(node.array):
            continue
        key = id(node.eqn), node.place.scopes, len(node.place.loops), node.wanted.shape
        turns.setdefault(key, []).append(node.wanted)
        # One program may have in one array what the other computes iteration by iteration.
        if node.place.loops:
            alone.append(node.pool)
    arguments = [[np.asarray(x)] for x in run.arrays if is_float(x)]
    return [*alone, *map(pool_of, [*arguments, *turns.values()])]


def _unmatched(run: _Run, name: str, others: Sequence[Pool], tolerance: float) -> set[int]:
    """Returns the unmatched steps that reach a result through unmatched steps only."""
    lost: set[int] = set()
    ahead, seen = [*_made(run, [run.floats[name].node])], set[int]()
    while ahead:
        number = ahead.pop()
        if number not in seen:
            seen.add(number)
            node = run.watcher.nodes[number]
            if not any(alike(node.pool, other, tolerance) for other in others):
                lost.add(number)
                ahead += _made(run, node.ins)
    return lost
