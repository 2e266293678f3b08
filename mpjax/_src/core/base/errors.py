"""Exception classes, and helpers that check arguments and word error messages and warnings.

Every message names the argument, its value, the valid values and, if possible, the one that the
user probably meant.
"""

import difflib
import inspect
import math
import operator
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mpjax._src.core.base.public import public

# A message shows at most LONGEST characters of a value; TAIL of them are from its end.
LONGEST, TAIL = 400, 40


@public("mpjax.errors")
class DivergenceError(RuntimeError):
    """Training has diverged: too many steps in a row were skipped as non-finite."""


@public("mpjax.errors")
class CompileError(RuntimeError):
    """The compiler of a target rejected a program, or crashed while compiling it."""


@public("mpjax.errors")
class OutOfMemoryError(CompileError):
    """The compiler of a target reported that a program does not fit the target's memory."""


@public("mpjax.errors")
class UnsupportedJaxError(RuntimeError):
    """The installed JAX lacks an internal that plans or reports need, or it behaves otherwise.

    What uses the public functions of JAX alone still works: policies that cast arguments once,
    optimizers with loss scales and skipped steps, and checkpoints.
    """


@public("mpjax.checkpoint")
class CheckpointError(RuntimeError):
    """A checkpoint is damaged, cannot be written, or is being written by another process."""


@public("mpjax.errors")
class PrecisionWarning(UserWarning):
    """A program probably runs in another precision than its author thinks."""


def brief(value: Any) -> str:
    """Returns ``repr(value)``, shortened if it is long; if ``repr`` fails, the name of the type.

    ``repr`` fails for lists that are nested too deeply and for integers with too many digits.
    """
    try:
        text = repr(value)
    except Exception:
        size = f" of {value.bit_length()} bits" if isinstance(value, int) else ""
        return f"<{type(value).__name__}{size}>"
    text = re.sub(r"\n\s*", " ", text)  # of arrays and states
    return text if len(text) <= LONGEST else f"{text[: LONGEST - TAIL]} ... {text[-TAIL:]}"


def check_callable(fun: Any, argument: str) -> None:
    """Raises a TypeError if an argument that must be a function is not callable."""
    # jnp.bfloat16 is callable, but who passes it for a function has mixed up the arguments.
    if not callable(fun) or _is_dtype(fun):
        raise TypeError(f"{argument}={brief(fun)} must be a function.{misplaced(fun)}")


def check_flag(name: str, value: Any) -> None:
    """Raises a ValueError if a setting is not True or False."""
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={brief(value)} must be True or False.{misplaced(value)}")


def check_choice(name: str, value: Any, *choices: str) -> None:
    """Raises a ValueError if a setting is neither None nor one of the choices."""
    if not (value is None or (isinstance(value, str) and value in choices)):
        raise ValueError(
            f"Unknown {name} {brief(value)}. Choose one of {', '.join(map(repr, choices))} and "
            f"None.{did_you_mean(value, choices)}"
        )


def _is_dtype(value: Any) -> bool:
    """Returns whether a value is a dtype, or a class that represents one, such as jnp.bfloat16."""
    return isinstance(value, np.dtype) or (isinstance(value, type) and hasattr(value, "dtype"))


# What an argument may be that belongs in the place of another one, by what all such objects have.
KINDS: dict[str, Callable[[Any], bool]] = {
    "a dtype": _is_dtype,
    "a class, not an instance": lambda x: isinstance(x, type),
    "an optax optimizer": lambda x: hasattr(x, "init") and hasattr(x, "update"),
    "a policy": lambda x: hasattr(x, "compute_dtype"),
    "a loss scale": lambda x: hasattr(x, "unscale") and hasattr(x, "adjust"),
    "the state of an optimizer": lambda x: is_state(x),
    "an array": lambda x: hasattr(x, "shape") and hasattr(x, "dtype"),
    "a function": callable,
    "a string": lambda x: isinstance(x, str),
    "a dict": lambda x: isinstance(x, dict),
    "a number": lambda x: isinstance(x, int | float),
}


def is_state(value: Any) -> bool:
    """Returns whether a value is the state of training or of an optimizer, not parameters."""
    package = type(value).__module__.split(".")[0]
    tuples = hasattr(value, "_fields") and not hasattr(value, "update")  # an optimizer is one too
    named = tuples and package in ("mpjax", "optax")
    chained = type(value) is tuple and any(map(is_state, value))
    return named or chained or hasattr(value, "opt_state")


def misplaced(value: Any) -> str:
    """Returns `` It is an optax optimizer. The order is mixed_precision(optimizer, policy).``

    The order is that of the function which the user called. It is "" for a value that is no usual
    argument of another place.
    """
    # The first kind that fits counts, so narrow ones come first: jnp.bfloat16 is a class, too.
    kind = next((kind for kind, fits in KINDS.items() if fits(value)), "")
    return f" It is {kind}.{_order()}" if kind else ""


def _order() -> str:
    """Returns the order of the arguments of the outermost function of mpjax on the call stack."""
    frame, code = inspect.currentframe(), _order.__code__
    while frame and frame.f_globals.get("__name__", "").split(".")[0] == "mpjax":
        # A decorated function runs inside of its decorator.
        tool = frame.f_locals.get("tool")
        code, frame = getattr(tool, "__code__", frame.f_code), frame.f_back
    names = code.co_varnames[: code.co_argcount]
    names = names[1:] if names[:1] in (("self",), ("cls",)) else names
    # A module body or a private function was not called by the user, whom its order would not help.
    if not names or code.co_name.startswith(("_", "<")):  # no names: keywords alone
        return ""
    return f" The order is {code.co_name}({', '.join(names)})."


def as_array(name: str, value: Any, kind: str = "an array") -> jax.Array:
    """Returns an argument as an array of JAX; a string, a function or None raises a TypeError."""
    try:
        return jnp.asarray(None if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):
        if isinstance(value, jax.core.Tracer):
            raise  # what JAX says of it
        raise TypeError(f"{name}={brief(value)} must be {kind}.{misplaced(value)}") from None


def optional_array(name: str, value: Any, kind: str = "an array") -> jax.Array | None:
    """Returns an argument that may be None, and else as `as_array`."""
    return None if value is None else as_array(name, value, f"None or {kind}")


def check_broadcasts(name: str, x: Any, shape: tuple[int, ...], what: str) -> None:
    """Raises a ValueError if an array, which may be None, does not broadcast to a shape."""
    try:
        fits = x is None or jnp.broadcast_shapes(x.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{name} has shape {x.shape}. It must broadcast to {what}, {shape}.")


def nearest(word: str, choices: Iterable[str], count: int = 5, cutoff: float = 0.6) -> list[str]:
    """Returns the ``choices`` most similar to ``word`` (case-insensitive), best first."""
    folded: dict[str, str] = {}
    for choice in choices:
        folded.setdefault(choice.lower(), choice)
    return [folded[m] for m in difflib.get_close_matches(word.lower(), folded, count, cutoff)]


def did_you_mean(word: Any, choices: Iterable[str]) -> str:
    """Returns `` Did you mean 'x'?``, or "" if no choice is similar."""
    near = nearest(word if isinstance(word, str) else brief(word), choices, count=1)
    return f" Did you mean {near[0]!r}?" if near else ""


def first_of(names: Sequence[str], most: int = 5, apart: str = ", ") -> str:
    """Returns ``a, b, c and 2 more``."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return apart.join(names[:most]) + more


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message that is not empty, or ""."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def in_one_line(error: BaseException) -> str:
    """Returns "TypeError: the first line of its message"."""
    line = first_line(error)
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


def no_attribute(what: str, name: str, choices: Iterable[str], hint: str = "") -> AttributeError:
    """Returns the error for an attribute that ``what`` lacks, with a hint or the nearest one."""
    message = f"{what} has no attribute {name!r}.{hint or did_you_mean(name, choices)}"
    return AttributeError(message, name=name, obj=None)  # else Python adds a suggestion of its own


# Of these packages no line is the user's; the last two are Python's own.
LIBRARIES = ("mpjax", "jax", "optax", "flax", "equinox", "functools", "contextlib")


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the nearest line of the call stack that is in none of `LIBRARIES`."""
    frame, level = inspect.currentframe(), 1
    while frame and frame.f_globals.get("__name__", "").split(".")[0] in LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


def warn_at(fun: Callable[..., Any], message: str) -> None:
    """Warns at the definition of the user's function, because the call stack is inside JAX."""
    fun = inspect.unwrap(fun)
    code = getattr(fun, "__code__", warn_at.__code__)
    # With the registry of the user's module, Python's filters treat it as a warning of that module:
    # by default one for each definition, not one for each trace.
    seen = getattr(fun, "__globals__", {}).setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message, UserWarning, code.co_filename, code.co_firstlineno, registry=seen
    )


# ---- numbers that are given as arguments -----------------------------------------------------


def is_number(value: Any) -> bool:
    """Returns whether a value is one integer or real number, an array without dimensions too."""
    # Not by isinstance: a bool is an int, but not a number that a user means.
    kind = getattr(value, "dtype", np.dtype(type(value) if type(value) in (int, float) else object))
    return getattr(kind, "kind", "") in ("i", "u", "f") and np.shape(value) == ()


def as_float(value: Any) -> float:
    """Returns a number as a float, and an integer above the float range as infinity."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_traced(value: Any) -> bool:
    """Returns whether a value is one number that jit traces: it is not known yet."""
    return isinstance(value, jax.core.Tracer) and is_number(value)


def refuse_traced(name: str, value: Any) -> None:
    """Raises a ValueError if a setting, whose value must be known, is traced."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"{name}={brief(value)} must be a number, but it is traced: jit, grad or vmap passes "
            "the function this argument without its value. Pass a number from outside the traced "
            "function, or list the argument in static_argnames of jax.jit."
        )


def finite_number(value: Any) -> float | None:
    """Returns a finite number of any type as a float, or None for anything else."""
    concrete = is_number(value) and not is_traced(value)
    number = as_float(value) if concrete else math.nan
    return number if math.isfinite(number) else None


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Returns an integer that fits an int32, as an int."""
    refuse_traced(name, value)
    number = whole_number(value)
    if number is None or not least <= number < 2**31:
        raise ValueError(f"{name}={brief(value)} must be an integer from {least} to 2**31 - 1.")
    return number


def whole_number(value: Any) -> int | None:
    """Returns an integer of any type as an int, or None for anything else."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None
