"""`survey`: what mixed precision would make of the training steps of a script, unchanged.

JAX is imported by the script, which may set its environment before.
"""

import contextlib
import dataclasses
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mpjax._src.core.base.lazy import with_jax
from mpjax._src.core.base.lines import is_library
from mpjax._src.tools.scripts.ending import PATIENCE, Stop
from mpjax._src.tools.scripts.launch import LaunchError, launch, own_code, restored
from mpjax._src.tools.scripts.started import heard

if TYPE_CHECKING:
    from mpjax._src.tools.scripts.surveyed import Survey

# Modules that run many functions once each, and hold what these raise for a failure of theirs.
RUNNERS = ("pytest", "py.test", "unittest")

NOTHING = (
    "no function was differentiated by jax.grad, jax.vjp or their like, but for what is named "
    "here, so there is no training step to look at"
)
FAILED = "the script failed before the first call of a training step had run"
STUCK = (
    f"the script caught what ends it more than {PATIENCE} times, as `except:` in an endless loop "
    "does: write `except Exception:` there"
)
NO_JAX = "JAX was not imported, so nothing was looked at"


def survey(
    script: str | os.PathLike[str],
    args: Sequence[str] = (),
    policies: Any = (),
    targets: Any = (),
    steps: int | None = 1,
    module: bool = False,
    run: bool = True,
    batches: bool = True,
    time: bool | None = None,
    timeout: float = 600.0,
    progress: bool = True,
) -> "Survey":
    """Runs a script as it is, and reports what mixed precision would make of its training steps.

    A training step is the outermost jitted function around one that is differentiated; the
    gradient, if nothing around it is jitted. At its first call, the step is traced again under each
    policy: with its optimizer, and all that the script does in it. Then the script goes on with
    results of its own. It is ended before a step is called once more than ``steps`` says.

    The script runs as ``__main__``, with its arguments. What it prints, writes and sends until it
    is ended, it prints, writes and sends; its ``finally`` blocks run. What it prints while a step
    is traced again is dropped.

    Args:
        script: The path of a script or of a notebook, or the name of a module.
        args: Its arguments.
        policies: Policies for the rows of the tables, or one; by default mixed_bfloat16,
            mixed_float16, and mixed_bfloat16 with ``storage=lean`` and, for steps with attention,
            with ``fused_attention=true``.
        targets: Names of targets, or one, to compile the steps for, as for `compile_for`. Without
            any, they are compiled for this machine.
        steps: After how many calls of a step the script is ended; None lets it run. Whoever runs
            tests (``module`` "pytest") runs to its end.
        module: Whether ``script`` is the name of a module, as for ``python -m``.
        run: Whether to run each step up to its first gradient, and the gradient itself, for the
            gradients' errors; and, unless it is long, one operation at a time for the rules of
            `lint` that read values.
        batches: Whether to look for the largest batch that fits each target, which compiles more.
        time: Whether to time each step on this machine; by default, if it has an accelerator.
        timeout: The time limit of each compilation for a target, in seconds.
        progress: Whether to show the progress if stderr is a terminal.

    Returns:
        A `mpjax.reports.Survey`. It is false if there is no step.

    Raises:
        ValueError: If a policy, a target or a number is invalid.
        LookupError: If there is nothing of this name to run.

    Example:
        >>> import mpjax.scripts
        >>> report = mpjax.scripts.survey("train.py", ["--epochs", "1"])  # doctest: +SKIP
        >>> print(report.steps[0].rows[1].half_flops)  # doctest: +SKIP
        1.0
    """
    options = Options(policies, targets, steps, run, batches, time, timeout, progress)
    with restored():
        return surveyed(options, os.fspath(script), [*map(str, args)], module)


@dataclasses.dataclass
class Options:
    """What a survey was asked for, as `survey` has it, checked as far as that needs no JAX."""

    policies: Any
    targets: Any
    steps: int | None
    run: bool
    batches: bool
    time: bool | None
    timeout: float = 600.0
    progress: bool = True

    def __post_init__(self) -> None:
        from mpjax._src.core.base.errors import brief, check_count, check_flag

        self.policies = _several(self.policies)
        self.targets = tuple(dict.fromkeys(_several(self.targets)))
        if self.steps is not None:
            check_count("steps", self.steps)
        for name in ("run", "batches", "progress"):
            check_flag(name, getattr(self, name))
        if not isinstance(self.timeout, int | float) or not self.timeout > 0:
            raise ValueError(
                f"timeout={brief(self.timeout)} must be a number of seconds greater than 0."
            )


def _several(given: Any) -> tuple[Any, ...]:
    """Returns one setting or several as a tuple."""
    return tuple(given) if isinstance(given, list | tuple | set | frozenset) else (given,)


def surveyed(
    options: Options,
    script: str,
    args: Sequence[str],
    module: bool,
    finish: Callable[["Survey"], None] = lambda report: None,
) -> "Survey":
    """Runs a script, and returns the report; raises a `LaunchError` if there is none to run.

    ``finish`` gets the report within the script, if that catches what ends it, time after time.
    """
    command = " ".join([*(["-m"] * module), script, *args])
    ended, error = "ended", ""
    commands: list[str] = []

    def stuck() -> None:
        running.observer.not_covered[STUCK] = None
        finish(running.report(command, "stopped", "", commands))

    running = Running(options, module and script in RUNNERS, stuck)
    with heard(lambda words, _: commands.append(" ".join(words))), running.observing():
        try:
            launch(script, args, module)
        except LaunchError:
            raise
        except Stop:
            ended = "stopped"
        except KeyboardInterrupt:
            ended = "interrupted"
        except SystemExit as raised:
            error = f"exit status {raised.code}" if raised.code else ""
        except BaseException as raised:
            ended, error = "failed", _told(raised)
    if running.refused is not None:
        raise running.refused
    if running.observer is not None:
        ended = running.observer.ending(ended)
    return running.report(command, ended, error, commands)


def _told(error: BaseException) -> str:
    """Prints a traceback of the script, and returns its error in one line."""
    from mpjax._src.core.base.errors import in_one_line

    trace = own_code(error.__traceback__)
    traceback.print_exception(type(error), error, trace)
    frames = [f for f in traceback.extract_tb(trace) if not is_library(f.filename)]
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{in_one_line(error)}{place}"


class Running:
    """A script that is observed from the moment in which it imports JAX."""

    def __init__(self, options: Options, whole: bool, stuck: Callable[[], None]) -> None:
        self.options, self.whole, self._stuck = options, whole, stuck
        self.observer: Any = None
        self.refused: Exception | None = None  # what was asked for, which is invalid
        self._stack = contextlib.ExitStack()
        self._active = False

    @contextlib.contextmanager
    def observing(self) -> Iterator[None]:
        if "jax" in sys.modules:  # what is invalid is refused before anything runs
            self._observer()
        self._active = True
        with_jax(self._begin)
        try:
            yield
        finally:
            self._active = False
            self._stack.close()

    def _observer(self) -> Any:
        from mpjax._src.tools.scripts.observer import Observer

        return Observer(self.options, None if self.whole else self.options.steps, self._stuck)

    def _begin(self) -> None:
        if not self._active:  # JAX is imported after the survey has ended
            return
        try:
            self.observer = self._observer()
        except (ValueError, TypeError) as error:
            self.refused = error
            raise Stop from None  # the script's import of JAX would fail
        self._stack.enter_context(self.observer.observing())

    def report(
        self, command: str, ended: str, error: str, commands: Sequence[Sequence[str]]
    ) -> "Survey":
        from mpjax._src.tools.scripts.surveyed import Survey

        seen = self.observer
        notes = [*seen.notes()] if seen is not None else [NO_JAX]
        if seen is not None and not seen.steps:
            notes.insert(0, FAILED if ended == "failed" else NOTHING)
        if commands and (seen is None or not seen.steps):
            notes.append(
                f"the script started {commands[0]!r}, which runs in a process of its own: survey "
                "the script that trains there"
            )
        if seen is None:
            return Survey(command, (), ended, error, tuple(notes))
        diff = seen.proposal() if seen.steps else None
        return Survey(
            command,
            tuple(step.result() for step in seen.steps),
            ended,
            error,
            tuple(notes),
            diff.diff if diff else "",
            diff.root if diff else "",
            diff.missing if diff else (),
            seen.compiling.compilations,
            sum(step.traces for step in seen.steps),
        )
