"""Locks between processes and threads. Only this module imports filelock.

A lock is a file that its holder has locked with flock, and that says who the holder is. The system
drops the lock when the process ends, however it ends, so the file that a killed process leaves
locks nothing. Of the processes of one distributed program only the first takes a lock, and all of
them learn whether it did.
"""

import contextlib
import errno
import gc
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax._src.checkpoint.packages import needed

# The locks of this process, by the path of the file, each with the process that took it: a child
# inherits the table but no lock. A file that this process has locked is not opened again: where
# flock is made of POSIX locks (NFS), closing it would drop the lock.
HELD: dict[str, tuple[Any, int]] = {}
GUARD = threading.RLock()
# Of file systems that have no locks, or are mounted without them or for reading only.
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EROFS}
# Bytes of the text that the first process tells the others.
TEXT_BYTES = 2000


def lock(file: str) -> tuple[Callable[[], None], str | None]:
    """Locks a file, unless someone else has.

    Nothing is locked where nothing can be written, nor where the file system has no locks.

    Returns:
        A function that removes the lock, and None; or one that does nothing, and who holds it.
    """
    if jax.process_index() == 0:
        free, holder = _lock(os.path.realpath(file))
    else:
        free, holder = _nothing, None
    return free, shared_text(holder)


def shared_text(text: str | None) -> str | None:
    """Returns the text of the first process of a distributed program, on all of its processes."""
    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    sent = np.zeros(TEXT_BYTES, np.uint8)
    data = np.frombuffer((text or "").encode()[:TEXT_BYTES], np.uint8)
    sent[: data.size] = data
    seen = np.asarray(multihost_utils.broadcast_one_to_all(sent), np.uint8)
    return seen.tobytes().rstrip(b"\0").decode(errors="replace") or None


def _lock(file: str) -> tuple[Callable[[], None], str | None]:
    filelock = needed("filelock")
    with GUARD:
        if _held_here(file):
            gc.collect()  # perhaps the holder is garbage
        if _held_here(file):
            return _nothing, f"{_process()}, this process"
        file_lock = filelock.FileLock(file, blocking=False, thread_local=False, on_acquired=_sign)
        try:
            file_lock.acquire()
        except filelock.Timeout:
            return _nothing, _holder(file)
        except OSError as error:
            if error.errno not in NO_LOCKS and os.access(os.path.dirname(file), os.W_OK):
                raise
            return _nothing, None
        HELD[file] = file_lock, os.getpid()
    return lambda: _free(file, file_lock), None


def _nothing() -> None:
    pass


def _held_here(file: str) -> bool:
    return file in HELD and HELD[file][1] == os.getpid()


def _free(file: str, file_lock: Any) -> None:
    with GUARD:
        if _held_here(file) and HELD[file][0] is file_lock:
            del HELD[file]
            # Removed before it is unlocked: who has opened it meanwhile sees that it was removed.
            Path(file).unlink(missing_ok=True)
            file_lock.release()


def _process() -> str:
    return f"process {os.getpid()} on host {socket.gethostname()!r}"


def _sign(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _process().encode(), 0)


def _holder(file: str) -> str:
    """Returns who says in the file that it holds the lock."""
    try:
        return Path(file).read_text()[:300] or "another process"
    except (OSError, ValueError):
        return "another process"
