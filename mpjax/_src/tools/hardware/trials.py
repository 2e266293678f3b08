"""The settings of `fit_memory`, tried: each is traced and compiled once, and compared."""

import contextlib
import dataclasses
import inspect
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from mpjax._src.core.base.errors import CompileError, OutOfMemoryError, brief
from mpjax._src.core.base.progress import advance
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy
from mpjax._src.tools.hardware.aot import Job, Program, compile_program, lower
from mpjax._src.tools.hardware.ladder import Setting, checkpoints, each_alone, rungs
from mpjax._src.tools.hardware.largest import largest
from mpjax._src.tools.hardware.report import CompileReport

TRY = "compiled"  # what progress counts

# What settings after the first may raise, when the first does not: they are then no choice.
REFUSALS = (CompileError, NotImplementedError, TypeError, ValueError)

# Memory and times that differ by no more than this share count as equal: of 16 steps of GPT-2 and
# Llama, the memory predicted without a device was that of a compilation on it within 0.1% for 15.
EQUAL = 1e-3

# A setting is chosen instead of a simpler one, which comes before it, only if its roofline or its
# bytes are smaller by this share. On an H100, 8-bit codes are faster than storage=0.5 by 2.5% on
# ResNet-50 by the roofline, and slower by 2.3% when timed; and the bytes of one step in 16 bits
# differ by up to 0.5% between a compilation without the device and one on it.
MARGIN = 0.03

FIGURES = ("total_bytes", "roofline_ms", "bound", "bytes_accessed")  # of a program

TOO_LARGE = "the compiler refuses it as too large"


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class FitTry:
    """One setting that `fit_memory` compiled.

    Attributes:
        setting: Its name: what it adds to the policy that was given.
        policy: The policy, as a string.
        checkpoint: The name in ``jax.checkpoint_policies`` of what ``jax.checkpoint`` keeps; "" if
            there is none.
        total_bytes: The memory of the program in bytes; None if it was refused.
        roofline_ms: The roofline of the program in milliseconds; infinite if it was refused.
        bound: The longest part of the roofline.
        bytes_accessed: The bytes that it moves.
        fits: Whether its memory is available.
        frontier: Whether no other setting takes less memory in no more time, or less time in no
            more memory; 0.1% counts as equal.
        same_as: The name of an earlier setting that produces the same program; "" if there is none.
        refused: The reason why the program was refused; "" if it was not.
        seconds: The time for tracing and compiling, in seconds.
    """

    setting: str
    policy: str
    checkpoint: str
    total_bytes: int | None = None
    roofline_ms: float = math.inf
    bound: str = ""
    bytes_accessed: float = math.inf
    fits: bool = False
    frontier: bool = False
    same_as: str = ""
    refused: str = ""
    seconds: float = 0.0

    @property
    def remark(self) -> str:
        """What a table says besides the numbers."""
        if self.refused or self.same_as:
            return "refused" if self.refused else f"= {self.same_as}"
        return "frontier" if self.frontier else ""


def checked_policy(policy: Any) -> Policy:
    """Returns a policy, or raises a ValueError if settings of storage do not apply to it."""
    base = get_policy(policy)
    if base.casting != "op":
        raise ValueError(
            f"policy={brief(str(policy))} casts parameters and inputs once, but the settings that "
            "save memory need op-level casting. Use 'mixed_bfloat16', 'mixed_float16' or an O2 "
            "policy, or add casting=op."
        )
    return base


def takes_checkpoint(make_step: Callable[..., Any]) -> bool:
    """Returns whether a function has a parameter ``checkpoint``."""
    try:
        return "checkpoint" in inspect.signature(make_step).parameters
    except (TypeError, ValueError):  # builtins have no signature
        return False


class Steps:
    """The training steps of settings, each program of which is compiled once."""

    def __init__(self, job: Job, make_step: Callable[..., Any]):
        self.job, self.make_step = job, make_step
        self.wraps = takes_checkpoint(make_step)
        _check_takes_policy(make_step, {"checkpoint": None} if self.wraps else {})
        self._traced: dict[Setting, tuple[Sequence[Any], Program, str]] = {}
        self._compiled: dict[str, CompileReport | None] = {}

    def ladder(self, policy: Policy, args: Sequence[Any]) -> list[Setting]:
        """Returns the ladder of a policy, without settings that do not change the program."""
        return rungs(policy, lambda one, other: self._differ(one, other, args))

    def off_ladder(self, ladder: Sequence[Setting], args: Sequence[Any]) -> list[Setting]:
        """Returns the settings that are not on a ladder: each alone, and ``jax.checkpoint``."""
        given = ladder[0]
        alone = [s for s in each_alone(given.policy) if self._differ(given, s, args)]
        return [*alone, *(checkpoints(ladder) if self.wraps else ())]

    def compiled(
        self, setting: Setting, args: Sequence[Any], what: str = ""
    ) -> CompileReport | None:
        """Returns the report, or None if the compiler refused the program as too large."""
        # By the text: settings that change nothing in a program share its compilation.
        program, text = self._lowered(setting, args, what)
        if text not in self._compiled:
            advance(TRY, f"compiling {what or setting.name}", by=0)
            report = None
            with contextlib.suppress(OutOfMemoryError):
                report = compile_program(self.job, program)
            self._compiled[text] = report
            advance(TRY)
        return self._compiled[text]

    def _differ(self, one: Setting, other: Setting, args: Sequence[Any]) -> bool:
        """Returns whether two settings give two programs, or one of them, as a table says, none."""
        try:
            return self._lowered(one, args)[1] != self._lowered(other, args)[1]
        except REFUSALS:
            return True

    def _lowered(
        self, setting: Setting, args: Sequence[Any], what: str = ""
    ) -> tuple[Program, str]:
        """Returns a program, and its text without lines of code, which caches of JAX change."""
        known = self._traced.get(setting)
        # `largest_batch` asks again with other arguments, which are other objects.
        if known is None or known[0] is not args:
            advance(TRY, f"tracing {what or setting.name}", by=0)
            program = lower(self.job.target, self._step(setting), args)
            known = self._traced[setting] = args, program, program.lowered.as_text()
        return known[1:]

    def _step(self, setting: Setting) -> Callable[..., Any]:
        wanted = {"checkpoint": setting.checkpoint} if self.wraps else {}
        made = self.make_step(setting.policy, **wanted)
        step = getattr(made, "step", None)
        if isinstance(made, tuple) and callable(step):
            return jax.jit(step, donate_argnums=0)  # of what build_train_step returns
        if not callable(made):
            raise TypeError(
                f"make_step({str(setting.policy)!r}) returned a {type(made).__name__}, but it must "
                "return the training step, which is a function."
            )
        return made


class Trials:
    """The settings that were compiled, and whether each fits."""

    def __init__(self, compile_setting: Callable[[Setting], CompileReport | None], available: int):
        self.compile_setting, self.available = compile_setting, available
        self.tries: dict[Setting, FitTry] = {}
        self.reports: dict[Setting, CompileReport | None] = {}
        self.order: Sequence[Setting] = ()  # the simplest first

    def measure_all(self, settings: Sequence[Setting]) -> None:
        """Compiles settings, of which the simplest is the first."""
        self.order = settings
        for setting in settings:
            self.measure(setting)

    def climb(self, ladder: Sequence[Setting]) -> bool:
        """Finds the first setting that fits, of which memory falls; returns whether there is one.

        Time need not rise, so what follows is compiled as long as it is no slower.
        """
        self.order, count = ladder, len(ladder)
        first, whole = 0, self.measure(ladder[0])
        if not whole.fits:  # counted from the smallest, the number of settings grows with memory
            sizes: dict[float, float] = {count: memory_of(whole)}
            of = lambda number: memory_of(self.measure(ladder[count - number]))  # noqa: E731
            first = count - largest(of, self.available, count, sizes, proven=True).most
        for one, other in itertools.pairwise(ladder[first:]):
            if cost(self.measure(other)) > cost(self.measure(one)):
                break
        return first < count

    def measure(self, setting: Setting) -> FitTry:
        """Returns the results of a setting, which is compiled if it was not yet."""
        if setting in self.tries:
            return self.tries[setting]
        start, report, refused = time.perf_counter(), None, TOO_LARGE
        try:
            report = self.compile_setting(setting)
        except REFUSALS as error:
            # An error of the policy as it is given is an error of the step, and not of a setting.
            if not self.tries:
                raise
            refused = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        same = (s.name for s, known in self.reports.items() if report and known is report)
        figures = {name: getattr(report, name) for name in FIGURES} if report else {}
        found = FitTry(
            *(setting.name, str(setting.policy), setting.keeping),
            **figures,
            fits=memory_of(report) <= self.available,
            same_as=next(same, ""),
            refused="" if report else refused,
            seconds=round(time.perf_counter() - start, 2),
        )
        self.reports[setting], self.tries[setting] = report, found
        return found

    def best(self) -> Setting | None:
        """Returns the simplest setting that fits, and that none beats in speed by the margin."""
        fitting = {s: t for s, t in self._ordered().items() if t.fits}
        rivals = fitting.values()
        return next((s for s, t in fitting.items() if not any(faster(r, t) for r in rivals)), None)

    def smallest(self) -> Setting | None:
        """Returns the simplest of the settings that take the least memory; None if all refused."""
        sizes = {s: memory_of(t) for s, t in self._ordered().items() if not t.refused}
        least = (1 + EQUAL) * min(sizes.values(), default=0.0)
        return next((s for s, size in sizes.items() if size <= least), None)

    def _ordered(self) -> dict[Setting, FitTry]:
        first = {s: self.tries[s] for s in self.order if s in self.tries}
        return first | self.tries


def with_frontier(tries: Sequence[FitTry]) -> list[FitTry]:
    """Returns settings, those marked that no other one beats in memory or time."""
    return [dataclasses.replace(t, frontier=not _beaten(t, tries)) for t in tries]


def memory_of(one: FitTry | CompileReport | None) -> float:
    """Returns the bytes of a program, infinite if it was refused."""
    return math.inf if one is None or one.total_bytes is None else one.total_bytes


def cost(one: FitTry) -> tuple[float, float]:
    """Returns what is compared for speed: the roofline, and between equal ones the bytes moved."""
    return one.roofline_ms, one.bytes_accessed


def faster(one: FitTry, other: FitTry, margin: float = MARGIN) -> bool:
    """Returns whether a setting is faster than another one by more than a share."""
    (time, moved), (its_time, its_moved) = cost(one), cost(other)
    less = (1 + margin) * moved < its_moved
    return (1 + margin) * time < its_time or (time <= its_time and less)


# ---- inside --------------------------------------------------------------------------------------


def _check_takes_policy(make_step: Callable[..., Any], more: dict[str, Any]) -> None:
    with contextlib.suppress(ValueError):  # builtins have no signature
        signature = inspect.signature(make_step)
        try:
            signature.bind("policy", **more)
        except TypeError as error:
            raise TypeError(
                f"make_step{signature} cannot be called with a policy: {error}. It returns the "
                "training step under a policy, such as functools.partial(mpjax.build_train_step, "
                "loss_fn, optimizer)."
            ) from None


def _beaten(one: FitTry, tries: Iterable[FitTry]) -> bool:
    """Returns whether a setting is beaten by another one, or is an earlier one again."""
    if one.same_as or one.refused:
        return True
    ratios = ((memory_of(t) / memory_of(one), t.roofline_ms / one.roofline_ms) for t in tries)
    # A rival is no worse in either, and better in one by more than what counts as equal.
    return any(max(pair) <= 1 + EQUAL and min(pair) < 1 - EQUAL for pair in ratios)
