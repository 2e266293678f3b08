"""The checkpoints of a run: numbered, written in the background, old ones removed."""

import math
import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import jmp

from mpjax._src.checkpoint import store
from mpjax._src.checkpoint.state import Description, describe, policy_name, restore
from mpjax._src.errors import did_you_mean
from mpjax._src.training.loss_scale import whole_number

# What a metric that is not finite counts as: the worst there is. A NaN would defy any order.
WORST = {"min": math.inf, "max": -math.inf}


class Manager:
    """The checkpoints of a run in one directory: saved in the background, old ones removed.

    `save` copies the arrays to the host and returns; files are written while the next steps run,
    and a checkpoint appears under its number when it is whole. Of a process that is killed, every
    checkpoint that was there stays as it was, and the half-written one is removed by the next
    Manager. Use it as a context manager: leaving it waits for what is being written. One process
    at a time may have a Manager on a directory (or all processes of one distributed program);
    others read with `restore` and `describe`.

    Args:
        directory: Where the checkpoints lie; made if need be. Each is named by its number.
        every: Which numbers are saved: the multiples of it.
        keep: How many of the newest are kept; all if None.
        keep_period: Those whose numbers are multiples of it are kept for ever.
        best: The name of a metric; the best by it are kept as well.
        best_mode: Whether the least ("min") or the greatest ("max") is best. What is not finite is
            worst of all.
        keep_best: How many of the best are kept.
        policy: The policy that the state is trained under, for whoever asks `describe`.
        catch_sigterm: Whether SIGTERM, by which schedulers announce the end, makes the next `save`
            save whatever its number and set ``stopping``. A second one ends the program. Under
            jax.distributed it is not needed: JAX's own notice is heeded, on all processes at the
            same step.

    Attributes:
        stopping: Whether the last `save` saved because the program is about to be ended.

    Raises:
        ImportError: If orbax-checkpoint is not installed.
        ValueError: If an argument is not legal.

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
        policy: str | jmp.Policy | None = None,
        catch_sigterm: bool = False,
    ):
        counts = {"every": every, "keep": keep, "keep_period": keep_period, "keep_best": keep_best}
        for name, value in counts.items():
            _check_count(name, value, optional=name in ("keep", "keep_period"))
        if best_mode not in WORST:
            raise ValueError(
                f"best_mode={best_mode!r} must be 'min' (of losses) or 'max' (of accuracies)."
                f"{did_you_mean(str(best_mode), WORST)}"
            )
        self.directory = store.absolute(directory)
        self.stopping = False
        self._policy = policy_name(policy)
        self._best = best
        ocp = store.orbax()
        policies = ocp.checkpoint_managers
        kept = [policies.LatestN(keep)]
        if keep_period is not None:
            kept.append(policies.EveryNSteps(keep_period))
        if best is not None:
            kept.append(
                policies.BestN(
                    get_metric_fn=self._value_of_best(best, best_mode),
                    reverse=best_mode == "min",
                    n=keep_best,
                    # Else what a killed process left of a removed one would be kept for ever.
                    keep_checkpoints_without_metrics=False,
                )
            )
        self._manager = ocp.CheckpointManager(
            self.directory,
            options=ocp.CheckpointManagerOptions(
                save_decision_policy=policies.FixedIntervalPolicy(every),
                preservation_policy=policies.AnyPreservationPolicy(kept),
                # Asked for metrics to be written, and for best(); what is kept is said above.
                best_fn=None if best is None else self._value_of_best(best, best_mode),
                best_mode=best_mode,
                cleanup_tmp_directories=True,
            ),
        )
        self._signalled = False
        self._previous: Any = None
        if catch_sigterm:
            self._catch()

    @staticmethod
    def _value_of_best(best: str, mode: str) -> Any:
        def value(metrics: Mapping[str, float] | None) -> float:
            number = (metrics or {}).get(best, math.nan)
            return number if math.isfinite(number) else WORST[mode]

        return value

    def save(
        self,
        number: int,
        state: Any,
        *,
        data: Any = None,
        metrics: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Saves a state if its number is due, or the program is about to be ended.

        Args:
            number: The number of the step, by your own count: ``state.step`` does not count
                skipped steps, and reading it waits for the device.
            state: The state, which may be donated as soon as this returns.
            data: Anything that JSON can hold, such as the position of the data iterator.
            metrics: Numbers by name; the one that ``best`` names must be among them. A step's own
                metrics may be passed as they are: only that one is read.
            force: Whether to save whatever the number.

        Returns:
            Whether it is saved; False too if this number was saved before.

        Raises:
            ValueError: If a later number is saved already, or ``data`` or ``metrics`` is not legal.
            Exception: Whatever went wrong while the checkpoint before this one was written.
        """
        _check_count("number", number, least=0)
        self.stopping = self._signalled or self._manager.reached_preemption(number)
        latest = self._manager.latest_step()
        if latest is not None and latest > number:
            raise ValueError(
                f"number={number!r} is less than {latest}, the last checkpoint in "
                f"{self.directory!r}. A run that goes back needs a directory of its own; or "
                "remove what is later."
            )
        if latest == number:
            return False
        force = force or self.stopping
        if not (force or self._manager.should_save(number)):
            return False
        saved = self._manager.save(
            number,
            args=store.saved_form(state, self._policy, data),
            metrics=self._metrics(metrics),
            force=force,
        )
        if self.stopping:
            self.wait()
        return saved

    def _metrics(self, metrics: Mapping[str, Any] | None) -> dict[str, float] | None:
        if self._best is None:
            return None
        if not metrics or self._best not in metrics:
            raise ValueError(
                f"metrics={metrics!r} lacks {self._best!r}, which best= names."
                f"{did_you_mean(self._best, metrics or ())}"
            )
        return {self._best: float(metrics[self._best])}

    def restore(
        self, like: Any, number: int | None = None, *, allow_narrowing: bool = False
    ) -> Any:
        """Restores a checkpoint, as `mpjax.checkpoint.restore` does.

        Args:
            like: The state that the program wants.
            number: Which checkpoint; the last one if None.
            allow_narrowing: Whether leaves may lose precision.

        Returns:
            A tree of the structure and dtypes of ``like``.

        Raises:
            FileNotFoundError: If there is no such checkpoint.
        """
        return restore(self.path(number), like, allow_narrowing=allow_narrowing)

    def describe(self, number: int | None = None) -> Description:
        """Tells what a checkpoint holds: the last one, if no number is given."""
        return describe(self.path(number))

    def path(self, number: int | None = None) -> str:
        """Returns the directory of one checkpoint: of the last one, if no number is given."""
        steps = self.steps()
        if number is None and steps:
            number = steps[-1]
        if number not in steps:
            raise FileNotFoundError(
                f"number={number!r}: {self.directory!r} holds "
                f"{f'the checkpoints {steps}' if steps else 'no checkpoint'}."
            )
        return f"{self.directory}/{number}"

    def steps(self) -> list[int]:
        """Returns the numbers of all checkpoints, once those being written are whole."""
        self.wait()
        return sorted(self._manager.all_steps())

    def latest(self) -> int | None:
        """Returns the number of the last checkpoint, or None if there is none."""
        return max(self.steps(), default=None)

    def best(self) -> int | None:
        """Returns the number of the best checkpoint by the metric that ``best`` named, or None."""
        self.wait()
        return None if self._best is None else self._manager.best_step()

    def wait(self) -> None:
        """Waits until everything is written, and raises what went wrong."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is written; the Manager is of no use afterwards."""
        self._release()
        self._manager.close()

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _catch(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError(
                "catch_sigterm=True works in the main thread alone, where Python handles signals."
            )
        self._previous = signal.signal(signal.SIGTERM, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
        self._release()

    def _release(self) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGTERM, self._previous)
            self._previous = None


def _check_count(name: str, value: Any, *, optional: bool = False, least: int = 1) -> None:
    if optional and value is None:
        return
    count = whole_number(value)
    if count is None or count < least:
        also = " or None" if optional else ""
        raise ValueError(f"{name}={value!r} must be a whole number, {least} or more{also}.")
