"""What each policy would make of a training step, found while the script calls it."""

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from mpjax._src.core.autocast.transform import trace
from mpjax._src.core.base import _jax
from mpjax._src.core.base.contexts import unchecked
from mpjax._src.core.base.devices import traced_for
from mpjax._src.core.base.errors import first_line, in_one_line
from mpjax._src.core.base.higher_order import WHILE, higher_order
from mpjax._src.core.base.progress import advance
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy, halves_of
from mpjax._src.core.program import trace as programs
from mpjax._src.core.program.gradient import is_loss
from mpjax._src.core.program.interpret import operations_in
from mpjax._src.core.program.site import equations
from mpjax._src.core.training.loss_scale import has_protocol
from mpjax._src.tools.instruments.explain import CastReport, explain, matmul_flops
from mpjax._src.tools.lint.linter import lint
from mpjax._src.tools.lint.report import LintReport
from mpjax._src.tools.scripts.batches import Batch, batch_of
from mpjax._src.tools.scripts.compiled import Compiling
from mpjax._src.tools.scripts.gradient_errors import Exact, Worst
from mpjax._src.tools.scripts.steps import Call, Loss, Noting, NoValues, under, values_of
from mpjax._src.tools.scripts.surveyed import (
    SurveyedLoss,
    SurveyedProgram,
    SurveyedStep,
    SurveyRow,
)

STAGE = "stage"  # what progress counts

# The policies of a table, after the step as it is written.
POLICIES = ("mixed_bfloat16", "mixed_float16", "mixed_bfloat16,storage=lean")
FUSED = "mixed_bfloat16,fused_attention=true"  # where the step has attention

# What stands in for the rows of other policies.
OWN = (
    "mpjax computes the gradient, under the policy that the script chooses: change the policy "
    "there to see another row"
)

# Of steps with more operations, the linter looks at no values: they would run one by one.
MOST_OPERATIONS = 5_000

WRITTEN = "as written"
SCALES = ("DynamicScale",)  # of other libraries than jmp: Flax's
SECONDS, LEAST, MOST_ROUNDS = 2.0, 3, 30  # of timing


@dataclasses.dataclass
class Row:
    """A row of the table, while it is made."""

    policy: Policy | None  # None for the step as written
    name: str
    figures: dict[str, Any] = dataclasses.field(default_factory=dict)
    compiled: dict[str, SurveyedProgram] = dataclasses.field(default_factory=dict)
    notes: list[str] = dataclasses.field(default_factory=list)
    program: programs.Traced | None = None

    @property
    def computes_in_half(self) -> bool:
        """Whether its program, or its policy, has anything in 16 bits."""
        if self.policy is None:
            return bool(self.figures.get("half_flops"))
        return bool(halves_of(self.policy))

    def result(self) -> SurveyRow:
        return SurveyRow(
            self.name, **self.figures, programs=(*self.compiled.values(),), notes=(*self.notes,)
        )


class Examined:
    """A training step, and what is known of it so far."""

    def __init__(self, call: Call, noting: Noting, program: programs.Traced, place: Any) -> None:
        self.call, self.noting, self.marked, self.place = call, noting, program, place
        self.calls, self.traces = 0, 1
        self.rows: list[Row] = []
        self.lint: LintReport | None = None
        self.notes: list[str] = []
        self.flops = 0
        self.batch: Batch | None = None
        self.explained: CastReport | None = None

    @property
    def losses(self) -> list[Loss]:
        return self.noting.losses

    def result(self) -> SurveyedStep:
        """Returns the report."""
        name, file, line = self.place
        return SurveyedStep(
            name,
            f"{file}:{line}",
            tuple(map(_surveyed, self.losses)),
            self.flops,
            self.batch.size if self.batch else None,
            tuple(row.result() for row in self.rows),
            self.lint,
            self.calls,
            tuple(self.notes),
            self.explained,
        )

    def forget(self) -> None:
        """Lets go of the arrays of the step."""
        self.call = self.marked = None  # type: ignore[assignment]
        for row in self.rows:
            row.program = None

    # ---- the stages, in the order of what is asked for most --------------------------------------

    def examine(self, asked: Any, compiling: Compiling) -> None:
        """Finds what is asked for, the options of a survey. What cannot be found has a note that
        says why."""
        self.asked, self.compiling = asked, compiling
        own = self._trace, self._compile, self._lint, self._compare
        for stage in (*own, self._explain, self._batches, self._time):
            with self._noted("", self.notes):
                stage()

    @contextlib.contextmanager
    def _noted(self, what: str, notes: list[str]) -> Iterator[None]:
        """Notes an error of a stage, which costs no other stage."""
        try:
            with unchecked():
                yield
        except Exception as error:
            notes.append(f"{what}{': ' * bool(what)}{reason_of(error)}")

    def _trace(self) -> None:
        self.rows.append(Row(None, "float32"))
        default = tuple(map(get_policy, POLICIES))
        if not self.asked.policies and self._attentions(get_policy(FUSED)):
            default += (get_policy(FUSED),)
        policies = self.asked.policies or default
        names = [str(p) for p in self.asked.policies] or [*POLICIES, FUSED]
        if not self.losses:
            policies = ()
            self.notes.append(OWN)
        self.rows += [Row(p, n) for p, n in zip(policies, names, strict=False)]
        for row in self.rows:
            advance(STAGE, f"tracing under {row.name}")
            with self._noted("", row.notes):
                row.program = self.call.program(under(row.policy))
                self.traces += 1
                half, total = matmul_flops(_jax.open_jaxpr(row.program.jaxpr)[0])
                row.figures["half_flops"] = half / total if total else 0.0
                if row.policy is None:
                    self.flops = total
                    row.name = WRITTEN if half else row.name
        if scales := self._own_scales():
            self.notes.append(
                f"scales its loss itself ({', '.join(scales)}); the tables are without the scale"
            )
        if not self.flops:
            self.notes.append("The step has no matmuls, which are what runs faster in 16 bits.")

    def _own_scales(self) -> list[str]:
        """Returns the kinds of loss scales among the arguments of the step, and of libraries."""

        def is_scale(x: Any) -> bool:
            return has_protocol(x) or type(x).__name__ in SCALES

        leaves = jax.tree.leaves((self.call.args, self.call.kwargs), is_leaf=is_scale)
        found = [type(x).__name__ for x in leaves if is_scale(x)]
        found = [name for name in found if not name.startswith("NoOp")]
        lines = [loss.site.library.replace("\\", "/") for loss in self.losses]
        found += [SCALES[0] for line in lines if "/dynamic_scale.py" in line]
        return [*dict.fromkeys(found)]

    def _attentions(self, policy: Policy, chip: str = "") -> list[str]:
        """Returns the kernel of each attention on a chip, or why it has none."""
        found: dict[str, None] = {}
        for loss in self.losses:
            args, kwargs = loss.arguments()
            with contextlib.suppress(Exception), traced_for(chip) if chip else unchecked():
                traced = trace(loss.fun, policy, args, kwargs, True)
                found |= dict.fromkeys(traced.replaced.attention.values())
        return [*found]

    def _tell_of_attention(self, row: Row) -> None:
        if row.policy is None or not row.policy.fused_attention:
            return
        for target, chip in self.compiling.chips():
            kernels = self._attentions(row.policy, chip) or ["none is found"]
            row.notes.append(f"attention on {target}: {'; '.join(kernels)}")

    def _compile(self) -> None:
        for row in self.rows:
            self._tell_of_attention(row)
            for target in self.compiling.targets:
                if row.program is None:
                    continue
                advance(STAGE, f"compiling {row.name} for {target}")
                row.compiled[target] = self.compiling.compiled(target, self.call, under(row.policy))
                self.traces += 1

    def _lint(self) -> None:
        advance(STAGE, "lint")
        written = self.rows[0].program
        run = self.asked.run and not self.call.is_abstract
        if run and written is not None:
            jaxpr, _ = _jax.open_jaxpr(written.jaxpr)
            if reason := _too_long(jaxpr):
                self.notes.append(f"lint looked at no values: {reason}")
            run = not (reason or jaxpr.effects)
        with self._noted("lint did not run", self.notes):
            step = self.call.jitted
            linted = lint(_named(step, self.place[0]), run=run, progress=False)
            self.lint = linted(*self.call.args, **self.call.kwargs)

    def _compare(self) -> None:
        halves = [row for row in self.rows if row.computes_in_half]
        if not (self.asked.run and halves and self.losses):
            return
        advance(STAGE, "running up to the gradient")
        try:
            values = values_of(self.call, self.noting, self.marked)
        except Exception as error:
            self.notes.append(f"no error of the gradient is known: {reason_of(error)}")
            return
        # The errors of results count where nothing has a gradient.
        scalar = [is_loss(loss.program.returned(), loss.site.has_aux) for loss in self.losses]
        for loss, given, own in zip(self.losses, values, scalar, strict=True):
            if any(scalar) and not own:
                continue
            if given is None:
                self.notes.append(
                    f"no error of {loss.site.fun} is known: this call of the step does not run it"
                )
                continue
            with self._noted(f"no error of {loss.site.fun}", self.notes):
                self._compare_loss(loss, given, halves)

    def _compare_loss(self, loss: Loss, given: Sequence[Any], rows: Sequence[Row]) -> None:
        exact = Exact(loss, given)
        known: dict[str, tuple[Worst, str]] = {}
        for row in rows:
            # As written, the casts are its own. Storing and computing again are exact.
            policy = (row.policy or get_policy("float32")).replace(storage="fast")
            same = str(policy)
            if same not in known:
                advance(STAGE, f"the gradient's error under {row.name}")
                with self._noted(f"no error of {loss.site.fun}", row.notes):
                    known[same] = exact.worst(policy)
            if same in known:
                (new, note), old = known[same], row.figures.get("gradient_error", -1.0)
                row.notes += [note] * bool(note)
                if not new.gradient_error <= old:
                    row.figures |= new._asdict()
        self.compiling.compilations += exact.compilations

    def _explain(self) -> None:
        policy = next((r.policy for r in self.rows if r.policy and r.computes_in_half), None)
        if policy is None:  # nor are there any where mpjax computes the gradient
            return
        loss = self.losses[0]
        args, kwargs = loss.arguments()
        scalar = is_loss(loss.program.returned(), loss.site.has_aux)
        argnums = loss.argnums if scalar else None
        self.explained = explain(loss.fun, policy, argnums, loss.site.has_aux)(*args, **kwargs)

    def _batches(self) -> None:
        written = self.rows[0].program
        if written is None:
            return
        advance(STAGE, "looking for the batch")
        results = [v.aval for v in _jax.open_jaxpr(written.jaxpr)[0].outvars]
        self.batch = batch_of(self.call, self.noting, results, self.flops)
        if not self.asked.batches:
            return
        if self.batch is None:
            self.notes.append(
                "no batch axis was found, so no largest batch: no axis of the arguments that the "
                "step does not return can have another size"
            )
            return
        for row in self.rows:
            for target, known in row.compiled.items():
                if known.total_bytes is None or not self.compiling.is_target(target):
                    continue
                advance(STAGE, f"the largest batch under {row.name} on {target}")
                with self._noted("no largest batch", row.notes):
                    hook = under(row.policy)
                    most = self.compiling.largest(target, self.call, hook, self.batch, known)
                    row.compiled[target] = dataclasses.replace(known, largest_batch=most)

    def _time(self) -> None:
        if not (jax.default_backend() != "cpu" if self.asked.time is None else self.asked.time):
            return
        if self.call.is_abstract:
            self.notes.append(f"not timed: {self.call.why_abstract}")
            return
        runs: dict[int, Callable[[], Any]] = {}
        for i, row in enumerate(self.rows):
            if row.program is None:
                continue
            advance(STAGE, f"timing {row.name}")
            with self._noted("not timed", row.notes):
                if _jax.open_jaxpr(row.program.jaxpr)[0].effects:
                    raise NoValues("the step calls back into Python")
                jitted = jax.jit(functools.partial(_jax.eval_closed, row.program.jaxpr))
                self.compiling.compilations += 1
                jax.block_until_ready(jitted(*self.call.flat.arrays))
                runs[i] = functools.partial(jitted, *self.call.flat.arrays)
        for i, seconds in timed(runs).items():
            self.rows[i].figures["time_ms"] = 1e3 * statistics.median(seconds)
        first = self.rows[0].figures.get("time_ms")
        for row in self.rows if first else ():
            if "time_ms" in row.figures:
                row.figures["speed"] = first / row.figures["time_ms"]


# ---- inside --------------------------------------------------------------------------------------


def timed(runs: dict[int, Callable[[], Any]]) -> dict[int, list[float]]:
    """Returns the seconds of each run, which take turns."""
    seconds: dict[int, list[float]] = {i: [] for i in runs}
    until = time.perf_counter() + SECONDS * len(runs)
    for number in range(MOST_ROUNDS):
        if number >= LEAST and time.perf_counter() > until:
            break
        for i, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds[i].append(time.perf_counter() - start)
    return {i: each for i, each in seconds.items() if each}


def reason_of(error: BaseException) -> str:
    """Returns the first line of an error."""
    return first_line(error) if isinstance(error, NoValues) else in_one_line(error)


def _too_long(jaxpr: Any) -> str:
    """Returns why a program is too long to run one operation at a time, or ""."""
    count = operations_in(jaxpr)
    if count > MOST_OPERATIONS:
        return (
            f"the step has {count:,} operations with the turns of its loops, too long to run one "
            f"operation at a time (at most {MOST_OPERATIONS:,})"
        )
    kinds = (higher_order(eqn.primitive.name).kind for eqn, _, _ in equations(jaxpr))
    return "it has a loop whose turns are not known before it runs" if WHILE in kinds else ""


def _named(step: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    named.__name__ = named.__qualname__ = name
    return named


def _surveyed(loss: Loss) -> SurveyedLoss:
    parameters = loss.parameters
    return SurveyedLoss(
        loss.site.fun,
        loss.site.source,
        loss.site.transform,
        sum(_jax.size_of(x.shape) for x in parameters),
        sum(_jax.bytes_of(x) for x in parameters),
    )
