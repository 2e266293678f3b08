"""The checkpoints of a run: numbered, written in the background; old ones are removed."""

import contextlib
import functools
import logging
import math
import signal
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import jax
import numpy as np

from mpjax._src.checkpoint import store
from mpjax._src.checkpoint.paths import worded
from mpjax._src.checkpoint.state import Description, describe, policy_name, restore
from mpjax._src.core.base.errors import (
    CheckpointError,
    as_float,
    brief,
    check_flag,
    did_you_mean,
    warn_user,
    whole_number,
)
from mpjax._src.core.base.public import public
from mpjax._src.core.base.trees import is_array
from mpjax._src.core.policy.policy import PolicyLike

# A non-finite metric counts as the worst value, because NaN has no order.
WORST = {"min": math.inf, "max": -math.inf}


class Best(NamedTuple):
    """Which checkpoints are the best: by which metric, whether its least value is, and how many."""

    metric: str
    mode: str
    kept: int

    def value(self, metrics: Mapping[str, float] | None) -> float:
        number = (metrics or {}).get(self.metric, math.nan)
        return number if math.isfinite(number) else WORST[self.mode]


@public("mpjax.checkpoint")
class Manager:
    """Manages the checkpoints of a run in one directory: saves, numbers and removes them.

    `save` copies the arrays to the host and returns. The files are written in the background, and a
    checkpoint appears under its number when it is complete. If the process is killed, all complete
    checkpoints remain, and the next Manager removes the incomplete one. Use a Manager as a context
    manager: on exit it waits until everything is written.

    A directory has one Manager that writes, of one process (or of all processes of one distributed
    program). It locks the file ``.lock`` in the directory; a second one raises an error that names
    the process and host of the first. The lock ends when the Manager is closed or garbage, and when
    its process ends, however it ends. Nothing is locked in storage buckets such as ``gs://``, and
    on file systems without flock; on a network file system, the lock holds between hosts only if
    its flock does. There, make sure yourself that only one process writes. Any number of Managers
    with ``read_only=True``, and ``mpjax.checkpoint.restore`` and ``describe``, read next to it.

    Args:
        directory: The directory of the checkpoints; created if it does not exist. Each checkpoint
            is a subdirectory named by its number. What mpjax has not written there is left alone.
        every: Only numbers that are a multiple of ``every`` are saved.
        keep: The number of newest checkpoints to keep; None keeps all.
        keep_period: Checkpoints whose number is a multiple of it are never removed.
        best: The name of a metric. The checkpoints that are best by it are kept too.
        best_mode: "min" if the least value is best, "max" if the greatest is. A value that is not
            finite counts as the worst.
        keep_best: The number of best checkpoints to keep.
        policy: The policy that the state is trained under, or None. `describe` returns it.
        catch_sigterm: Whether SIGTERM, which schedulers send before they stop a job, makes the next
            `save` save any number and set ``stopping``. A second SIGTERM ends the program. Not
            needed under jax.distributed: the preemption notice of JAX is used there, on all
            processes at the same step.
        read_only: Whether this Manager only reads, without a lock and while another one writes, as
            an evaluation does. `save` raises an error.

    Attributes:
        stopping: Whether the last `save` saved because the program is about to be stopped.

    Raises:
        CheckpointError: If another Manager writes to the directory, or it cannot be written to.
        FileNotFoundError: If the directory does not exist, with ``read_only=True``.
        ImportError: If a package of the extra ``checkpoint`` is not installed.
        TypeError: If ``directory`` is not a path.
        ValueError: If an argument is invalid.

    Example:
        >>> import jax, jax.numpy as jnp, mpjax, optax, tempfile
        >>> loss_fn = lambda params, batch: jnp.mean((batch @ params["w"]) ** 2)
        >>> init, step = mpjax.build_train_step(loss_fn, optax.adam(1e-3), "O2:bfloat16")
        >>> state, directory = init({"w": jnp.ones(3)}), tempfile.mkdtemp()
        >>> with mpjax.checkpoint.Manager(directory, every=2, keep=2, best="loss") as manager:
        ...     for number in range(1, 9):
        ...         state, metrics = step(state, jnp.eye(3))
        ...         _ = manager.save(number, state, metrics=metrics, data={"batch": number})
        ...     manager.steps()
        [6, 8]
        >>> with mpjax.checkpoint.Manager(directory) as manager:
        ...     state = manager.restore(like=init({"w": jnp.ones(3)}))
        ...     manager.describe().data
        {'batch': 8}
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int = 1,
        keep: int | None = 3,
        keep_period: int | None = None,
        best: str | None = None,
        best_mode: str = "min",
        keep_best: int = 1,
        policy: "PolicyLike | None" = None,
        catch_sigterm: bool = False,
        read_only: bool = False,
    ):
        directory = store.absolute(directory)
        counts = {"every": every, "keep": keep, "keep_period": keep_period, "keep_best": keep_best}
        _check_arguments(counts, best, best_mode, catch_sigterm, read_only)
        self.directory = directory
        self.stopping = False
        self._policy = policy_name(policy)
        self._best = None if best is None else Best(best, best_mode, keep_best)
        self._read_only = read_only
        writing = functools.partial(store.writing, directory, inside=True)
        self._writing: Callable[[], Any] = contextlib.nullcontext if read_only else writing
        self._signaled = False
        self._previous: Any = None
        with contextlib.ExitStack() as stack:
            # Of its options for reading orbax warns.
            stack.enter_context(store.quiet(logging.ERROR if read_only else logging.NOTSET))
            options = _options(every, keep, keep_period, self._best, read_only)
            self._manager = self._open(stack, options)
            # Several processes would have to end at the same time to wait for each other.
            if jax.process_count() == 1:
                stack.enter_context(self._writing())
                stack.callback(self._manager.wait_until_finished)
            # Not __del__: a finalizer runs when the interpreter ends, too. (What is being written
            # then is lost with an error, because Python starts no more threads.) It may not
            # refer to the Manager, which would then never be garbage.
            self._end = weakref.finalize(self, stack.pop_all().close)
        if catch_sigterm:
            self._previous = signal.signal(signal.SIGTERM, self._note)

    def _open(self, stack: contextlib.ExitStack, options: Any) -> Any:
        """Returns orbax's manager of the directory, which is locked until the end of a stack."""
        if self._read_only:
            if not store.for_orbax(self.directory).is_dir():
                raise FileNotFoundError(f"directory={self.directory!r} is not a directory.")
        # orbax locks nothing (test_a_second_manager_is_refused_and_the_first_loses_nothing).
        elif holder := store.claim(self.directory, ".lock", stack, inside=True):
            raise CheckpointError(
                f"directory={self.directory!r} has a Manager already, of {holder}. Only one at a "
                "time may write to a directory: close it or end its process, or choose another "
                "directory. To read meanwhile, use Manager(directory, read_only=True) or "
                "mpjax.checkpoint.restore."
            )
        before = f"directory={self.directory!r}: its checkpoints cannot be listed: "
        with worded(before, ".", cause=False):
            foreign = [] if self._read_only else store.foreign(self.directory)
            store.check_metrics(self.directory)
            manager = store.orbax().CheckpointManager(
                store.for_orbax(self.directory),
                options=options,
                handler_registry=store.handlers(),
            )
        if foreign:
            warn_user(
                f"directory={self.directory!r} contains {brief(foreign)}, which mpjax has not "
                "written, or not completely. The Manager leaves it alone. Remove it, or use a "
                "directory of its own."
            )
        return manager

    def save(
        self,
        number: int,
        state: Any,
        *,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a state if its number is due, or if the program is about to be stopped.

        Args:
            number: The number of the step, counted by you: ``state.step`` does not count skipped
                steps, and reading it waits for the device.
            state: The state. It may be donated as soon as this method returns.
            data: Any data that JSON can represent, such as the position of the data iterator.
            metrics: Numbers by name. They must include the metric that ``best`` names. You can pass
                all metrics of a step: only the value of ``best`` is read.
            force: Whether to save even if the number is not due.

        Returns:
            Whether the state is being saved; False if this number is saved already.

        Raises:
            CheckpointError: If this or the previous checkpoint could not be written, such as on a
                full disk; or if this Manager only reads.
            TypeError: If ``state`` has no leaves, or a leaf that is not an array.
            ValueError: If a later number is saved already, or ``data`` or ``metrics`` is invalid.
        """
        _check_count("number", number, least=0)
        check_flag("force", force)
        if self._read_only:
            raise CheckpointError(
                f"directory={self.directory!r} is only read by this Manager, which was created "
                "with read_only=True."
            )
        # Asked for every number, because all processes of a program have to ask for the same one.
        self.stopping = self._signaled or self._manager.reached_preemption(number)
        latest = self._manager.latest_step()
        if latest is not None and latest > number:
            raise ValueError(
                f"number={number!r} is less than {latest}, the last checkpoint in "
                f"{self.directory!r}. Continue from an earlier checkpoint in a new directory, or "
                "remove the later checkpoints."
            )
        if latest == number:
            return False
        force = force or self.stopping
        if not (force or self._manager.should_save(number)):
            return False
        metrics = self._metrics(metrics)
        about = store.described(state, self._policy, data)
        if metrics is not None:
            about["metrics"] = metrics  # orbax writes them to a file without a checksum
        if store.for_orbax(f"{self.directory}/{number}").exists():
            raise CheckpointError(
                f"number={number!r}: {self.directory}/{number} exists, but mpjax has not written "
                "it, or not completely. It is not overwritten: remove it, or use another directory."
            )
        args = store.saved_form(state, about)
        with self._writing():
            saved = self._manager.save(number, args=args, metrics=metrics, force=force)
        # The process may be killed at any moment, so nothing is left to the background.
        if self.stopping:
            self.wait()
        return saved

    def _metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float] | None:
        if not isinstance(metrics, Mapping | None):
            raise ValueError(f"metrics={brief(metrics)} must be a dict of numbers by name.")
        if self._best is None:
            return None
        name = self._best.metric
        if not metrics or name not in metrics:
            raise ValueError(
                f"metrics={brief(metrics)} lacks {name!r}, the metric that best= names."
                f"{did_you_mean(name, metrics or ())}"
            )
        value = metrics[name]
        try:
            # A plus refuses strings, which float() would read.
            number = np.asarray(value).item() if is_array(value) else +value
            return {name: as_float(number)}
        except (TypeError, ValueError):
            raise ValueError(f"metrics[{name!r}]={brief(value)} must be one real number.") from None

    def restore(
        self,
        like: Any,
        number: int | None = None,
        *,
        allow_narrowing: bool = False,
        verify: bool = True,
    ) -> Any:
        """Restores a checkpoint, as ``mpjax.checkpoint.restore`` does.

        Args:
            like: A tree with the structure, shapes and dtypes to restore.
            number: The number of the checkpoint; None for the last one.
            allow_narrowing: Whether leaves may lose precision.
            verify: Whether to compare what is read with the checksums in the checkpoint.

        Returns:
            A tree of the structure and dtypes of ``like``.

        Raises:
            CheckpointError: If the checkpoint is damaged.
            FileNotFoundError: If there is no such checkpoint.
            ValueError: If the checkpoint was written by a different model or optimizer, or would
                lose precision.
        """
        return restore(self.path(number), like, allow_narrowing=allow_narrowing, verify=verify)

    def describe(self, number: int | None = None) -> Description:
        """Describes a checkpoint, by default the last one, as ``mpjax.checkpoint.describe`` does.

        Args:
            number: The number of the checkpoint; None for the last one.

        Returns:
            A `Description`.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
        """
        return describe(self.path(number))

    def path(self, number: int | None = None) -> str:
        """Returns the directory of a checkpoint, by default the last one.

        Args:
            number: The number of the checkpoint; None for the last one.

        Returns:
            The path as a string.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
        """
        _check_count("number", number, optional=True, least=0)
        steps = self.steps()
        number = max(steps, default=None) if number is None else number
        if number not in steps:
            raise FileNotFoundError(
                f"number={number!r}: {self.directory!r} has "
                f"{f'the checkpoints {steps}' if steps else 'no checkpoint'}."
            )
        return f"{self.directory}/{number}"

    def steps(self) -> list[int]:
        """Waits until everything is written, and returns the numbers of all checkpoints, sorted."""
        self.wait()
        if self._read_only:
            # Another Manager may have written or removed some since.
            self._manager.reload()
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Returns the number of the last checkpoint, or None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the number of the best checkpoint by the metric ``best``, or None."""
        self.steps()
        return None if self._best is None else self._manager.best_step()

    def wait(self) -> None:
        """Waits until everything is written. Raises an error that occurred while writing."""
        with self._writing():
            self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is written, and closes the Manager; it cannot be used again."""
        self._release()
        try:
            with self._writing():
                self._manager.close()
        finally:
            self._end()

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A handler runs between any two instructions, so it only notes the signal. The handler
        # before it is back for the next one.
        self._signaled = True
        self._release()

    def _release(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


def _options(
    every: int, keep: int | None, keep_period: int | None, best: Best | None, read_only: bool
) -> Any:
    """Returns orbax's options: what is saved, and what is kept."""
    ocp = store.orbax()
    policies = ocp.checkpoint_managers
    kept, by_metric = [policies.LatestN(keep)], {}
    if keep_period is not None:
        kept.append(policies.EveryNSteps(keep_period))
    if best is not None:
        # Needed to write metrics, and for best(); preservation_policy says what is kept.
        by_metric = {"best_fn": best.value, "best_mode": best.mode}
        by_value = {"get_metric_fn": best.value, "reverse": best.mode == "min", "n": best.kept}
        # Otherwise the rest of a checkpoint that a killed process was removing stays
        # (test_half_removed_checkpoint_does_not_block_the_manager).
        kept.append(policies.BestN(**by_value, keep_checkpoints_without_metrics=False))
    return ocp.CheckpointManagerOptions(
        step_name_format=store.numbers(),
        save_decision_policy=policies.FixedIntervalPolicy(every),
        preservation_policy=policies.AnyPreservationPolicy(kept),
        **by_metric,
        cleanup_tmp_directories=True,
        read_only=read_only,
        num_deletion_threads=1,  # several would remove the files, not the directory
    )


def _check_arguments(
    counts: dict[str, Any], best: Any, best_mode: Any, catch_sigterm: Any, read_only: Any
) -> None:
    for name, value in counts.items():
        _check_count(name, value, optional=name in ("keep", "keep_period"))
    check_flag("catch_sigterm", catch_sigterm)
    check_flag("read_only", read_only)
    if best is not None and not (isinstance(best, str) and best):
        raise ValueError(f"best={brief(best)} must be the name of a metric, such as 'loss'.")
    if not (isinstance(best_mode, str) and best_mode in WORST):
        raise ValueError(
            f"best_mode={brief(best_mode)} must be 'min' (for a loss) or 'max' (for an accuracy)."
            f"{did_you_mean(best_mode, WORST)}"
        )
    if catch_sigterm and threading.current_thread() is not threading.main_thread():
        raise ValueError(
            "catch_sigterm=True works only in the main thread, because Python handles signals "
            "there. Create the Manager in the main thread, or leave catch_sigterm out."
        )


def _check_count(name: str, value: Any, *, optional: bool = False, least: int = 1) -> None:
    if optional and value is None:
        return
    if (count := whole_number(value)) is None or not least <= count < 2**63:
        also = " or None" if optional else ""
        raise ValueError(f"{name}={brief(value)} must be an integer >= {least}, below 2**63{also}.")
