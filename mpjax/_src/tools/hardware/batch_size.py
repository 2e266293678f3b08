"""`largest_batch`: the largest batch that fits a device, which this machine need not have."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from mpjax._src.core.base.errors import OutOfMemoryError, brief, check_count
from mpjax._src.core.base.progress import progress_bar
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.grammar import get_policy
from mpjax._src.core.policy.policy import Policy, PolicyLike
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.hardware.aot import job_of
from mpjax._src.tools.hardware.compiler import require
from mpjax._src.tools.hardware.ladder import Setting
from mpjax._src.tools.hardware.largest import Found, largest
from mpjax._src.tools.hardware.report import CompileReport
from mpjax._src.tools.hardware.targets import Target, room_in_words, room_of, size
from mpjax._src.tools.hardware.trials import TRY, Steps, Trials, checked_policy, memory_of

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
        batch: The largest batch size that fits. It was compiled.
        report: The report of `compile_for` for this size.
        next_bytes: The memory of the next size in bytes. None if the compiler rejected it as too
            large, or if the search reached its limit.
        available_bytes: The memory of the device in bytes, without the reserve.
        reserve: The share of the memory that is left free, from 0 to 1.
        limited: Whether the search ended at ``limit``, so that larger batches may fit.
        tries: All sizes that were compiled, in order.
        policy: With ``storage="any"``, the policy of the fastest setting with which the batch fits,
            as a string; else "".
        predicted: Whether the next size is predicted not to fit, and was not compiled: its memory
            is too large by more than the compiled sizes deviate from a line.
        linear: Whether lines through two sizes predicted the memory of the others, within 5% of
            what is available.
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
    predicted: bool = False
    linear: bool = True

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
        taken = f"{self.batch}, with {size(self.report.total_bytes)}"
        room = room_in_words(self.available_bytes, self.reserve, self.report.device_bytes)
        return Document(
            f"The largest batch for {self.target}",
            f"{self.target}: the largest batch is {taken} of {room}",
            (*([f"policy  {self.policy}"] if self.policy else []), *self._beyond()),
            (Table("Compiled", COLUMNS, rows, COLUMNS[2:5:2]),),
            drawing=self.report._drawing,
        )

    def _beyond(self) -> Iterator[str]:
        """Yields what is known of larger batches."""
        if self.limited:
            yield f"The search ended at limit={self.batch}. Larger batches may fit."
            return
        grows = "linear" if self.linear else "not linear"
        yield f"Memory is {grows} in the batch: {len(self.tries)} programs were compiled."
        if self.predicted and self.next_bytes:
            needs = size(self.next_bytes)
            yield f"The next size was not compiled: it is predicted to take {needs}."


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
    """Finds the largest batch whose program fits a target.

    Where memory is linear in the batch, two sizes predict the answer, and a third confirms it: the
    next size is then predicted not to fit. Elsewhere, such as with attention or on TPUs, which pad
    arrays, both sides of the limit are compiled. What is returned was compiled and fits. A larger
    batch is missed only if memory falls again beyond the next size, or if that one is predicted and
    further from the line than all sizes that were compiled.

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
    job = job_of(target, timeout, compiler_options, progress, make_args=make_args, fun=fun)
    _check(multiple_of, limit)
    reserve, available = room_of(job.target, reserve)
    _check_dependence(make_args, multiple_of)
    base = _base(storage, policy)
    steps = Steps(job, fun if base else lambda policy: fun)
    require(job.target)
    args = functools.partial(_args, make_args)
    search = Search(job.target, reserve, available, multiple_of, limit, steps.compiled, args)
    with progress_bar(progress, f"batches for {job.target.name}", TRY):
        if base:
            return search.of_any(steps.ladder(base, args(multiple_of)))
        plain = Setting("", get_policy("float32"))
        return search.result(search.found(plain), plain)


@dataclasses.dataclass
class Search:
    """A search for the largest batch, with what it has compiled."""

    target: Target
    reserve: float
    available: int  # in bytes
    multiple_of: int
    limit: int
    # Compiles a setting for arguments, with what progress calls it.
    compiled: Callable[[Setting, Any, str], CompileReport | None]
    args: Callable[[int], Any]
    tries: list[BatchTry] = dataclasses.field(default_factory=list)
    trials: dict[int, Trials] = dataclasses.field(default_factory=dict)  # by batch

    def at(self, batch: int) -> Trials:
        """Returns the settings that were compiled for a batch."""
        if batch not in self.trials:
            args, what = self.args(batch), f"a batch of {batch}"
            compiled = lambda s: self.compiled(s, args, f"{what}, {s.name}".rstrip(", "))  # noqa: E731
            self.trials[batch] = Trials(compiled, self.available)
        return self.trials[batch]

    def found(self, setting: Setting, known: Sequence[int] = ()) -> Found:
        """Returns the largest batch that fits with a setting, by its multiple."""
        measure = functools.partial(self._measure, setting)
        sizes: dict[float, float] = {units: measure(units) for units in known}
        # In units of `multiple_of`, so that every size between two others is valid.
        return largest(measure, self.available, max(1, self.limit // self.multiple_of), sizes)

    def _measure(self, setting: Setting, units: int) -> float:
        batch = units * self.multiple_of
        one = self.at(batch).measure(setting)
        self.tries.append(BatchTry(batch, one.total_bytes, one.fits, one.seconds, one.setting))
        return memory_of(one)

    def result(self, found: Found, setting: Setting, policy: str = "") -> LargestBatch:
        """Returns what was found, with the report on a setting.

        Raises:
            OutOfMemoryError: If the smallest batch does not fit.
        """
        if not found.most:
            self._refuse_smallest()
        batch, beyond = found.most * self.multiple_of, found.next_size
        report = self.at(batch).reports[setting]
        assert report is not None
        return LargestBatch(
            *(self.target.name, batch, report),
            next_bytes=None if beyond is None or beyond == math.inf else int(beyond),
            available_bytes=self.available,
            reserve=self.reserve,
            limited=beyond is None,
            tries=tuple(self.tries),
            policy=policy,
            predicted=found.predicted,
            linear=found.linear,
        )

    def of_any(self, ladder: Sequence[Setting]) -> LargestBatch:
        """Returns the largest batch that fits with any setting, and the fastest with which it does.

        The last setting of the ladder need not take the least memory, so all are compared at the
        first batch with which it does not fit: once, because that compiles the whole ladder.
        """
        setting = ladder[-1]
        found = self.found(setting)
        if found.next_size is not None:
            beyond = found.most + 1
            compared = self.at(beyond * self.multiple_of)
            compared.measure_all(ladder)
            smallest = compared.smallest()
            needs = memory_of(compared.tries[smallest] if smallest else None)
            if smallest and needs <= self.available:
                setting = smallest
                found = self.found(setting, sorted({1, beyond}))
            else:
                found = found._replace(next_size=needs, predicted=False)
        if found.most:
            fitting = self.at(found.most * self.multiple_of)
            fitting.climb(ladder)
            setting = fitting.best() or setting
        return self.result(found, setting, str(setting.policy))

    def _refuse_smallest(self) -> NoReturn:
        first = self.tries[0]
        needs = "more memory than it has" if first.total_bytes is None else size(first.total_bytes)
        raise OutOfMemoryError(
            f"a batch of {first.batch} does not fit target={self.target.name!r}: it needs {needs}, "
            f"and {size(self.available)} are available (reserve={self.reserve:g}). Use a target "
            "with more memory, a smaller model, mixed precision, or rematerialization "
            "(jax.checkpoint)."
        )


# ---- inside --------------------------------------------------------------------------------------


def _check(multiple_of: int, limit: int) -> None:
    check_count("multiple_of", multiple_of)
    check_count("limit", limit)
    if limit < multiple_of:
        raise ValueError(
            f"limit={brief(limit)} must be at least multiple_of={brief(multiple_of)}, the smallest "
            "batch."
        )


def _base(storage: Any, policy: Any) -> Policy | None:
    if storage not in (None, "any"):
        raise ValueError(
            f"storage={brief(storage)} must be 'any', which tries all settings, or None. For one "
            "setting, build fun with a policy such as 'mixed_bfloat16,storage=lean'."
        )
    return storage and checked_policy(policy)


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
