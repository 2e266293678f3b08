"""Runs measurements in separate processes.

JAX and PyTorch each keep the GPU memory that they once reserved, so in one process the second would
measure the memory that the first left over. Each rival therefore has a process that ends after it.
JAX does not reserve three quarters of the memory at its start, because two processes live at a time
and take turns.
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
    """A call took longer than the remaining budget."""


class Died(Exception):
    """The process ended, for example because memory ran out, or the called function failed."""


def environment(cache: Path) -> dict[str, str]:
    """Returns environment variables for JAX, PyTorch and Triton, with caches of programs."""
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
    """Sets a new process's environment, before JAX and PyTorch are imported and read it."""
    os.environ.update(variables)


@contextlib.contextmanager
def child(variables: dict[str, str], left: Callable[[], float]) -> Iterator[Call]:
    """Starts a process, yields a function that calls others in it within the budget, and ends it.

    Args:
        variables: The environment variables that are set before anything is imported.
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
