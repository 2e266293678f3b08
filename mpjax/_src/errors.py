"""How mpjax words its errors, and the exception classes of its own.

Every message names the argument, its value, what is legal and what was probably meant.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable
from typing import Any

# Of what a message shows of a value at most: it is read by people.
LONGEST, TAIL = 400, 40


class DivergenceError(RuntimeError):
    """Training cannot go on: too many steps in a row were skipped as non-finite."""


class CompileError(RuntimeError):
    """The compiler of a target refused a program, or broke on it."""


class OutOfMemoryError(CompileError):
    """The compiler of a target says that a program does not fit its memory."""


class CheckpointError(RuntimeError):
    """A checkpoint is damaged, or is none of mpjax's."""


def brief(value: Any) -> str:
    """Returns ``repr(value)``, cut where it is long, or the type where there is no such thing.

    A message must not fail itself: over a list nested too deep, or an integer of too many digits.
    """
    try:
        text = repr(value)
    except Exception:
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{size}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - TAIL]} ... {text[-TAIL:]}"


def check_callable(fun: Any, argument: str) -> None:
    """Raises a TypeError if an argument that must be a function is none."""
    if not callable(fun):
        policy = " A policy is the second argument, or policy=." if isinstance(fun, str) else ""
        raise TypeError(f"{argument}={brief(fun)} must be a function.{policy}")


def nearest(word: str, choices: Iterable[str], count: int = 5, cutoff: float = 0.6) -> list[str]:
    """Returns the ``choices`` that look most like ``word`` (case-insensitive), best first."""
    folded: dict[str, str] = {}
    for choice in choices:
        folded.setdefault(choice.lower(), choice)
    return [folded[m] for m in difflib.get_close_matches(word.lower(), folded, count, cutoff)]


def did_you_mean(word: Any, choices: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?``, or nothing where no choice is near."""
    found = nearest(word if isinstance(word, str) else brief(word), choices, count=1)
    return f" Did you mean {found[0]!r}?" if found else ""


def warn_at(fun: Callable[..., Any], message: str) -> None:
    """Warns at the definition of the user's function, if it has one: the call stack is JAX's."""
    fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", warn_at.__code__)
    seen = getattr(fun, "__globals__", {}).setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, code.co_filename, code.co_firstlineno, registry=seen
    )
