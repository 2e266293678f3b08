"""`fit_memory`: the fastest setting with which a training step fits a device's memory."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from mpjax._src.core.base.errors import check_flag
from mpjax._src.core.base.progress import progress_bar
from mpjax._src.core.base.public import public
from mpjax._src.core.policy.policy import PolicyLike
from mpjax._src.tools.document.model import Document, Table
from mpjax._src.tools.document.plots import plot_fit
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.hardware import trials
from mpjax._src.tools.hardware.aot import job_of
from mpjax._src.tools.hardware.compiler import require
from mpjax._src.tools.hardware.largest import largest
from mpjax._src.tools.hardware.report import CompileReport
from mpjax._src.tools.hardware.targets import Target, find_target, room_in_words, room_of, size

# In how many steps a smaller batch is looked for.
STEPS = 16

COLUMNS = ("setting", "memory", "fits", "roofline, ms", "GB moved", "")


@public("mpjax.reports")
@dataclasses.dataclass(frozen=True)
class MemoryFit(Report):
    """The result of `fit_memory`. ``print`` it, and train with ``policy``.

    Attributes:
        target: The name of the target.
        setting: The name of the fastest setting that fits, where 3% count as equal and the one that
            adds less is taken; or of the smallest one if none fits; "" if the compiler refused all
            of them as too large.
        policy: The policy of that setting, as a string; None if none fits.
        checkpoint: The name in ``jax.checkpoint_policies`` of what ``jax.checkpoint`` keeps in that
            setting; "" if it has none.
        report: The report of `compile_for` for ``setting``; None if there is none.
        device_bytes: The memory of the device, in bytes.
        available_bytes: The same without the reserve.
        reserve: The share of the memory that is left free, from 0 to 1.
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
    tries: tuple[trials.FitTry, ...]
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
        ordered = sorted(self.tries, key=lambda t: (trials.cost(t), trials.memory_of(t)))
        rows = tuple(map(_cells, ordered))
        title = "Settings, the fastest first"
        table = Table(title, COLUMNS, rows, (COLUMNS[0], COLUMNS[2], COLUMNS[-1]), folded=0)
        drawing = {"drawing": self.report._drawing} if self.report else {}
        lines, notes = tuple(self._lines()), tuple(self._notes())
        return Document(
            f"What fits {self.target}", self._sentence(), lines, (table,), notes, **drawing
        )

    def _sentence(self) -> str:
        room = room_in_words(self.available_bytes, self.reserve, self.device_bytes)
        if self.report is None:
            return f"{self.target}: NOTHING FITS {room}: its compiler refuses all settings"
        shown = f"{self.setting}, with {size(self.report.total_bytes)}"
        if self.fits:
            return f"{self.target}: the fastest setting that fits is {shown} of {room}"
        over = size(self.report.total_bytes - self.available_bytes)
        return f"{self.target}: NOTHING FITS {room}. The smallest is {shown}: {over} too much"

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
        compiled = [t for t in self.tries if not t.refused]
        if len(compiled) > 1 and all(t.same_as for t in compiled[1:]):
            yield (
                "All settings give the same program: make_step does not use its policy, or nothing "
                "that the step differentiates runs under autocast."
            )
        fastest = min((t for t in self.tries if t.fits), key=trials.cost, default=None)
        if fastest and self.report and fastest.roofline_ms < self.report.roofline_ms:
            gain = self.report.roofline_ms / fastest.roofline_ms - 1
            yield (
                f"{fastest.setting} is faster by {gain:.1%} by the roofline. It adds more, so it "
                f"must win by more than {trials.MARGIN:.0%}: smaller gains were losses when timed."
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
    one before: the policy as it is given, with fused attention, without the logits of a loss, and
    with less and less storage (lean, 8-bit codes, numbers down to 0). A bisection compiles few of
    them. Among those that fit, the fastest is the one with the smallest roofline
    (`CompileReport.roofline_ms`), which is a bound and not a forecast.

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
        every: Whether to compile all settings, also those that the search can leave out, and each
            alone. The report then has the whole frontier.
        reserve: The share of the device's memory to leave free, as for `largest_batch`.
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
        ValueError: If an argument is invalid.

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
    job = job_of(target, timeout, compiler_options, progress, make_step=make_step)
    check_flag("every", every)
    base = trials.checked_policy(policy)
    reserve, available = room_of(job.target, reserve)
    steps = trials.Steps(job, make_step)
    require(job.target)
    with progress_bar(progress, f"fit {job.target.name}", trials.TRY):
        ladder = steps.ladder(base, args)
        tried = trials.Trials(lambda setting: steps.compiled(setting, args), available)
        every = every or not tried.climb(ladder)
        if every:  # the last setting of the ladder need not be the smallest of all
            tried.measure_all([*ladder, *steps.off_ladder(ladder, args)])
        found = fit_of(tried, job.target, reserve, every)
        if found.fits:
            return found
        smallest = tried.smallest() or ladder[-1]
        return _with_rows(found, args, lambda cut: steps.compiled(smallest, cut))


def fit_of(tried: trials.Trials, target: Target, reserve: float, every: bool) -> MemoryFit:
    """Returns the report on all settings that were compiled."""
    best = tried.best()
    shown = best or tried.smallest()
    return MemoryFit(
        target=target.name,
        setting=shown.name if shown else "",
        policy=str(best.policy) if best else None,
        checkpoint=best.keeping if best else "",
        report=tried.reports[shown] if shown else None,
        device_bytes=target.memory,
        available_bytes=tried.available,
        reserve=reserve,
        tries=tuple(trials.with_frontier([*tried.tries.values()])),
        every=every,
    )


# ---- inside --------------------------------------------------------------------------------------


def _cells(one: trials.FitTry) -> tuple[str, ...]:
    if one.total_bytes is None:
        return (one.setting, "-", "NO", "-", "-", one.remark)
    fits, moved = "yes" if one.fits else "NO", f"{one.bytes_accessed / 1e9:.4g}"
    return (one.setting, size(one.total_bytes), fits, f"{one.roofline_ms:.4g}", moved, one.remark)


def _with_rows(
    found: MemoryFit,
    args: Sequence[Any],
    compile_cut: Callable[[Sequence[Any]], CompileReport | None],
) -> MemoryFit:
    """Returns a report with the number of rows that fit, if the batch is known."""
    rows = _rows(args)
    if not rows:
        return found
    devices = find_target(found.target).devices
    # A batch is spread over all devices, so its size must be a multiple of their number.
    step = devices * math.ceil(rows / STEPS / devices)
    # The whole batch does not fit.
    sizes: dict[float, float] = {rows / step: trials.memory_of(found.report)}

    def measure(steps: int) -> float:
        return trials.memory_of(compile_cut(_cut(args, steps * step)))

    try:
        most = largest(measure, found.available_bytes, rows, sizes).most
    except trials.REFUSALS:  # the length of the batch is written in the step
        return found
    return dataclasses.replace(found, rows=rows, fitting_rows=most * step)


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
