"""The largest batch that fits a device that need not be there."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from mpjax._src.errors import OutOfMemoryError, brief, check_callable
from mpjax._src.hardware.aot import (
    check_timeout,
    checked_options,
    compile_program,
    lower,
)
from mpjax._src.hardware.compiler import compilers
from mpjax._src.hardware.report import CompileReport
from mpjax._src.hardware.targets import GPU_PREALLOCATED, Target, find_target, size
from mpjax._src.reports import Report, table, wrapped


@dataclasses.dataclass(frozen=True)
class BatchTry:
    """One batch that was compiled.

    Attributes:
        batch: Its size.
        total_bytes: The memory that it takes; None where the compiler refused it as too large.
        fits: Whether that is available.
        seconds: What tracing and compiling took.
    """

    batch: int
    total_bytes: int | None
    fits: bool
    seconds: float


@dataclasses.dataclass(frozen=True)
class LargestBatch(Report):
    """What `largest_batch` found. ``print`` it.

    Attributes:
        target: The name of the target.
        batch: The largest size that fits: it was compiled, and so was the next one.
        report: What it takes, as `compile_for` reports it.
        next_bytes: What the next size would take; None where the compiler refused it as too large,
            or the limit was reached.
        available_bytes: The device's memory without the reserve.
        reserve: The share of the memory that was kept free.
        limited: Whether the search ended at its limit, and larger batches would fit.
        tries: All that was compiled, in order.
    """

    target: str
    batch: int
    report: CompileReport
    next_bytes: int | None
    available_bytes: int
    reserve: float
    limited: bool
    tries: tuple[BatchTry, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns all of it as plain data, ready for JSON."""
        return {
            **vars(self),
            "report": self.report.to_dict(),
            "tries": [dataclasses.asdict(t) for t in self.tries],
        }

    def __str__(self) -> str:
        found = (
            f"{self.target}: the largest batch is {self.batch}, with "
            f"{size(self.report.total_bytes)} of {size(self.available_bytes)} "
            f"({self.reserve:.0%} of {size(self.report.device_bytes)} kept free)"
        )
        rows = [
            (
                f"{t.batch}",
                "refused" if t.total_bytes is None else size(t.total_bytes),
                "fits" if t.fits else "does not fit",
                f"{t.seconds:.1f}",
            )
            for t in self.tries
        ]
        lines = [found, *table(("batch", "memory", "", "seconds"), rows, words=("",))]
        if self.limited:
            lines.append(f"The search ended at limit={self.batch}: larger batches would fit too.")
        return "\n".join(map(wrapped, lines))


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
) -> LargestBatch:
    """Finds, by doubling and bisection, the largest batch whose program fits a target.

    What a program takes is what its compiler says: arguments, results, all between, code. What
    else lies on the device (a second model, the next batch, fragmentation) must fit the reserve.

    Args:
        target: As for `compile_for`.
        make_args: A function of the batch's size that returns the tuple of ``fun``'s arguments;
            best of `jax.ShapeDtypeStruct`, which need no memory here.
        fun: As for `compile_for`; donate its state.
        multiple_of: Of which number the batch must be a multiple: that of micro-batches, say.
        reserve: The share of the device's memory to keep free. By default 0.25 on GPUs, because
            JAX gives programs 75% of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise,
            and 0.05 on TPUs.
        limit: Where to end the search.
        timeout: Seconds that each compilation may take.
        compiler_options: As for `compile_for`. Near the limit, XLA for GPUs computes parts of a
            step again to save memory; ``{"xla_gpu_memory_limit_slop_factor": 1000}`` keeps it from
            that.

    Returns:
        A `LargestBatch`.

    Raises:
        ImportError: If the target's compiler is not installed; it says what to install.
        OutOfMemoryError: If not even the smallest batch fits.
        CompileError: If the compiler refuses the program for another reason.
        TimeoutError: If one compilation takes longer than ``timeout``.
        TypeError, ValueError: If an argument is not legal; if ``make_args`` does not depend on the
            batch.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax
        >>> def make_args(batch):
        ...     return (jax.ShapeDtypeStruct((batch, 1024, 1024), jnp.float32),)
        >>> mpjax.largest_batch("h100", make_args, jnp.sin).batch  # doctest: +SKIP
        7594
    """
    found = find_target(target)
    reserve = found.reserve if reserve is None else reserve
    _check(make_args, fun, multiple_of, reserve, limit, timeout)
    _check_dependence(make_args, multiple_of)
    options = checked_options(compiler_options)
    available = int(found.memory * (1 - reserve))
    with compilers(found) as child:

        def compile_batch(batch: int) -> CompileReport | None:
            program = lower(found, fun, _args(make_args, batch))
            try:
                return compile_program(child, found, program, timeout, options)
            except OutOfMemoryError:
                return None

        return search(found, compile_batch, available, reserve, multiple_of, limit)


def search(
    target: Target,
    compile_batch: Callable[[int], CompileReport | None],
    available: int,
    reserve: float,
    multiple_of: int,
    limit: int,
) -> LargestBatch:
    """Doubles until a batch does not fit, then bisects."""
    tries: list[BatchTry] = []
    reports: dict[int, CompileReport | None] = {}

    def fits(units: int) -> bool:
        start = time.perf_counter()
        batch = units * multiple_of
        report = reports[units] = compile_batch(batch)
        total = None if report is None else report.total_bytes
        good = total is not None and total <= available
        tries.append(BatchTry(batch, total, good, round(time.perf_counter() - start, 2)))
        return good

    if not fits(1):
        _refuse_smallest(target, tries[0], available, reserve)
    most = max(1, limit // multiple_of)
    good, bad = 1, 0
    while good < most and not bad:
        units = min(2 * good, most)
        if fits(units):
            good = units
        else:
            bad = units
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    report, beyond = reports[good], reports.get(bad)
    assert report is not None
    return LargestBatch(
        target=target.name,
        batch=good * multiple_of,
        report=report,
        next_bytes=None if beyond is None else beyond.total_bytes,
        available_bytes=available,
        reserve=reserve,
        limited=not bad,
        tries=tuple(tries),
    )


# ---- inside --------------------------------------------------------------------------------------


def _check(
    make_args: Any, fun: Any, multiple_of: int, reserve: float, limit: int, timeout: float
) -> None:
    check_callable(make_args, "make_args")
    check_callable(fun, "fun")
    check_timeout(timeout)
    for name, number in (("multiple_of", multiple_of), ("limit", limit)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name}={brief(number)} must be a whole number, 1 or more.")
    if limit < multiple_of:
        raise ValueError(
            f"limit={brief(limit)} must not be less than multiple_of={brief(multiple_of)}."
        )
    legal = isinstance(reserve, int | float) and not isinstance(reserve, bool)
    if not legal or not 0 <= reserve < 1:
        raise ValueError(
            f"reserve={brief(reserve)} must be a share of the device's memory, from 0 to less "
            f"than 1, or None: {1 - GPU_PREALLOCATED:g} on GPUs, which JAX keeps free by default, "
            "and 0.05 on TPUs."
        )


def _args(make_args: Callable[[int], Any], batch: int) -> tuple[Any, ...]:
    args = make_args(batch)
    if not isinstance(args, tuple | list):
        raise TypeError(
            f"make_args({batch}) returned a {type(args).__name__}; it must return the tuple of "
            "fun's arguments, such as (state, batch)."
        )
    return tuple(args)


def _check_dependence(make_args: Callable[[int], Any], multiple_of: int) -> None:
    small, large = (jax.tree.map(_shape, _args(make_args, units * multiple_of)) for units in (1, 2))
    if small == large:
        raise ValueError(
            f"make_args gives the same shapes for a batch of {multiple_of} and of "
            f"{2 * multiple_of}: {small!r}. It must make arguments of the size that it is called "
            "with."
        )


def _shape(leaf: Any) -> Any:
    return str(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)) if hasattr(leaf, "dtype") else leaf


def _refuse_smallest(target: Target, first: BatchTry, available: int, reserve: float) -> None:
    needs = "more memory than it has" if first.total_bytes is None else size(first.total_bytes)
    raise OutOfMemoryError(
        f"not even a batch of {first.batch} fits target={target.name!r}: it takes {needs}, and "
        f"{size(available)} are available (reserve={reserve:g}). Use a target with more memory, a "
        "smaller model, mixed precision, or rematerialisation (jax.checkpoint)."
    )
