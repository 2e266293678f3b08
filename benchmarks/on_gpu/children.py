"""Processes of their own for what is measured.

JAX and PyTorch each keep the GPU's memory that they once had, so both in one process, or one after
the other, would measure what is left. A rival has a process that ends after it; JAX's are told not
to take three quarters of the memory at their start, for two live at a time, taking turns.
"""

import concurrent.futures
import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

Call = Callable[..., Any]


class Late(Exception):
    """What was called took longer than the budget leaves."""


class Died(Exception):
    """The process ended, as when the memory of the machine runs out, or what ran in it failed."""


def environment(cache: Path) -> dict[str, str]:
    """Returns what JAX, PyTorch and Triton read at their start: compiled programs are kept."""
    return {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.5",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }


def prepare(variables: dict[str, str]) -> None:
    """Runs first in a process: what JAX and PyTorch read, they read when they are imported."""
    os.environ.update(variables)


@contextlib.contextmanager
def child(variables: dict[str, str], left: Callable[[], float]) -> Iterator[Call]:
    """Starts a process; yields what calls a function in it, within the budget, and ends it.

    Args:
        variables: Set in its environment before anything is imported.
        left: Returns the seconds that a call may take.
    """
    pool = concurrent.futures.ProcessPoolExecutor(
        1,
        multiprocessing.get_context("spawn"),
        initializer=prepare,
        initargs=(variables,),
    )
    try:
        process = pool.submit(os.getpid).result()

        def call(function: Callable[..., Any], *args: Any) -> Any:
            try:
                return pool.submit(function, *args).result(max(left(), 0.1))
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                raise Late(function.__name__) from None
            except BrokenProcessPool:
                raise Died("the process ended without an answer") from None
            except Exception as error:
                raise Died(f"{type(error).__name__}: {error}"[:300]) from None

        yield call
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
