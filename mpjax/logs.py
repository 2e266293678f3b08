"""Metrics to TensorBoard and JSON lines, without ever making a step wait."""

import collections
import json
import math
import weakref
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax.patterns import path_of

# What each writer has been given and has not been handed yet, because the device still computes it.
_WAITING: "weakref.WeakKeyDictionary[Any, collections.deque]" = weakref.WeakKeyDictionary()

SCALARS = (bool, int, float, np.generic, np.ndarray, jax.Array)


class JsonLines:
    """A file of one JSON object per step, for `log_metrics`.

    As a context it flushes at its end; outside of one call `flush_metrics`.

    Args:
        path: Of the file; what it holds is kept, and lines are added.

    Raises:
        OSError: If the file cannot be written.

    Example:
        >>> import mpjax, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.jsonl"
        >>> with mpjax.JsonLines(path) as log:
        ...     mpjax.log_metrics(log, 1, {"loss": 0.5})
        >>> path.read_text()
        '{"step": 1, "loss": 0.5}\\n'
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.path.touch()  # a path that cannot be written is told now

    def add(self, step: int, scalars: dict[str, float]) -> None:
        """Adds a line. JSON has no NaN and Infinity: they are written as strings."""
        values = {k: v if math.isfinite(v) else str(v) for k, v in scalars.items()}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def __enter__(self) -> "JsonLines":
        return self

    def __exit__(self, *_: Any) -> None:
        flush_metrics(self)


def log_metrics(writer: Any, step: int, metrics: Any) -> None:
    """Logs a step's metrics, once the device has computed them; never waits for it.

    What is ready is written, in order; the rest waits for a later call, or for `flush_metrics`.

    Args:
        writer: A `JsonLines`, a ``tensorboardX.SummaryWriter`` (anything with ``add_scalar``), or a
            ``flax.metrics.tensorboard.SummaryWriter`` (anything with ``scalar``).
        step: The number of the step, on the host: ``int(state.step)`` would wait.
        metrics: What a training step returned, or any pytree; scalars are logged under their
            paths ("aux/accuracy"), other leaves are left out.

    Returns:
        None.

    Raises:
        TypeError: If an argument is not what it should be, or this is called inside jit.

    Example:
        >>> import mpjax, pathlib, tempfile
        >>> with mpjax.JsonLines(pathlib.Path(tempfile.mkdtemp()) / "run.jsonl") as log:
        ...     mpjax.log_metrics(log, 1, {"loss": 0.5, "aux": {"accuracy": 1.0}})
    """
    _check_writer(writer)
    if isinstance(step, jax.Array) or not isinstance(step, (int, np.integer)):
        raise TypeError(
            f"step={step!r} must be a Python integer: the loop's own counter. Reading it from the "
            "state would wait for the device."
        )
    scalars = {}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(metrics):
        if isinstance(leaf, jax.core.Tracer):
            raise TypeError(
                f"metrics[{path_of(keys)!r}] is being traced. Call log_metrics outside of jit, "
                "with what the jitted step returned."
            )
        if isinstance(leaf, SCALARS) and np.ndim(leaf) == 0 and _is_real(leaf):
            scalars[path_of(keys)] = leaf
    waiting = _WAITING.setdefault(writer, collections.deque())
    waiting.append((int(step), scalars))
    while waiting and all(_is_ready(leaf) for leaf in waiting[0][1].values()):
        _write(writer, *waiting.popleft())


def flush_metrics(writer: Any) -> None:
    """Writes everything that `log_metrics` was given; waits for the device.

    Args:
        writer: The writer.

    Returns:
        None.

    Raises:
        TypeError: If ``writer`` is not one.

    Example:
        >>> import mpjax, pathlib, tempfile
        >>> log = mpjax.JsonLines(pathlib.Path(tempfile.mkdtemp()) / "run.jsonl")
        >>> mpjax.log_metrics(log, 1, {"loss": 0.5})
        >>> mpjax.flush_metrics(log)
    """
    _check_writer(writer)
    waiting = _WAITING.get(writer, ())
    while waiting:
        _write(writer, *waiting.popleft())
    flush = getattr(writer, "flush", None)
    if flush is not None:
        flush()


def _write(writer: Any, step: int, scalars: dict[str, Any]) -> None:
    values = {name: _plain(leaf) for name, leaf in scalars.items()}
    if hasattr(writer, "add_scalar"):
        for name, value in values.items():
            writer.add_scalar(name, value, step)
    elif hasattr(writer, "scalar"):
        for name, value in values.items():
            writer.scalar(name, value, step)
    else:
        writer.add(step, values)


def _plain(leaf: Any) -> float | int:
    value = np.asarray(leaf)
    return int(value) if value.dtype.kind in "biu" else float(value)


def _is_real(leaf: Any) -> bool:
    dtype = jax.numpy.result_type(leaf)
    real = (jax.numpy.floating, jax.numpy.integer, np.bool_)
    return any(jax.numpy.issubdtype(dtype, kind) for kind in real)


def _is_ready(leaf: Any) -> bool:
    is_ready = getattr(leaf, "is_ready", None)
    return True if is_ready is None else is_ready()


def _check_writer(writer: Any) -> None:
    known = isinstance(writer, JsonLines)
    if not (known or hasattr(writer, "add_scalar") or hasattr(writer, "scalar")):
        raise TypeError(
            f"writer={writer!r} must be an mpjax.JsonLines(path), a tensorboardX.SummaryWriter or "
            "a flax.metrics.tensorboard.SummaryWriter."
        )
