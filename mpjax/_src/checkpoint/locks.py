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
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mpjax._src.checkpoint.packages import needed

GUARD = threading.RLock()
# Of file systems that have no locks, or are mounted without them or for reading only.
NO_LOCKS = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK, errno.EROFS}
# Bytes of the text that the first process tells the others.
TEXT_BYTES = 2000


def lock(file: str, until: contextlib.ExitStack) -> str | None:
    """Locks a file until the end of a stack, or returns who has locked it.

    Nothing is locked where nothing can be written, nor where the file system has no locks.
    """
    is_first = jax.process_index() == 0
    return shared_text(_lock(os.path.realpath(file), until) if is_first else None)


def shared_text(text: str | None) -> str | None:
    """Returns the text of the first process of a distributed program, on all of its processes."""
    if jax.process_count() == 1:
        return text
    from jax.experimental import multihost_utils

    sent = np.array([(text or "").encode()], f"S{TEXT_BYTES}")
    seen = np.asarray(multihost_utils.broadcast_one_to_all(sent.view(np.uint8)), np.uint8)
    return seen.tobytes().rstrip(b"\0").decode(errors="replace") or None


def _lock(file: str, until: contextlib.ExitStack) -> str | None:
    filelock = needed("filelock")
    # One for each file of this process. A file that it has locked is not opened again: where flock
    # is made of POSIX locks (NFS), closing it would drop the lock.
    own = filelock.FileLock(
        file, is_singleton=True, blocking=False, thread_local=False, on_acquired=_sign
    )
    with GUARD:
        if own.is_locked:
            gc.collect()  # perhaps the holder is garbage
        if own.is_locked:
            return f"{_process()}, this process"
        try:
            own.acquire()
        except filelock.Timeout:
            return _holder(file)
        except OSError as error:
            if error.errno not in NO_LOCKS and os.access(os.path.dirname(file), os.W_OK):
                raise
        else:
            until.callback(_free, own)
    return None


def _free(own: Any) -> None:
    with GUARD:
        # A child of the process that has locked it inherits the object, but no lock.
        if own.is_locked:
            # Removed before it is unlocked: who has opened it meanwhile sees that it was removed.
            Path(own.lock_file).unlink(missing_ok=True)
            own.release()


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
