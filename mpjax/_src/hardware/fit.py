"""`fit_memory`: the fastest setting with which a training step fits a device's memory."""

import dataclasses
import inspect
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from mpjax._src.base.errors import CompileError, OutOfMemoryError, brief, check_callable
from mpjax._src.base.progress import advance, check_progress, progress_bar
from mpjax._src.base.public import public
from mpjax._src.document.model import Document, Table
from mpjax._src.document.plots import plot_fit
from mpjax._src.document.report import Report
from mpjax._src.hardware.aot import Program, check_timeout, checked_options, compile_program, lower
from mpjax._src.hardware.compiler import Options, compilers, require
from mpjax._src.hardware.ladder import Setting, checkpoints, each_alone, rungs
from mpjax._src.hardware.report import CompileReport
from mpjax._src.hardware.targets import Target, checked_reserve, find_target, size
from mpjax._src.policy.policy import Policy, PolicyLike, get_policy

TRY = "compiled"  # what progress counts

# What settings after the first may raise, when the first does not: they are then no choice.
REFUSALS = (CompileError, NotImplementedError, TypeError, ValueError)

# In how many steps a smaller batch is looked for.
STEPS = 16

EQUAL = 1e-3  # memory and times that differ by no more than this share count as equal

TOO_LARGE = "the compiler refuses it as too large"

COLUMNS = ("setting", "memory", "fits", "roofline, ms", "GB moved", "")


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
        same_as: The name of an earlier setting that gives the same program; "" if there is none.
        refused: The reason why the program was refused; "" if it was not.
        seconds: The time for tracing and compiling, in seconds.
    """

    setting: str
    policy: str
    checkpoint: str
    total_bytes: int | None
    roofline_ms: float
    bound: str
    bytes_accessed: float
    fits: bool
    frontier: bool = False
    same_as: str = ""
    refused: str = ""
    seconds: float = 0.0

    @property
    def remark(self) -> str:
        """What a table says beside the figures."""
        if self.refused or self.same_as:
            return "refused" if self.refused else f"= {self.same_as}"
        return "frontier" if self.frontier else ""


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class MemoryFit(Report):
    """The result of `fit_memory`. ``print`` it, and train with ``policy``.

    Attributes:
        target: The name of the target.
        setting: The name of the fastest setting that fits, or of the smallest one if none fits; ""
            if the compiler refused all of them as too large.
        policy: The policy of the fastest setting that fits, as a string; None if none fits.
        checkpoint: The name in ``jax.checkpoint_policies`` of what ``jax.checkpoint`` keeps in that
            setting; "" if it has none.
        report: The report of `compile_for` for ``setting``; None if there is none.
        device_bytes: The memory of the device, in bytes.
        available_bytes: The same without the reserve.
        reserve: The share of the memory that is kept free, from 0 to 1.
        tries: All settings that were compiled, in order.
        every: Whether all settings were compiled.
        rows: The size of the batch, if nothing fits and the size is known; else None.
        fitting_rows: Of these, the number with which the smallest setting fits, in steps of a
            sixteenth; 0 if it fits with none, and None if that was not looked for.
    """

    target: str
    setting: str
    policy: str | None
    checkpoint: str
    report: CompileReport | None
    device_bytes: int
    available_bytes: int
    reserve: float
    tries: tuple[FitTry, ...]
    every: bool
    rows: int | None = None
    fitting_rows: int | None = None

    _also = ("fits",)

    @property
    def fits(self) -> bool:
        """Whether a setting fits."""
        return self.policy is not None

    def plot(self, path: str | Path | None = None) -> Any:
        """Draws the memory of all settings over their rooflines, and the frontier.

        Args:
            path: The PNG file to write, or None.

        Returns:
            The matplotlib figure.

        Raises:
            ImportError: If matplotlib, which the extra ``plot`` installs, is missing.
            ValueError: If no setting compiles.
        """
        return plot_fit(self, path)

    def document(self) -> Document:
        rows = tuple(map(_cells, sorted(self.tries, key=lambda t: (_cost(t), _bytes(t)))))
        title = "Settings, the fastest first"
        table = Table(title, COLUMNS, rows, (COLUMNS[0], COLUMNS[2], COLUMNS[-1]), folded=0)
        drawing = {"drawing": self.report._drawing} if self.report else {}
        lines, notes = tuple(self._lines()), tuple(self._notes())
        return Document(
            f"What fits {self.target}", self._sentence(), lines, (table,), notes, **drawing
        )

    def _sentence(self) -> str:
        room = (
            f"{size(self.available_bytes)} ({self.reserve:.0%} of {size(self.device_bytes)} kept "
            "free)"
        )
        if self.report is None:
            return f"{self.target}: NOTHING FITS {room}: its compiler refuses all settings"
        told = f"{self.setting}, with {size(self.report.total_bytes)}"
        if self.fits:
            return f"{self.target}: the fastest setting that fits is {told} of {room}"
        over = size(self.report.total_bytes - self.available_bytes)
        return f"{self.target}: NOTHING FITS {room}. The smallest is {told}: {over} too much"

    def _lines(self) -> Iterable[str]:
        if self.fits:
            yield f"policy  {self.policy}"
        if self.checkpoint:
            keeps = f"jax.checkpoint_policies.{self.checkpoint}"
            yield f"with jax.checkpoint(..., policy={keeps}) where make_step has checkpoint(...)"
        if self.fitting_rows:
            yield (
                f"With it, a batch of {self.fitting_rows} fits instead of {self.rows}. "
                "accumulate_steps= splits a batch into micro-batches."
            )
        elif self.fitting_rows == 0:
            yield "With it, no batch fits: the training state is too large."

    def _notes(self) -> Iterable[str]:
        yield from self.report.notes if self.report else ()
        told = [t for t in self.tries if not t.refused]
        if len(told) > 1 and all(t.same_as for t in told[1:]):
            yield (
                "All settings give the same program: make_step does not use its policy, or nothing "
                "that the step differentiates runs under autocast."
            )
        if not self.every:
            yield "Few settings were compiled. every=True, or --every, shows the whole frontier."
        yield from (f"{t.setting}: {t.refused}" for t in self.tries if t.refused)


def fit_memory(
    target: str,
    make_step: Callable[..., Any],
    *args: Any,
    policy: "PolicyLike" = "mixed_bfloat16",
    every: bool = False,
    reserve: float | None = None,
    timeout: float = 600.0,
    compiler_options: Mapping[str, Any] | None = None,
    progress: bool = True,
) -> MemoryFit:
    """Finds the fastest setting with which a training step fits the memory of a target.

    The settings are a ladder, on which each step keeps fewer bytes for the backward pass than the
    one before: the policy as it is given, with fused attention, and with ``storage=lean``. A
    bisection compiles few of them. Among those that fit, the fastest is the one with the smallest
    roofline (`CompileReport.roofline_ms`), which is a bound and not a forecast.

    Args:
        target: The target, as for `compile_for`.
        make_step: A function from a policy to the training step, such as
            ``lambda policy: jax.jit(build_train_step(loss, optimizer, policy)[1],
            donate_argnums=0)``. Of the pair that `build_train_step` returns, the step is taken, and
            its state is donated. If the function has a parameter ``checkpoint``, it gets a function
            to put around the loss, or around each layer: settings with ``jax.checkpoint`` are then
            compiled too, where none of the ladder fits or if ``every`` is set.
        *args: The arguments of the step, as for `compile_for`: its state and the batch, as
            `jax.ShapeDtypeStruct`.
        policy: The policy to which the settings are added, or its name. It casts op by op.
        every: Whether to compile all settings, also those that bisection can leave out, and each
            alone. The report then has the whole frontier.
        reserve: The share of the device's memory to keep free, as for `largest_batch`.
        timeout: The time limit of each compilation, in seconds.
        compiler_options: XLA flags, as for `compile_for`.
        progress: Whether to show the progress if stderr is a terminal.

    Returns:
        A `MemoryFit`. If nothing fits, it says what the smallest setting lacks, and which batch
        would fit: the first axis of all arrays of the last argument is then the batch.

    Raises:
        ImportError: If the target's compiler is not installed. The message says what to install.
        CompileError: If the compiler rejects the program for another reason than its memory.
        TimeoutError: If one compilation takes longer than ``timeout``.
        TypeError: If ``make_step`` is not a function or does not return one.
        ValueError: If an argument is not legal.

    Example:
        >>> import functools, jax, jax.numpy as jnp, mpjax, optax
        >>> def loss_fn(params, batch):
        ...     return jnp.mean(jax.nn.gelu(batch @ params["up"]) @ params["down"])
        >>> shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
        >>> params = {"up": shape((1024, 4096)), "down": shape((4096, 1024))}
        >>> make_step = functools.partial(mpjax.build_train_step, loss_fn, optax.adamw(3e-4))
        >>> state = jax.eval_shape(make_step("mixed_bfloat16").init, params)
        >>> batch = shape((65536, 1024))
        >>> fit = mpjax.hardware.fit_memory("a100", make_step, state, batch)  # doctest: +SKIP
        >>> fit.policy  # doctest: +SKIP
        'mixed_bfloat16'

    The budget for activations is that of PyTorch's ``activation_memory_budget``, and the frontier
    that of Checkmate (Jain et al., 2020, https://arxiv.org/abs/1910.02653), over whole settings.
    """
    accelerator = find_target(target)
    check_callable(make_step, "make_step")
    check_progress(progress)
    check_timeout(timeout)
    base = checked_policy(policy)
    reserve = checked_reserve(accelerator, reserve)
    steps = Steps(accelerator, make_step, timeout, checked_options(compiler_options))
    require(accelerator)
    available = int(accelerator.memory * (1 - reserve))
    with progress_bar(progress, f"fit {accelerator.name}", TRY):
        ladder = steps.ladder(base, args)
        trials = Trials(lambda setting: steps.compiled(setting, args), available)
        every = every or not trials.climb(ladder)
        if every:  # the last setting of the ladder need not be the smallest of all
            trials.all_of([*ladder, *steps.beside(ladder, args)])
        found = trials.result(accelerator, reserve, every)
        if found.fits:
            return found
        smallest = trials.smallest() or ladder[-1]
        return _with_rows(found, args, lambda cut: steps.compiled(smallest, cut))


# ---- the parts, which largest_batch uses too -----------------------------------------------------


def checked_policy(policy: Any) -> Policy:
    """Returns a policy, or raises a ValueError if settings of storage do not apply to it."""
    base = get_policy(policy)
    if base.casting != "op":
        raise ValueError(
            f"policy={brief(str(policy))} casts at the boundary of the function, and the settings "
            "that save memory are those of op-level casting. Use 'mixed_bfloat16', 'mixed_float16' "
            "or an O2 policy, or add casting=op."
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

    def __init__(
        self, target: Target, make_step: Callable[..., Any], timeout: float, options: Options
    ):
        self.target, self.make_step = target, make_step
        self.timeout, self.options = timeout, options
        self.wraps = takes_checkpoint(make_step)
        self._traced: dict[Setting, tuple[Sequence[Any], Program, str]] = {}
        self._compiled: dict[str, CompileReport | None] = {}

    def ladder(self, policy: Policy, args: Sequence[Any]) -> list[Setting]:
        """Returns the ladder of a policy, without settings that do not change the program."""
        return rungs(policy, lambda one, other: self._differ(one, other, args))

    def beside(self, ladder: Sequence[Setting], args: Sequence[Any]) -> list[Setting]:
        """Returns the settings that are not on a ladder: each alone, and ``jax.checkpoint``."""
        given = ladder[0]
        alone = [s for s in each_alone(given.policy) if self._differ(given, s, args)]
        return [*alone, *(checkpoints(ladder) if self.wraps else ())]

    def compiled(self, setting: Setting, args: Sequence[Any]) -> CompileReport | None:
        """Returns the report, or None if the compiler refused the program as too large."""
        program, text = self._lowered(setting, args)
        if text not in self._compiled:
            advance(TRY, f"compiling {setting.name}", by=0)
            self._compiled[text] = self._report(program)
            advance(TRY)
        return self._compiled[text]

    def _differ(self, one: Setting, other: Setting, args: Sequence[Any]) -> bool:
        """Returns whether two settings give two programs, or one of them, as a table says, none."""
        try:
            return self._lowered(one, args)[1] != self._lowered(other, args)[1]
        except REFUSALS:
            return True

    def _lowered(self, setting: Setting, args: Sequence[Any]) -> tuple[Program, str]:
        """Returns a program, and its text without lines of code, which caches of JAX change."""
        known = self._traced.get(setting)
        if known is None or known[0] is not args:
            advance(TRY, f"tracing {setting.name}", by=0)
            program = lower(self.target, self._step(setting), args)
            known = self._traced[setting] = args, program, program.lowered.as_text()
        return known[1:]

    def _report(self, program: Program) -> CompileReport | None:
        # A process for each program: a compiler that crashes must not take others with it.
        with compilers(self.target) as child:
            try:
                return compile_program(child, self.target, program, self.timeout, self.options)
            except OutOfMemoryError:
                return None

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

    def all_of(self, settings: Iterable[Setting]) -> None:
        """Compiles settings."""
        for setting in settings:
            self.measure(setting)

    def climb(self, ladder: Sequence[Setting]) -> bool:
        """Finds the first setting that fits by bisection; returns whether there is one.

        Memory falls along the ladder. Time need not rise, so what follows is compiled as long as it
        is no slower.
        """
        bad, good = 0, len(ladder) - 1
        if self.measure(ladder[0]).fits:
            good = 0
        elif not self.measure(ladder[-1]).fits:
            return False
        while good - bad > 1:
            middle = (bad + good) // 2
            bad, good = (bad, middle) if self.measure(ladder[middle]).fits else (middle, good)
        for slower, faster in zip(ladder[good:], ladder[good + 1 :], strict=False):
            if _cost(self.measure(faster)) > _cost(self.measure(slower)):
                break
        return True

    def measure(self, setting: Setting) -> FitTry:
        """Returns the figures of a setting, which is compiled if it was not yet."""
        if setting not in self.tries:
            start = time.perf_counter()
            found = self._measured(setting)
            seconds = round(time.perf_counter() - start, 2)
            self.tries[setting] = dataclasses.replace(found, seconds=seconds)
        return self.tries[setting]

    def _measured(self, setting: Setting) -> FitTry:
        named = setting.name, str(setting.policy), setting.keeping
        try:
            report = self.reports[setting] = self.compile_setting(setting)
        except REFUSALS as error:
            if not self.tries:
                raise
            text = f"{type(error).__name__}: {str(error).splitlines()[0]}"
            return FitTry(*named, None, math.inf, "", math.inf, False, refused=text)
        if report is None:
            return FitTry(*named, None, math.inf, "", math.inf, False, refused=TOO_LARGE)
        same = next((s for s, r in self.reports.items() if r is report and s != setting), None)
        fits = report.total_bytes <= self.available
        return FitTry(
            *named,
            report.total_bytes,
            report.roofline_ms,
            report.bound,
            report.bytes_accessed,
            fits,
            same_as=same.name if same else "",
        )

    def best(self) -> Setting | None:
        """Returns the fastest setting that fits; of equally fast ones, the one that moves least."""
        fitting = {s: _cost(t) for s, t in self.tries.items() if t.fits}
        return min(fitting, key=lambda s: fitting[s], default=None)

    def smallest(self) -> Setting | None:
        """Returns the setting that takes the least memory, or None if all were refused."""
        sizes = {s: t.total_bytes for s, t in self.tries.items() if t.total_bytes is not None}
        return min(sizes, key=lambda s: sizes[s], default=None)

    def result(self, target: Target, reserve: float, every: bool) -> MemoryFit:
        """Returns the report on all that was compiled."""
        best = self.best()
        told = best or self.smallest()
        return MemoryFit(
            target=target.name,
            setting=told.name if told else "",
            policy=str(best.policy) if best else None,
            checkpoint=best.keeping if best else "",
            report=self.reports[told] if told else None,
            device_bytes=target.memory,
            available_bytes=self.available,
            reserve=reserve,
            tries=tuple(with_frontier([*self.tries.values()])),
            every=every,
        )


def with_frontier(tries: Sequence[FitTry]) -> list[FitTry]:
    """Returns settings, those marked that no other one beats in memory or time."""
    return [dataclasses.replace(t, frontier=not _beaten(t, tries)) for t in tries]


# ---- inside --------------------------------------------------------------------------------------


def _beaten(one: FitTry, tries: Iterable[FitTry]) -> bool:
    """Returns whether a setting is beaten by another one, or is an earlier one again."""
    if one.same_as or one.refused:
        return True
    ratios = ((_bytes(t) / _bytes(one), t.roofline_ms / one.roofline_ms) for t in tries)
    return any(max(pair) <= 1 + EQUAL and min(pair) < 1 - EQUAL for pair in ratios)


def _bytes(one: FitTry) -> float:
    return math.inf if one.total_bytes is None else one.total_bytes


def _cost(one: FitTry) -> tuple[float, float]:
    return one.roofline_ms, one.bytes_accessed


def _cells(one: FitTry) -> tuple[str, ...]:
    if one.total_bytes is None:
        return (one.setting, "-", "NO", "-", "-", one.remark)
    fits, moved = "yes" if one.fits else "NO", f"{one.bytes_accessed / 1e9:.4g}"
    return (one.setting, size(one.total_bytes), fits, f"{one.roofline_ms:.4g}", moved, one.remark)


def _with_rows(
    found: MemoryFit,
    args: Sequence[Any],
    compile_cut: Callable[[Sequence[Any]], CompileReport | None],
) -> MemoryFit:
    """Returns a report with the number of rows that fit, by bisection, if the batch is known."""
    rows = _rows(args)
    if not rows:
        return found
    devices = find_target(found.target).devices
    step = devices * math.ceil(rows / STEPS / devices)
    good, bad = 0, math.ceil(rows / step)
    try:
        while bad - good > 1:
            middle = (good + bad) // 2
            report = compile_cut(_cut(args, middle * step))
            fits = report is not None and report.total_bytes <= found.available_bytes
            good, bad = (middle, bad) if fits else (good, middle)
    except REFUSALS:  # the length of the batch is written in the step
        return found
    return dataclasses.replace(found, rows=rows, fitting_rows=good * step)


def _rows(args: Sequence[Any]) -> int | None:
    """Returns the length of the first axis of all arrays of the last argument, if it is one."""
    shapes = {getattr(leaf, "shape", ()) for leaf in jax.tree.leaves(args[-1:])}
    lengths = {shape[0] for shape in shapes if shape}
    return lengths.pop() if len(lengths) == 1 and () not in shapes else None


def _cut(args: Sequence[Any], rows: int) -> tuple[Any, ...]:
    """Returns the arguments with fewer rows in the last one."""

    def cut(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype, sharding=sharding)

    return (*args[:-1], jax.tree.map(cut, args[-1]))
