"""Loads the function that the command line names as MODULE:FUNCTION, and reports errors in it.

FUNCTION is called without arguments and returns ``(fun, args)``: a function and the tuple of its
arguments, which may be `jax.ShapeDtypeStruct`.
"""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mpjax._src.core.base.lines import is_library

FORM = (
    "FUNCTION takes no arguments and returns (fun, args): a function, and the tuple of arguments "
    "to call it with."
)

FORM_OF_FIT = (
    "For fit, FUNCTION takes a policy, and returns (fun, args): the training step under that "
    "policy, and the tuple of its arguments."
)

# Advice in the library's messages, and the same advice for the command line.
OPTIONS = {
    "pass has_aux=True": "pass --has-aux",
    "has_aux=True": "--has-aux",
    "pass argnums=None": "pass --argnums none",
}

GONE = "a directory that no longer exists"


class TargetError(Exception):
    """MODULE:FUNCTION cannot be used; the message is for the user."""


def load(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns the function and the arguments that MODULE:FUNCTION or FILE.py:FUNCTION names.

    Raises:
        TargetError: If there is no such function, or it does not return this form.
    """
    with running(f"reading {target}"):
        return _called(_named(target, FORM), target, FORM)


def load_maker(target: str) -> Callable[..., tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns the function of a policy that MODULE:FUNCTION names, which returns (fun, args).

    Its result takes ``checkpoint=`` if the named function does.

    Raises:
        TargetError: If there is no such function, or it does not take a policy.
    """
    with running(f"reading {target}"):
        thing = _named(target, FORM_OF_FIT, "policy")

    @functools.wraps(thing)
    def make(*policy: Any, **checkpoint: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return _called(functools.partial(thing, *policy, **checkpoint), target, FORM_OF_FIT)

    return make


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Turns an exception into a `TargetError`: one line with the user's file and line number."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # prints are not part of a command's result
            yield
    except TargetError:
        raise
    # A script without a main guard may end in sys.exit(), which would end the command silently.
    except SystemExit as error:
        raise TargetError(
            f"{what} ended the program ({describe(error)}). Put code that runs as a script under "
            "if __name__ == '__main__'."
        ) from error
    except Exception as error:
        message = describe(error)
        for argument, option in OPTIONS.items():
            message = message.replace(argument, option)
        raise TargetError(f"{what} failed: {message}") from error


def describe(error: BaseException) -> str:
    """Returns an exception as one line: its type, its message, the user's file and line number."""
    try:
        lines = str(error).splitlines()
    except Exception:  # a user's exception may fail to convert to a string
        lines = []
    message = next((line.strip() for line in lines if line.strip()), "")
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    # The file did not run, so the traceback has no line of it.
    if isinstance(error, SyntaxError) and error.filename:
        return f"{text} ({error.filename}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if _is_users(frame.filename)]
    return f"{text} ({own[-1].filename}:{own[-1].lineno})" if own else text


# ---- inside --------------------------------------------------------------------------------------


def _named(target: str, form: str, *given: str) -> Any:
    """Returns the function that a text names, which can be called with what is ``given``."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise TargetError(
            f"{target!r} must be MODULE:FUNCTION, such as train:step, or FILE.py:FUNCTION. {form}"
        )
    thing: Any = _module(place)
    for part in name.split("."):
        if not hasattr(thing, part):
            from mpjax._src.core.base.errors import did_you_mean

            public = [each for each in dir(thing) if not each.startswith("_")]
            raise TargetError(f"{place} has no {part!r}.{did_you_mean(part, public)} {form}")
        thing = getattr(thing, part)
        place = f"{place}.{part}" if ":" in place else f"{place}:{part}"
    _check_takes(thing, target, form, *given)
    return thing


def _module(place: str) -> ModuleType:
    if place.endswith(".py") or os.sep in place:
        return _from_file(Path(place))
    # The installed command has its own folder on the path, and not the current one as python has.
    here = _here()
    if here and not {"", here} & {*sys.path}:
        sys.path.insert(0, here)
    try:
        with running(f"importing {place}"):
            return importlib.import_module(place)
    except TargetError as error:
        cause = error.__cause__
        # Missing is the named module or a package of it, and no import in it.
        if isinstance(cause, ModuleNotFoundError) and f"{place}.".startswith(f"{cause.name}."):
            raise TargetError(
                f"there is no module {cause.name!r} in {here or GONE} or among the installed "
                "packages. To name a file, give its path: path/to/file.py:FUNCTION."
            ) from cause
        raise


def _here() -> str:
    """Returns the current directory, or "" if it was deleted."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def _from_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise TargetError(f"there is no file {str(path)!r} (from {_here() or GONE}).")
    sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise TargetError(f"{str(path)!r} must be a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Before it runs: dataclasses and pickle look modules up by their names.
    sys.modules[path.stem] = module
    with running(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _check_takes(thing: Any, target: str, form: str, *given: str) -> None:
    """Refuses what cannot be called with these arguments, and a ``checkpoint`` if it takes one."""
    if not callable(thing):
        raise TargetError(f"{target} is {_kind(thing)}, not a function. {form}")
    with contextlib.suppress(ValueError):  # some built-in callables have no signature
        signature = inspect.signature(thing)
        more = {"checkpoint": None} if given and "checkpoint" in signature.parameters else {}
        try:
            signature.bind(*given, **more)
        except TypeError as error:
            what = f"with {' and '.join(given)}" if given else "without arguments"
            advice = "" if given else " Write a function that returns yours and its arguments."
            raise TargetError(
                f"{target} cannot be called {what}: {error}. {form}{advice}"
            ) from None


def _called(
    thing: Callable[[], Any], target: str, form: str
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    with running(f"{target}()"):
        result = thing()
    if not (isinstance(result, tuple) and len(result) == 2 and callable(result[0])):
        raise TargetError(f"{target}() returned {_kind(result)}. {form}")
    fun, args = result
    if not isinstance(args, tuple | list):
        raise TargetError(
            f"{target}() returned {_kind(args)} for args, which must be a tuple. For a single "
            "argument, write (fun, (argument,))."
        )
    return fun, tuple(args)


def _kind(thing: Any) -> str:
    if isinstance(thing, tuple):
        return f"a tuple of {', '.join(type(each).__name__ for each in thing) or 'nothing'}"
    if hasattr(thing, "dtype"):
        return "an array"
    return f"{'an' if type(thing).__name__[0] in 'aeiou' else 'a'} {type(thing).__name__}"


def _is_users(filename: str) -> bool:
    """Returns whether a file is the user's, not mpjax's, Python's or a library's."""
    # An editable install of mpjax is in no folder of packages, so `is_library` misses it.
    ours = (str(Path(__file__).parents[3]), "<string>")
    return not filename.startswith(ours) and not is_library(filename)
