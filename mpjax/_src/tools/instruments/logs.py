"""Logs metrics to TensorBoard and JSON lines without waiting for the device."""

import collections
import contextlib
import errno
import json
import math
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.errors import as_float, brief, finite_number, whole_number
from mpjax._src.core.base.patterns import path_of
from mpjax._src.core.base.public import public
from mpjax._src.tools.document.report import Report
from mpjax._src.tools.instruments.histogram import GradientHistogram

# Records that are not yet written, by writer, because the device is still computing them.
_WAITING: "weakref.WeakKeyDictionary[Any, collections.deque]" = weakref.WeakKeyDictionary()

SCALARS = (bool, int, float, np.generic, np.ndarray, jax.Array)

# The methods of TensorBoard's writers: for numbers, and for text.
METHODS = {"add_scalar": "add_text", "scalar": "text"}


@public("mpjax.debug")
class JsonLines:
    """A file with one JSON object per step, as a writer for `log_metrics`.

    Used as a context manager, it flushes on exit; otherwise call `flush_metrics` at the end. A line
    is written completely or not at all. If the disk is full, `log_metrics` and `flush_metrics`
    raise an OSError that names the lost step, and continue with the next step when they are called
    again.

    Args:
        path: The path of the file. Lines are appended to an existing file.

    Raises:
        TypeError: If ``path`` is not a path.
        OSError: If the file cannot be written: the path is empty or a directory, or its folder does
            not exist.

    Example:
        >>> import mpjax, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> with mpjax.debug.JsonLines(path) as log:
        ...     mpjax.debug.log_metrics(log, 1, {"loss": 0.5})
        >>> path.read_text()
        '{"step": 1, "loss": 0.5}\\n'
    """

    def __init__(self, path: str | Path):
        if not isinstance(path, (str, os.PathLike)):
            raise TypeError(f"path={brief(path)} must be the path of a file, such as 'run.jsonl'.")
        self.path = Path(path)
        if self.path.is_dir():  # as Path("") is
            raise IsADirectoryError(
                errno.EISDIR,
                f"path={brief(path)} is a directory, but must be a file, such as 'run.jsonl'",
                str(path),
            )
        self.path.open("ab").close()  # raises now if the path cannot be written

    def add(self, step: int, values: dict[str, float | str]) -> None:
        """Appends a line. NaN and Infinity are written as strings, because JSON lacks them.

        Args:
            step: The number of the step.
            values: Numbers and texts by name.

        Raises:
            OSError: If the line could not be written. The message names the step.
        """
        values = {
            k: v if isinstance(v, str) or math.isfinite(as_float(v)) else brief(v)
            for k, v in values.items()
        }
        line = json.dumps({"step": step, **values}) + "\n"
        try:
            _append(self.path, line.encode())
        except OSError as error:
            why = f"{error.strerror}: the record of step {step} was lost"
            raise OSError(error.errno, why, str(self.path)) from error

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: Any) -> None:
        flush_metrics(self)


def log_metrics(writer: Any, step: int, metrics: Any) -> None:
    """Logs the metrics of a step without waiting for the device.

    Metrics that the device has computed are written, in the order of the steps. The others are
    written by a later call, or by `flush_metrics`.

    Args:
        writer: A `JsonLines`, a ``tensorboardX.SummaryWriter`` (any object with ``add_scalar``), or
            a ``flax.metrics.tensorboard.SummaryWriter`` (any object with ``scalar``).
        step: The number of the step, a Python integer. Count it on the host, because
            ``int(state.step)`` waits for the device.
        metrics: The metrics of a training step, or any pytree. Scalars are logged under their paths
            ("aux/accuracy"); an `Overflow` and an `Underflow` under their fields; a `Stalled` under
            its parameters; a `PrecisionReport` under its tensors, with its risks as text; and a
            `GradientHistogram` as the shares of entries that each 16-bit dtype would lose at
            ``metrics["loss_scale"]``. Other leaves are ignored. NaN and Inf are written to a
            `JsonLines` alone, because charts cannot show them.

    Returns:
        None.

    Raises:
        TypeError: If ``writer`` or ``step`` is invalid, or the call is inside jit.
        OSError: If a record could not be written. The message names the step.

    Example:
        >>> import mpjax, pathlib, tempfile
        >>> with mpjax.debug.JsonLines(pathlib.Path(tempfile.mkdtemp()) / "run.jsonl") as log:
        ...     mpjax.debug.log_metrics(log, 1, {"loss": 0.5, "aux": {"accuracy": 1.0}})
    """
    _check_writer(writer)
    whole = None if isinstance(step, jax.Array) else whole_number(step)
    if whole is None or not -(2**63) <= whole < 2**63:
        raise TypeError(
            f"step={brief(step)} must be a Python integer of 64 bits: the loop's own counter, "
            "because reading it from the state would wait for the device."
        )
    values = dict(_loggable(metrics))
    waiting = _WAITING.setdefault(writer, collections.deque())
    waiting.append((whole, values))
    # In the order of the steps: a step that is ready waits for those before it.
    while waiting and all(map(_is_ready, jax.tree.leaves(waiting[0][1]))):
        _write(writer, *waiting.popleft())


def _loggable(metrics: Any) -> Iterator[tuple[str, Any]]:
    """Yields what can be logged, by its path. Leaves of other kinds are ignored."""
    is_report = lambda leaf: isinstance(leaf, Report)  # noqa: E731
    for keys, leaf in jax.tree_util.tree_leaves_with_path(metrics, is_leaf=is_report):
        if any(isinstance(array, jax.core.Tracer) for array in jax.tree.leaves(leaf)):
            raise TypeError(
                f"metrics[{path_of(keys)!r}] is being traced. Call log_metrics outside of jit, "
                "with the metrics that the jitted step returned."
            )
        if isinstance(leaf, GradientHistogram):
            # It is carried from step to step, so the next step may donate its counts.
            leaf = jax.tree.map(jnp.copy, leaf)
        if _is_loggable(leaf):
            yield path_of(keys), leaf


def flush_metrics(writer: Any) -> None:
    """Writes all metrics that `log_metrics` has not written yet. Waits for the device.

    Args:
        writer: The writer that `log_metrics` was called with.

    Returns:
        None.

    Raises:
        TypeError: If ``writer`` is not a writer.
        OSError: If a record could not be written. The message names the step.

    Example:
        >>> import mpjax, pathlib, tempfile
        >>> log = mpjax.debug.JsonLines(pathlib.Path(tempfile.mkdtemp()) / "run.jsonl")
        >>> mpjax.debug.log_metrics(log, 1, {"loss": 0.5})
        >>> mpjax.debug.flush_metrics(log)
    """
    _check_writer(writer)
    waiting = _WAITING.get(writer, ())
    while waiting:
        _write(writer, *waiting.popleft())
    getattr(writer, "flush", lambda: None)()


def _append(path: Path, line: bytes) -> None:
    """Appends a line to a file, completely or not at all."""
    # Unbuffered, so that it is known how much of a line was written when the disk is full.
    with path.open("a+b", buffering=0) as file:
        if not _ends_whole(file):  # an earlier process was stopped in the middle of a line
            line = b"\n" + line
        written = 0
        try:
            while written < len(line):
                written += file.write(line[written:]) or 0
        except OSError:
            with contextlib.suppress(OSError):  # a pipe or a device cannot be truncated
                file.truncate(file.tell() - written)
            raise


def _ends_whole(file: Any) -> bool:
    try:
        file.seek(-1, os.SEEK_END)
    except OSError:  # the file is empty, or cannot be read
        return True
    return file.read(1) in (b"\n", b"")


def _write(writer: Any, step: int, metrics: dict[str, Any]) -> None:
    scale = _power_of_two(metrics.get("loss_scale", 1.0))
    values = {
        "/".join(filter(None, (name, part))): value
        for name, leaf in metrics.items()
        for part, value in _parts(leaf, scale).items()
    }
    if isinstance(writer, JsonLines):
        writer.add(step, values)
        return
    number, text = next(names for names in METHODS.items() if hasattr(writer, names[0]))
    for name, value in values.items():
        if isinstance(value, str):
            # A writer of numbers may have no method for texts, which it then does not get.
            getattr(writer, text, lambda *_: None)(name, value, step)
        elif math.isfinite(value):
            # A chart has no place for others, and tensorboardX prints a line for each.
            getattr(writer, number)(name, value, step)


def _parts(leaf: Any, scale: float) -> Mapping[str, float | str]:
    """Returns the plain values of a leaf, with names below its own."""
    if isinstance(leaf, Report):
        return leaf.logged(scale)
    value = np.asarray(leaf)
    return {"": int(value) if value.dtype.kind in "biu" else as_float(value)}


def _power_of_two(scale: Any) -> float:
    """Returns the power of two at or below a scale, as the histogram needs one."""
    value = finite_number(scale) or 0.0
    return 2.0 ** (math.frexp(value)[1] - 1) if value > 0 else 1.0


def _is_loggable(leaf: Any) -> bool:
    if isinstance(leaf, Report):
        return leaf.is_read
    if not (isinstance(leaf, SCALARS) and np.ndim(leaf) == 0):
        return False
    dtype = jnp.result_type(leaf)
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, np.bool_))


def _is_ready(leaf: Any) -> bool:
    return getattr(leaf, "is_ready", lambda: True)()


def _check_writer(writer: Any) -> None:
    if not (isinstance(writer, JsonLines) or any(hasattr(writer, name) for name in METHODS)):
        raise TypeError(
            f"writer={brief(writer)} must be an mpjax.debug.JsonLines(path), a "
            "tensorboardX.SummaryWriter or a flax.metrics.tensorboard.SummaryWriter."
        )
