"""`tune`: finds the fewest float32 operations with which a program meets an error tolerance.

`compare` estimates which operations matter. Which of them must be float32 is then measured on the
compiled program, one set of places at a time.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.dtypes import FLOAT32
from mpjax._src.core.base.errors import (
    brief,
    check_flag,
    finite_number,
    misplaced,
    whole_number,
)
from mpjax._src.core.base.progress import advance, progress_bar
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.training.loss_scale import LossScale, resolve_loss_scale
from mpjax._src.tools.document.model import WORST, Color, Document, Drawing, Operation, Table
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments.compare import compare_program
from mpjax._src.tools.instruments.places import Place, Places
from mpjax._src.tools.instruments.programs import Program, make_program, training_scale
from mpjax._src.tools.instruments.search import Search
from mpjax._src.tools.instruments.shadows import SUSPICIOUS, perturbed, size_of_terms

# The error of a gradient is relative to at least this share of the norm of all gradients together.
SMALL = 1e-3

# Longer error vectors are projected to this many entries, which about keeps their inner products
# (random projections; Johnson and Lindenstrauss, 1984).
ENTRIES = 64

LEAST_RUNS = 2  # the float32 reference, and the policy without overrides

COLUMNS = ("operations", "FLOPs", "error before", "after", "left out", "in float32")

ALONE = WORST(
    "error without it",
    "The largest error of a result if only this part is left in 16 bits.",
)
WORK = Color("work", "The share of the matmul FLOPs that a part moves to float32.", unit="share")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class TuneStep:
    """An override of the tuned policy, which moves one part of the program to float32.

    Attributes:
        pattern: The pattern of the override.
        operations: The number of operations of the program that it moves.
        flops: The share of the program's matmul FLOPs that it moves, from 0 to 1.
        error_before: The largest relative error of a result with the previous steps only; None if
            the search did not measure it.
        error: The largest relative error with the previous steps and this one; None if the search
            did not measure it.
        alone: The largest relative error if only this override is left out of the tuned policy;
            None if no run was left to measure it.
    """

    pattern: str
    operations: int
    flops: float
    error_before: float | None
    error: float | None
    alone: float | None


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Tuning(Report):
    """The result of `tune`. ``print`` it, and train with ``policy``.

    Attributes:
        policy: The tuned policy: the given one with overrides.
        met: Whether it meets the tolerance.
        error: The largest relative error of a result under it.
        tolerance: The tolerance.
        results: The relative error of each result under it, by name.
        steps: The effect of each override, the most valuable first.
        runs: The number of times a program was run, in float32 and in 16 bits.
        least: Whether no single part can be left out. This follows from the measurements, assuming
            that less float32 never reduces the error.
        cut_short: Whether the search stopped at ``max_runs``. Then this is the best set that was
            tried.
        places: The number of parts of the program in float32, counted in the smallest parts that
            patterns can name. A step may contain more than one.
        needed: A lower bound of ``places``. It follows from the sets that were tried and failed,
            assuming that less float32 never reduces the error.
    """

    policy: Policy
    met: bool
    error: float
    tolerance: float
    results: dict[str, float]
    steps: tuple[TuneStep, ...]
    runs: int
    least: bool
    cut_short: bool = False
    places: int = 0
    needed: int = 0

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "policy": str(self.policy)}

    def document(self) -> Document:
        verdict = "meets" if self.met else "does not meet"
        lines = []
        if self.cut_short:
            lines.append(
                "The search stopped at max_runs. This is the best policy that was tried; "
                + (
                    "less float32 may be enough."
                    if self.met
                    else "more float32, or other parts, may meet the tolerance."
                )
            )
        elif self.met and self.places:
            lines.append(
                f"parts of the program in float32: {self.places}; every smaller set that was tried "
                "exceeds the tolerance"
            )
        results = sorted(self.results.items(), key=lambda item: -item[1])
        named = tuple((f"{error:.3g}", name) for name, error in results)
        return Document(
            "Fewest float32 parts that meet a tolerance",
            f"error {self.error:.3g} {verdict} the tolerance of {self.tolerance:.3g}, after "
            f"{self.runs} runs",
            (*lines, f"policy  {self.policy}"),
            (
                Table("Overrides", COLUMNS, tuple(map(_cells, self.steps)), COLUMNS[-1:]),
                Table("Error of the results", ("error", "result"), named, ("result",), most=5),
            ),
            drawing=lambda: Drawing(
                operations=tuple(map(_place, self.steps)), colors=(ALONE, WORK), things="parts"
            ),
        )


def _cells(step: TuneStep) -> tuple[str, ...]:
    errors = (step.error_before, step.error, step.alone)
    texts = ("-" if error is None else f"{error:.3g}" for error in errors)
    return (str(step.operations), f"{step.flops:.1%}", *texts, step.pattern)


def _place(step: TuneStep) -> Operation:
    scope, _, label = step.pattern.removesuffix("/*").rpartition("/")
    return Operation(
        label=label + "/*" * step.pattern.endswith("/*"),
        scope=scope or "anywhere",
        facts=tuple(zip(COLUMNS, _cells(step), strict=True)),
        colors={"error without it": step.alone, "work": step.flops},
    )


@takes_arguments
def tune(
    fun: Callable[..., Any],
    policy: "PolicyLike",
    tolerance: float,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    max_runs: int = 100,
    *,
    loss_scale: LossScale | str | float | None = "auto",
    progress: bool = True,
) -> Callable[..., Tuning]:
    """Finds the fewest parts to run in float32 so that value and gradients meet a tolerance.

    Args:
        fun: A function, as for `autocast`. If it returns a scalar loss, its gradient counts too.
        policy: The policy to start from, or its name.
        tolerance: The largest relative error allowed, ``norm(got - wanted) / norm(wanted)`` for
            each result and each gradient, where ``wanted`` is that of float32. For a gradient whose
            norm is below 1e-3 of that of all gradients together, ``norm(wanted)`` is replaced by
            that share.
        argnums: The arguments to differentiate; None for the forward pass only.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        max_runs: The largest number of runs of a program: 2 or more, because the float32 reference
            and the given policy take one each. For float16, finding the loss scale takes one or
            more.
        loss_scale: The loss scale, as for `compare`.
        progress: Whether to show a progress bar if stderr is a terminal. It counts runs up to
            ``max_runs``; most searches end earlier.

    Returns:
        A function of the same arguments, which must be concrete arrays. It returns a `Tuning`,
        whose ``policy`` is the given one with the fewest parts in float32 that were found to be
        enough; of sets of equal size, the one with less work. In tests on sums of up to 12 errors,
        as vectors or as squares, it had at most one part more than an exhaustive search. If the
        result is a single number and the tolerance is far below the errors of most parts, only sets
        whose errors happen to cancel meet it, and few runs do not find all of them.
        With these arguments after the tolerance, the report.

    Raises:
        TypeError: If ``fun`` is not a function, or an array is abstract or being traced.
        ValueError: If an argument is invalid, there are no arrays, or nothing to differentiate.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     with jax.named_scope("risky"):
        ...         y = jnp.tanh(x @ w["a"]) * 40
        ...     with jax.named_scope("safe"):
        ...         return jnp.mean(jnp.cos(y @ w["b"]) ** 2)
        >>> w = {"a": jnp.eye(4) * 0.3, "b": jnp.ones((4, 1))}
        >>> x = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
        >>> tuned = mpjax.debug.tune(loss, "mixed_bfloat16", 1e-3)(w, x)
        >>> tuned.met
        True
    """
    check_flag("progress", progress)
    policy = get_policy(policy)
    if (finite_number(tolerance) or 0.0) <= 0:
        raise ValueError(
            f"tolerance={brief(tolerance)} must be a positive number such as 1e-2."
            f"{misplaced(tolerance)}"
        )
    if (whole_number(max_runs) or 0) < LEAST_RUNS:
        raise ValueError(
            f"max_runs={brief(max_runs)} must be an integer >= {LEAST_RUNS}: float32 and "
            "the given policy need one run each."
        )

    resolve_loss_scale(loss_scale, False)

    def report(*args, **kwargs):
        make = functools.partial(
            make_program, "tune", fun, args=args, kwargs=kwargs, argnums=argnums, has_aux=has_aux
        )
        with progress_bar(progress, "tune", RUN, max_runs):
            trial = _Trial(make, policy, max_runs, loss_scale)
            places = trial.places.finest()
            search = Search(
                lambda chosen: trial.vectors([places[i] for i in sorted(chosen)]),
                lambda: _suspicions(trial, places),
                [trial.places.cost(place.ops) for place in places],
                tolerance,
                [[i for i, q in enumerate(places) if q.ops <= p.ops] for p in places],
            )
            try:
                search.run()
                cut_short = False
            except _OutOfRuns:
                cut_short = True
            return trial.report(search, places, cut_short)

    return report


# ---- trials -------------------------------------------------------------------------------------


RUN = "run"  # what progress counts


class _OutOfRuns(Exception):
    """All runs are used up."""


class _Trial:
    """Runs the program with some places in float32, and keeps the results."""

    def __init__(self, make: Callable[..., Program], policy: Policy, max_runs: int, loss_scale):
        self.policy, self.max_runs, self.loss_scale = policy, max_runs, loss_scale
        self.runs = 0
        self._make = functools.partial(make, ran=self._count)
        self.program = self._make(policy=policy)
        self.arrays = self.program.arrays
        self.places = Places(self.program.plan)
        self._scale: float | None = None  # a loss scale at which the gradients are finite
        self._known: dict[frozenset[int], tuple[dict[str, float], list[Any]]] = {}
        # The reference keeps the rest of the policy, such as its storage.
        full = dataclasses.replace(
            policy, overrides=(), half_ops=(), compute_dtype=FLOAT32, output_dtype=FLOAT32
        )
        self._full = self._make(policy=full)
        self.wanted = self._results(self._full, 1.0, self.arrays)
        self._norms = {name: float(norm) for name, norm in _norms(self.wanted).items()}
        longest = max((x.size for x in self.wanted.values()), default=0)
        self._signs = np.random.default_rng(0).choice([-1.0, 1.0], longest).astype(np.float32)
        self._terms: dict[str, float] = {}  # the sizes of canceled terms, by result

    def _count(self) -> None:
        if self.runs >= self.max_runs:
            raise _OutOfRuns
        self.runs += 1
        advance(RUN)

    def _results(self, program: Program, scale: float, arrays) -> dict[str, jax.Array]:
        # An auxiliary result of a loss trains nothing, so the tolerance does not concern it.
        outs = program.compiled(*arrays, jnp.float32(scale))
        return {
            name: x
            for name, x in zip(program.results, outs, strict=True)
            if jnp.issubdtype(x.dtype, jnp.floating)
            and not (name.startswith("aux") and program.follows_gradient)
        }

    def with_places(self, places: Iterable[Place]) -> Policy:
        patterns = dict.fromkeys((p.pattern for p in places), "float32")
        return self.policy.override(patterns) if patterns else self.policy

    def errors(self, places: Sequence[Place]) -> dict[str, float]:
        """Returns the error of each result with these places in float32."""
        return self._measured(places)[0]

    def vectors(self, places: Sequence[Place]) -> list[Any]:
        """Returns the errors as vectors: projections of the errors of all entries."""
        return self._measured(places)[1]

    def worst(self, places: Sequence[Place]) -> float | None:
        """Returns the largest error of a result, or None if that was not measured."""
        measured = self._known.get(_ops(places))
        return measured and max(measured[0].values(), default=0.0)

    def _measured(self, places: Sequence[Place]) -> tuple[dict[str, float], list[Any]]:
        key = _ops(places)
        if key not in self._known:
            program = self._make(policy=self.with_places(places)) if places else self.program
            got = self._results(program, self.scale(program), self.arrays)
            distances = jax.device_get(_distances(got, self.wanted, self._signs))
            errors = self._errors({name: float(d) for name, (d, _) in distances.items()}, program)
            vectors = [_of_length(v, errors[name]) for name, (_, v) in distances.items()]
            self._known[key] = errors, vectors
        return self._known[key]

    def scale(self, program: Program) -> float:
        """Returns the loss scale of all runs, which is fixed once gradients are finite."""
        if self._scale is not None:
            return self._scale
        scale = training_scale(program, self.policy, self.loss_scale)
        # 1 may also mean that no scale was finite with these places; with others one may be.
        if scale != 1 or not self.policy.needs_loss_scaling:
            self._scale = scale
        return scale

    def _errors(self, distances: dict[str, float], program: Program) -> dict[str, float]:
        is_gradient = dict(zip(program.results, program.gradients, strict=True))
        everything = math.hypot(*(norm for name, norm in self._norms.items() if is_gradient[name]))
        norms = {
            name: max(norm, SMALL * everything) if is_gradient[name] else norm
            for name, norm in self._norms.items()
        }
        odd = (n for n, d in distances.items() if norms[n] * SUSPICIOUS < d < math.inf)
        if any(name not in self._terms for name in odd):
            # One more run tells results that are noise in float32 from results that are wrong.
            changed = self._results(self._full, 1.0, perturbed(self.arrays))
            self._terms = {n: size_of_terms(x, changed[n]) for n, x in self.wanted.items()}
        return {
            name: _ratio(distance, max(norms[name], self._terms.get(name, 0.0)))
            for name, distance in distances.items()
        }

    # ---- the report ----

    def report(self, search: Search, places: Sequence[Place], cut_short: bool) -> "Tuning":
        """Returns the best set that was found, and the effect of each of its places."""
        best = search.best
        if best is None or (cut_short and len(best) == len(places)):
            # A search that was cut short does not report all of the program in float32.
            tried = [s for s in search.tried if not cut_short or len(s) < len(places)]
            best = min(tried, key=lambda s: search.tried[s], default=None)
        if best is None:  # no run was left for the given policy
            return Tuning(
                self.policy, False, math.nan, search.tolerance, {}, (), self.runs, False, True
            )
        chosen = [places[i] for i in sorted(best)]
        merged = self._pruned(self.places.merged(_ops(chosen), chosen), search.tolerance)
        chosen = [place for place in chosen if place.ops <= _ops(merged)]
        results = self.errors(chosen)
        worst = max(results.values(), default=0.0)
        return Tuning(
            policy=self.with_places(merged),
            met=worst <= search.tolerance,
            error=worst,
            tolerance=search.tolerance,
            results=results,
            steps=tuple(self._steps(merged)),
            runs=self.runs,
            least=search.least and not cut_short,
            cut_short=cut_short,
            places=len(chosen),
            needed=min(search.needed(), len(chosen)),
        )

    def _pruned(self, merged: Sequence[Place], tolerance: float) -> list[Place]:
        """Returns the places without those that need not be in float32, the costliest first.

        The search leaves out single places; overrides may contain several. And less float32 can
        reduce the error, against the search's assumption, where errors cancel.
        """
        kept = list(merged)
        for place in sorted(merged, key=lambda p: self.places.cost(p.ops), reverse=True):
            alone = self._without(place, kept)
            if alone is not None and alone <= tolerance:
                kept.remove(place)
        return kept

    def _steps(self, merged: Sequence[Place]) -> list["TuneStep"]:
        alone = {place: self._without(place, merged) for place in merged}
        steps: list[TuneStep] = []
        done: list[Place] = []
        for place in sorted(merged, key=lambda p: -(alone[p] or 0.0)):
            before = self.worst(done)
            done.append(place)
            flops, after = self.places.flops(place.ops), self.worst(done)
            steps.append(
                TuneStep(place.pattern, len(place.ops), flops, before, after, alone[place])
            )
        return steps

    def _without(self, place: Place, merged: Sequence[Place]) -> float | None:
        """Returns the error without one place, or None if no run is left."""
        others = [other for other in merged if other is not place]
        try:
            self.errors(others)
        except _OutOfRuns:
            return None
        return self.worst(others)


def _ops(places: Iterable[Place]) -> frozenset[int]:
    return frozenset().union(*(p.ops for p in places))


def _ratio(distance: float, size: float) -> float:
    error = distance / size if size else (0.0 if distance == 0 else math.inf)
    return math.inf if math.isnan(error) else error


@jax.jit
def _norms(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return jax.tree.map(lambda x: jnp.linalg.norm(jnp.ravel(x)), arrays)


@jax.jit
def _distances(
    got: dict[str, jax.Array], wanted: dict[str, jax.Array], signs: jax.Array
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """Returns for each result the norm of its error, and `ENTRIES` sums of it with random signs."""

    def distance(got, wanted):
        # The difference of equal infinities would be NaN.
        error = jnp.ravel(jnp.where(got == wanted, 0, got - wanted))
        columns = min(error.size, ENTRIES)
        rows = -(-error.size // max(columns, 1))
        signed = jnp.pad(error * signs[: error.size], (0, rows * columns - error.size))
        return jnp.linalg.norm(error), signed.reshape(rows, columns).sum(0)

    return {name: distance(got[name], x) for name, x in wanted.items()}


def _of_length(vector: np.ndarray, length: float) -> np.ndarray:
    """Returns a vector of this norm and of the given direction, or of any if there is none."""
    size = float(np.linalg.norm(vector))
    if 0 < size < math.inf and length < math.inf:
        return vector * (length / size)
    return np.full(max(len(vector), 1), length / max(len(vector), 1) ** 0.5)


def _suspicions(trial: _Trial, places: Sequence[Place]) -> list[float]:
    """Returns the expected share of the squared error of each place, from its ops' own errors."""
    squares: dict[int, float] = {}
    compared = compare_program(trial.program, trial.scale(trial.program))
    for row in compared.rows:
        if row.op is not None and not row.noise:
            # An operation that overflows adds an infinite error, which would hide all others.
            squares[row.op] = squares.get(row.op, 0.0) + min(row.added, 1.0) ** 2
    # An op is suspected in the smallest place that contains it.
    inner = [frozenset().union(*(q.ops for q in places if q.ops < p.ops)) for p in places]
    return [
        sum(squares.get(op, 0.0) for op in place.ops - inside)
        for place, inside in zip(places, inner, strict=True)
    ]
