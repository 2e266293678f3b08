"""How mpjax words its errors, and the exception classes of its own.

Every message names the argument, its value, what is legal and what was probably meant.
"""

import difflib
from collections.abc import Iterable


class DivergenceError(RuntimeError):
    """Training cannot go on: too many steps in a row were skipped as non-finite."""


class CompileError(RuntimeError):
    """The compiler of a target refused a program, or broke on it."""


class OutOfMemoryError(CompileError):
    """The compiler of a target says that a program does not fit its memory."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or is none of mpjax's."""


def nearest(word: str, choices: Iterable[str], count: int = 5, cutoff: float = 0.6) -> list[str]:
    """Returns the ``choices`` that look most like ``word`` (case-insensitive), best first."""
    folded: dict[str, str] = {}
    for choice in choices:
        folded.setdefault(choice.lower(), choice)
    return [folded[m] for m in difflib.get_close_matches(word.lower(), folded, count, cutoff)]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?``, or nothing where no choice is near."""
    found = nearest(word, choices, count=1)
    return f" Did you mean {found[0]!r}?" if found else ""
