"""`calibrate`: finds what the values of a model need in float32, and returns the policy for it.

A policy is made before there are values, so it knows neither a range nor an error. The function
runs once in float32, operation by operation. Matmuls whose operands or results come near the end
of the 16-bit range are put into float32. Then `tune` finds what else the tolerance asks for. Each
override has the cause that the values show.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base import rules
from mpjax._src.core.base.dtypes import is_float
from mpjax._src.core.base.progress import progress_bar
from mpjax._src.core.base.public import public
from mpjax._src.core.base.rules import AMPLIFIES, FOLLOW, HALF, SUM, rule_of
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import FoundPolicy, Policy, PolicyLike
from mpjax._src.core.program.curried import takes_arguments
from mpjax._src.core.program.graph import Op
from mpjax._src.core.program.interpret import Wide, interpret, root_of, run_in_float32
from mpjax._src.core.program.site import Site
from mpjax._src.core.training.loss_scale import LossScale
from mpjax._src.tools.document.model import Document, Table, time
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.hardware.targets import Target
from mpjax._src.tools.instruments.masked import has_derivative
from mpjax._src.tools.instruments.places import Place, Places, overridden
from mpjax._src.tools.instruments.programs import Program, make_program
from mpjax._src.tools.instruments.ranges import largest_finite
from mpjax._src.tools.instruments.trials import RUN, OutOfRuns, ops_of, worst
from mpjax._src.tools.instruments.tune import (
    TARGET,
    Tuner,
    TuneStep,
    Tuning,
    checked,
    errors_table,
)

# Values grow in training: what comes within this factor of the largest 16-bit number needs float32.
HEADROOM = 4.0

# The causes of an override, beside a rounding that nothing amplifies.
RANGE, AMPLIFIED, CANCELED, ROUNDED = "range", "amplified", "canceled", "rounding"

# By so much an operation has to amplify the rounding of a value to be its cause.
CAUSE = 8.0

COLUMNS = ("cause", "operations", "FLOPs", "time", "left out", "in float32")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class CalibratedPart:
    """A part of a program that its values need in float32.

    Attributes:
        pattern: The pattern of its override.
        kind: "range" for values near the end of the 16-bit range, "amplified" for a rounding that
            an exponential, a sine or the like amplifies, "canceled" for one that is large beside a
            difference, and "rounding" otherwise.
        cause: The same in words, with the sizes that were seen.
        operations: The number of operations that the override moves.
        flops: The share of the program's matmul FLOPs that it moves, from 0 to 1.
        seconds: The time that it adds to a step on the target.
        alone: The largest relative error if only this part is left in 16 bits; None if it was not
            measured.
    """

    pattern: str
    kind: str
    cause: str
    operations: int
    flops: float
    seconds: float
    alone: float | None


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class Calibration(Report, FoundPolicy):
    """The result of `calibrate`. It is taken wherever a policy is.

    Attributes:
        policy: The policy with the overrides that the values need.
        met: Whether it meets the tolerance. It was compiled and measured.
        before: The largest relative error of a result under the given policy.
        error: The same under the calibrated one.
        tolerance: The tolerance.
        results: The relative error of each result under the calibrated policy, by name.
        parts: What is in float32, and why.
        target: The device of the times.
        batches: The number of calibrations that were joined.
        tuning: The result of `tune` for the last of them.
        seconds: The time that the parts add to a step on the target; of several batches, at most.
    """

    policy: Policy
    met: bool
    before: float
    error: float
    tolerance: float
    results: dict[str, float]
    parts: tuple[CalibratedPart, ...]
    target: str = TARGET
    batches: int = 1
    tuning: Tuning | None = None
    seconds: float = 0.0

    @property
    def flops(self) -> float:
        """The share of the matmul FLOPs in the parts, from 0 to 1."""
        return min(sum(part.flops for part in self.parts), 1.0)

    def __or__(self, other: "Calibration") -> "Calibration":
        """Returns a calibration with the parts of both, for the batches of both.

        Its errors are the larger ones of the two, each measured with its own parts.
        """
        if not isinstance(other, Calibration):
            return NotImplemented
        given = {part.pattern: part for part in (*self.parts, *other.parts)}
        known = {part.pattern for part in self.parts}
        return dataclasses.replace(
            other,
            policy=self.policy.override(dict(other.policy.overrides)),
            met=self.met and other.met,
            before=max(self.before, other.before),
            error=max(self.error, other.error),
            tolerance=max(self.tolerance, other.tolerance),
            results={
                name: max(each.results.get(name, 0.0) for each in (self, other))
                for name in self.results | other.results
            },
            parts=tuple(given.values()),
            batches=self.batches + other.batches,
            seconds=self.seconds + sum(p.seconds for p in other.parts if p.pattern not in known),
        )

    def to_dict(self) -> dict[str, Any]:
        tuning = self.tuning and self.tuning.to_dict()
        return {**super().to_dict(), "policy": str(self.policy), "tuning": tuning}

    def summary(self) -> str:
        """Returns what the calibration changed, as a line of text."""
        return (
            f"{self._cost()}; largest error of a result {self.error:.3g}, before {self.before:.3g}"
        )

    def _cost(self) -> str:
        if not self.parts:
            return "nothing needs float32"
        return (
            f"parts in float32: {len(self.parts)}, with {self.flops:.1%} of the matmul FLOPs; they "
            f"add {time(self.seconds)} to a step on {self.target}"
        )

    def document(self) -> Document:
        verdict = "meets" if self.met else "does not meet"
        return Document(
            "What the values need in float32",
            f"error {self.error:.3g} {verdict} the tolerance of {self.tolerance:.3g}; before "
            f"{self.before:.3g}",
            (self._cost(), *(self.tuning.notes() if self.tuning else ()), f"policy  {self.policy}"),
            (
                Table("Parts", COLUMNS, tuple(map(_cells, self.parts)), (COLUMNS[0], COLUMNS[-1])),
                errors_table("Error of the results", "result", self.results, 5),
            ),
        )


def _cells(part: CalibratedPart) -> tuple[str, ...]:
    alone = "-" if part.alone is None else f"{part.alone:.3g}"
    work = (str(part.operations), f"{part.flops:.1%}", time(part.seconds))
    return (part.cause, *work, alone, part.pattern)


@takes_arguments
def calibrate(
    fun: Callable[..., Any],
    policy: "PolicyLike",
    tolerance: float = 1e-2,
    argnums: int | Sequence[int] | None = 0,
    has_aux: bool = False,
    max_runs: int = 1000,
    *,
    target: str | None = None,
    loss_scale: LossScale | str | float | None = "auto",
    progress: bool = True,
) -> Callable[..., Calibration]:
    """Returns the policy with overrides for what the values of a model need in float32.

    A policy alone promises no tolerance: it knows no values. On a batch, these are seen: matmuls
    with values within a factor of 4 of the largest 16-bit number, or all of them below its normal
    ones; and what makes the error larger than the tolerance, such as scores of a softmax that is
    almost one-hot, phases, or large values that are taken off again. They get overrides, at the
    least time on the target that is found (`tune`).

    Further batches join: pass a calibration as the policy, and its parts stay, or write
    ``first | second``.

    Args:
        fun: A function, as for `autocast`. If it returns a scalar loss, its gradient counts too.
        policy: The policy to start from, its name, or an earlier calibration.
        tolerance: The largest relative error allowed of a result or gradient, as for `tune`.
        argnums: The arguments to differentiate; None for the forward pass only.
        has_aux: Whether ``fun`` returns ``(loss, aux)``.
        max_runs: The largest number of runs of a program, as for `tune`.
        target: The device whose times are minimized, as for `tune`.
        loss_scale: The loss scale, as for `compare`.
        progress: Whether to show a progress bar if stderr is a terminal.

    Returns:
        A function of the same arguments, which must be concrete arrays. It returns a
        `Calibration`, which is taken wherever a policy is. With these arguments after the
        tolerance, the calibration.

    Raises:
        TypeError: If ``fun`` is not a function, or an array is abstract or being traced.
        ValueError: If an argument is invalid, there are no arrays, or nothing to differentiate.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def loss(w, batch):
        ...     x, unit = batch
        ...     with jax.named_scope("physics"):
        ...         force = (x * unit) @ w["a"]
        ...     with jax.named_scope("head"):
        ...         return jnp.mean(jnp.tanh(force / unit @ w["b"]) ** 2)
        >>> w = {"a": jnp.eye(8) * 0.3, "b": jnp.ones((8, 2))}
        >>> x = jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)
        >>> calibrated = mpjax.debug.calibrate(loss, "mixed_float16")(w, (x, jnp.float32(1e6)))
        >>> calibrated.met, calibrated.parts[0].pattern, calibrated.parts[0].kind
        (True, 'physics/*', 'range')
        >>> step = mpjax.autocast(loss, calibrated)
    """
    start = get_policy(policy)
    chip = checked(tolerance, max_runs, target, loss_scale, progress)

    def report(*args, **kwargs):
        make = functools.partial(make_program, "calibrate", fun, args=args, kwargs=kwargs)
        seen = Values(make(policy=start, argnums=None, has_aux=False))
        ranged = seen.out_of_range(start)
        make = functools.partial(make, argnums=argnums, has_aux=has_aux)
        with progress_bar(progress, "calibrate", RUN, max_runs):
            try:
                tuner = Tuner(make, overridden(start, ranged), max_runs, loss_scale, chip)
                before = worst(tuner.trained(start)[0])
            except OutOfRuns:
                raise ValueError(
                    f"calibrate: max_runs={max_runs} is too small: float32, the loss scale and the "
                    "given policy need more runs."
                ) from None
            tuning = tuner.report(tolerance)
        parts = [seen.ranged(place, chip) for place in ranged]
        parts += seen.tuned(tuning.steps, tuner.places)
        moved = [*ranged, *(tuner.places.place(step.pattern) for step in tuning.steps)]
        found = Calibration(
            *(tuning.policy, tuning.met, before, tuning.error, tolerance, tuning.results),
            *(tuple(parts), tuning.target, 1, tuning, tuner.places.seconds(ops_of(moved), chip)),
        )
        return policy | found if isinstance(policy, Calibration) else found

    return report


# ---- what a run in float32 shows -----------------------------------------------------------------


Look = Callable[[Any, Sequence[Any], Sequence[Any]], tuple[float, ...]]


class Seen(Wide):
    """Runs a program in float32, operation by operation, and looks at the values of its ops.

    Attributes:
        found: Of each op, the largest figures that were seen, over all iterations.
    """

    def __init__(self, program: Program, look: Look, among: Collection[Op]):
        super().__init__()
        self._ops, self._look, self._among = program.ops, look, among
        self.found: dict[Op, tuple[float, ...]] = {}
        interpret(program.jaxpr, program.inputs(1.0), self, root_of(program.jaxpr))

    def operation(self, eqn: Any, ins: list[Any], place: Site) -> list[Any]:
        outs = super().operation(eqn, ins, place)
        op = None if place.op is None else self._ops[place.op]
        if op is None or op not in self._among or op.name != eqn.primitive.name:
            return outs
        if all(map(_is_filled, outs)):
            new = self._look(eqn, ins, outs)
            self.found[op] = tuple(map(max, self.found.get(op, new), new))
        return outs


class Values:
    """What the values of a program show."""

    def __init__(self, program: Program):
        self._program, self._ops = program, program.ops
        self.places = Places(program.plan)
        self._sizes = Seen(program, _sizes, {*program.ops}).found
        self._readers: dict[Any, list[Op]] = {}
        for op in self._ops:
            for v in op.ins:
                self._readers.setdefault(v, []).append(op)

    def out_of_range(self, policy: Policy) -> list[Place]:
        """Returns the smallest places whose values come near an end of the 16-bit range."""
        info = jnp.finfo(policy.compute_dtype)

        def is_near(n: int) -> bool:
            low, high = self._ends(self._ops[n])
            return high * HEADROOM > float(info.max) or low < float(info.smallest_normal)

        found: list[Place] = []
        for place in sorted(self.places.finest(), key=lambda place: len(place.ops)):
            moved = {n for each in found for n in each.ops}
            if any(map(is_near, place.ops - moved)):
                found.append(place)
        return found

    def _ends(self, op: Op) -> tuple[float, float]:
        """Returns the largest magnitudes of an op's smallest and largest array."""
        found = [x for x in self._sizes.get(op, ()) if x]
        return min(found, default=1.0), max(found, default=1.0)

    def ranged(self, place: Place, chip: Target) -> CalibratedPart:
        """Returns a part that is near an end of the range."""
        low, high = zip(*(self._ends(self._ops[n]) for n in place.ops), strict=True)
        values = f"values up to {max(high):.3g}"
        return CalibratedPart(
            *(place.pattern, RANGE, values if max(high) > 1 else f"no value above {min(low):.3g}"),
            *(len(place.ops), self.places.flops(place.ops), self.places.seconds(place.ops, chip)),
            alone=None,
        )

    def tuned(self, steps: Sequence[TuneStep], places: Places) -> Iterator[CalibratedPart]:
        """Yields the parts that `tune` found, each with what amplifies its rounding most."""
        behind = [
            {r for n in places.place(step.pattern).ops for r in self._behind(self._ops[n])}
            for step in steps
        ]
        among = set[Op]().union(*behind)
        seen = Seen(self._program, lambda *run: (_gain(*run),), among).found if among else {}
        gains = {op: gain for op, (gain,) in seen.items()}
        for step, ops in zip(steps, behind, strict=True):
            most = max(ops, key=lambda op: (gains[op], -op.index), default=None)
            gain = gains[most] if most else 0.0
            kind, cause = ROUNDED, "rounding errors add up"
            if most and gain >= CAUSE and most.spec.gain_of(most.params) == SUM:
                kind, cause = CANCELED, f"{most.name} cancels all but 1/{gain:.3g} of it"
            elif most and gain >= CAUSE:
                kind, cause = AMPLIFIED, f"{most.name} amplifies it up to {gain:.3g} times"
            work = (step.operations, step.flops, step.seconds, step.alone)
            yield CalibratedPart(step.pattern, kind, cause, *work)

    def _behind(self, op: Op) -> Iterator[Op]:
        """Yields the ops that read what an op makes, up to the second matmul behind it."""
        found, ahead = {op}, [op]
        for _ in range(2):
            matmuls = list[Op]()
            while ahead:
                for reader in (r for v in ahead.pop().outs for r in self._readers.get(v, ())):
                    if reader not in found:
                        found.add(reader)
                        (matmuls if reader.spec.need == HALF else ahead).append(reader)
            ahead = matmuls
        yield from (each for each in found if each is not op and each in self._sizes)


def _sizes(eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> tuple[float, ...]:
    """Returns the largest magnitudes of an operation's operands and results."""
    return tuple(map(largest_finite, filter(_is_filled, (*ins, *outs))))


def _gain(eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> float:
    """Returns by how much an operation amplifies a relative error of an operand."""
    rule, floats = rule_of(eqn.primitive.name), [*filter(_is_filled, ins)]
    gain = rule.gain_of(eqn.params)
    if gain == rules.RANGE and "y" not in eqn.params:
        # |x f'(x) / f(x)| of an exponential is its operand. Under a mask it is 0 in any case.
        return max(largest_finite(jnp.where(outs[0] == 0, 0, x)) for x in floats)
    if rule.need == HALF and has_derivative(eqn):  # its operands are no terms of its sums
        return max(_rms(dx) / (_rms(x) or math.inf) for dx, x in _moved(eqn, ins, outs))
    if gain in AMPLIFIES and has_derivative(eqn):
        # An entry of the result counts as at least the root mean square of all.
        moved = ((dx, jnp.maximum(jnp.abs(x), _rms(x))) for dx, x in _moved(eqn, ins, outs))
        return max(largest_finite(dx / size) for dx, size in moved)
    if gain == SUM and rule.need == FOLLOW:
        return max(map(_rms, floats)) / (_rms(outs[0]) or math.inf)
    return 1.0


def _moved(eqn: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """Yields how results move with operands that move by as much as they are, with random signs."""
    moving = [i for i, x in enumerate(ins) if is_float(x)]

    def compute(*floats):
        arrays = {**dict(enumerate(ins)), **dict(zip(moving, floats, strict=True))}
        return run_in_float32(eqn, [*arrays.values()])

    keys = jax.random.split(jax.random.key(0), len(ins))
    floats = [ins[i] for i in moving]
    errors = [x * jax.random.rademacher(keys[i], x.shape, x.dtype) for i, x in enumerate(floats)]
    _, moved = jax.jvp(compute, floats, errors)
    return zip(moved, outs, strict=True)


def _is_filled(x: Any) -> bool:
    return is_float(x) and bool(x.size)


def _rms(x: Any) -> float:
    wide = np.asarray(x, np.float64)  # in float32 the squares of large numbers are infinite
    return float(np.sqrt(np.mean(np.square(np.where(np.isfinite(wide), wide, 0)))))
