"""The commands that a script starts in processes of their own, of which nothing is seen here."""

import contextlib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Tell = Callable[[Sequence[str], bool], None]

# What Python tells an audit hook when a process is started: the program and its arguments.
STARTING: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "subprocess.Popen": lambda args: args[:2],
    "os.posix_spawn": lambda args: args[:2],
    "os.exec": lambda args: args[:2],
    "os.spawn": lambda args: args[1:3],
    "os.system": lambda args: (None, args[0]),
}
PYTHON = re.compile(r"(^|[/\\])(python|pypy)[0-9.]*(\.exe)?$", re.IGNORECASE)
# What starts Python of its own accord, but for its own processes.
OWN_PROCESSES = ("multiprocessing", "mpjax")


def words_of(program: Any, args: Any) -> list[str]:
    """Returns the words of a command: a list, a text, or a list that hands a shell a text."""
    if isinstance(args, (str, bytes, os.PathLike)):
        return shlex.split(os.fsdecode(args))
    words = [os.fsdecode(each) for each in args]
    words[:1] = [os.fsdecode(program)] if program is not None else words[:1]
    shell = words[1:2] == ["-c"] and not PYTHON.search(words[0])
    return shlex.split(words[2]) if shell else words


def runs_python(words: Sequence[str]) -> bool:
    """Returns whether a command runs code of Python, and not as multiprocessing or mpjax would."""
    at = next((i for i, word in enumerate(words) if PYTHON.search(word)), len(words))
    rest = words[at + 1 :]
    return bool(rest) and not any(own in " ".join(rest[:3]) for own in OWN_PROCESSES)


_INSTALLED: list[Any] = []
_TOLD: list[Tell] = []
_LAST: list[str] = []


@contextlib.contextmanager
def heard(tell: Tell) -> Iterator[None]:
    """Tells the words of each command, and whether it takes the place of this process."""
    if not _INSTALLED:
        _INSTALLED.append(_heard)
        sys.addaudithook(_heard)  # there is no way to remove one
    _TOLD.append(tell)
    try:
        yield
    finally:
        _TOLD.remove(tell)


def _heard(event: str, args: Any) -> None:
    if not _TOLD or event not in STARTING:
        return
    words: list[str] = []
    with contextlib.suppress(Exception):  # it would end what the script does
        words = words_of(*STARTING[event](args))
    if event == "os.posix_spawn" and words == _LAST:  # by subprocess itself
        return
    _LAST[:] = words
    for tell in [*_TOLD]:
        with contextlib.suppress(Exception):
            tell(words, event == "os.exec")
