"""How a script that was seen is ended, with the threads and processes that it leaves."""

import _thread
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

GRACE = 2.0  # seconds in which threads may end by themselves
PATIENCE = 10  # how often a thread may catch what ends it


class Stop(BaseException):
    """Ends a script. No ``except Exception`` of the script catches it; ``finally`` blocks run."""


class Stopping(threading.local):
    """Ends a script from within one of its calls.

    ``stuck`` is called if a thread catches what ends it, time after time: ``except:`` in an endless
    loop does.
    """

    def __init__(self, stuck: Callable[[], None]) -> None:  # in each thread
        self.stuck, self.caught = stuck, 0

    def __call__(self) -> NoReturn:
        if self.caught == PATIENCE:
            self.stuck()
        self.caught += 1
        stop()


def stop() -> NoReturn:
    """Ends the script from within one of its calls."""
    if threading.current_thread() is not threading.main_thread():
        _thread.interrupt_main()  # which may wait for this thread
    raise Stop


@contextlib.contextmanager
def quiet_threads() -> Iterator[None]:
    """Lets a thread of the script that is stopped end without a traceback."""
    before = threading.excepthook

    def hook(args: Any) -> None:
        if not issubclass(args.exc_type, Stop):
            before(args)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def end_process(status: int, at_once: bool = False) -> NoReturn:
    """Ends the process, also if the script left threads or processes that would keep it.

    ``at_once`` is for within the script, which catches what would end it.
    """
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.terminate()
    others = [t for t in threading.enumerate() if t is not threading.current_thread()]
    for thread in others:
        if not (thread.daemon or at_once):
            thread.join(GRACE)
    if at_once or any(thread.is_alive() and not thread.daemon for thread in others):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # sys.exit would wait for them
    sys.exit(status)
