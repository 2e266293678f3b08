"""`tune`: finds the cheapest float32 operations with which a program meets an error tolerance.

Each set of places is measured by one program that is compiled once and rounds by a mask
(`masked`). What the search finds is then measured as it would be trained: with the overrides of
the policy, compiled.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from mpjax._src.core.base.dtypes import FLOAT64, default_device
from mpjax._src.core.base.errors import (
    brief,
    check_flag,
    finite_number,
    misplaced,
    whole_number,
)
from mpjax._src.core.base.lines import where
from mpjax._src.core.base.progress import progress_bar
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import RULES
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import FoundPolicy, Policy, PolicyLike
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.training.loss_scale import LossScale, resolve_loss_scale
from mpjax._src.tools.document.model import (
    WORST,
    Color,
    Document,
    Drawing,
    Operation,
    Table,
    size,
    time,
)
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.hardware.targets import Target, find_target
from mpjax._src.tools.instruments.compare import compare_program
from mpjax._src.tools.instruments.places import Place, overridden
from mpjax._src.tools.instruments.programs import make_program
from mpjax._src.tools.instruments.search import Model, Search
from mpjax._src.tools.instruments.trials import RUN, OutOfRuns, Trial, ops_of, worst

LEAST_RUNS = 2  # the float32 reference, and the policy without overrides

# The overrides are measured as they train so often. In between, what a search allows the masks is
# this part of what they saw, but not less than that of the tolerance, and grows by so much or not.
VERIFIED, ROOM, LEAST_ALLOWED, NEAR = 4, 0.98, 1 / 64, 1.05

# The device whose times count if this one's are not known.
TARGET = "h100"

COLUMNS = ("operations", "FLOPs", "time", "error before", "after", "left out", "in float32")

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
        seconds: The time that it adds to a step on the target, as ``cost`` of `Tuning`.
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
    seconds: float
    error_before: float | None
    error: float | None
    alone: float | None


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Tuning(Report, FoundPolicy):
    """The result of `tune`. ``print`` it, and train with ``policy``.

    Attributes:
        policy: The tuned policy: the given one with overrides.
        met: Whether it meets the tolerance. It was compiled and measured.
        error: The largest relative error of a result under it.
        tolerance: The tolerance.
        results: The relative error of each result under it, by name.
        steps: The effect of each override, the most valuable first.
        runs: The number of times a program was run, in float32 and in 16 bits; a set of places that
            is found again is not.
        cut_short: Whether the search stopped at ``max_runs``. Then this is the best set that was
            tried.
        places: The number of parts of the program in float32, counted in the smallest parts that
            patterns can name. A step may contain more than one.
        cost: The time that float32 adds to a step on the target, in seconds: matmul FLOPs at its
            peak rates, and bytes at the bandwidth of its memory.
        bound: What no policy that meets the tolerance costs less than, in seconds, if errors add as
            they did where the search's model of them was most wrong.
        target: The device of these times.
        before: The largest relative error of a result under the given policy.
        totals: The bytes of the arrays of all operations that an override can move, and the time
            of these on the target at its peak rates, in seconds: under the given policy, and under
            the tuned one.
        unfollowed: What a mask cannot follow in the program, such as a kernel. Then each set was
            compiled. Else "", and the search rounded by a mask.
        remaining: If the tolerance is not met: the largest relative error of a result with all
            parts in float32 that an override can move, compiled and measured.
        unnamed: The primitives whose operations without a scope had to be moved together, because
            no pattern tells them apart.
        left: What rounds to 16 bits even then, by operation and line, with the largest relative
            error of a result that each makes alone; or ``unfollowed``, with ``remaining``.
        float32_error: In that case, the largest relative error of a result in float32 itself,
            relative to float64; None on a TPU, or if no run was left.
    """

    policy: Policy
    met: bool
    error: float
    tolerance: float
    results: dict[str, float]
    steps: tuple[TuneStep, ...]
    runs: int
    cut_short: bool = False
    places: int = 0
    cost: float = 0.0
    bound: float = 0.0
    target: str = TARGET
    before: float = math.nan
    totals: tuple[tuple[int, float], ...] = ()
    unfollowed: str = ""
    unnamed: tuple[str, ...] = ()
    remaining: float | None = None
    left: dict[str, float] = dataclasses.field(default_factory=dict)
    float32_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "policy": str(self.policy)}

    def notes(self) -> list[str]:
        """Returns what limits the result, as lines of text."""
        lines = []
        if self.unfollowed:
            lines.append(f"Each set was compiled: a mask cannot follow {self.unfollowed}.")
        if self.cut_short:
            more = "less float32 may be enough"
            less = "more float32, or other parts, may meet the tolerance"
            lines.append(
                "The search stopped at max_runs. This is the best policy that was tried; "
                f"{more if self.met else less}."
            )
        if self.unnamed:
            lines.append(
                f"All operations {' and '.join(self.unnamed)} without a scope were moved together: "
                "with jax.named_scope around parts of the code, fewer may be enough."
            )
        if self.remaining is not None:
            lines.append(
                "With all parts in float32 that an override can move, the error is "
                f"{self.remaining:.3g}."
            )
        if self.float32_error is not None:
            lines.append(f"The error of float32, relative to float64, is {self.float32_error:.3g}.")
        return lines

    def _totals(self) -> tuple[tuple[str, ...], ...]:
        both = zip((self.before, self.error), self.totals, ("before", "after"), strict=False)
        return tuple((f"{e:.3g}", size(b), time(t), name) for e, (b, t), name in both)

    def document(self) -> Document:
        verdict, lines = "meets" if self.met else "does not meet", self.notes()
        if self.met and self.places and not self.cut_short:
            lines.append(
                f"parts of the program in float32: {self.places}; they add {time(self.cost)} to a "
                f"step on {self.target}; at least {time(self.bound)} by the model of errors"
            )
        return Document(
            "Cheapest float32 parts that meet a tolerance",
            f"error {self.error:.3g} {verdict} the tolerance of {self.tolerance:.3g}; before "
            f"{self.before:.3g}, after {self.runs} runs"
            if self.results
            else f"max_runs left no run for the policy: {self.runs} runs",
            (*lines, f"policy  {self.policy}"),
            (
                Table("Overrides", COLUMNS, tuple(map(_cells, self.steps)), COLUMNS[-1:]),
                Table("Before and after", ("error", "bytes", "time", "policy"), self._totals()),
                errors_table(
                    "Rounds even with all these parts in float32", "operation", self.left, 12
                ),
                errors_table("Error of the results", "result", self.results, 5),
            ),
            drawing=lambda: Drawing(
                operations=tuple(map(_place, self.steps)), colors=(ALONE, WORK), things="parts"
            ),
        )


def errors_table(title: str, of: str, errors: dict[str, float], most: int) -> Table:
    """Returns a table of errors by name, the largest first."""
    order = sorted(errors.items(), key=lambda item: -item[1])
    rows = tuple((f"{error:.3g}", name) for name, error in order)
    return Table(title, ("error", of), rows, (of,), most=most)


def _cells(step: TuneStep) -> tuple[str, ...]:
    errors = (step.error_before, step.error, step.alone)
    texts = ("-" if error is None else f"{error:.3g}" for error in errors)
    counted = (str(step.operations), f"{step.flops:.1%}", time(step.seconds))
    return (*counted, *texts, step.pattern)


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
    max_runs: int = 1000,
    *,
    target: str | None = None,
    loss_scale: LossScale | str | float | None = "auto",
    progress: bool = True,
) -> Callable[..., Tuning]:
    """Finds the cheapest parts to run in float32 so that value and gradients meet a tolerance.

    Each part is measured alone in 16 bits, then sets of parts, all by one compiled program that
    rounds by a mask. The error of a set is predicted from these error vectors (to first order it
    is their sum), the cheapest set under that prediction is measured, and corrects it. The policy
    that is found is compiled and measured as it trains. Searches of precision by measurement are
    Precimonious (SC 2013) and, with costs of casts, Campo (ATC 2022).

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
            and the given policy take one each. One per part is needed to know what it adds.
        target: The device whose times are minimized, such as "h100" or "v5e". It need not exist.
            None for the local one, or an H100 if its peak rates are not known.
        loss_scale: The loss scale, as for `compare`.
        progress: Whether to show a progress bar if stderr is a terminal. It counts runs up to
            ``max_runs``; most searches end earlier.

    Returns:
        A function of the same arguments, which must be concrete arrays. It returns a `Tuning`,
        whose ``policy`` is the given one with the parts in float32 that add the least time on the
        target, of those that were found to be enough. In a test on 220 sums of 9 errors, each
        cost at most 5% more than the best of all sets. With these arguments after the
        tolerance, the report.

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
    policy = get_policy(policy)
    chip = checked(tolerance, max_runs, target, loss_scale, progress)

    def report(*args, **kwargs):
        make = functools.partial(
            make_program, "tune", fun, args=args, kwargs=kwargs, argnums=argnums, has_aux=has_aux
        )
        with progress_bar(progress, "tune", RUN, max_runs):
            try:
                tuner = Tuner(make, policy, max_runs, loss_scale, chip)
            except OutOfRuns:  # no run was left for the given policy
                return Tuning(policy, False, math.nan, tolerance, {}, (), max_runs, True)
            return tuner.report(tolerance)

    return report


def checked(
    tolerance: Any, max_runs: Any, target: str | None, loss_scale: Any, progress: Any
) -> Target:
    """Checks the settings of a search, and returns its target."""
    check_flag("progress", progress)
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
    if target is not None:
        return find_target(target)
    try:  # this device, or the default where its times are not known
        return find_target(jax.devices()[0].device_kind)
    except ValueError:
        return find_target(TARGET)


# ---- the search ---------------------------------------------------------------------------------


class Tuner(Trial):
    """Searches the cheapest places to run in float32."""

    def report(self, tolerance: float) -> Tuning:
        """Returns the cheapest places that were found to be enough, and the effect of each."""
        before = math.nan
        best: Sequence[Place] = []
        results: dict[str, float] = {}
        met = cut_short = False
        bound, unmet = 0.0, dict[str, Any]()
        places = self.places.finest()

        def rank(chosen: Sequence[Place], errors: dict[str, float]) -> tuple[bool, float]:
            error = worst(errors)
            return error > tolerance, error if error > tolerance else self._seconds(chosen)

        try:
            results, _ = self.trained(self.policy)
            before = worst(results)
            met = before <= tolerance
            for chosen, errors, least in () if met else self._proposals(places, tolerance):
                if not best or rank(chosen, errors) < rank(best, results):
                    best, results, bound = chosen, errors, least
                met = worst(results) <= tolerance
                if not met and len(chosen) == len(places):
                    unmet = self._unmet(errors, places)
        except OutOfRuns:
            cut_short = True
        merged = self._merged(best)
        return Tuning(
            policy=overridden(self.policy, merged),
            met=met,
            error=worst(results) if results else math.nan,
            tolerance=tolerance,
            results=results,
            steps=tuple(self._steps(merged)),
            runs=self.runs,
            cut_short=cut_short,
            places=len(best),
            cost=self._seconds(best),
            bound=bound,
            target=self.target.name,
            before=before,
            totals=tuple(
                self.places.totals(ops, self.target) for ops in (frozenset[int](), ops_of(best))
            ),
            unfollowed=self.unfollowed,
            unnamed=tuple(sorted({p.pattern for p in best if p.pattern in RULES and p.ops})),
            **unmet,
        )

    def _proposals(
        self, places: Sequence[Place], tolerance: float
    ) -> Iterator[tuple[Sequence[Place], dict[str, float], float]]:
        """Yields sets of places, their errors as they train, and what is needed at least.

        If masks see less than all of an error, the next search is allowed less, until a set is
        enough; then it is allowed more again.
        """
        allowed, low, high = tolerance, 0.0, math.inf
        for _ in range(VERIFIED if places else 0):
            chosen, least = self._search(places, allowed)
            errors, _ = self.trained(overridden(self.policy, self._merged(chosen)))
            yield chosen, errors, least
            by_mask, error = worst(self.masked(ops_of(chosen))[0]), worst(errors)
            seen = tolerance * by_mask / max(error, 1e-30)
            if error <= tolerance:
                low = allowed
                allowed = min(seen, math.sqrt(low * high))
            elif len(chosen) == len(places):
                return
            else:
                high = allowed
                allowed = math.sqrt(low * high) or max(ROOM * seen, tolerance * LEAST_ALLOWED)
            if allowed < NEAR * low:
                return
        if not low:
            errors, _ = self.trained(overridden(self.policy, self._merged(places)))
            yield places, errors, 0.0

    def _seconds(self, places: Iterable[Place]) -> float:
        """Returns the time that places add to a step on the target."""
        return self.places.seconds(ops_of(places), self.target)

    def _unmet(self, errors: dict[str, float], places: Sequence[Place]) -> dict[str, Any]:
        """Returns what there is to say if all places in float32 are not enough.

        ``errors`` are those with all of them in float32.
        """
        remaining = worst(errors)
        left = {self.unfollowed: remaining} if self.unfollowed else {}
        told: dict[str, Any] = {"remaining": remaining, "left": left}
        with contextlib.suppress(OutOfRuns):
            if not self.unfollowed:
                told["left"] = self._left(overridden(self.policy, self._merged(places)))
            if default_device().platform != "tpu":  # which have no float64
                program = self._make(policy=self._float32)
                compared = compare_program(program, self.scale, FLOAT64)
                # The program's own casts are not float32's.
                told["float32_error"] = worst(compared.float32 or compared.results)
        return told

    def _left(self, policy: Policy) -> dict[str, float]:
        """Returns what rounds under a policy beside own casts, with the error of each alone."""
        rounding = self._rounding(policy)
        own = self._own(rounding)
        masks: dict[str, np.ndarray] = {}
        for i in np.flatnonzero(~own):
            step = rounding.entries[i].step
            line = where(*self.program.lines(step.eqn, step.site))
            masks.setdefault(f"{step.eqn.primitive.name}  {line}".strip(), own.copy())[i] = True
        errors = {n: self._errors(self._by_mask(rounding, m))[0] for n, m in masks.items()}
        return {name: worst(each) for name, each in errors.items() if worst(each)}

    def _search(self, places: Sequence[Place], tolerance: float) -> tuple[Sequence[Place], float]:
        """Returns the cheapest places that were found, or all, and what is needed at least."""
        inside = [[i for i, q in enumerate(places) if q.ops < p.ops] for p in places]
        own = [p.ops - ops_of(places[i] for i in of) for p, of in zip(places, inside, strict=True)]
        vectors = [self.alone(ops)[1] for ops in own]
        rest = self.masked(ops_of(places))[1]
        by_result = range(len(rest))
        model = Model(
            [np.array([vector[r] for vector in vectors]) / tolerance for r in by_result],
            [rest[r] / tolerance for r in by_result],
        )
        costs, has, arrays = self.places.prices(own, self.target)
        search = Search(
            lambda chosen: worst(self.masked(ops_of(places[i] for i in chosen))[0]),
            model,
            costs,
            tolerance,
            inside,
            (has, arrays),
        )
        search.run()
        best = range(len(places)) if search.best is None else sorted(search.best)
        return [places[i] for i in best], search.bound

    def _merged(self, chosen: Sequence[Place]) -> list[Place]:
        return self.places.merged(ops_of(chosen), chosen) if chosen else []

    def _steps(self, merged: Sequence[Place]) -> list["TuneStep"]:
        alone = {place: self._error_with([p for p in merged if p is not place]) for place in merged}
        steps: list[TuneStep] = []
        done: list[Place] = []
        for place in sorted(merged, key=lambda p: -(alone[p] or 0.0)):
            before = self._error_with(done)
            done.append(place)
            flops, seconds = (
                self.places.flops(place.ops),
                self.places.seconds(place.ops, self.target),
            )
            after = self._error_with(done)
            count = len(place.ops)
            steps.append(
                TuneStep(place.pattern, count, flops, seconds, before, after, alone[place])
            )
        return steps

    def _error_with(self, places: Sequence[Place]) -> float | None:
        """Returns the largest error with these places in float32, or None if no run is left."""
        try:
            return worst(self.masked(ops_of(places))[0])
        except OutOfRuns:
            return None
