"""Where two programs that should agree part: training and rollout, a port, two versions.

Both run one operation after the other, each with its shadow in float32. Where the shadows agree,
rounding parts the two: lines of code are given float32 results in turn, and what a line is to blame
for is what the difference loses by that. Where they do not, the formulas differ: values are known
again by their entries (`likeness`), and the programs part at the first values without a likeness
whose operands all have one.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src import _jax
from mpjax._src.dtypes import HALVES, short_name
from mpjax._src.errors import brief
from mpjax._src.instruments.healed import run_healed
from mpjax._src.instruments.interpret import Place, Wide, interpret, shown, widen
from mpjax._src.instruments.likeness import Pool, alike, pool_of
from mpjax._src.instruments.noise import moved
from mpjax._src.instruments.nonfinite import check_concrete
from mpjax._src.instruments.shadows import Comparer, CompareRow, Shadowed, is_float
from mpjax._src.patterns import path_of
from mpjax._src.reports import Report, table, where, wrapped

# What results mean, and what is said of them.
MEANINGS = ("log_probs", "logits", "values")

# Lines that are tried; those that add the most error come first.
TRIED = 12

# Rounding in float32: this many times what moving the arguments by a last bit does to the results;
# a larger difference than the second number is never that.
NOISE, NEVER = 16.0, 1e-3

# Above this share of the difference, what float32 leaves of it is no rounding.
LEFT = 0.5

# Rows that are printed.
SHOWN = 6

# A longer name of a function is not the title of a column.
LONGEST = 16

# How many lines of each program are named where formulas differ.
ROOTS = 3

# What float32 runs of one formula may differ by, relative to the usual size of entries: the largest
# at which the results are not the same.
TOLERANCES = (2e-5, 4e-6, 8e-7, 1.6e-7)

# A line that takes less of the difference than this is not its cause.
CAUSE = 0.25

HALF = tuple(short_name(dtype) for dtype in HALVES)


@dataclasses.dataclass(frozen=True)
class Parting:
    """An operation at which two programs part.

    Attributes:
        source: "file:line" of the user's code.
        library: "file:line" of the library that it calls there, or "".
        primitive: The operation of that line that adds the most error, or differs.
        scope: The named scopes around it, joined with "/".
        dtypes: Its operands' and its result's, in the first program and the second, such as
            ("f32->f32", "bf16->bf16"); "" in a program that has no such line.
        left: What the difference comes to, as a share of what it is, where the results of this line
            are kept in float32; None where the formulas differ.
    """

    source: str
    library: str
    primitive: str
    scope: str
    dtypes: tuple[str, str]
    left: float | None = None


@dataclasses.dataclass(frozen=True)
class Agreement(Report):
    """Where two programs part. ``print`` it, or read `partings`.

    Attributes:
        names: Of the two programs.
        meaning: What the results are: "log_probs", "logits" or "values".
        difference: The mean magnitude of the difference of the results: of the log-ratio of a token
            where they are log-probabilities; else relative to the results' size.
        worst: The largest magnitude of it.
        worst_at: The index of that in the results.
        kl: The mean over tokens of the KL divergence of the first program from the second, in nats:
            exact for logits; of log-probabilities of tokens that the second program sampled, the
            estimate ``exp(r) - 1 - r`` of the log-ratio r (Schulman, 2020). None for values.
        in_float32: What ``difference`` is where both programs compute in float32.
        agrees: Whether the difference is float32's own rounding.
        by_formula: Whether they part in float32 too.
        partings: The cause first. Of rounding: lines by what is left without theirs. Of formulas:
            the first operations without a likeness, of both programs.
        differences: The first program's results less the second's, float64, of their shape: the
            log-ratio of each token, where they are log-probabilities.
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

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data, ready for JSON."""
        return dataclasses.asdict(self) | {"differences": self.differences.tolist()}

    def titles(self) -> tuple[str, ...]:
        """Returns the titles of the columns of `cells`."""
        return "left", "operation", *self.names, "where"

    def cells(self) -> list[tuple[str, ...]]:
        """Returns the partings as text: what is left, the operation, its dtypes in both, where."""
        return [
            (
                "" if p.left is None else f"{p.left:.0%}",
                p.primitive,
                *p.dtypes,
                "  ".join(filter(None, (where(p.source, p.library), p.scope))),
            )
            for p in self.partings
        ]

    def __str__(self) -> str:
        first, second = self.names
        at = f", at {list(self.worst_at)}" if self.worst_at else ""
        what = "relative difference" if self.meaning == "values" else "|log ratio| per token"
        kl = "" if self.kl is None else f"; KL {self.kl:.2g}"
        lines = [
            f"{first} and {second}: {what} {self.difference:.2g} (at most {self.worst:.2g}{at}){kl}"
        ]
        lines.append(f"both in float32: {self.in_float32:.2g}. {self._verdict()}")
        titles = self.titles()
        rows = ["", *table(titles, self.cells()[:SHOWN], titles[1:])] if self.partings else []
        return "\n".join([*map(wrapped, lines), *rows])

    def _verdict(self) -> str:
        if self.agrees:
            return "They agree, up to float32's own rounding."
        if self.by_formula:
            where = " It begins here:" if self.partings else ""
            return f"They compute different things; rounding is not what parts them.{where}"
        best = self.partings[0].left if self.partings else None
        if best is None:
            return "Rounding parts them, in operations that have no line or no float32 form."
        cause = "Many lines part them, by rounding" if best > 1 - CAUSE else "Rounding parts them"
        return f"{cause}. What is left of it where a line gives float32:"


def agreement(
    functions: tuple[Callable[..., Any], Callable[..., Any]], meaning: str, args: Any, kwargs: Any
) -> Agreement:
    """Compares two functions, as `compare` does."""
    runs = [_Run(fun, args, kwargs) for fun in functions]
    names = _names(functions)
    first, second = (run.results() for run in runs)
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


# ---- what the results differ by -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Difference:
    mean: float
    worst: float
    worst_at: tuple[int, ...]
    kl: float | None
    entries: np.ndarray


def _parting_of(meaning: str, first: Any, second: Any) -> _Difference:
    """Returns what results differ by, in float64."""
    a, b = (np.asarray(x, np.float64) for x in (first, second))
    kl = None
    if meaning == "logits":
        a, b = (x - _log_sum(x) for x in (a, b))
        kl = float(np.mean(np.sum(np.exp(b) * np.where(a == b, 0, b - a), -1)))
    ratio = np.where(a == b, 0, a - b)  # of infinities too
    sizes = np.abs(ratio)
    if meaning == "log_probs":
        kl = float(np.mean(np.expm1(ratio) - ratio))
    if meaning == "values":
        finite = b[np.isfinite(b)]
        sizes = sizes / (np.sqrt(np.mean(finite**2)) if np.any(finite) else 1.0)
    at = np.unravel_index(np.argmax(np.nan_to_num(sizes, nan=np.inf)), sizes.shape)
    weights = np.exp(b) if meaning == "logits" else None  # unlikely tokens are not met
    mean = float(np.average(np.where(weights == 0, 0, sizes), weights=weights))
    return _Difference(mean, float(sizes[at]), tuple(map(int, at)), kl, ratio)


def _log_sum(x: np.ndarray) -> np.ndarray:
    top = np.max(x, -1, keepdims=True)
    return top + np.log(np.sum(np.exp(x - top), -1, keepdims=True))


def _checked(meaning: str, names: tuple[str, str], first: Shadowed, second: Shadowed) -> str:
    """Returns what results mean; raises where they cannot be compared."""
    shapes = [np.shape(x.array) for x in (first, second)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"compare: {names[0]} returned the shape {shapes[0]}, and {names[1]} {shapes[1]}. Both "
            "have to return the same: for the same tokens, in the same order."
        )
    if meaning != "auto":
        return meaning
    arrays = [np.asarray(x.shadow, np.float64) for x in (first, second)]
    if all(x.ndim > 1 and x.shape[-1] > 1 and np.all(np.abs(_log_sum(x)) < 1e-3) for x in arrays):
        return "logits"  # log-probabilities of all tokens are logits, too
    return "log_probs" if all(np.all(x <= 0) for x in arrays) else "values"


def _names(functions: Sequence[Callable[..., Any]]) -> tuple[str, str]:
    names = [getattr(inspect.unwrap(f), "__name__", "<") for f in functions]
    unfit = [name.startswith("<") or len(name) > LONGEST for name in names]  # lambdas
    places = ("first", "second")
    first, second = (
        place if is_unfit or names[0] == names[1] else name
        for name, place, is_unfit in zip(names, places, unfit, strict=True)
    )
    return first, second


# ---- the runs -----------------------------------------------------------------------------------


class _Run:
    """A function as a program that was run once, beside float32."""

    def __init__(self, fun: Callable[..., Any], args: Any, kwargs: Any):
        leaves, tree = jax.tree_util.tree_flatten((args, kwargs))
        here = [isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct) for x in leaves]
        arrays = [x for x, is_array in zip(leaves, here, strict=True) if is_array]
        self.arrays = check_concrete("compare", arrays)
        self.paths: list[str] = []

        def flat(*arrays):
            given = iter(arrays)
            filled = [next(given) if h else x for x, h in zip(leaves, here, strict=True)]
            args, kwargs = jax.tree_util.tree_unflatten(tree, filled)
            out = fun(*args, **kwargs)
            pairs = jax.tree_util.tree_leaves_with_path(out)
            self.paths = [path_of(keys) or "result" for keys, _ in pairs]
            return [x for _, x in pairs]

        avals = [_jax.aval_of(x) for x in self.arrays]
        self.jaxpr = _jax.trace(flat, avals, "compare")
        self.fun = fun
        self.watcher = _Watcher()
        outs = interpret(self.jaxpr, [self.watcher.constant(x) for x in self.arrays], self.watcher)
        self.outs: list[_Seen] = outs

    @property
    def which(self) -> int:
        """The index of the one result that is compared."""
        floats = [i for i, out in enumerate(self.outs) if is_float(out.value.array)]
        if len(floats) != 1:
            arrays = [f"{aval.dtype}{list(aval.shape)}" for aval in self.jaxpr.out_avals]
            found = ", ".join(map(": ".join, zip(self.paths, arrays, strict=True))) or "nothing"
            raise ValueError(
                f"compare: {brief(self.fun)} has to return one floating array, such as the "
                f"log-probabilities of tokens, and returned {found}. Wrap it in a function that "
                "returns what should agree."
            )
        return floats[0]

    def results(self) -> Shadowed:
        """Returns the result that is compared, beside float32."""
        return self.outs[self.which].value

    def noise(self, meaning: str) -> float:
        """Returns what the float32 result differs by where the arguments move by a last bit."""
        given = moved([widen(x) for x in self.arrays])
        try:
            again = interpret(self.jaxpr, list(given), Wide())[self.which]
        except NotImplementedError:  # something in it has no float32 form
            return 0.0
        return _parting_of(meaning, again, self.results().shadow).mean

    def without(self, line: tuple[str, str]) -> Any:
        """Returns the result with those of a line in float32."""
        heals = lambda eqn, place: place.lines(eqn) == line  # noqa: E731
        return run_healed(self.jaxpr, self.arrays, heals)[self.which]


@dataclasses.dataclass(frozen=True, slots=True)
class _Seen:
    """A value beside float32, and the numbers of the `_Step` that it comes from."""

    value: Shadowed
    makers: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class _Step:
    """An operation that gave a float, in one turn of the loops around it."""

    eqn: Any
    place: Place
    given: frozenset[int]  # the steps that its operands come from
    shadow: np.ndarray

    @functools.cached_property
    def pool(self) -> Pool:
        """Its entries, which are looked for at every tolerance."""
        return pool_of([self.shadow])


class _Watcher:
    """A `Comparer` that keeps what each operation gave in float32, and what it was given."""

    def __init__(self) -> None:
        self.comparer = Comparer(lambda eqn, place: place.lines(eqn))
        self.steps: list[_Step] = []

    def operation(self, eqn: Any, ins: list[_Seen], place: Place) -> list[_Seen]:
        values = self.comparer.operation(eqn, [v.value for v in ins], place)
        given = frozenset().union(*(v.makers for v in ins))
        return [self._step(value, _Step(eqn, place, given, value.shadow)) for value in values]

    def _step(self, value: Shadowed, step: _Step) -> _Seen:
        if not is_float(value.shadow):
            return _Seen(value)
        self.steps.append(dataclasses.replace(step, shadow=np.asarray(value.shadow)))
        return _Seen(value, frozenset({len(self.steps) - 1}))

    def constant(self, array: Any) -> _Seen:
        return _Seen(self.comparer.constant(array))

    def decide(self, seen: _Seen, eqn: Any, place: Place) -> int:
        return self.comparer.decide(seen.value, eqn, place)

    def slice(self, seen: _Seen, index: int) -> _Seen:
        return _Seen(self.comparer.slice(seen.value, index), seen.makers)

    def stack(self, seen: Sequence[_Seen]) -> _Seen:
        value = self.comparer.stack([s.value for s in seen])
        return _Seen(value, frozenset().union(*(s.makers for s in seen)))


# ---- causes -------------------------------------------------------------------------------------


def _of_rounding(runs: Sequence[_Run], meaning: str, difference: float) -> list[Parting]:
    """Returns lines by what is left of the difference where their results are float32."""
    lines: dict[tuple[str, str], tuple[list[CompareRow], list[CompareRow]]] = {}
    for i, run in enumerate(runs):
        for row in run.watcher.comparer.rows.values():
            if row.source and row.new and row.dtypes.endswith(HALF):  # else it rounds nothing
                lines.setdefault((row.source, row.library), ([], []))[i].append(row)
    added = {line: sum(row.blame for rows in both for row in rows) for line, both in lines.items()}
    own = [run.results().array for run in runs]
    found = []
    for line in sorted(lines, key=lambda line: -added[line])[:TRIED]:
        outs = [
            run.without(line) if rows else out
            for run, rows, out in zip(runs, lines[line], own, strict=True)
        ]
        left = _parting_of(meaning, *outs).mean / difference
        worst = [max(rows, key=lambda row: row.blame, default=None) for rows in lines[line]]
        here = max(filter(None, worst), key=lambda row: row.blame)
        dtypes = [row.dtypes if row else "" for row in worst]
        found.append(Parting(*line, here.primitive, here.scope, (dtypes[0], dtypes[1]), left))
    return sorted(found, key=lambda parting: parting.left or 0.0)


def _of_formulas(first: _Run, second: _Run) -> list[Parting]:
    """Returns the first lines of each program that give what the other never has."""
    pools = [_pools(run) for run in (first, second)]
    for tolerance in TOLERANCES:
        sides = zip((first, second), reversed(pools), strict=True)
        lost = [_unmatched(run, others, tolerance) for run, others in sides]
        if any(lost):
            return [*_roots(first, lost[0], 0), *_roots(second, lost[1], 1)]
    return []


def _roots(run: _Run, lost: set[int], side: int) -> Iterator[Parting]:
    """Yields the first lines of steps without a likeness whose operands have one."""
    roots: dict[tuple[str, str], _Step] = {}
    for step in (run.watcher.steps[number] for number in sorted(lost)):
        if not step.given & lost:
            roots.setdefault(step.place.lines(step.eqn), step)
    lined = {line: step for line, step in roots.items() if line[0]} or roots
    for line, step in [*lined.items()][:ROOTS]:
        dtypes = f"{_names_of(step.eqn.invars)}->{_names_of(step.eqn.outvars)}"
        scope = "/".join(shown(step.place.scopes))
        sides = ("", dtypes) if side else (dtypes, "")
        yield Parting(*line, step.eqn.primitive.name, scope, sides)


def _pools(run: _Run) -> list[Pool]:
    """Returns the values of a program: arguments, each turn of loops, and all turns together."""
    turns: dict[Any, list[np.ndarray]] = {}
    for step in run.watcher.steps:
        key = id(step.eqn), step.place.scopes, len(step.place.loops), step.shadow.shape
        turns.setdefault(key, []).append(step.shadow)
    arguments = [[np.asarray(x)] for x in run.arrays if is_float(x)]
    alone = [step.pool for step in run.watcher.steps if step.place.loops]
    return [*alone, *map(pool_of, [*arguments, *turns.values()])]


def _unmatched(run: _Run, others: Sequence[Pool], tolerance: float) -> set[int]:
    """Returns the steps without a likeness from which such ones alone lead to the result."""
    lost: set[int] = set()
    ahead, seen = [*run.outs[run.which].makers], set[int]()
    while ahead:
        number = ahead.pop()
        if number not in seen:
            seen.add(number)
            step = run.watcher.steps[number]
            if not any(alike(step.pool, other, tolerance) for other in others):
                lost.add(number)
                ahead += step.given
    return lost


def _names_of(atoms: Sequence[Any]) -> str:
    dtypes = [getattr(atom.aval, "dtype", None) for atom in atoms]
    return ",".join(dict.fromkeys(map(short_name, dtypes)))
