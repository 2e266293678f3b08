"""`largest_batch`: the largest batch that fits a device, which this machine need not have."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from mpjax._src.core.base.errors import (
    OutOfMemoryError,
    brief,
    check_callable,
    check_count,
    check_flag,
)
from mpjax._src.core.base.progress import advance, progress_bar
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.hardware.aot import check_timeout, checked_options, compile_program, lower
from mpjax._src.tools.hardware.compiler import compilers, require
from mpjax._src.tools.hardware.ladder import Setting
from mpjax._src.tools.hardware.report import CompileReport
from mpjax._src.tools.hardware.targets import Target, checked_reserve, find_target, size
from mpjax._src.tools.hardware.trials import TRY, Steps, Trials, bisected, checked_policy, fits_in

COLUMNS = ("batch", "memory", "", "seconds", "setting")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class BatchTry:
    """One batch size that `largest_batch` compiled.

    Attributes:
        batch: The batch size.
        total_bytes: The memory of the program in bytes, or None if the compiler rejected it as too
            large.
        fits: Whether that much memory is available.
        seconds: The time for tracing and compiling, in seconds.
        setting: The name of the setting with which it was compiled, with ``storage="any"``.
    """

    batch: int
    total_bytes: int | None
    fits: bool
    seconds: float
    setting: str = ""


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class LargestBatch(Report):
    """The result of `largest_batch`. ``print`` it.

    Attributes:
        target: The name of the target.
        batch: The largest batch size that fits. Both this size and the next one were compiled.
        report: The report of `compile_for` for this size.
        next_bytes: The memory of the next size in bytes. None if the compiler rejected it as too
            large, or if the search reached its limit.
        available_bytes: The memory of the device in bytes, without the reserve.
        reserve: The share of the memory that is left free, from 0 to 1.
        limited: Whether the search ended at ``limit``, so that larger batches may fit.
        tries: All sizes that were compiled, in order.
        policy: With ``storage="any"``, the policy of the fastest setting with which the batch fits,
            as a string; else "".
    """

    target: str
    batch: int
    report: CompileReport
    next_bytes: int | None
    available_bytes: int
    reserve: float
    limited: bool
    tries: tuple[BatchTry, ...]
    policy: str = ""

    def document(self) -> Document:
        rows = tuple(
            (
                f"{t.batch}",
                "rejected" if t.total_bytes is None else size(t.total_bytes),
                "fits" if t.fits else "does not fit",
                f"{t.seconds:.1f}",
                t.setting,
            )
            for t in self.tries
        )
        more = f"The search ended at limit={self.batch}. Larger batches may fit."
        return Document(
            f"The largest batch for {self.target}",
            f"{self.target}: the largest batch is {self.batch}, with "
            f"{size(self.report.total_bytes)} of {size(self.available_bytes)} "
            f"({self.reserve:.0%} of {size(self.report.device_bytes)} left free)",
            (*([f"policy  {self.policy}"] if self.policy else []), *([more] * self.limited)),
            (Table("Compiled", COLUMNS, rows, COLUMNS[2:5:2]),),
            drawing=self.report._drawing,
        )


def largest_batch(
    target: str,
    make_args: Callable[[int], Any],
    fun: Callable[..., Any],
    *,
    multiple_of: int = 1,
    reserve: float | None = None,
    limit: int = 2**20,
    timeout: float = 600.0,
    compiler_options: Mapping[str, Any] | None = None,
    progress: bool = True,
    storage: str | None = None,
    policy: "PolicyLike" = "mixed_bfloat16",
) -> LargestBatch:
    """Finds the largest batch whose program fits a target, by doubling and bisection.

    The memory of a program is the compiler's number: arguments, results, temporary arrays and code.
    Everything else on the device (a second model, the next batch, fragmentation) must fit the
    reserve.

    Args:
        target: The target, as for `compile_for`.
        make_args: A function from the batch size to the tuple of the arguments of ``fun``.
            `jax.ShapeDtypeStruct` arguments need no memory here.
        fun: The function, as for `compile_for`. Jit it with its state donated.
        multiple_of: The batch size must be a multiple of this number, such as the number of
            micro-batches.
        reserve: The share of the device's memory to leave free, from 0 to less than 1. The default
            is 0.25 on GPUs, because JAX gives programs 75% of a GPU unless
            ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise, and 0.05 on TPUs.
        limit: The largest batch size to try.
        timeout: The time limit of each compilation, in seconds.
        compiler_options: XLA flags, as for `compile_for`. Near the limit, XLA for GPUs recomputes
            parts of a step to save memory; ``{"xla_gpu_memory_limit_slop_factor": 1000}`` turns
            this off.
        progress: Whether to show the progress if stderr is a terminal.
        storage: "any" to look for the largest batch that fits with any setting of `fit_memory`.
            ``fun`` is then a function from a policy to the function to compile, as ``make_step``
            there. None, the default, compiles ``fun`` as it is.
        policy: With ``storage="any"``, the policy to which the settings are added, or its name.

    Returns:
        A `LargestBatch`.

    Raises:
        ImportError: If the target's compiler is not installed. The message says what to install.
        OutOfMemoryError: If the smallest batch does not fit.
        CompileError: If the compiler rejects the program for another reason.
        TimeoutError: If one compilation takes longer than ``timeout``.
        TypeError: If ``make_args`` or ``fun`` is not a function, or if ``make_args`` does not
            return a tuple.
        ValueError: If an argument is invalid, or if the shapes that ``make_args`` returns do not
            depend on the batch size.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def make_args(batch):
        ...     return (jax.ShapeDtypeStruct((batch, 1024, 1024), jnp.float32),)
        >>> mpjax.hardware.largest_batch("h100", make_args, jnp.sin).batch  # doctest: +SKIP
        7594
    """
    check_flag("progress", progress)
    accelerator = find_target(target)
    _check(make_args, fun, multiple_of, limit, timeout)
    reserve = checked_reserve(accelerator, reserve)
    _check_dependence(make_args, multiple_of)
    options = checked_options(compiler_options)
    available = int(accelerator.memory * (1 - reserve))
    if storage is not None:
        base = _base(storage, policy)
        steps = Steps(accelerator, fun, timeout, options)
        require(accelerator)
        with progress_bar(progress, f"batches for {accelerator.name}", TRY):
            args = functools.partial(_args, make_args)
            ladder = steps.ladder(base, args(multiple_of))
            smallest = _Smallest(steps, ladder, args, available)
            found = search(accelerator, smallest, available, reserve, multiple_of, limit)
            return smallest.with_fastest(found)
    with (
        compilers(accelerator) as child,
        progress_bar(progress, f"batches for {accelerator.name}", TRY),
    ):

        def compile_batch(batch: int) -> CompileReport | None:
            advance(TRY, f"compiling a batch of {batch}", by=0)
            program, report = lower(accelerator, fun, _args(make_args, batch)), None
            with contextlib.suppress(OutOfMemoryError):
                report = compile_program(child, accelerator, program, timeout, options)
            advance(TRY)
            return report

        return search(accelerator, compile_batch, available, reserve, multiple_of, limit)


def search(
    target: Target,
    compile_batch: Callable[[int], CompileReport | None],
    available: int,
    reserve: float,
    multiple_of: int,
    limit: int,
) -> LargestBatch:
    """Doubles the batch until it does not fit, then bisects."""
    tries: list[BatchTry] = []
    reports: dict[int, CompileReport | None] = {}

    def fits(units: int) -> bool:
        start = time.perf_counter()
        batch = units * multiple_of
        report = reports[units] = compile_batch(batch)
        seconds, good = round(time.perf_counter() - start, 2), fits_in(report, available)
        tries.append(BatchTry(batch, report.total_bytes if report else None, good, seconds))
        return good

    if not fits(1):
        _refuse_smallest(target, tries[0], available, reserve)
    # In units of `multiple_of`, so that every size between two others is valid.
    good, bad = _bracketed(fits, max(1, limit // multiple_of))
    report, beyond = reports[good], reports.get(bad)
    assert report is not None
    return LargestBatch(
        target=target.name,
        batch=good * multiple_of,
        report=report,
        next_bytes=beyond.total_bytes if beyond else None,
        available_bytes=available,
        reserve=reserve,
        limited=not bad,
        tries=tuple(tries),
    )


class _Smallest:
    """Compiles batches with the setting that takes the least memory.

    That is the last one of the ladder, until a batch does not fit: there all settings are compared.
    """

    def __init__(
        self, steps: Steps, ladder: Sequence[Setting], args: Callable[[int], Any], available: int
    ):
        self.steps, self.ladder, self.args, self.available = steps, ladder, args, available
        self.setting, self.compared = ladder[-1], False
        self.names: dict[int, str] = {}

    def __call__(self, batch: int) -> CompileReport | None:
        args = self.args(batch)
        report = self.steps.compiled(self.setting, args)
        # Once, because a comparison compiles the whole ladder.
        if not self.compared and not fits_in(report, self.available):
            self.compared = True
            reports = {s: self.steps.compiled(s, args) for s in reversed(self.ladder)}
            sizes = {s: r.total_bytes for s, r in reports.items() if r}
            self.setting = min(sizes, key=sizes.__getitem__, default=self.setting)
            report = reports[self.setting]
        self.names[batch] = self.setting.name
        return report

    def with_fastest(self, found: LargestBatch) -> LargestBatch:
        """Returns the result of a search with the fastest setting with which its batch fits."""
        args = self.args(found.batch)
        trials = Trials(lambda setting: self.steps.compiled(setting, args), self.available)
        trials.climb(self.ladder)
        best = trials.best() or self.setting  # else the ladder's last setting is not the smallest
        report = trials.reports.get(best) or self.steps.compiled(best, args)
        assert report is not None
        tries = tuple(dataclasses.replace(t, setting=self.names[t.batch]) for t in found.tries)
        return dataclasses.replace(found, report=report, policy=str(best.policy), tries=tries)


# ---- inside --------------------------------------------------------------------------------------


def _check(make_args: Any, fun: Any, multiple_of: int, limit: int, timeout: float) -> None:
    check_callable(make_args, "make_args")
    check_callable(fun, "fun")
    check_timeout(timeout)
    check_count("multiple_of", multiple_of)
    check_count("limit", limit)
    if limit < multiple_of:
        raise ValueError(
            f"limit={brief(limit)} must be at least multiple_of={brief(multiple_of)}, the smallest "
            "batch."
        )


def _base(storage: Any, policy: Any) -> Policy:
    if storage != "any":
        raise ValueError(
            f"storage={brief(storage)} must be 'any', which tries all settings, or None. For one "
            "setting, build fun with a policy such as 'mixed_bfloat16,storage=lean'."
        )
    return checked_policy(policy)


def _args(make_args: Callable[[int], Any], batch: int) -> tuple[Any, ...]:
    args = make_args(batch)
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"make_args({batch}) returned a {type(args).__name__}, but it must return a tuple of "
            "the arguments of fun, such as (state, batch)."
        )
    return tuple(args)


def _check_dependence(make_args: Callable[[int], Any], multiple_of: int) -> None:
    small, large = (jax.tree.map(_shape, _args(make_args, units * multiple_of)) for units in (1, 2))
    # Such a program is the same for all sizes, and the search would end at its limit.
    if small == large:
        raise ValueError(
            f"make_args returns the same shapes for batches of {multiple_of} and "
            f"{2 * multiple_of}: {small!r}. The shapes must depend on the batch size, its "
            "argument."
        )


def _shape(leaf: Any) -> Any:
    return str(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) if hasattr(leaf, "dtype") else leaf


def _bracketed(fits: Callable[[int], bool], most: int) -> tuple[int, int]:
    """Returns the largest number that fits, and the next one, or 0 if all up to ``most`` fit.

    1 is known to fit. Memory grows with the batch, so what does not fit bounds all that is larger.
    """
    good, bad = 1, 0
    # Doubling first, because what is far beyond the answer takes long to compile.
    while good < most and not bad:
        units = min(2 * good, most)
        good, bad = (units, 0) if fits(units) else (good, units)
    return bisected(fits, good, bad) if bad else (good, bad)


def _refuse_smallest(target: Target, first: BatchTry, available: int, reserve: float) -> None:
    needs = "more memory than it has" if first.total_bytes is None else size(first.total_bytes)
    raise OutOfMemoryError(
        f"a batch of {first.batch} does not fit target={target.name!r}: it needs {needs}, and "
        f"{size(available)} are available (reserve={reserve:g}). Use a target with more memory, a "
        "smaller model, mixed precision, or rematerialization (jax.checkpoint)."
    )
