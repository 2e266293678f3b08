"""`tune`: the least float32 with which a program under a policy meets a tolerance.

`compare` tells which operations are suspect. Which of them must be float32 is then measured, on the
compiled program: a set of places is enough or it is not.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mpjax._src.autocast.classify import CHANGEABLE
from mpjax._src.autocast.explain import flops_of
from mpjax._src.autocast.graph import Block, Op, numbered
from mpjax._src.dtypes import FLOAT32
from mpjax._src.errors import brief, check_callable
from mpjax._src.instruments.compare import compare
from mpjax._src.instruments.nonfinite import check_concrete, shown
from mpjax._src.instruments.programs import Program, make_program, training_scale
from mpjax._src.patterns import matches
from mpjax._src.policy import Policy, get_policy
from mpjax._src.training.loss_scale import (
    LossScale,
    finite_number,
    resolve_loss_scale,
    whole_number,
)

# A gradient this much smaller than all together is held to its share of that, not to its own size.
SMALL = 1e-3

# Cheaper sets of places are looked for among this many at most.
SEARCHED = 12


@dataclasses.dataclass(frozen=True)
class TuneStep:
    """One place that was moved to float32.

    Attributes:
        pattern: Of the override.
        operations: How many operations of the program it moves.
        flops: The share of the program's matmul FLOPs that it moves.
        error_before: The largest relative error of a result without it, with the steps before.
        error: The same with it.
        alone: The same where all other places of the tuned policy are float32 and it is not: what
            it would cost to leave it out.
    """

    pattern: str
    operations: int
    flops: float
    error_before: float
    error: float
    alone: float


@dataclasses.dataclass(frozen=True)
class Tuning:
    """What `tune` found. ``print`` it, and train with `policy`.

    Attributes:
        policy: The policy with overrides.
        met: Whether it meets the tolerance.
        error: The largest relative error of a result under it.
        tolerance: That was asked for.
        results: The error of each result under it.
        steps: What each override bought, the most valuable first.
        runs: How many programs were compiled and run to find it.
        least: Whether no cheaper set of places can do, if more float32 never makes it worse; False
            where the search ended at ``max_runs``.
    """

    policy: Policy
    met: bool
    error: float
    tolerance: float
    results: dict[str, float]
    steps: tuple[TuneStep, ...]
    runs: int
    least: bool

    def to_dict(self) -> dict[str, Any]:
        """Returns the tuning as plain data, ready for JSON; the policy as its string."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        steps = [dataclasses.asdict(step) for step in self.steps]
        return {**plain, "policy": str(self.policy), "steps": steps}

    def __str__(self) -> str:
        verdict = "meets" if self.met else "does not meet"
        lines = [
            f"error {self.error:.3g} {verdict} the tolerance of {self.tolerance:.3g}, after "
            f"{self.runs} runs",
            f"policy  {self.policy}",
        ]
        if self.steps:
            lines += [
                "",
                f"{'in float32':<44}{'operations':>11}{'FLOPs':>8}{'error before':>14}"
                f"{'after':>10}{'left out':>10}",
            ]
        for s in self.steps:
            lines.append(
                f"{s.pattern:<44}{s.operations:>11}{s.flops:>8.1%}{s.error_before:>14.3g}"
                f"{s.error:>10.3g}{s.alone:>10.3g}"
            )
        if self.steps and self.met and not self.least:
            lines.append("The search ended at max_runs: less float32 may do.")
        return "\n".join(lines)


def tune(
    fun: Callable[..., Any],
    policy: Any,
    tolerance: float,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    max_runs: int = 100,
    *,
    loss_scale: LossScale | str | float | None = "auto",
) -> Callable[..., Tuning]:
    """Finds the least float32 with which the value and the gradients meet a tolerance.

    Args:
        fun: A function, as for `autocast`. If it returns a scalar loss, its gradient counts too.
        policy: The policy to start from, or its name.
        tolerance: The largest relative error allowed, ``norm(got - wanted) / norm(wanted)`` for
            each result and each gradient, against float32. Gradients smaller than 1e-3 of all
            together are held to that share.
        argnums: Of which arguments gradients are taken; None for the forward pass alone.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        max_runs: How many programs may be compiled and run.
        loss_scale: As for `compare`; "auto" chooses it for every program that is tried.

    Returns:
        A function of the same arguments, which must be concrete arrays. It returns a `Tuning`: its
        ``policy`` is the one given, with the fewest overrides that move the least work to float32,
        in matmul FLOPs first.

    Raises:
        TypeError: If ``fun`` is not a function, or an array is abstract or being traced.
        ValueError: If an argument is not legal, there are no arrays, or nothing to differentiate
            by.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, x):
        ...     with jax.named_scope("risky"):
        ...         y = jnp.tanh(x @ w["a"]) * 40
        ...     with jax.named_scope("safe"):
        ...         return jnp.mean(jnp.cos(y @ w["b"]) ** 2)
        >>> w = {"a": jnp.eye(4) * 0.3, "b": jnp.ones((4, 1))}
        >>> x = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)
        >>> tuned = mpjax.tune(loss, "mixed_bfloat16", 1e-3)(w, x)
        >>> tuned.met
        True
    """
    check_callable(fun, "tune: fun")
    policy = get_policy(policy)
    if (finite_number(tolerance) or 0.0) <= 0:
        raise ValueError(f"tolerance={brief(tolerance)} must be a positive number such as 1e-2.")
    if (whole_number(max_runs) or 0) < 1:
        raise ValueError(f"max_runs={brief(max_runs)} must be a whole number, 1 or more.")

    resolve_loss_scale(loss_scale, False)

    @functools.wraps(fun)
    def wrapped(*args, **kwargs):
        program = functools.partial(
            make_program, "tune", fun, args=args, kwargs=kwargs, argnums=argnums, has_aux=has_aux
        )
        arrays = check_concrete("tune", program(policy=policy).arrays)
        trial = _Trial(program, policy, arrays, tolerance, max_runs, loss_scale)
        if trial.errors(())[0] <= tolerance:
            return trial.report((), [], True)
        compared = compare(fun, policy, argnums, has_aux, loss_scale=loss_scale)(*args, **kwargs)
        suspicion: dict[int, float] = {}
        for row in compared.rows:
            if row.op is not None and not row.noise:
                suspicion[row.op] = suspicion.get(row.op, 0.0) + min(row.added, 1.0) ** 2
        places = _places(trial.plan.block, suspicion)
        return _search(trial, places)

    return wrapped


# ---- places -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """What one override pattern moves to float32."""

    pattern: str
    ops: frozenset[int]
    suspicion: float


def _places(block: Block, suspicion: dict[int, float]) -> list[Place]:
    """Returns the smallest places that patterns can name, the most suspect first."""
    movable = [op for op, _ in numbered(block) if _is_movable(op)]
    named: dict[str, set[int]] = {}
    for op in movable:
        for pattern in _patterns(op):
            named.setdefault(pattern, set())
    for pattern, covered in named.items():
        covered |= {op.row for op in movable if any(matches(pattern, p) for p in _spots(op))}
    finest: dict[frozenset[int], str] = {}
    for op in movable:
        scoped = "/".join(shown(op.scopes))
        best = min(_patterns(op), key=lambda p: (len(named[p]), not p.startswith(scoped), len(p)))
        finest.setdefault(frozenset(named[best]), best)
    places = [
        Place(pattern, covered, sum(suspicion.get(i, 0.0) for i in covered))
        for covered, pattern in finest.items()
    ]
    return sorted(places, key=lambda place: -place.suspicion)


def _is_movable(op: Op) -> bool:
    by_rule = op.rule in CHANGEABLE and op.rule not in ("layout", "neutral", "full")
    return (by_rule or op.forced == "half") and op.forced != "full" and op.has_float32


def _spots(op: Op) -> list[str]:
    """Returns what the pattern of an override may match of an op."""
    return ["/".join(op.scopes), "/".join((*op.scopes, op.name)), *_paths(op)]


def _paths(op: Op) -> list[str]:
    return [path for v in op.ins for path in v.paths if path]


def _patterns(op: Op) -> list[str]:
    """Returns patterns that move an op, exact ones first."""
    scopes = shown(op.scopes)
    exact = [_escape(path) for path in _paths(op)]
    exact.append(_escape("/".join((*scopes, op.name))))
    return [*exact, *(_escape("/".join(scopes[:i])) + "/*" for i in range(len(scopes), 0, -1))]


def _escape(path: str) -> str:
    return path.replace("[", "[[]").replace("*", "[*]").replace("?", "[?]")


# ---- trials -------------------------------------------------------------------------------------


class _OutOfRuns(Exception):
    """The search has used up its runs."""


class _Trial:
    """Runs the program with some places in float32, and remembers what came out."""

    def __init__(self, program, policy: Policy, arrays, tolerance, max_runs, loss_scale):
        self.program, self.policy, self.arrays = program, policy, arrays
        self.tolerance, self.max_runs, self.loss_scale = tolerance, max_runs, loss_scale
        self.runs = 0
        self._known: dict[frozenset[str], tuple[float, dict[str, float]]] = {}
        full = dataclasses.replace(
            policy, overrides=(), half_ops=(), compute_dtype=FLOAT32, output_dtype=FLOAT32
        )
        self.wanted = self._run(full)[0]
        self.plan = program(policy=policy).plan
        self.work = {
            op.row: (flops_of(op.eqn) * times, _elements(op) * times)
            for op, times in numbered(self.plan.block)
        }

    def _run(self, policy: Policy) -> tuple[list[jax.Array | None], Program]:
        program = self.program(policy=policy)
        scale = training_scale(program, self.arrays, policy, self.loss_scale)
        outs = program.compiled(*self.arrays, jnp.float32(scale))
        return [x if jnp.issubdtype(x.dtype, jnp.floating) else None for x in outs], program

    def with_places(self, patterns: Sequence[str]) -> Policy:
        return self.policy.override(dict.fromkeys(patterns, "float32")) if patterns else self.policy

    def errors(self, patterns: Sequence[str]) -> tuple[float, dict[str, float]]:
        """Returns the largest error with these places in float32, and each result's."""
        key = frozenset(patterns)
        if key not in self._known:
            if self.runs >= self.max_runs:
                raise _OutOfRuns
            self.runs += 1
            outs, program = self._run(self.with_places(patterns))
            self._known[key] = _errors(outs, self.wanted, program)
        return self._known[key]

    def enough(self, places: Sequence[Place]) -> bool:
        """Tells whether these places in float32 meet the tolerance."""
        return self.errors([p.pattern for p in places])[0] <= self.tolerance

    def cost(self, places: Sequence[Place]) -> tuple[int, int, int]:
        """Returns the work that these places move: matmul FLOPs, entries computed, patterns."""
        moved = frozenset().union(*(p.ops for p in places))
        flops, entries = (sum(self.work[i][k] for i in moved) for k in (0, 1))
        return flops, entries, len(places)

    def report(self, places: Sequence[Place], merged: Sequence[Place], least: bool) -> Tuning:
        """Measures what each place of a solution buys."""
        self.max_runs = self.runs + 3 + 2 * len(merged)  # the table is not part of the search
        error, results = self.errors([p.pattern for p in merged])
        total = sum(flops for flops, _ in self.work.values()) or 1
        left_out = {p: self.errors([q.pattern for q in merged if q is not p])[0] for p in merged}
        steps, done = [], []
        before = self.errors(())[0]
        for place in sorted(merged, key=lambda p: -left_out[p]):
            done.append(place)
            after = self.errors([p.pattern for p in done])[0]
            flops = sum(self.work[i][0] for i in place.ops) / total
            steps.append(
                TuneStep(place.pattern, len(place.ops), flops, before, after, left_out[place])
            )
            before = after
        return Tuning(
            self.with_places([p.pattern for p in merged]),
            error <= self.tolerance,
            error,
            self.tolerance,
            results,
            tuple(steps),
            self.runs,
            least,
        )


def _elements(op: Op) -> int:
    return sum(v.size for v in op.outs if v.is_f32)


def _errors(got, wanted, program: Program) -> tuple[float, dict[str, float]]:
    norms = [0.0 if w is None else float(jnp.linalg.norm(w)) for w in wanted]
    pairs = zip(norms, program.gradients, strict=True)
    everything = math.sqrt(sum(n**2 for n, is_gradient in pairs if is_gradient))
    errors = {}
    for name, a, w, norm, gradient in zip(
        program.results, got, wanted, norms, program.gradients, strict=True
    ):
        if w is None or (name.startswith("aux") and program.follows_gradient):
            continue
        distance = float(jnp.linalg.norm(jnp.where(a == w, 0, a - w)))
        size = max(norm, SMALL * everything) if gradient else norm
        error = distance / size if size else (0.0 if distance == 0 else math.inf)
        errors[name] = math.inf if math.isnan(error) else error
    return max(errors.values(), default=0.0), errors


# ---- the search ---------------------------------------------------------------------------------


def _search(trial: _Trial, places: list[Place]) -> Tuning:
    """Returns the cheapest set of places found that is enough."""
    solution, least = None, False
    try:
        if not trial.enough(places):
            return trial.report(places, _merged(trial, places, places), False)
        solution = places
        solution = _first_enough(trial, places)
        solution = _thinned(trial, solution)
        solution, least = _cheapest(trial, places, solution)
    except _OutOfRuns:
        pass
    solution = places if solution is None else solution
    return trial.report(solution, _merged(trial, places, solution), least)


def _first_enough(trial: _Trial, places: list[Place]) -> list[Place]:
    """Returns the most suspect places, as few as are enough, up to a factor of two."""
    count = 1
    while count < len(places) and not trial.enough(places[:count]):
        count *= 2
    return places[:count]


def _thinned(trial: _Trial, solution: list[Place]) -> list[Place]:
    """Leaves out what can be left out: halves first, then single places, expensive ones first."""
    solution = sorted(solution, key=lambda p: (trial.cost([p]), -p.suspicion), reverse=True)
    size = len(solution) // 2
    while size:
        start = 0
        while start < len(solution):
            rest = solution[:start] + solution[start + size :]
            if trial.enough(rest):
                solution = rest
            else:
                start += size
        size //= 2
    return solution


def _cheapest(
    trial: _Trial, places: list[Place], solution: list[Place]
) -> tuple[list[Place], bool]:
    """Looks for cheaper sets. A place is needed if all others together are not enough."""
    needed = [p for p in solution if not trial.enough([q for q in places if q is not p])]
    if len(needed) == len(solution):
        return solution, True
    others = [p for p in places if p not in needed]
    kept = sorted(others, key=lambda p: (p not in solution, -p.suspicion))[:SEARCHED]
    sets = itertools.chain.from_iterable(
        itertools.combinations(kept, n) for n in range(len(kept) + 1)
    )
    candidates = sorted(([*needed, *some] for some in sets), key=trial.cost)
    failed: list[frozenset[int]] = []
    try:
        for candidate in candidates:
            if trial.cost(candidate) >= trial.cost(solution):
                break
            moved = frozenset().union(*(p.ops for p in candidate))
            if any(moved <= ops for ops in failed):
                continue
            if trial.enough(candidate):
                return candidate, len(kept) == len(others)
            failed.append(moved)
    except _OutOfRuns:
        return solution, False
    return solution, len(kept) == len(others)


def _merged(trial: _Trial, places: list[Place], solution: list[Place]) -> list[Place]:
    """Returns the fewest places that move the same operations, scopes for their parts."""
    moved = frozenset().union(*(p.ops for p in solution))
    ops = [op for op, _ in numbered(trial.plan.block) if _is_movable(op)]
    wider: dict[frozenset[int], str] = {p.ops: p.pattern for p in solution}
    if all(op.row in moved for op in ops):
        return [Place("*", moved, 0.0)]
    for op in ops:
        if op.row not in moved:
            continue
        for pattern in _patterns(op):
            covered = frozenset(o.row for o in ops if any(matches(pattern, s) for s in _spots(o)))
            if covered <= moved:
                wider.setdefault(covered, pattern)
    chosen: list[Place] = []
    left = set(moved)
    while left:
        covered = max(wider, key=lambda c: (len(c & left), -len(c)))
        chosen.append(Place(wider[covered], covered, 0.0))
        left -= covered
    return chosen
